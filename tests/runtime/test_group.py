"""Waiting, failing and refusing of a worker group, with a backend whose calls do not answer by themselves."""

import asyncio
import gc
import os
from typing import Any

import pytest
from runtime_workers import Adder, Summer

from rolemesh.errors import BatchError, ConfigError, DeadlineExceeded, NotJoined, RolemeshError
from rolemesh.protocols.backend import Call, Pending, Process, Reply, Report
from rolemesh.runtime import LocalBackend, Pool, Worker, WorkerGroup, register


class Silent(LocalBackend):
    """Calls of `step` stay unanswered; control requests are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Pending] = []
        self.requests: list[tuple[str, str]] = []

    def call(self, process: Process, call: Call, blocks: Any) -> Pending:
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if call.method != "step":
            reply.set_result(Reply())
        self.pending.append(Pending(process=process, call=call, reply=reply, blocks=(None, None)))
        return self.pending[-1]

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
    for pending in backend.pending:
        if not pending.reply.done():
            pending.reply.set_exception(RolemeshError(text="gone"))
    await asyncio.sleep(0)
    backend.pending.clear()
    del pending
    gc.collect()
    await asyncio.sleep(0)
    assert [context for context in noise if "gone" in str(context.get("exception"))] == []


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
