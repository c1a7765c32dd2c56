"""Waiting, failing and refusing of a worker group, with a backend whose calls do not answer by themselves."""

import asyncio
import gc
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from runtime_workers import Adder, Summer

from rolemesh.batch import BlockMeta
from rolemesh.errors import BatchError, ConfigError, DeadlineExceeded, NotJoined, ResourceError, RolemeshError, WorkerDied, WorkerError
from rolemesh.plan.schema import NodeInfo
from rolemesh.protocols.backend import Bundle, Call, Failure, OnAnswer, Process, ProcessSpec, Reply, Report
from rolemesh.runtime import LocalBackend, Pool, Worker, WorkerGroup, register
from rolemesh.runtime.calls import Called, failed


class Silent(LocalBackend):
    """Calls of `step` stay unanswered; control requests are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[OnAnswer] = []
        self.requests: list[tuple[str, str]] = []

    def call(self, process: Process, call: Call, blocks: Any, answered: OnAnswer) -> tuple[Any, Any]:
        if call.method == "step":
            self.waiting.append(answered)
        else:
            answered(Reply())
        return None, None

    async def control(self, process: Process, request: str, deadline: float, **kwargs: Any) -> Any:
        self.requests.append((request, kwargs.get("group", "")))
        return Report(pid=1, node="n", workers=(), state="computing", call="sums.step", since=0.0)


async def summers(backend: Silent, tensor_parallel: int = 1) -> WorkerGroup:
    pool = await Pool.of_slots(backend, "pool", [2], cpus=0.1)
    group = WorkerGroup("sums", Summer, pool, [0, 1], tensor_parallel=tensor_parallel)
    await group.create()
    return group


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolemesh.runtime.group.UNWIND_SECONDS", 0.02)


async def test_a_late_call_is_cut_on_all_ranks_and_later_ones_are_refused_until_the_group_rejoins() -> None:
    backend = Silent()
    group = await summers(backend)
    await group.rejoin()
    with pytest.raises(DeadlineExceeded, match=r"sums.step\(\) on ranks 0, 1"):
        await group.call("step", 1.0, deadline=0.02)
    assert backend.requests == [("report", "")] * 2 + [("abort", "sums")] * 2
    with pytest.raises(NotJoined, match=r"sums.pid\(\) refused.*Call rejoin\(\)"):
        await group.pid()
    await group.call("pid", ranks=(0,))
    await group.rejoin()
    await group.pid()


async def test_before_the_first_join_a_call_to_all_ranks_is_refused() -> None:
    group = await summers(Silent())
    with pytest.raises(NotJoined):
        await group.pid()


async def test_the_death_of_a_rank_that_nobody_waits_for_any_more_is_no_noise() -> None:
    noise: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
    backend = Silent()
    group = await summers(backend)
    await group.rejoin()
    with pytest.raises(DeadlineExceeded):
        await group.call("step", 1.0, deadline=0.02)
    assert len(backend.waiting) == 2
    while backend.waiting:
        backend.waiting.pop()(RolemeshError(text="gone"))
    await asyncio.sleep(0)
    gc.collect()
    await asyncio.sleep(0)
    assert [context for context in noise if "gone" in str(context.get("exception"))] == []


class Elsewhere(Silent):
    """`step` fails, as another thread tells while the controller goes on."""

    def call(self, process: Process, call: Call, blocks: Any, answered: OnAnswer) -> tuple[Any, Any]:
        if call.method != "step":
            return super().call(process, call, blocks, answered)
        failure = Failure(type="ValueError", message="no", traceback="", at=0.0)
        threading.Thread(target=answered, args=(Reply(failure=failure),)).start()
        time.sleep(0.02)
        return None, None


async def test_a_failure_that_is_being_told_of_is_never_taken_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(answer: Reply | Exception) -> bool:
        time.sleep(0.05 if threading.current_thread() is not threading.main_thread() else 0)
        return failed(answer)

    monkeypatch.setattr("rolemesh.runtime.calls.failed", slowly)
    group = await summers(Elsewhere())
    with pytest.raises(WorkerError, match=r"sums rank 0 .* in step\(\): ValueError: no"):
        await group.call("step", 1.0, ranks=(0,), deadline=10)


async def test_an_answer_in_the_moment_of_the_deadline_comes_before_it_or_after(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Silent()

    class Close(Called):
        def replies(self) -> dict[int, Reply] | None:
            found = super().replies()
            for answered in backend.waiting:
                answered(Reply())
            return found

    group = await summers(backend)
    await group.rejoin()
    monkeypatch.setattr("rolemesh.runtime.group.Called", Close)
    with pytest.raises(DeadlineExceeded, match=r"sums.step\(\) on ranks 0, 1"):
        await group.call("step", 1.0, ranks=(0, 1), deadline=0.01)


async def test_rows_never_go_to_half_a_tensor_parallel_group() -> None:
    from test_dispatch import ref

    group = await summers(Silent(), tensor_parallel=2)
    with pytest.raises(BatchError, match=r"whole tensor-parallel groups of 2"):
        await group.call("pid", ref(4), ranks=(1,))


class Clashing(Worker):
    @register()
    def rejoin(self) -> None: ...

    @register()
    def epoch(self) -> None: ...


async def test_ranks_have_places_of_their_own_that_exist() -> None:
    backend = LocalBackend()
    pool = await Pool.of_slots(backend, "pool", [2], cpus=0.1)
    for bundles, tensor_parallel in (([], 1), ([0, 0], 1), ([2], 1), ([-1], 1), ([0, 1], 0), ([0], 2)):
        with pytest.raises(ConfigError, match=r"group sums: some of the places 0 to 1 of pool pool, each once.*found bundles \["):
            WorkerGroup("sums", Summer, pool, bundles, tensor_parallel=tensor_parallel)
    for slots in ([], [0], [2, -1]):
        with pytest.raises(ResourceError, match="pool pool: at least one place; found slots"):
            await Pool.of_slots(backend, "pool", slots)
    for cpus in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ResourceError, match="pool pool: places of some CPUs or GPUs each; found cpus="):
            await Pool.of_slots(backend, "pool", [1], cpus=cpus)


async def test_a_process_that_dies_as_it_starts_is_named_by_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    async def spawn(spec: ProcessSpec, deadline: float) -> Process:
        raise WorkerDied(group="", rank=-1, node="n", pid=0, method="", original_type="Killed", original_message="no")

    backend = LocalBackend()
    monkeypatch.setattr(backend, "spawn", spawn)
    with pytest.raises(WorkerDied, match=r"sums rank 0 \(node n, pid 0\) in __init__\(\): Killed: no"):
        await WorkerGroup("sums", Summer, await Pool.of_slots(backend, "pool", [1]), [0]).create()


async def test_a_method_named_like_something_of_the_group_is_refused() -> None:
    pool = await Pool.of_slots(LocalBackend(), "pool", [1], cpus=0.1)
    with pytest.raises(ConfigError, match=r"worker class Clashing: .*found epoch, rejoin"):
        WorkerGroup("clashing", Clashing, pool, [0])


async def test_calls_leave_the_environment_of_their_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "mine")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    pool = await Pool.of_slots(LocalBackend(), "pool", [2], cpus=0.1)
    group = WorkerGroup("adders", Adder, pool, [0, 1])
    await group.create()
    await group.init()
    assert [seen["RANK"] for seen in await group.who()] == ["0", "1"]
    assert os.environ["RANK"] == "mine"
    assert "WORLD_SIZE" not in os.environ


class Prompt(LocalBackend):
    """Calls are answered in the next turn of the loop, with the same small column for every rank."""

    def call(self, process: Process, call: Call, blocks: Any, answered: OnAnswer) -> tuple[Any, Any]:
        self.calls = [*getattr(self, "calls", []), call]
        ids = call.assembly.ids if call.assembly else np.zeros((0, 2), np.int64)
        meta = BlockMeta(ids=ids, tokens={}, columns={"response_length": "int"}, nbytes=8)
        asyncio.get_running_loop().call_soon(answered, Reply(metas=(meta, None) if call.assembly else (None, None)))
        return object(), None


async def adders(backend: LocalBackend, ranks: int) -> WorkerGroup:
    pool = Pool(backend, "pool", [Bundle(node=0, cpus=0, gpus=0)] * ranks, [NodeInfo(name="n", cpus=1, memory_bytes=1)])
    group = WorkerGroup("adders", Adder, pool, range(ranks))
    await group.create()
    return group


async def test_ranks_with_the_same_share_get_the_same_call() -> None:
    backend = Prompt()
    group = await adders(backend, 3)
    await group.count_up()
    assert len(backend.calls) == 3
    assert len({id(call) for call in backend.calls}) == 1


async def seconds_on(ranks: int) -> float:
    """CPU time of a call on rows that as many ranks have written before, the quickest of several."""
    from test_dispatch import ref

    group = await adders(Prompt(), ranks)
    batch = ref(2000)
    batch = batch.join(await group.lengths(batch))
    assert len(batch.refs) == ranks + 1
    times = []
    for _ in range(9):
        began = time.process_time()
        await group.lengths(batch)
        times.append(time.process_time() - began)
    return min(times)


@pytest.mark.slow
async def test_a_call_on_ten_times_as_many_ranks_takes_about_ten_times_as_long() -> None:
    assert await seconds_on(1000) / await seconds_on(100) < 16  # 11; with a loop over all objects for each rank 21
