"""One suite for all backends. What a backend says it lacks is skipped by name."""

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from runtime_workers import Adder, DiesJoining, Flaky, SilentWhileMade, SlowToLoad, Summer

from rolemesh.batch import Batch, BatchRef, assemble, block_meta
from rolemesh.errors import BatchError, DataLost, DeadlineExceeded, NotJoined, ResourceError, WorkerDied, WorkerError
from rolemesh.protocols.backend import Call, Reply, Report
from rolemesh.runtime import Backend, Bundle, CallRecord, Deadlines, KvStore, Pool, WorkerGroup


def needs(backend: Backend, *capabilities: str) -> None:
    lacking = backend.lacks & set(capabilities)
    if lacking:
        pytest.skip(f"{backend.name} lacks {', '.join(sorted(lacking))}")


SHARED: dict[Backend, Pool] = {}
"""Processes that tests share, by backend: starting them is what takes the time."""


async def shared_pool(backend: Backend) -> Pool:
    if backend not in SHARED:
        SHARED[backend] = await Pool.of_slots(backend, "shared", [4], cpus=0.25)
        await SHARED[backend].create(deadline=60)
    return SHARED[backend]


@asynccontextmanager
async def a_pool(backend: Backend, slots: int) -> AsyncIterator[Pool]:
    """A pool of its own, for tests that kill processes."""
    pool = await Pool.of_slots(backend, f"pool{time.monotonic_ns()}", [slots], cpus=0.25)
    await pool.create(deadline=60)
    try:
        yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def a_group(
    backend: Backend, worker_class: type, workers: int, *, pool: Pool | None = None, bundles: Sequence[int] = (), **settings: object
) -> AsyncIterator[WorkerGroup]:
    places = bundles or range(workers)
    group = WorkerGroup(f"group{time.monotonic_ns()}", worker_class, pool or await shared_pool(backend), places, **settings)
    await group.create(deadline=120)
    await group.init()
    yield group


def stored(backend: Backend, rows: int) -> BatchRef:
    batch = Batch.from_columns(
        {"draw": np.arange(rows), "sample": np.zeros(rows, np.int64), "prompt_ids": [[7] * (index + 1) for index in range(rows)],
         "prompt": ["text"] * rows}
    )  # fmt: skip
    return BatchRef.from_blocks([(backend.put(batch), block_meta(batch))])


async def column(backend: Backend, ref: BatchRef, name: str) -> list[int]:
    refs, assembly = ref.assembly([name])
    return list(assemble(assembly, await backend.fetch(refs, 10)).scalars(name))


def test_ranks_and_environment(backend: Backend) -> None:
    async def main() -> None:
        async with a_group(backend, Adder, 2) as group:
            seen = await group.who()
            assert [answer["RANK"] for answer in seen] == ["0", "1"]
            assert {answer["WORLD_SIZE"] for answer in seen} == {"2"}
            assert [answer["LOCAL_RANK"] for answer in seen] == ["0", "1"]
            assert {answer["LOCAL_WORLD_SIZE"] for answer in seen} == {"2"}
            assert {answer["GROUP_NAME"] for answer in seen} == {group.name}
            distinct = len({answer["pid"] for answer in seen})
            assert distinct == (1 if "processes" in backend.lacks else 2)

    backend.run(main())


@pytest.mark.parametrize("rows", [10, 2, 1])
def test_C01_columns_go_out_in_shards_and_come_back_in_order(backend: Backend, rows: int) -> None:
    async def main() -> None:
        async with a_group(backend, Adder, 4, worker_kwargs={"bonus": 100}) as group:
            batch = stored(backend, rows)
            for method in ("lengths", "lengths_balanced"):
                written = await group.call(method, batch)
                assert (written.ids == batch.ids).all()
                assert await column(backend, written, "response_length") == [101 + index for index in range(rows)]
            totals = await group.total(batch.join(written))
            assert len(totals) == 4
            assert sum(totals) == sum(101 + index for index in range(rows))

    backend.run(main())


def test_a_call_to_some_ranks_loses_no_row(backend: Backend) -> None:
    async def main() -> None:
        async with a_group(backend, Adder, 3) as group:
            batch = stored(backend, 5)
            written = await group.call("lengths", batch, ranks=(0, 2))
            assert (written.ids == batch.ids).all()
            assert await column(backend, written, "response_length") == [1, 2, 3, 4, 5]

    backend.run(main())


def test_a_method_that_loses_or_repeats_rows_is_named(backend: Backend) -> None:
    async def main() -> None:
        async with a_group(backend, Adder, 1) as group:
            for positions, said in (
                ([0, 2], r"1 were lost, first \(draw 1,"),
                ([0, 1, 2, 2], r"1 were made up or repeated, first \(draw 2"),
            ):
                with pytest.raises(WorkerError, match=rf"{group.name}.picks\(\) got 3 rows and returned \d: {said}"):
                    await group.picks(stored(backend, 3), positions)
            written = await group.picks(stored(backend, 3), [2, 0, 1])
            assert await column(backend, written, "response_length") == [1, 2, 3], "joined by id, whatever the order"

    backend.run(main())


def test_a_worker_receives_only_the_columns_it_reads(backend: Backend) -> None:
    async def main() -> None:
        async with a_group(backend, Adder, 2) as group:
            for names in await group.columns_seen(stored(backend, 4)):
                assert set(names) == {"draw", "sample", "prompt_ids"}

    backend.run(main())


def test_dispatch_modes(backend: Backend) -> None:
    async def main() -> None:
        async with a_group(backend, Adder, 3) as group:
            assert await group.double([1, 2, 3]) == [2, 4, 6]
            assert await group.first() == 0
            assert await group.own(0) == 10 * (2 + 1 + 0)
            assert await group.call("fail_on", 9, ranks=(1, 2)) == [1, 2]
            assert await group.call("first", ranks=(1,)) == 1
            assert await group.call("double", [1, 2], ranks=(0, 2)) == [2, 4]
            with pytest.raises(BatchError, match="ranks must be some of 0 to 2"):
                await group.call("first", ranks=(3,))
            with pytest.raises(BatchError, match="one entry for each of 3 ranks, got 2"):
                await group.double([1, 2])
            with pytest.raises(AttributeError, match="no registered method 'lenghts'"):
                await group.lenghts()
            with pytest.raises(AttributeError, match=r"no registered method 'lenghts'; it has .*lengths"):
                await group.call("lenghts")
            with pytest.raises(BatchError, match=r"too_few\(\): its dispatch 'too few' must return .* for each of 3 ranks, got 1"):
                await group.too_few()

    backend.run(main())


def test_stored_objects_travel_by_reference(backend: Backend) -> None:
    async def main() -> None:
        async with a_group(backend, Adder, 2) as group:
            size, held = await group.big(1000)
            assert size == 1000
            assert await group.sum_of(held) == [499500.0, 499500.0]

    backend.run(main())


def test_an_error_keeps_its_type_message_and_place(backend: Backend) -> None:
    async def main() -> None:
        async with a_group(backend, Adder, 2) as group:
            with pytest.raises(WorkerError) as caught:
                await group.fail_on(1)
            assert caught.value.original_type == "ValueError"
            assert f"{group.name} rank 1" in str(caught.value)
            assert "rank 1 does not like this" in str(caught.value).splitlines()[0]
            assert "runtime_workers.py" in caught.value.original_traceback
            with pytest.raises(WorkerError, match="response_length is missing"):
                await group.forgets(stored(backend, 4))
            assert await group.count_up() == [1, 1], "a failed call leaves the workers usable"

    backend.run(main())


def test_an_answer_that_cannot_travel_is_an_error_of_its_method(backend: Backend) -> None:
    needs(backend, "processes")

    async def main() -> None:
        async with a_group(backend, Adder, 2) as group:
            with pytest.raises(WorkerError, match=rf"{group.name} rank 1 .* in lock\(\): TypeError: .*pickle") as caught:
                await group.lock(1)
            assert not isinstance(caught.value, WorkerDied)
            assert await group.count_up() == [1, 1]
            call = Call(id="x", epoch=1, generation=0, group=group.name, method="lock", args=(1,))
            told: asyncio.Queue[Reply | Exception] = asyncio.Queue()
            loop = asyncio.get_running_loop()
            blocks = backend.call(group.processes[1], call, [], lambda answer: loop.call_soon_threadsafe(told.put_nowait, answer))
            async with asyncio.timeout(20):
                answer = await told.get()
            assert isinstance(answer, WorkerError)
            assert "pickle" in str(answer)
            with pytest.raises(DataLost, match=r"stored values that are gone .*pickle"):
                await backend.fetch(blocks, 20)

    backend.run(main())


def test_arguments_that_cannot_travel_end_the_call_on_all_ranks(backend: Backend) -> None:
    needs(backend, "processes")

    async def main() -> None:
        async with a_group(backend, Adder, 2) as group:
            with pytest.raises(BatchError, match=rf"{group.name}.double\(\): .*process .* cannot be sent: TypeError: .*lock"):
                await group.double([3, threading.Lock()])  # rank 0 has it by then
            assert await group.double([3, 4]) == [6, 8]

    backend.run(main())


def test_a_failed_call_leaves_no_metrics_behind(backend: Backend) -> None:
    records: list[CallRecord] = []

    async def main() -> None:
        async with a_group(backend, Adder, 1, observer=records.append) as group:
            with pytest.raises(WorkerError):
                await group.forgets(stored(backend, 3))
            records.clear()
            await group.lengths(stored(backend, 1))

    backend.run(main())
    assert records[0].metrics.reduce() == {"length": 1}
    assert [span.name for span in records[0].spans] == ["lengths", "counting"]


def test_loading_is_retried_worker_by_worker(backend: Backend) -> None:
    async def main() -> None:
        async with a_group(backend, Flaky, 2) as group:
            assert await group.loads_seen() == [1, 2]

    backend.run(main())


def test_a_mutating_call_runs_once_however_often_it_is_asked(backend: Backend) -> None:
    async def main() -> None:
        async with a_group(backend, Adder, 2) as group:
            assert await group.call("count_up", call_id="a") == [1, 1]
            assert await group.call("count_up", call_id="a") == [1, 1]
            assert await group.call("count_up", call_id="b") == [2, 2]

    backend.run(main())


def test_calls_of_an_older_controller_or_generation_are_refused(backend: Backend) -> None:
    async def main() -> None:
        async with a_group(backend, Adder, 1, epoch=2) as group:
            await group.count_up()
            group.epoch = 1
            with pytest.raises(WorkerError, match="StaleCall") as caught:
                await group.count_up()
            assert "older controller" in str(caught.value)
            group.epoch, group.generation = 2, 5
            assert await group.count_up() == [2]
            group.generation = 4
            with pytest.raises(WorkerError, match="StaleCall"):
                await group.count_up()

    backend.run(main())


def test_several_roles_share_one_process_and_all_are_restored_when_it_is_replaced(backend: Backend) -> None:
    async def main() -> None:
        async with a_pool(backend, 2) as pool:
            first, second = WorkerGroup("first", Adder, pool, [0, 1]), WorkerGroup("second", Adder, pool, [1], worker_kwargs={"bonus": 7})
            for group in (first, second):
                await group.create()
                await group.init()
            assert (await second.who())[0]["pid"] == (await first.who())[1]["pid"]
            assert (await second.who())[0]["WORLD_SIZE"] == "1"
            assert (await first.who())[1]["WORLD_SIZE"] == "2", "each role keeps its own ranks"
            await second.count_up()
            assert await first.count_up() == [1, 1]
            await pool.kill(1)
            with pytest.raises(WorkerDied, match="second rank 0"):
                await second.count_up()
            await first.replace(1)
            assert await first.count_up() == [2, 1], "rank 0 lives on, rank 1 is new"
            assert await second.count_up() == [1]
            assert await second.loads_seen() == [1]
            assert (await second.who())[0]["pid"] == (await first.who())[1]["pid"]
            assert await column(backend, await second.lengths(stored(backend, 1)), "response_length") == [8]

    backend.run(main())


def test_C06_H06_metrics_of_all_ranks_and_spans_reach_the_observer(backend: Backend) -> None:
    records: list[CallRecord] = []

    async def main() -> None:
        async with a_group(backend, Adder, 4, observer=records.append) as group:
            records.clear()
            await group.lengths(stored(backend, 4))

    backend.run(main())
    assert [record.method for record in records] == ["lengths"]
    assert records[0].metrics.reduce()["length"] == 2.5
    names = sorted(span.name for span in records[0].spans)
    assert names == ["counting"] * 4 + ["lengths"] * 4


def test_the_control_thread_answers_while_a_call_computes(backend: Backend) -> None:
    needs(backend, "preempt")

    async def main() -> None:
        async with a_group(backend, Adder, 1) as group:
            busy = asyncio.ensure_future(group.sleep(3))
            await asyncio.sleep(1)
            (report,) = await group.reports(stack=True)
            assert (report.state, report.call) == ("computing", f"{group.name}.sleep")
            assert "time.sleep(seconds)" in report.stack
            await busy
            (report,) = await group.reports()
            assert report.state == "idle"
            assert group.name in report.workers

    backend.run(main())


def test_B12_a_late_call_ends_with_who_what_and_where_it_hangs(backend: Backend) -> None:
    needs(backend, "preempt")

    async def main() -> None:
        async with a_group(backend, Adder, 2) as group:
            with pytest.raises(DeadlineExceeded) as caught:
                await group.call("sleep", 3, ranks=(1,), deadline=1)
            assert f"{group.name}.sleep() on rank 1" in str(caught.value)
            assert "time.sleep(seconds)" in str(caught.value)

    backend.run(main())


def test_B01_a_dead_worker_is_named_with_its_last_words(backend: Backend, tmp_path: object) -> None:
    needs(backend, "processes")

    async def main() -> None:
        pool = await Pool.of_slots(backend, "mortal", [2], cpus=0.5)
        pool = Pool(backend, "mortal", pool.bundles, pool.nodes, log_dir=tmp_path)
        await pool.create(deadline=20)
        try:
            group = WorkerGroup("group", Adder, pool, [0, 1])
            await group.create()
            pid = (await group.who())[1]["pid"]
            with pytest.raises(WorkerDied) as caught:
                await group.die(1)
            text = str(caught.value)
            assert f"group rank 1 (node {group.processes[1].node}, pid {pid}) in die()" in text
            assert "about to go" in text
            assert "mortal-1.log" in text
        finally:
            await pool.close()

    backend.run(main())


def test_A04_a_pool_that_does_not_fit_fails_in_time_with_numbers(backend: Backend) -> None:
    async def main() -> None:
        pool = await Pool.of_slots(backend, "toobig", [2], cpus=500)
        started = backend.time()
        with pytest.raises(ResourceError) as caught:
            await pool.create(deadline=2)
        assert backend.time() - started < 4
        assert "toobig" in str(caught.value)
        assert "1000" in str(caught.value)

    backend.run(main())


def test_the_second_pool_of_a_name_is_refused_and_the_first_is_not_harmed(backend: Backend) -> None:
    async def main() -> None:
        async with a_pool(backend, 1) as pool:
            with pytest.raises(ResourceError, match=rf"pool .*{pool.name}: a name of its own; found a pool of this name"):
                await (await Pool.of_slots(backend, pool.name, [1], cpus=0.25)).create(deadline=10)
            async with a_group(backend, Adder, 1, pool=pool) as group:
                assert await group.double([2]) == [4]

    backend.run(main())


def test_a_pool_on_a_node_that_is_gone_says_so(backend: Backend) -> None:
    needs(backend, "processes")

    async def main() -> None:
        (node, *_) = (await backend.inventory()).nodes
        pool = Pool(backend, "lost", [Bundle(node=0, cpus=1, gpus=0)], [replace(node, name="10.9.9.9#0", labels={"ray.io/node-id": "0"})])
        with pytest.raises(ResourceError, match=r"pool \S*lost: node 10\.9\.9\.9#0; found alive: "):
            await pool.create(deadline=5)

    backend.run(main())


def test_two_ranks_sum_over_their_communicator(backend: Backend) -> None:
    needs(backend, "communicators")

    async def main() -> None:
        async with a_group(backend, Summer, 2) as group:
            assert await group.step(1.0) == [1.5, 1.5]

    backend.run(main())


@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, id="kill"), pytest.param(signal.SIGSTOP, id="stop", marks=pytest.mark.slow)])
def test_B04_four_ranks_lose_one_and_form_again(backend: Backend, how: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors' communicators are cut from their control threads, the group re-forms under a new generation, processes stay.

    Two other roles live in these processes: one that has nothing to do with the lost process goes on, one that had a rank in it gets
    its worker back with the new process and says that it must rejoin.
    """
    needs(backend, "communicators", "processes")
    monkeypatch.setattr("rolemesh.runtime.group.UNWIND_SECONDS", 5.0)  # of which the case with the stopped rank takes all
    deadlines = Deadlines(join=60, call=120, control=5)

    async def main() -> None:
        async with (
            a_pool(backend, 4) as pool,
            a_group(backend, Summer, 4, pool=pool, deadlines=deadlines) as group,
            a_group(backend, Summer, 2, pool=pool, bundles=[0, 1]) as apart,
            a_group(backend, Summer, 2, pool=pool, bundles=[2, 3]) as beside,
        ):
            before = await group.pid()
            generation = group.generation
            started = backend.time()
            if how == signal.SIGKILL:
                with pytest.raises(WorkerDied, match="rank 2"):
                    await group.step(1.0, 2, how)
            else:
                with pytest.raises(DeadlineExceeded, match="rank 2: its control thread does not answer"):
                    await group.call("step", 1.0, 2, how, deadline=3)
            assert backend.time() - started < 25
            states = [report.state for report in await group.reports() if isinstance(report, Report)]
            assert states == ["idle"] * 3, "the survivors are free"
            with pytest.raises(NotJoined, match="Call rejoin"):
                await group.step(1.0)
            assert await apart.step(1.0) == [1.5] * 2
            await group.replace(2)
            with pytest.raises(NotJoined):
                await beside.step(1.0)
            await group.rejoin()
            await beside.rejoin()
            after = await group.pid()
            assert [after[rank] for rank in (0, 1, 3)] == [before[rank] for rank in (0, 1, 3)]
            assert after[2] != before[2]
            assert group.generation > generation
            assert await group.step(1.0) == [2.5] * 4
            assert await beside.step(1.0) == [1.5] * 2
            assert await beside.pid() == after[2:]
            with pytest.raises(ProcessLookupError):
                os.kill(before[2], 0)

    backend.run(main())


def test_a_rank_that_dies_while_the_group_forms_ends_it_in_time(backend: Backend) -> None:
    """The others wait for it in their stores and ports, from where they are freed at once and not after the join's deadline."""
    needs(backend, "communicators", "processes")

    async def main() -> None:
        async with a_pool(backend, 2) as pool:
            group = WorkerGroup("mortals", DiesJoining, pool, [0, 1], deadlines=Deadlines(join=60, control=5))
            await group.create(deadline=120)
            started = backend.time()
            with pytest.raises(WorkerDied, match=r"mortals rank 1 .* in join\(\)"):
                await group.init()
            assert backend.time() - started < 20
            assert (await group.reports())[0].state == "idle"

    backend.run(main())


def test_a_process_that_does_not_answer_while_it_starts_is_told_of_as_silent_not_as_failed(backend: Backend) -> None:
    needs(backend, "processes")

    async def main() -> None:
        async with a_pool(backend, 1) as pool:
            group = WorkerGroup("late", SilentWhileMade, pool, [0], deadlines=Deadlines(control=1))
            making = asyncio.create_task(group.create(deadline=60))
            told = [""]
            while "has not answered yet" not in told[-1]:
                assert not making.done()
                told.append(await group.unready())
                await backend.sleep(0.2)
            process = group.processes[0]
            assert f"rank 0 computing late.__init__ (pid {process.pid} on {process.node})" in told
            silence = (
                rf"rank 0 \(pid {process.pid} on {process.node}\) has not answered yet, for (\d+) s now; when last heard of it computed "
            )
            found = re.fullmatch(silence + r"late\.__init__", told[-1])
            assert found, told[-1]
            assert 1 <= int(found[1]) <= 10
            await making
            assert await group.unready() == ""

    backend.run(main())


def test_workers_use_the_store_of_their_group_and_speak_for_its_generation(backend: Backend) -> None:
    async def main() -> None:
        link = await backend.start_store("of-a-group", 60)
        pool = await Pool.of_slots(backend, "stored", [2], cpus=0.5)
        await pool.create(30)
        group = WorkerGroup("slow", SlowToLoad, pool, [0, 1], store=link)
        assert await group.unready() == "rank 0, 1 has not started"
        await group.create()
        loading = asyncio.ensure_future(group.init())
        if "preempt" not in backend.lacks:
            await asyncio.sleep(0.7)
            assert "rank 1 computing slow.load" in await group.unready()
            assert "rank 0" not in await group.unready()
        await loading
        assert await group.unready() == ""
        async with KvStore(link, owner="controller") as store:
            assert await store.list("loaded/") == {"loaded/0": "slow", "loaded/1": "slow"}
        assert await group.speaks_for() == [(f"slow rank {rank}", "slow", 0) for rank in (0, 1)]
        without = WorkerGroup("without", SlowToLoad, pool, [0])
        await without.create()
        with pytest.raises(WorkerError, match=r"RuntimeError: without rank 0 has no KV store: give its WorkerGroup one"):
            await without.init()
        await pool.close()

    backend.run(main())
