"""The simulated backend: groups, pools, store and guard on virtual time, with faults. Hours pass here, and no test takes seconds."""

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_workers import Adder, Flaky

from rolemesh.errors import DeadlineExceeded, ResourceError, StandStill, WorkerDied
from rolemesh.plan import NodeInfo
from rolemesh.protocols.backend import Call
from rolemesh.runtime import (
    Backend,
    CallRecord,
    Deadlines,
    Fault,
    Faults,
    KvStore,
    Pool,
    ResourceGuard,
    SimulatedBackend,
    Worker,
    WorkerGroup,
    create_backend,
    register,
)
from rolemesh.runtime.group import UNWIND_SECONDS

HOUR = 3600.0


async def adders(backend: Backend, workers: int = 2, worker_class: type[Worker] = Adder, **options: Any) -> WorkerGroup:
    pool = await Pool.of_slots(backend, "pool", [workers])
    await pool.create(deadline=HOUR)
    group = WorkerGroup("adders", worker_class, pool, range(workers), **options)
    await group.create(deadline=HOUR)
    await group.init()
    return group


def faulty(*script: Fault, **options: Any) -> SimulatedBackend:
    return SimulatedBackend(faults=Faults(script=script), **options)


# Time.


def test_hours_pass_in_an_instant_and_in_order() -> None:
    backend, order = SimulatedBackend(), list[tuple[str, float]]()

    async def sleeper(name: str, seconds: float) -> None:
        await backend.sleep(seconds)
        order.append((name, backend.time()))

    async def main() -> None:
        await asyncio.gather(sleeper("day", 24 * HOUR), sleeper("hour", HOUR), sleeper("second", 1))

    started = time.monotonic()
    backend.run(main())
    assert time.monotonic() - started < 5
    assert order == [("second", 1), ("hour", HOUR), ("day", 24 * HOUR)]
    backend.run(sleeper("later", 1))
    assert order[-1] == ("later", 24 * HOUR + 1), "time goes on where it was"


def test_a_program_that_would_wait_for_ever_is_ended_with_where_it_stands() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(StandStill, match=r"at 0 s nothing is ready and no timer runs") as caught:
        SimulatedBackend().run(main())
    assert "main at " in str(caught.value)
    assert f"{os.path.basename(__file__)}:" in str(caught.value)


def test_a_program_without_an_end_is_ended_at_the_limit() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(60)

    with pytest.raises(StandStill, match="it has gone on for more than 86400 virtual seconds"):
        SimulatedBackend(limit=24 * HOUR).run(main())


def test_it_is_made_from_python_and_is_no_option_of_a_config() -> None:
    from rolemesh.config.schema import Config

    assert isinstance(create_backend("simulated", limit=1.0), SimulatedBackend)
    assert "simulated" not in str(Config.model_fields["backend"].annotation)


# Create: resources.


def test_A04_a_pool_waits_until_another_gives_back_and_not_longer_than_its_deadline() -> None:
    backend = SimulatedBackend([NodeInfo(name="a", cpus=4, memory_bytes=0, gpus=2), NodeInfo(name="b", cpus=4, memory_bytes=0)])

    async def main() -> None:
        first = await Pool.of_slots(backend, "first", [2, 3], gpus=0)
        await first.create(deadline=1)
        assert [(node.free_cpus, node.free_gpus) for node in (await backend.inventory()).nodes] == [(2, 2), (1, 0)]
        second = await Pool.of_slots(backend, "second", [2, 2])
        with pytest.raises(ResourceError) as caught:
            await second.create(deadline=2 * HOUR)
        assert str(caught.value) == "pool second on node b: CPU 2, GPU 0; found free CPU 1, GPU 0. Lower pools.*.nodes"
        assert backend.time() == 2 * HOUR
        asyncio.get_running_loop().call_later(HOUR, lambda: asyncio.ensure_future(first.close()))
        await second.create(deadline=2 * HOUR)
        assert backend.time() == 3 * HOUR
        with pytest.raises(ResourceError, match="CPU 1, GPU 3; found free CPU 2, GPU 2"):
            await (await Pool.of_slots(backend, "third", [1], gpus=3)).create(deadline=1)

    backend.run(main())


def test_S16_a_process_that_starts_too_slowly_ends_the_create_at_its_deadline() -> None:
    backend = SimulatedBackend(start_seconds=600)

    async def main() -> None:
        pool = await Pool.of_slots(backend, "pool", [2])
        await pool.create(deadline=1)
        group = WorkerGroup("adders", Adder, pool, [0, 1])
        with pytest.raises(DeadlineExceeded, match=r"the controller waited 60\.0 s for process pool-0.1 to start"):
            await group.create(deadline=60)
        assert backend.time() == 60
        await group.create(deadline=HOUR)
        assert backend.time() == 660

    backend.run(main())


# Init.


def test_S16_a_load_that_hangs_ends_at_its_own_deadline() -> None:
    backend = faulty(Fault(kind="hang", method="load", rank=1))

    async def main() -> None:
        with pytest.raises(DeadlineExceeded) as caught:
            await adders(backend, deadlines=Deadlines(load=HOUR))
        assert "adders.load() on rank 1" in str(caught.value)
        assert "rank 1: computing adders.load (pid 2 on sim-0)\nsimulated call, for 3600 virtual seconds" in str(caught.value)
        assert backend.time() == HOUR + UNWIND_SECONDS

    backend.run(main())


def test_S16_a_failed_load_is_retried_on_that_worker_alone() -> None:
    records: list[CallRecord] = []
    backend = SimulatedBackend(durations={"load": 100})

    async def main() -> None:
        group = await adders(backend, worker_class=Flaky, observer=records.append)
        assert await group.loads_seen() == [1, 2]
        assert backend.time() == 200

    backend.run(main())


# Call.


def test_calls_take_their_time_one_after_the_other_in_each_process_and_side_by_side_in_several() -> None:
    records: list[CallRecord] = []
    backend = SimulatedBackend(durations={"double": lambda call, chance: 10.0 * call.args[0], "adders.first": 5})

    async def main() -> None:
        group = await adders(backend, observer=records.append)
        started = backend.time()
        assert await asyncio.gather(group.double([1, 2]), group.double([3, 1]), group.first()) == [[2, 4], [6, 2], 0]
        assert backend.time() - started == 45, "rank 0: 10 + 30 + 5 s, rank 1: 20 + 10 s"

    backend.run(main())
    spans = [(record.method, [(reply.started, reply.ended) for reply in record.replies]) for record in records[2:]]
    assert spans == [("double", [(0, 10), (0, 20)]), ("double", [(10, 40), (20, 30)]), ("first", [(40, 45)])]
    assert [(span.start, span.end) for span in records[-1].spans] == [(40, 45)]


def test_B12_a_call_that_hangs_for_hours_ends_with_who_what_and_since_when() -> None:
    backend = faulty(Fault(kind="hang", method="count_up", rank=1, nth=2))

    async def main() -> None:
        group = await adders(backend)
        await group.count_up()
        await asyncio.sleep(HOUR)
        with pytest.raises(DeadlineExceeded) as caught:
            await group.call("count_up", deadline=2 * HOUR)
        assert str(caught.value).startswith("the controller waited 7200.0 s for adders.count_up() on rank 1 and gave up.")
        (idle, busy) = await group.reports()
        assert (idle.state, idle.call) == ("idle", "")
        assert (busy.state, busy.call, busy.since) == ("computing", "adders.count_up", HOUR)
        await group.replace(1)
        assert await group.count_up() == [3, 1], "rank 0 had done its part"

    backend.run(main())


def test_B01_a_process_that_dies_in_a_call_is_named_and_replaced() -> None:
    backend = faulty(Fault(kind="death", method="count_up", rank=1, nth=3), durations={"count_up": 100})

    async def main() -> None:
        group = await adders(backend)
        assert [await group.count_up() for _ in range(2)] == [[1, 1], [2, 2]]
        with pytest.raises(WorkerDied) as caught:
            await group.count_up()
        assert "adders rank 1 (node sim-0, pid 2) in count_up(): Killed: process pool-1.1 died in adders.count_up" in str(caught.value)
        assert backend.time() == 250 + UNWIND_SECONDS, "it died in the middle of the call, and rank 0 had not done its part yet"
        with pytest.raises(WorkerDied, match="is gone"):
            await group.call("count_up", ranks=(1,))
        await group.replace(1)
        assert await group.count_up() == [4, 1]

    backend.run(main())


def test_who_waits_in_the_queue_of_a_process_that_dies_is_told() -> None:
    backend = faulty(Fault(kind="death", method="double"), durations={"double": 10, "first": 10})

    async def main() -> None:
        group = await adders(backend, workers=1)
        outcomes = await asyncio.gather(group.double([1]), group.first(), group.first(), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [WorkerDied] * 3
        assert backend.time() == 5

    backend.run(main())


def test_ending_a_process_tells_who_waits_for_it_at_once() -> None:
    backend = SimulatedBackend(durations={"first": HOUR})

    async def main() -> None:
        group = await adders(backend, workers=1)
        waiting = asyncio.ensure_future(group.first())
        await asyncio.sleep(60)
        await group.pool.kill(0)
        with pytest.raises(WorkerDied, match=r"adders rank 0 .* process pool-0.1 was ended"):
            await waiting
        assert backend.time() == 60

    backend.run(main())


class Recording(Worker):
    """Writes down which of its methods ran."""

    ran: ClassVar[list[str]] = []

    @register()
    def dig(self) -> None:
        self.ran.append("dig")

    @register()
    def sow(self) -> None:
        self.ran.append("sow")


@pytest.mark.parametrize("how", ["killed", "dies"])
def test_a_process_that_ended_computes_no_more(how: str) -> None:
    backend = faulty(*([Fault(kind="death", method="dig")] if how == "dies" else []), durations={"dig": 600, "sow": 600})
    Recording.ran.clear()

    async def main() -> None:
        group = await adders(backend, workers=1, worker_class=Recording)
        waiting = asyncio.gather(group.dig(), group.sow(), return_exceptions=True)
        await asyncio.sleep(60)
        if how == "killed":
            await group.pool.kill(0)
        assert [type(outcome) for outcome in await waiting] == [WorkerDied] * 2
        await asyncio.sleep(10 * HOUR)

    backend.run(main())
    assert Recording.ran == []


def test_after_a_lost_reply_the_same_call_is_answered_and_not_made_again() -> None:
    backend = faulty(Fault(kind="lost_reply", method="count_up", rank=0))

    async def main() -> None:
        group = await adders(backend)
        with pytest.raises(DeadlineExceeded, match=r"adders.count_up\(\) on rank 0 .* rank 0: idle"):
            await group.call("count_up", deadline=60, call_id="a")
        assert await group.call("count_up", deadline=60, call_id="a") == [1, 1]
        assert await group.call("count_up", deadline=60, call_id="b") == [2, 2]

    backend.run(main())


def test_a_slow_call_is_slow() -> None:
    backend = SimulatedBackend(faults=Faults(script=[Fault(kind="slow", rank=1, method="first")], slow_factor=3, slow_seconds=7))
    backend._durations["first"] = 10

    async def main() -> None:
        group = await adders(backend)
        await group.call("first", ranks=(1,))
        assert backend.time() == 37
        await group.call("first", ranks=(1,))
        assert backend.time() == 47

    backend.run(main())


# Faults.


def test_faults_depend_on_the_seed_and_on_nothing_else() -> None:
    def struck(seed: int, ranks: Sequence[int]) -> list[tuple[int, int, str]]:
        faults = Faults(seed=seed, rates={"death": 0.1, "slow": 0.2}, methods=frozenset({"step"}))
        call, other = (Call(id="x", epoch=1, generation=0, group="actor", method=method) for method in ("step", "load"))
        assert faults.strike(other, 0, 1) is None
        return sorted((rank, nth, kind) for rank in ranks for nth in range(200) if (kind := faults.strike(call, rank, nth)))

    assert struck(1, range(5)) == struck(1, [4, 2, 3, 0, 1])
    assert struck(1, range(5)) != struck(2, range(5))
    counts = Counter(kind for _, _, kind in struck(1, range(5)))
    assert 60 < counts["death"] < 140, "100 of 1000 are expected, 9.5 is the standard deviation"
    assert 140 < counts["slow"] < 260


class Counting(Worker):
    """Adds up what it was given."""

    def load(self) -> None:
        self.total = 0

    @register(dispatch="one_each", mutates=True)
    def add(self, value: int) -> int:
        self.total += value
        return self.total


@given(seed=st.integers(0, 2**32), workers=st.integers(1, 6))
@settings(max_examples=40)
def test_every_call_ends_in_time_and_the_same_seed_gives_the_same_history(seed: int, workers: int) -> None:
    """Under deaths, hangs, slow calls and lost replies: an answer that is right, or an error that names the rank, by the deadline."""
    rates = {"death": 0.05, "hang": 0.05, "slow": 0.1, "lost_reply": 0.05}

    def history() -> list[tuple[float, str]]:
        faults = Faults(seed=seed, rates=rates, methods=frozenset({"add"}), slow_seconds=100)
        backend = SimulatedBackend(faults=faults, durations={"add": lambda call, chance: chance.uniform(1, 30)}, start_seconds=20)
        told: list[tuple[float, str]] = []

        async def main() -> None:
            group = await adders(backend, workers, Counting)
            totals = [0] * workers
            for number in range(10):
                started = backend.time()
                try:
                    answers = await group.call("add", [1] * workers, deadline=200, call_id=f"call {number}")
                except (WorkerDied, DeadlineExceeded) as error:
                    told.append((backend.time(), f"{type(error).__name__} {re.search(' ranks? [0-9, ]+', str(error))}"))
                    for rank in range(workers):
                        await group.replace(rank)
                    totals = [0] * workers
                else:
                    totals = [total + 1 for total in totals]
                    assert answers == totals
                    told.append((backend.time(), "answered"))
                assert backend.time() - started <= 200 + UNWIND_SECONDS + workers * 20 + 1e-6
            await group.pool.close()

        backend.run(main())
        return told

    first = history()
    assert first == history()
    assert [what for _, what in first if what.endswith("None")] == [], "every error names its rank"


# All together, without any reinforcement learning.


def test_S33_pool_group_store_and_guard_for_a_day_of_virtual_time() -> None:
    """Workers register in the store, phases take turns on the devices, one worker dies, and the books are right in the end."""
    script = [Fault(kind="death", method="count_up", rank=1, nth=10)]
    backend = SimulatedBackend(faults=Faults(script=script), durations={"count_up": 900})
    shares: Counter[str] = Counter()

    async def phase(guard: ResourceGuard, store: KvStore, group: WorkerGroup, who: str, slots: int) -> None:
        for turn in range(24):
            with await guard.acquire("devices", slots, who=who, deadline=24 * HOUR):
                try:
                    await group.count_up()
                except WorkerDied:
                    await group.replace(1)
                    await store.put("replaced", turn)
                shares[who] += 1
            await store.put(f"turns/{who}", turn)

    async def main() -> None:
        group, guard = await adders(backend), ResourceGuard(backend)
        guard.add_slots("devices", 8)
        async with await KvStore.start(backend, "run") as store:
            phases = (phase(guard, store, group, who, slots) for who, slots in (("generation", 8), ("training", 4)))
            finished = asyncio.gather(*phases)
            assert await store.get("turns/training", deadline=HOUR) == 0
            await finished
            assert await store.list() == {"replaced": 4, "turns/generation": 23, "turns/training": 23}
            assert guard.snapshot()[0].free == 8

    backend.run(main())
    assert shares == {"generation": 24, "training": 24}
    assert backend.time() == 48 * 900, "rank 0 makes all calls, one after the other; the new rank 1 waits for it once"
