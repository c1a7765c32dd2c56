"""The server of a run's KV store: an actor on Ray, a plain object in the other backends. Clients reach it through `runtime/kv_store.py`.

It only holds what owners tell it, and forgets everything when it restarts; then it answers nobody before they have told their facts
again. All waiting happens here, on the time of the event loop: a reader is woken by the write it waits for.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import WeakValueDictionary

from rolemesh.errors import LeaseExpired, RolemeshError, StaleWrite
from rolemesh.protocols.store import (
    Changes,
    Fact,
    KvChange,
    KvEntry,
    Look,
    OpenWait,
    StoreAnswer,
    StoreGone,
    StoreRequest,
    Version,
    Waits,
    WaitStatistic,
)

Place = tuple[str, str]
"""(namespace, key)."""

ANSWERS_KEPT = 256
"""Of writes, for each client: more than it has under way at a time."""
DELETIONS_KEPT = 4096
"""A watcher that is more deletions behind gets the whole state instead."""
SILENT_SECONDS = 120.0
"""A client that was silent for so long is not told any more which of its facts others have taken over."""
SETTLE_SECONDS = 2.0
"""So long after its first request a store that has restarted calls no key absent and writes nothing that depends on what is there:
owners, who stay in touch, tell their facts first."""
STALL_SECONDS = 1.0
"""A timer that is this late tells of a pause of the server, in which no keep-alive could arrive."""


@dataclass(slots=True)
class _Client:
    heard: float
    lost: dict[Place, Version] = field(default_factory=dict)
    """Keys it wrote last before somebody else did, not told yet."""
    answered: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    """Answers to its latest writes by request, for asking again when one got lost."""


class KvServer:
    """One life of the store, numbered by `incarnation`, which is higher than that of any life before."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation, self._number, self._arrivals = incarnation, 0, 0
        self._entries: dict[Place, KvEntry] = {}
        self._fences: dict[Place, int] = {}
        """Generation by (namespace, group)."""
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._clients: dict[str, _Client] = {}
        self._changes: OrderedDict[Place, tuple[int, KvChange]] = OrderedDict()
        """The last change of each key with its number, in order."""
        self._deletions: OrderedDict[Place, int] = OrderedDict()
        self._unheard: dict[Version, tuple[str, Place]] = {}
        """Writes over somebody else's key by version, of which the new owner may not know yet: (the owner before, the key)."""
        self._forgotten = 0
        """Deletions up to this arrival are not in `_changes` any more."""
        self._bells: WeakValueDictionary[tuple[str, str], asyncio.Event] = WeakValueDictionary()
        """What waiting requests wait for, as long as they do: ("key", key), ("namespace", name), ("client", id)."""
        self._statistics: dict[tuple[str, str, str], WaitStatistic] = {}
        self._open: dict[str, tuple[StoreRequest, float, float]] = {}
        self._stopped = False
        self._settled = 0.0 if incarnation == 1 else float("inf")
        """When all owners have told their facts."""

    async def answer(self, request: StoreRequest) -> StoreAnswer:
        """Serve one request. Raises StoreGone when the server is stopped meanwhile."""
        if self._stopped:
            raise StoreGone("the store was stopped")
        if self._settled == float("inf"):
            self._settled = _now() + SETTLE_SECONDS
        self._clients.setdefault(request.client, _Client(heard=_now())).heard = _now()
        if request.incarnation != self._incarnation and request.do != "publish":
            return StoreAnswer(incarnation=self._incarnation)
        try:
            value = await self._serve(request)
        except RolemeshError as error:
            return StoreAnswer(incarnation=self._incarnation, error=error)
        return StoreAnswer(incarnation=self._incarnation, value=value)

    def stop(self) -> None:
        """Leave everyone who waits without an answer."""
        self._stopped = True
        for timer in self._leases.values():
            timer.cancel()
        for bell in list(self._bells.values()):
            bell.set()

    async def _serve(self, request: StoreRequest) -> Any:
        absent = request.do in ("get", "delete") and (request.namespace, request.key) not in self._entries
        if request.do == "list" or request.conditional or absent:
            await self._settle()
        serve = getattr(self, f"_do_{request.do}")
        if request.do in ("get", "changes", "stay"):
            return await serve(request)
        if request.do not in ("put", "delete"):
            return serve(request)
        answered = self._clients[request.client].answered
        if request.id not in answered:  # a write whose answer got lost is asked for again, and is not made again
            answered[request.id] = serve(request)
            while len(answered) > ANSWERS_KEPT:
                answered.popitem(last=False)
        return answered[request.id]

    async def _settle(self) -> None:
        while _now() < self._settled:
            await self._sleep(("settled", ""), self._settled)

    # -- reading and waiting --------------------------------------------------------------------------------------------------

    async def _do_get(self, request: StoreRequest) -> Look:
        place, started, looks = (request.namespace, request.key), _now() - request.waited, max(request.looks, 1)
        ends = _now() + request.seconds
        self._open[request.id] = request, started, _now() + request.patience
        try:
            while place not in self._entries and _now() < ends:
                await self._sleep(("key", "\0".join(place)), ends)
                looks += 1
        finally:
            del self._open[request.id]
        entry = self._entries.get(place)
        if request.seconds > 0 or request.waited > 0:
            self._count(request, _now() - started, again=request.looks > 0, found=entry is not None)
        if entry is not None:
            return Look(entry=entry, looks=looks)
        keys = [key for namespace, key in self._entries if namespace == request.namespace]
        elsewhere = tuple(sorted(namespace for namespace, key in self._entries if key == request.key))
        nearest = tuple(difflib.get_close_matches(request.key, keys, n=3, cutoff=0.5))
        return Look(entry=None, looks=looks, nearest=nearest, elsewhere=elsewhere)

    def _count(self, request: StoreRequest, waited: float, *, again: bool, found: bool) -> None:
        """A wait that its client cuts into slices is counted once, and is in vain only while its latest slice was."""
        pattern = re.sub(r"\d+", "*", request.key)
        place = request.namespace, request.owner, pattern
        old = self._statistics.get(place) or WaitStatistic(
            namespace=request.namespace, waiter=request.owner, key=pattern, count=0, seconds=0.0, longest=0.0, expired=0
        )
        self._statistics[place] = replace(
            old,
            count=old.count + (not again or old.count == 0),
            seconds=old.seconds + waited - request.waited,
            longest=max(old.longest, waited),
            expired=max(old.expired - again, 0) + (not found),
        )

    async def _sleep(self, what: tuple[str, str], ends: float) -> None:
        """Until somebody wakes what is waited for, at most until `ends`."""
        bell = self._bells.setdefault(what, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout_at(ends):
                await bell.wait()
        if self._stopped:
            raise StoreGone("the store was stopped")

    def _wake(self, kind: str, name: str) -> None:
        bell = self._bells.pop((kind, name), None)
        if bell is not None:
            bell.set()

    def _do_list(self, request: StoreRequest) -> list[KvEntry]:
        found = [e for (namespace, key), e in self._entries.items() if namespace == request.namespace and key.startswith(request.key)]
        return sorted(found, key=lambda entry: entry.key)

    async def _do_changes(self, request: StoreRequest) -> Changes:
        life, arrival = request.cursor
        ends = _now() + request.seconds
        while True:
            whole = life != self._incarnation or arrival < self._forgotten
            items = tuple(map(_change, self._do_list(request)) if whole else self._later(request, arrival))
            if items or whole or _now() >= ends:
                return Changes(cursor=(self._incarnation, self._arrivals), items=items, whole=whole)
            await self._sleep(("namespace", request.namespace), ends)

    def _later(self, request: StoreRequest, arrival: int) -> list[KvChange]:
        found = []
        for (namespace, key), (number, change) in reversed(self._changes.items()):
            if number <= arrival:
                break
            if namespace == request.namespace and key.startswith(request.key):
                found.append(change)
        return found[::-1]

    def _do_waits(self, request: StoreRequest) -> Waits:
        now = [
            OpenWait(
                namespace=asked.namespace, waiter=asked.owner, key=asked.key, seconds=_now() - started, remaining=max(ends - _now(), 0)
            )
            for asked, started, ends in self._open.values()
        ]
        return Waits(over=tuple(sorted(self._statistics.values(), key=lambda row: -row.seconds)), now=tuple(now))

    # -- writing --------------------------------------------------------------------------------------------------------------

    def _do_put(self, request: StoreRequest) -> tuple[Version, bool] | None:
        """The new version and whether somebody else had written the key, or None when a condition does not hold."""
        place = request.namespace, request.key
        self._do_fence(request)
        old = self._entries.get(place)
        if request.conditional and request.expected != (old.version if old else None):
            return None
        if request.lease and request.lease not in self._leases:
            raise LeaseExpired(holder=request.owner, seconds=request.seconds)
        version = self._next_version()
        self._set(place, _entry(request, request, version))
        return version, old is not None and self._is_taken_over(old, request, version)

    def _do_delete(self, request: StoreRequest) -> tuple[Version, bool] | None:
        """The version of the deletion and whether somebody else had written the key; None when there was none."""
        self._do_fence(request)
        old = self._entries.get((request.namespace, request.key))
        if old is None:
            return None
        version = self._remove((request.namespace, request.key), "deleted", tell=False)
        return version, self._is_taken_over(old, request, version)

    def _is_taken_over(self, old: KvEntry, request: StoreRequest, version: Version) -> bool:
        """Whether somebody else had written the key."""
        foreign = old.client != request.client
        if foreign:
            self._unheard[version] = old.client, (request.namespace, request.key)
        return foreign

    def _next_version(self) -> Version:
        self._number += 1
        return self._incarnation, self._number

    def _do_heard(self, request: StoreRequest) -> None:
        """The new owner of a key knows that it is. Until then the one before keeps the fact, or a restart could lose both."""
        told = self._unheard.pop(request.expected or (0, 0), None)
        if told is not None and request.expected is not None:
            self._tell_lost(*told, request.expected)

    def _set(self, place: Place, entry: KvEntry) -> None:
        self._entries[place] = entry
        self._deletions.pop(place, None)
        self._note(place, _change(entry))

    def _remove(self, place: Place, kind: Literal["deleted", "expired"], *, tell: bool = True) -> Version:
        old, version = self._entries.pop(place), self._next_version()
        if tell:
            self._tell_lost(old.client, place, version)
        self._note_removed(place, KvChange(key=old.key, kind=kind, value=None, version=version, owner=old.owner))
        return version

    def _note_removed(self, place: Place, change: KvChange) -> None:
        self._note(place, change)
        self._deletions[place] = self._arrivals
        self._deletions.move_to_end(place)
        while len(self._deletions) > DELETIONS_KEPT:
            oldest, self._forgotten = self._deletions.popitem(last=False)
            self._changes.pop(oldest, None)

    def _note(self, place: Place, change: KvChange) -> None:
        self._arrivals += 1
        self._changes[place] = self._arrivals, change
        self._changes.move_to_end(place)
        self._wake("key", "\0".join(place))
        self._wake("namespace", place[0])

    # -- generations ----------------------------------------------------------------------------------------------------------

    def _do_fence(self, request: StoreRequest) -> None:
        """Raises StaleWrite for a writer of an older generation; the first of a newer one raises the fence."""
        if not request.group:
            return
        current = self._fences.get((request.namespace, request.group), 0)
        if request.generation < current:
            raise StaleWrite(writer=request.owner, key=request.key, group=request.group, got=request.generation, current=current)
        self._raise_fence((request.namespace, request.group), request.generation)

    def _raise_fence(self, scope: Place, generation: int) -> None:
        """From now on only this generation of the group may write. What older ones have written is true no longer, and goes away."""
        if generation <= self._fences.get(scope, 0):
            return
        self._fences[scope] = generation
        namespace, group = scope
        for place, entry in list(self._entries.items()):
            if place[0] == namespace and entry.group == group and entry.generation < generation:
                self._remove(place, "deleted")

    # -- leases ---------------------------------------------------------------------------------------------------------------

    def _do_lease(self, request: StoreRequest) -> None:
        self._grant(request.lease, request.seconds)

    def _grant(self, lease: str, seconds: float) -> None:
        if lease in self._leases:
            self._leases[lease].cancel()
        due = _now() + seconds
        self._leases[lease] = asyncio.get_running_loop().call_at(due, self._expire, lease, seconds, due)

    def _expire(self, lease: str, seconds: float, due: float) -> None:
        if _now() - due > STALL_SECONDS:
            self._grant(lease, seconds)
        else:
            self._end_lease(lease, "expired")

    def _end_lease(self, lease: str, kind: Literal["deleted", "expired"]) -> None:
        self._leases.pop(lease).cancel()
        for place in [place for place, entry in self._entries.items() if entry.lease == lease]:
            self._remove(place, kind)

    def _do_keep(self, request: StoreRequest) -> bool:
        """False when the lease is over."""
        known = request.lease in self._leases
        if known:
            self._do_lease(request)
        return known

    def _do_release(self, request: StoreRequest) -> None:
        if request.lease in self._leases:
            self._end_lease(request.lease, "deleted")

    # -- owners ---------------------------------------------------------------------------------------------------------------

    def _do_publish(self, request: StoreRequest) -> list[Place]:
        """An owner tells its facts after a restart, with the versions they had. Returns those that are not true any more."""
        for group, generation in (request.fences or {}).items():
            self._raise_fence((request.namespace, group), generation)
        for lease, seconds in (request.leases or {}).items():
            self._grant(lease, seconds)
        return [(fact.namespace, fact.key) for fact in request.facts if not self._take(request, fact)]

    def _take(self, request: StoreRequest, fact: Fact) -> bool:
        place, scope = (fact.namespace, fact.key), (fact.namespace, fact.group)
        if fact.group and fact.generation < self._fences.get(scope, 0):
            return False
        if fact.lease and fact.lease not in self._leases:
            return False
        known = self._changes.get(place)
        if known is not None and known[1].version >= fact.version:
            return known[1].version == fact.version
        if fact.group:
            self._raise_fence(scope, fact.generation)
        old = self._entries.pop(place, None)
        if old is not None and (fact.deleted or old.client != request.client):
            self._tell_lost(old.client, place, fact.version)
        if fact.deleted:
            self._note_removed(place, KvChange(key=fact.key, kind="deleted", value=None, version=fact.version, owner=request.owner))
        else:
            self._set(place, _entry(request, fact, fact.version))
        return True

    def _tell_lost(self, client: str, place: Place, version: Version) -> None:
        """The earlier owner of a key shall not republish it."""
        known = self._clients.get(client)
        if known is None or _now() - known.heard > SILENT_SECONDS:
            self._clients.pop(client, None)
            return
        known.lost[place] = version
        self._wake("client", client)

    async def _do_stay(self, request: StoreRequest) -> dict[Place, Version]:
        """Held until the client has something to hear, or the time is over. It notices a restart at once by this."""
        client, ends = self._clients[request.client], _now() + request.seconds
        while not client.lost and _now() < ends:
            await self._sleep(("client", request.client), ends)
        told, client.lost = client.lost, {}
        return told


def _now() -> float:
    return asyncio.get_running_loop().time()


def _change(entry: KvEntry) -> KvChange:
    return KvChange(key=entry.key, kind="put", value=entry.value, version=entry.version, owner=entry.owner)


def _entry(request: StoreRequest, told: StoreRequest | Fact, version: Version) -> KvEntry:
    return KvEntry(
        key=told.key, value=told.value, version=version, owner=request.owner,
        group=told.group, generation=told.generation, lease=told.lease, client=request.client,
    )  # fmt: skip
