"""The KV store of a run, as its clients see it: who is where, states, versions, shared variables, and hand-off by key.

    async with await KvStore.start(backend, "run-1") as store:       # the controller
        await store.put("variables/kl_coefficient", 0.1)
        address = await store.get("rollout/3/address", deadline=60)  # waits in the store until somebody has put it

A worker opens `BlockingKvStore(link, ...)` on the `link` that it was given as an argument. Values are small and plain. The store is
never the only place of a fact: the client that wrote a key last remembers it and tells it again when the store has restarted, so a
restart costs a pause, and neither keys nor leases. Writers that speak for a group carry its generation; older ones are refused.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any, Final, Self

from rolemesh.errors import DeadlineExceeded, LeaseExpired, ValueRefused
from rolemesh.plan.schema import NodeInfo
from rolemesh.protocols.backend import Backend
from rolemesh.protocols.store import (
    Changes,
    Fact,
    KvChange,
    KvEntry,
    Look,
    Operation,
    StoreGone,
    StoreLink,
    StoreRequest,
    Version,
    Waits,
)

SLICE_SECONDS: Final = 30.0
"""A wait in the store is asked for in pieces of this length: a store that went silent is noticed after one."""
GRACE_SECONDS: Final = 5.0
"""How much later than asked for an answer may be; a store that has just restarted takes 2 s to hear all owners."""
PAUSES: Final = (0.05, 1.0)
"""First and longest pause between two tries to reach a store that is restarting, seconds; they double."""
TOMBSTONE_SECONDS: Final = 120.0
"""How long the deletion of somebody else's key is remembered, in case the store restarts before the other client has heard of it."""
VALUE_BYTES: Final = 65_536
"""Of all texts, byte strings and keys, the entry's own too, and 8 for everything else."""
PLAIN: Final = "made of None, bool, int, float, str, bytes, list, tuple and dict with keys of str"


class KvStore(AbstractAsyncContextManager["KvStore"]):
    """One client. `owner` names it in messages and statistics; `group` and `generation` are those of the group that it speaks for."""

    def __init__(
        self,
        link: StoreLink,
        *,
        owner: str,
        namespace: str = "",
        group: str = "",
        generation: int = 0,
        answer_seconds: float = 30.0,
    ) -> None:
        self.link, self.owner, self.namespace = link, owner, namespace or link.run
        self.group, self.generation = group, generation
        self._answer_seconds = answer_seconds
        self._client, self._numbers = uuid.uuid4().hex, count(1)
        self._incarnation = 0
        self._meeting = asyncio.Lock()
        self._facts: dict[tuple[str, str], Fact] = {}
        """What this client wrote last, by (namespace, key)."""
        self._tombstones: deque[tuple[float, Fact]] = deque()
        self._leases: dict[str, KvLease] = {}
        self._fences: dict[str, int] = {}
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, backend: Backend, run: str, *, deadline: float = 60.0, node: NodeInfo | None = None) -> Self:
        """Start the store of a run, on that node or else beside the controller; its backend's `close` ends it."""
        return cls(await backend.start_store(run, deadline, node), owner="controller")

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give leases back and stop remembering. Keys without a lease stay in the store until it restarts."""
        for lease in list(self._leases.values()):
            await lease.close()
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None

    # -- keys -----------------------------------------------------------------------------------------------------------------

    async def put(self, key: str, value: Any, *, lease: KvLease | None = None) -> Version:
        """Write a key. Raises ValueRefused, StaleWrite, LeaseExpired, or DeadlineExceeded when the store stays away."""
        version = await self._put(key, value, lease)
        assert version is not None, "a write without a condition"
        return version

    async def compare_and_set(self, key: str, value: Any, expected: Version | None, *, lease: KvLease | None = None) -> bool:
        """Write a key if its version (see `look`) still is `expected`, or with None if it is absent. False when it is not.

        If the store dies between the write and its answer, and others build on what was written before it is asked again, the answer is
        False all the same. After a restart the store waits 2 s for owners to tell what is there: if the owner of the key does not get
        through in this time, the key is taken to be absent, or as an earlier owner knows it, and what is written then replaces the owner's.
        """
        return await self._put(key, value, lease, expected=expected, conditional=True) is not None

    async def _put(self, key: str, value: Any, lease: KvLease | None, **condition: Any) -> Version | None:
        check_plain(key, value)
        value = copy.deepcopy(value)  # the caller may go on changing it, here it is told again
        if lease is not None and lease.expired:
            raise LeaseExpired(holder=self.owner, seconds=lease.seconds)
        bound: dict[str, Any] = {"lease": lease.id, "seconds": lease.seconds} if lease is not None else {}
        written: tuple[Version, bool] | None = await self._ask("put", key=key, value=value, **bound, **condition)
        if written is None:
            return None
        version, foreign = written
        await self._remember(self._fact(key, value, version, lease=lease.id if lease is not None else ""), foreign)
        return version

    async def get(self, key: str, deadline: float) -> Any:
        """The value of a key, waiting in the store until there is one. Raises DeadlineExceeded saying what there is instead."""
        now = asyncio.get_running_loop().time
        started, subject = now(), f"key {key!r} of {self.namespace}"
        look: Look = await self._ask("get", ends=started + deadline, waits=True, subject=subject, key=key)
        if look.entry is None:
            raise DeadlineExceeded(waiter=self.owner, subject=subject, seconds=now() - started, last_report=_instead(look))
        return look.entry.value

    async def look(self, key: str) -> KvEntry | None:
        """A key as it is now, with version and owner; None if it is absent."""
        look: Look = await self._ask("get", key=key)
        return look.entry

    async def delete(self, key: str) -> bool:
        """False when there was no such key."""
        deleted: tuple[Version, bool] | None = await self._ask("delete", key=key)
        self._facts.pop((self.namespace, key), None)
        if deleted is None:
            return False
        version, foreign = deleted
        await self._remember(self._fact(key, None, version, deleted=True), foreign)
        return True

    async def list(self, prefix: str = "") -> dict[str, Any]:
        """Values of the keys that begin with `prefix`, by key in alphabetical order."""
        entries: list[KvEntry] = await self._ask("list", key=prefix)
        return {entry.key: entry.value for entry in entries}

    def watch(self, prefix: str = "") -> KvWatch:
        """What is there under a prefix, one key after the other, and then what changes."""
        return KvWatch(self, prefix)

    # -- groups, leases, statistics -------------------------------------------------------------------------------------------

    async def fence(self, group: str, generation: int) -> None:
        """From now on only this generation of a group may write, and what older ones wrote is gone. Raises StaleWrite if it is old."""
        await self._ask("fence", key="generation", group=group, generation=generation)
        self._fences[group] = max(generation, self._fences.get(group, 0))
        self._keep_facts()

    async def lease(self, seconds: float) -> KvLease:
        """A promise to be there: keys put with it go away when this client does not keep it for `seconds`. It is kept by itself. Raises
        ValueError for a time that is none."""
        if not 0 < seconds < inf:
            raise ValueError(f"a lease must last for some seconds, above 0, got {seconds}")
        identity = uuid.uuid4().hex
        await self._ask("lease", lease=identity, seconds=seconds)
        lease = self._leases[identity] = KvLease(self, identity, seconds)
        self._keep_facts()
        return lease

    async def waits(self) -> Waits:
        """Who waited for which keys, how often and how long, and who waits now."""
        waits: Waits = await self._ask("waits")
        return waits

    async def ping(self, deadline: float) -> None:
        """Raises StoreGone when there is no answer at once, where everything else tries again."""
        await self.link.ask(self._request("waits"), deadline)

    # -- what this client owns ------------------------------------------------------------------------------------------------

    def _fact(self, key: str, value: Any, version: Version, *, lease: str = "", deleted: bool = False) -> Fact:
        return Fact(
            namespace=self.namespace, key=key, value=value, version=version,
            group=self.group, generation=self.generation, lease=lease, deleted=deleted,
        )  # fmt: skip

    async def _remember(self, fact: Fact, foreign: bool) -> None:
        """What this client wrote is there to be told after a restart, and now, if it was written before one and answered after it. Then
        whose key it was before, if it was somebody else's, may forget it."""
        place, late = (fact.namespace, fact.key), fact.version[0] < self._incarnation
        if fact.deleted:
            if foreign or late:
                self._tombstones.append((asyncio.get_running_loop().time() + TOMBSTONE_SECONDS, fact))
        elif place not in self._facts or self._facts[place].version < fact.version:
            self._facts[place] = fact
        if late:
            self._incarnation = 0
        self._keep_facts()
        if foreign or late:
            with suppress(DeadlineExceeded):  # a store that is away for so long is told all facts anyhow
                await self._ask("heard", expected=fact.version)

    def _keep_facts(self) -> None:
        """Stay in touch with the store from the first fact on, to tell all facts again as soon as it has restarted."""
        if self._keeper is None:
            self._keeper = asyncio.ensure_future(self._stay())

    async def _stay(self) -> None:
        while True:
            lost: Mapping[tuple[str, str], Version] = await self._ask("stay", ends=float("inf"), waits=True)
            for place, version in lost.items():
                if place in self._facts and self._facts[place].version < version:
                    del self._facts[place]
            while self._tombstones and self._tombstones[0][0] < asyncio.get_running_loop().time():
                self._tombstones.popleft()

    def _forget_lease(self, lease: str) -> None:
        self._leases.pop(lease, None)
        self._facts = {place: fact for place, fact in self._facts.items() if fact.lease != lease}

    async def _meet(self, incarnation: int) -> None:
        """Tell the facts to a store that began a new life, before anything else is asked of it."""
        async with self._meeting:
            if self._incarnation >= incarnation:  # somebody has introduced us meanwhile
                return
            facts = (*self._facts.values(), *(fact for _, fact in self._tombstones))
            leases = {lease.id: lease.seconds for lease in self._leases.values()}
            request = self._request("publish", facts=facts, leases=leases, fences=dict(self._fences))
            answer = await self.link.ask(request, self._answer_seconds)
            for place in answer.value:
                self._facts.pop(place, None)
            self._incarnation = answer.incarnation

    # -- asking ---------------------------------------------------------------------------------------------------------------

    def _request(self, do: Operation, *, key: str = "", **fields: Any) -> StoreRequest:
        if not isinstance(key, str):  # among the others it would break the store for everybody
            raise TypeError(f"{self.owner}: a key of the store must be a str, got {key!r}")
        told: dict[str, Any] = {"group": self.group, "generation": self.generation} | fields
        return StoreRequest(
            do=do,
            id=f"{self._client}-{next(self._numbers)}",
            client=self._client,
            owner=self.owner,
            incarnation=self._incarnation,
            namespace=self.namespace,
            key=key,
            **told,
        )

    async def _ask(self, do: Operation, *, ends: float | None = None, waits: bool = False, subject: str = "", **fields: Any) -> Any:
        """Ask until there is an answer, at most until `ends` on the loop's clock. With `waits` the server waits too, a slice at most;
        a read goes on so until the key is there.

        Raises the server's error, or DeadlineExceeded when the store is away for so long.
        """
        now = asyncio.get_running_loop().time
        started, pause = now(), PAUSES[0]
        ends = started + self._answer_seconds if ends is None else ends
        request = self._request(do, **fields)
        while True:
            if waits:
                patience = max(ends - now(), 0)
                request = replace(request, seconds=min(patience, SLICE_SECONDS), patience=patience, waited=now() - started)
            silence = request.seconds + GRACE_SECONDS if waits else min(self._answer_seconds, SLICE_SECONDS)
            try:
                asked = self._incarnation
                answer = await self.link.ask(replace(request, incarnation=asked), silence)
                if answer.incarnation != asked:  # a stranger: it knows the facts after this, and is asked again
                    await self._meet(answer.incarnation)
                    continue
            except StoreGone as gone:
                if now() >= ends:
                    subject = subject or f"the store of {self.link.run} to answer {do} {request.key}".rstrip()
                    report = f"the store does not answer: {gone}"
                    raise DeadlineExceeded(waiter=self.owner, subject=subject, seconds=now() - started, last_report=report) from gone
                await asyncio.sleep(min(pause, max(ends - now(), 0.001)))
                pause = min(2 * pause, PAUSES[1])
                continue
            if answer.error is not None:
                raise answer.error
            if not (waits and isinstance(answer.value, Look) and answer.value.entry is None and now() < ends):
                return answer.value
            request = replace(request, looks=answer.value.looks)


class KvLease(AbstractAsyncContextManager["KvLease"]):
    """Kept alive by its store client until `close`. `expired` when the store has given it up, and its keys with it."""

    def __init__(self, store: KvStore, identity: str, seconds: float) -> None:
        self.id, self.seconds, self.expired = identity, seconds, False
        self._store = store
        self._keeper = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        while not self.expired:
            await asyncio.sleep(self.seconds / 3)
            kept: bool = await self._store._ask("keep", ends=float("inf"), lease=self.id, seconds=self.seconds)
            if not kept:
                self.expired = True
                self._store._forget_lease(self.id)

    async def close(self) -> None:
        """Give the lease back; its keys go away at once."""
        self._keeper.cancel()
        if not self.expired:
            self.expired = True
            self._store._forget_lease(self.id)
            with suppress(DeadlineExceeded):  # a store that is away for so long forgets the lease by itself
                await self._store._ask("release", lease=self.id)

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class KvWatch:
    """A stream of changes under a prefix. Two quick changes of one key may arrive as the later one.

    A restart of the store is not seen: keys come back with the versions that were reported already. Only a key whose owner died while
    the store restarted is gone without a report.
    """

    def __init__(self, store: KvStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._cursor: Version = (0, 0)
        self._seen: dict[str, Version] = {}
        self._coming: deque[KvChange] = deque()

    async def next(self, deadline: float) -> KvChange:
        """The next change. Raises DeadlineExceeded when there is none for `deadline` seconds."""
        now = asyncio.get_running_loop().time
        started = now()
        ends = started + deadline
        subject = f"a change under {self._prefix!r} of {self._store.namespace}"
        while not self._coming:
            changes: Changes = await self._store._ask(
                "changes", ends=ends, waits=True, subject=subject, key=self._prefix, cursor=self._cursor
            )
            self._take(changes)
            if not self._coming and now() >= ends:
                there = f"{len(self._seen)} keys are there"
                raise DeadlineExceeded(waiter=self._store.owner, subject=subject, seconds=now() - started, last_report=there)
        return self._coming.popleft()

    def _take(self, changes: Changes) -> None:
        if changes.whole and changes.cursor[0] == self._cursor[0]:
            gone = self._seen.keys() - {change.key for change in changes.items}  # deleted too long ago for the store to know
            self._coming += [KvChange(key=key, kind="deleted", value=None, version=self._seen.pop(key), owner="") for key in sorted(gone)]
        self._cursor = changes.cursor
        for change in changes.items:
            if change.version > self._seen.get(change.key, (0, 0)):
                self._coming.append(change)
            if change.kind == "put":
                self._seen[change.key] = change.version
            else:
                self._seen.pop(change.key, None)


def _instead(look: Look) -> str:
    parts = [f"looked {look.looks} time{'s' if look.looks > 1 else ''}"]
    parts.append(f"nearest keys: {', '.join(look.nearest)}" if look.nearest else "no similar key is there")
    if look.elsewhere:
        parts.append(f"the same key is in namespace {', '.join(look.elsewhere)}")
    return "; ".join(parts)


def check_plain(key: str, value: Any) -> None:
    """Raises ValueRefused naming the part of the value that is not plain, or the size of one that is too large."""
    size = 0
    parts = [("the value", value), ("the key", key)]
    while parts:
        where, part = parts.pop()
        if part is None or type(part) in (bool, int, float):
            size += 8
        elif type(part) in (str, bytes):
            size += len(part)
        elif type(part) in (list, tuple):
            parts += [(f"{where}[{index}]", item) for index, item in enumerate(part)]
            size += 8
        elif type(part) is dict and all(isinstance(name, str) for name in part):
            parts += [(f"{where}[{name!r}]", item) for name, item in part.items()]
            size += 8 + sum(map(len, part))
        else:
            raise ValueRefused(key=key, need=PLAIN, found=f"{type(part).__module__}.{type(part).__qualname__} as {where}")
        if size > VALUE_BYTES:
            raise ValueRefused(key=key, need=f"at most {VALUE_BYTES} bytes", found="more")
