"""One suite for the KV store on every backend: an actor on Ray, an object in this process, and an object on virtual time."""

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_workers import Registrar

from rolemesh.errors import DeadlineExceeded, LeaseExpired, StaleWrite, ValueRefused, WorkerError
from rolemesh.protocols.store import StoreAnswer, StoreGone, StoreLink, StoreRequest
from rolemesh.runtime import Backend, KvChange, KvStore, LocalBackend, Pool, SimulatedBackend, WaitStatistic, WorkerGroup, kept_alive
from rolemesh.runtime.local import LocalStoreLink

RUNS = count(1)


LINKS: dict[Backend, StoreLink] = {}
"""Stores that tests share, by backend, each test in a namespace of its own: starting an actor is what takes the time."""


@asynccontextmanager
async def a_store(backend: Backend, run: str = "") -> AsyncIterator[KvStore]:
    """The controller's client, of a new store if a run is given."""
    if run:
        link = await backend.start_store(run, 60)
    else:
        link = LINKS[backend] = LINKS.get(backend) or await backend.start_store("shared", 60)
    async with KvStore(link, owner="controller", namespace=run or f"run-{next(RUNS)}") as store:
        yield store


async def waits_of(store: KvStore) -> list[WaitStatistic]:
    return [row for row in (await store.waits()).over if row.namespace == store.namespace]


def client(store: KvStore, owner: str, **options: Any) -> KvStore:
    return KvStore(store.link, owner=owner, **{"namespace": store.namespace, **options})


def on(backend: Backend, test: Callable[[KvStore], Awaitable[None]]) -> None:
    async def main() -> None:
        async with a_store(backend) as store:
            await test(store)

    backend.run(main())


slow_on_ray = pytest.mark.parametrize(
    "backend", ["local", "simulated", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])], indirect=True
)
"""For tests that take their time where it is not virtual."""


def brief(backend: Backend) -> float:
    """Seconds of a lease that is short, and long enough for its keep-alive on a busy machine."""
    return 3.0 if backend.name == "ray" else 0.6


def told(change: KvChange) -> tuple[str, str, Any]:
    return change.kind, change.key, change.value


def test_put_get_list_delete(backend: Backend) -> None:
    async def test(store: KvStore) -> None:
        value = {"host": "10.0.0.3", "ports": [80, 81], "ready": True, "load": 0.5, "blob": b"\x00", "none": None}
        first = await store.put("rollout/3/address", value)
        assert await store.get("rollout/3/address", deadline=0) == value
        value["ports"].append(82)
        assert (await store.get("rollout/3/address", deadline=0))["ports"] == [80, 81], "what is stored is a copy"
        assert await store.put("rollout/3/address", 1) > first
        await store.put("rollout/10/address", 2)
        await store.put("actor/0/address", 3)
        assert await client(store, "other").list("rollout/") == {"rollout/10/address": 2, "rollout/3/address": 1}
        assert await store.delete("rollout/3/address")
        assert not await store.delete("rollout/3/address")
        assert await store.look("rollout/3/address") is None
        assert list(await store.list()) == ["actor/0/address", "rollout/10/address"]

    on(backend, test)


def test_a_read_is_woken_by_the_write_that_it_waits_for(backend: Backend) -> None:
    async def test(store: KvStore) -> None:
        reader = client(store, "reader")
        reading = asyncio.ensure_future(reader.get("weights/version", deadline=60))
        await asyncio.sleep(0.3)
        await store.put("weights/other", 1)
        assert not reading.done()
        (waiting,) = (await store.waits()).now
        assert (waiting.waiter, waiting.key) == ("reader", "weights/version")
        assert 0.2 < waiting.seconds < 30 < waiting.remaining < 60
        await store.put("weights/version", 7)
        assert await reading == 7
        assert (await store.waits()).now == ()
        (row,) = await waits_of(store)
        assert (row.waiter, row.key, row.count, row.expired) == ("reader", "weights/version", 1, 0)
        assert 0.2 < row.seconds < 30
        assert row.longest == pytest.approx(row.seconds, abs=0.1)

    on(backend, test)


def test_an_expired_read_names_time_looks_nearest_keys_and_the_other_namespace(backend: Backend) -> None:
    async def test(store: KvStore) -> None:
        reader = client(store, "rollout rank 3")
        await store.put("actor/0/address", 1)
        await client(store, "old", namespace=f"{store.namespace}-before").put("actor/0/adress", 1)
        with pytest.raises(DeadlineExceeded) as caught:
            await reader.get("actor/0/adress", deadline=0.5)
        text = str(caught.value)
        assert re.match(rf"rollout rank 3 waited 0\.[5-9] s for key 'actor/0/adress' of {store.namespace} ", text)
        assert "looked 2 times" in text
        assert "nearest keys: actor/0/address" in text
        assert f"the same key is in namespace {store.namespace}-before" in text
        (row,) = await waits_of(store)
        assert (row.waiter, row.key, row.count, row.expired) == ("rollout rank 3", "actor/*/adress", 1, 1)

    on(backend, test)


def test_a_long_wait_is_one_wait_however_many_slices_it_takes(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolemesh.runtime.kv_store.SLICE_SECONDS", 0.2)

    async def test(store: KvStore) -> None:
        with pytest.raises(DeadlineExceeded, match=r"reader waited 0\.[7-9] s"):
            await client(store, "reader").get("never", deadline=0.7)
        (row,) = await waits_of(store)
        assert (row.count, row.expired) == (1, 1)
        assert 0.6 < row.longest < 5
        reading = asyncio.ensure_future(client(store, "reader").get("late", deadline=20))
        await asyncio.sleep(0.5)
        await store.put("late", 1)
        assert await reading == 1
        assert [(row.key, row.count, row.expired) for row in await waits_of(store) if row.key == "late"] == [("late", 1, 0)]

    on(backend, test)


def test_compare_and_set_lets_one_of_many_win(backend: Backend) -> None:
    async def test(store: KvStore) -> None:
        racers = [client(store, f"racer {number}") for number in range(5)]
        won = await asyncio.gather(*(racer.compare_and_set("leader", number, None) for number, racer in enumerate(racers)))
        assert sum(won) == 1
        entry = await store.look("leader")
        assert (entry.value, entry.owner) == (won.index(True), f"racer {won.index(True)}")
        await store.put("leader", 9)
        assert not await store.compare_and_set("leader", 10, entry.version)
        assert await store.compare_and_set("leader", 11, (await store.look("leader")).version)
        assert await store.get("leader", deadline=0) == 11

    on(backend, test)


def test_a_watch_begins_with_what_is_there_and_follows(backend: Backend) -> None:
    async def test(store: KvStore) -> None:
        await store.put("variables/beta", 1)
        await store.put("elsewhere", 0)
        watch = client(store, "watcher").watch("variables/")
        assert told(await watch.next(deadline=20)) == ("put", "variables/beta", 1)
        coming = asyncio.ensure_future(watch.next(deadline=20))
        await asyncio.sleep(0.2)
        await store.put("elsewhere", 1)
        await store.put("variables/beta", 2)
        assert told(await coming) == ("put", "variables/beta", 2)
        await store.delete("variables/beta")
        assert told(await watch.next(deadline=20)) == ("deleted", "variables/beta", None)
        with pytest.raises(DeadlineExceeded, match=r"watcher waited .* for a change under 'variables/'"):
            await watch.next(deadline=0.2)

    on(backend, test)


def test_a_watch_that_fell_far_behind_still_ends_with_the_truth(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend.name == "ray":
        pytest.skip("the number of deletions kept is set in this process")
    monkeypatch.setattr("rolemesh.runtime.kv_server.DELETIONS_KEPT", 2)

    async def test(store: KvStore) -> None:
        watch = store.watch()
        for number in range(6):
            await store.put(f"key{number}", number)
            await watch.next(deadline=5)
        for number in range(5):
            await store.delete(f"key{number}")
        changes = [told(await watch.next(deadline=5)) for _ in range(5)]
        assert changes == [("deleted", f"key{number}", None) for number in range(5)]
        with pytest.raises(DeadlineExceeded):
            await watch.next(deadline=0)

    on(backend, test)


@slow_on_ray
def test_a_lease_that_nobody_keeps_takes_its_keys_along(backend: Backend) -> None:
    async def test(store: KvStore) -> None:
        worker = client(store, "rollout rank 0")
        seconds = brief(backend)
        lease = await worker.lease(seconds)
        await worker.put("rollout/0", "here", lease=lease)
        await worker.put("note", "stays")
        watch = store.watch("rollout/")
        assert told(await watch.next(deadline=20)) == ("put", "rollout/0", "here")
        await asyncio.sleep(2 * seconds)
        assert await store.get("rollout/0", deadline=0) == "here", "kept alive by itself"
        lease._keeper.cancel()
        assert told(await watch.next(deadline=20)) == ("expired", "rollout/0", None)
        assert await store.list() == {"note": "stays"}
        with pytest.raises(LeaseExpired, match=r"the lease of rollout rank 0 \(.* s\) has run out"):
            await worker.put("rollout/0", "again", lease=lease)

    on(backend, test)


def test_a_lease_given_back_takes_its_keys_along_at_once(backend: Backend) -> None:
    async def test(store: KvStore) -> None:
        worker = client(store, "worker")
        async with await worker.lease(60) as lease:
            await worker.put("here", 1, lease=lease)
        assert await store.look("here") is None
        with pytest.raises(LeaseExpired):
            await worker.put("here", 1, lease=lease)

    on(backend, test)


def test_a_late_writer_of_an_older_generation_is_fenced_off(backend: Backend) -> None:
    async def test(store: KvStore) -> None:
        old, new = (client(store, f"rollout rank 1 of {number}", group="rollout", generation=number) for number in (4, 5))
        await old.put("rollout/1/address", "old")
        await old.put("rollout/0/address", "old")
        await store.put("variables/beta", 1)
        await new.put("rollout/1/address", "new")
        with pytest.raises(StaleWrite) as caught:
            await old.put("rollout/1/address", "late")
        assert str(caught.value).startswith(
            "rollout rank 1 of 4 may not write 'rollout/1/address': it speaks for generation 4 of group rollout, which is at generation 5"
        )
        with pytest.raises(StaleWrite):
            await old.delete("rollout/1/address")
        with pytest.raises(StaleWrite):
            await old.compare_and_set("rollout/2/address", "late", None)
        assert await store.list() == {"rollout/1/address": "new", "variables/beta": 1}, "addresses of the old generation are gone"
        await store.fence("rollout", 6)
        with pytest.raises(StaleWrite):
            await new.put("rollout/1/address", "late")
        assert await store.list("rollout/") == {}
        await store.link.restart(60)
        await store.look("rollout/1/address")
        with pytest.raises(StaleWrite):
            await new.put("rollout/1/address", "late")

    on(backend, test)


def test_namespaces_do_not_meet(backend: Backend) -> None:
    async def test(store: KvStore) -> None:
        other = client(store, "other", namespace="other", group="rollout", generation=9)
        await other.put("key", 1)
        assert await store.look("key") is None
        mine = client(store, "mine", group="rollout", generation=1)
        await mine.put("key", 2)
        assert [await each.list() for each in (store, other)] == [{"key": 2}, {"key": 1}]

    on(backend, test)


def test_two_runs_have_stores_of_their_own(backend: Backend) -> None:
    async def main() -> None:
        async with a_store(backend, "first") as first, a_store(backend, "second") as second:
            await first.put("key", 1)
            assert await KvStore(second.link, owner="second", namespace=first.namespace).list() == {}

    backend.run(main())


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.zeros(2), "found numpy.ndarray as the value"),
        ({"a": [1, np.float32(1)]}, r"found numpy.float32 as the value\['a'\]\[1\]"),
        ({1: 2}, "found builtins.dict as the value"),
        ("x" * 70_000, "at most 65536 bytes; found more"),
        ([0.0] * 9000, "at most 65536 bytes; found more"),
    ],
)
async def test_values_are_small_and_plain(value: object, found: str) -> None:
    async with a_store(LocalBackend()) as store:
        with pytest.raises(ValueRefused, match=rf"value of 'key' refused: .*{found}.*travel by reference"):
            await store.put("key", value)
        assert await store.list() == {}


async def test_keys_are_texts_and_leases_last() -> None:
    async with a_store(LocalBackend()) as store:
        for wrong in (None, 1, b"key"):
            for method, more in ((store.put, (1,)), (store.look, ()), (store.delete, ()), (store.list, ()), (store.get, (0.1,))):
                with pytest.raises(TypeError, match=r"a key of the store must be a str, got (None|1|b'key')"):
                    await method(wrong, *more)
        with pytest.raises(ValueRefused, match="at most 65536 bytes"):
            await store.put("k" * 70_000, 1)
        for wrong in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="a lease must last"):
                await store.lease(wrong)
        assert await store.list() == {}
        with pytest.raises(DeadlineExceeded):
            await store.get("absent", 0)


# A store that restarts.


def test_owners_tell_their_facts_again_and_readers_only_wait_longer(backend: Backend) -> None:
    async def test(store: KvStore) -> None:
        worker = client(store, "rollout rank 0", group="rollout", generation=2)
        await store.put("variables/beta", 0.1)
        await store.put("variables/beta", 0.2)
        value = [1]
        await store.put("list", value)
        value.append(2)
        await worker.put("rollout/0/address", "here")
        entry = await store.look("rollout/0/address")
        reading = asyncio.ensure_future(client(store, "reader").get("weights/version", deadline=120))
        watch = client(store, "watcher").watch("rollout/")
        await watch.next(deadline=20)
        await asyncio.sleep(0.3)
        await store.link.restart(60)
        await store.put("weights/version", 3)
        assert await reading == 3
        late = client(store, "reader")
        assert await late.get("rollout/0/address", deadline=60) == "here"
        assert await late.get("variables/beta", deadline=60) == 0.2
        assert await late.get("list", deadline=60) == [1], "what was put, not what became of it"
        assert await late.look("rollout/0/address") == entry, "the version is that of before"
        with pytest.raises(DeadlineExceeded):
            await watch.next(deadline=1)
        with pytest.raises(StaleWrite):
            await client(store, "old", group="rollout", generation=1).put("rollout/0/address", "there")
        assert await late.compare_and_set("rollout/0/address", "moved", entry.version)
        assert told(await watch.next(deadline=20)) == ("put", "rollout/0/address", "moved")

    on(backend, test)


@slow_on_ray
@pytest.mark.slow
def test_a_restart_brings_back_the_last_word_on_a_key_only(backend: Backend) -> None:
    """Of two writers the later one, and what was deleted stays deleted."""

    async def test(store: KvStore) -> None:
        first, second = client(store, "first"), client(store, "second")
        await first.put("changed", 1)
        await second.put("changed", 2)
        await first.put("taken", 1)
        await second.delete("taken")
        await first.put("own", 1)
        await first.delete("own")
        await store.link.restart(60)
        assert await store.list() == {"changed": 2}
        await second.close()
        await store.link.restart(60)
        assert await first.list() == {}, "the first has heard that its word is not the last"

    on(backend, test)


@pytest.mark.slow
def test_what_somebody_else_took_over_does_not_come_back_with_the_earlier_owner(backend: Backend) -> None:
    """Even when the later owner is gone by the time the store restarts."""

    async def test(store: KvStore) -> None:
        first, second = client(store, "first"), client(store, "second")
        for key in ("changed", "taken", "mine"):
            await first.put(key, 1)
        await second.put("changed", 2)
        await second.delete("taken")
        await asyncio.sleep(0.5)
        await second.close()
        await store.link.restart(60)
        assert await first.list() == {"mine": 1}

    on(backend, test)


class Unreliable(LocalStoreLink):
    """`after(request)` is awaited between a request that was served and its answer, and may raise StoreGone: then the answer is lost."""

    def __init__(self, run: str, after: Callable[[StoreRequest], Awaitable[None]]) -> None:
        super().__init__(run)
        self.after = after

    async def ask(self, request: StoreRequest, deadline: float) -> StoreAnswer:
        answer = await super().ask(request, deadline)
        if answer.incarnation == request.incarnation:
            await self.after(request)
        return answer


async def test_a_write_whose_answer_got_lost_counts_once() -> None:
    lost: list[str] = []

    async def after(request: StoreRequest) -> None:
        if request.do in ("put", "delete") and request.id not in lost:
            lost.append(request.id)
            raise StoreGone("lost on the way")

    store = KvStore(Unreliable("run", after), owner="controller")
    assert await store.compare_and_set("leader", "me", None)
    entry = await store.look("leader")
    assert await store.compare_and_set("leader", "still me", entry.version)
    assert (await store.look("leader")).version == (1, entry.version[1] + 1)
    assert await store.delete("leader")
    assert not await store.delete("leader")
    assert len(lost) == 4


async def test_a_write_that_is_answered_after_a_restart_is_told_again() -> None:
    """The store wrote it and restarted, and the client told its facts to the new life before it heard of the write."""
    restarted: list[str] = []

    async def after(request: StoreRequest) -> None:
        if request.do not in restarted and (request.value == 2 or request.do == "delete"):
            restarted.append(request.do)
            await link.restart(1)
            await store.look("before")

    link = Unreliable("run", after)
    store = KvStore(link, owner="controller")
    await store.put("before", 1)
    await store.put("key", 2)
    assert await store.list() == {"before": 1, "key": 2}
    assert await store.delete("key")
    assert await store.list() == {"before": 1}
    assert restarted == ["put", "delete"]


class Slow(LocalStoreLink):
    """While the first answer to a `get` is on its way, `meanwhile` happens."""

    meanwhile: Callable[[], Awaitable[object]] | None = None

    async def ask(self, request: StoreRequest, deadline: float) -> StoreAnswer:
        answer = await super().ask(request, deadline)
        if request.do == "get" and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return answer


async def test_who_was_a_stranger_when_it_asked_asks_again_though_it_was_introduced_since() -> None:
    link = Slow("run")
    store = KvStore(link, owner="controller")
    await store.put("key", 1)
    await link.restart(1)
    link.meanwhile = lambda: store.put("other", 2)
    assert await store.get("key", deadline=5) == 1


@slow_on_ray
@pytest.mark.slow
def test_a_restart_expires_no_lease(backend: Backend) -> None:
    """Also when the store is away for longer than the lease lasts; a lease that is not kept afterwards ends."""

    async def test(store: KvStore) -> None:
        worker = client(store, "worker")
        seconds = brief(backend)
        lease = await worker.lease(seconds)
        await worker.put("here", 1, lease=lease)
        watch = store.watch()
        assert told(await watch.next(deadline=20)) == ("put", "here", 1)
        await store.link.stop()
        await asyncio.sleep(2 * seconds)
        await store.link.restart(60)
        assert await store.get("here", deadline=60) == 1
        await asyncio.sleep(2 * seconds)
        assert not lease.expired
        assert await store.get("here", deadline=0) == 1
        with pytest.raises(DeadlineExceeded):
            await watch.next(deadline=0.2)
        lease._keeper.cancel()
        assert told(await watch.next(deadline=20)) == ("expired", "here", None)

    on(backend, test)


@slow_on_ray
def test_a_store_that_stays_away_ends_waits_within_their_deadline(backend: Backend) -> None:
    async def test(store: KvStore) -> None:
        hasty = client(store, "hasty", answer_seconds=1)
        await hasty.put("key", 1)
        await store.link.stop()
        started = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded, match=r"hasty waited \d\.\d s for the store of shared to answer put other.*does not answer"):
            await hasty.put("other", 1)
        with pytest.raises(DeadlineExceeded, match=r"hasty waited \d\.\d s for key 'key' of run-\d+ .*does not answer"):
            await hasty.get("key", deadline=1)
        assert asyncio.get_running_loop().time() - started < 20
        await hasty.close()
        await store.link.restart(60)

    on(backend, test)


def test_a_pause_of_the_store_itself_expires_no_lease() -> None:
    """When nothing could arrive, nothing is late. The store and its client stop here, as on a machine that was suspended."""

    async def test(store: KvStore) -> None:
        lease = await store.lease(0.3)
        await store.put("here", 1, lease=lease)
        time.sleep(1.5)
        await asyncio.sleep(0.5)
        assert await store.get("here", deadline=0) == 1
        assert not lease.expired

    on(LocalBackend(), test)


@pytest.mark.slow
@pytest.mark.ray
def test_a_store_that_is_stopped_is_noticed_and_can_be_restarted(ray_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolemesh.runtime.kv_store.SLICE_SECONDS", 1.0)

    async def test(store: KvStore) -> None:
        await store.put("key", 1)
        pid, _ = store.link._process
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match=r"key 'key' of run.*the store does not answer: no answer in"):
            await store.get("key", deadline=2)
        reading = asyncio.ensure_future(store.get("key", deadline=120))
        await asyncio.sleep(0.5)
        await store.link.restart(60)
        assert await reading == 1
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    on(ray_backend, test)


@pytest.mark.ray
def test_a_store_whose_process_is_killed_is_started_anew_by_its_keeper_and_told_again(ray_backend: Backend) -> None:
    async def main() -> None:
        heard: list[str] = []
        async with a_store(ray_backend, "kept") as store, kept_alive(store, heard.append, every=0.1):
            await store.put("key", 1)
            reader = client(store, "reader")
            assert await reader.get("key", deadline=10) == 1
            os.kill(store.link._process[0], signal.SIGKILL)
            waiting = asyncio.ensure_future(reader.get("later", deadline=60))
            async with asyncio.timeout(60):
                while not heard:
                    await asyncio.sleep(0.05)
            assert await reader.get("key", deadline=30) == 1
            await store.put("later", 2)
            assert await waiting == 2
            assert "the KV store of kept was gone" in heard[0]
            assert "was started anew" in heard[0]

    ray_backend.run(main())


async def test_a_store_that_does_not_start_anew_is_told_of_and_tried_again() -> None:
    class Stubborn(LocalStoreLink):
        tries = 0

        async def restart(self, deadline: float) -> None:
            self.tries += 1
            if self.tries < 3:
                raise DeadlineExceeded(waiter="the controller", subject="the store to start", seconds=deadline)
            await super().restart(deadline)

    heard: list[str] = []
    link = Stubborn("stubborn")
    async with KvStore(link, owner="controller") as store, kept_alive(store, heard.append, every=0.01):
        await store.put("key", 1)
        await link.stop()
        assert await store.get("key", deadline=30) == 1
    assert link.tries == 3
    assert ["did not start anew" in text for text in heard] == [True, True, False]


@given(
    seed=st.integers(0, 2**32),
    clients=st.integers(1, 4),
    restarts=st.lists(st.floats(0, 60), max_size=3),
    loss=st.sampled_from([0.0, 0.1, 0.3]),
)
@settings(max_examples=60)
def test_no_increment_of_a_shared_counter_is_lost_or_doubled(seed: int, clients: int, restarts: list[float], loss: float) -> None:
    """Whatever answers get lost and whenever the store restarts, or is away for a while. Each client also keeps a key of its own.

    Only if both happen at once may one be doubled; and one may be lost if answers to the owner get lost for longer than the store waits for
    owners, see `compare_and_set`. It waits for a minute here, so that this does not happen.
    """
    with pytest.MonkeyPatch.context() as patched:
        if restarts and loss:
            patched.setattr("rolemesh.runtime.kv_server.SETTLE_SECONDS", 60.0)
        count_with_faults(seed, clients, restarts, loss)


def count_with_faults(seed: int, clients: int, restarts: list[float], loss: float) -> None:
    chance, backend = random.Random(seed), SimulatedBackend()

    async def after(request: StoreRequest) -> None:
        await asyncio.sleep(chance.random())
        if chance.random() < loss:
            raise StoreGone("lost on the way")

    async def count_up(store: KvStore) -> None:
        lease = await store.lease(10)
        for number in range(5):
            await store.put(f"own/{store.owner}", number, lease=lease)
            while True:
                entry = await store.look("counter")
                value, version = (entry.value, entry.version) if entry else (0, None)
                if await store.compare_and_set("counter", value + 1, version):
                    break
            await asyncio.sleep(10 * chance.random())

    async def restart(link: Unreliable, at: float) -> None:
        await asyncio.sleep(at)
        await link.stop()
        await asyncio.sleep(chance.choice([0, 5]))
        await link.restart(1)

    async def main() -> None:
        link = Unreliable("run", after)
        stores = [KvStore(link, owner=f"client {number}", answer_seconds=600) for number in range(clients)]
        await asyncio.gather(*map(count_up, stores), *(restart(link, at) for at in restarts))
        reader = KvStore(link, owner="reader", answer_seconds=600)
        counted = (await reader.look("counter")).value
        assert counted == 5 * clients if not (restarts and loss) else counted >= 5 * clients
        assert await reader.list("own/") == {f"own/client {number}": 4 for number in range(clients)}
        for store in stores:
            await store.close()
        assert await reader.list("own/") == {}

    backend.run(main())


# Workers.


def test_workers_register_and_find_each_other(backend: Backend) -> None:
    async def test(store: KvStore) -> None:
        pool = await Pool.of_slots(backend, f"registrars-{store.namespace}", [2], cpus=0.25)
        await pool.create(deadline=60)
        group = WorkerGroup("registrars", Registrar, pool, [0, 1], worker_kwargs={"link": store.link, "run": store.namespace})
        await group.create(deadline=120)
        try:
            await group.init()
            assert await store.get("registrars/0", deadline=20) == await store.get("registrars/1", deadline=20) - 1
            assert await group.neighbour() == [1, 0]
            assert await store.list("registrars/") == {"registrars/0": 0, "registrars/1": 1}
            with pytest.raises(WorkerError, match=r"DeadlineExceeded: .* waited"):
                await group.call("missing", ranks=(0,))
        finally:
            await pool.close()

    on(backend, test)
