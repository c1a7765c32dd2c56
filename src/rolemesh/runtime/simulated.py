"""The simulated backend: the real controller and real worker classes in one process, on virtual time, with faults by seed.

Calls run one after the other in each process and take as long as `durations` says; the worker's method itself runs in an instant at the
end of that time. Waits, deadlines, deaths and late answers are those that a controller meets on Ray, and hours of them pass in
milliseconds. Only for programs and tests that make it: no option of a config leads here.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

from rolemesh.errors import DeadlineExceeded, Problem, ResourceError
from rolemesh.plan.schema import Inventory, NodeInfo
from rolemesh.protocols.backend import Bundle, Call, Capability, Failure, OnAnswer, Process, ProcessSpec, Reply, Report, WorkerSpec, taken
from rolemesh.runtime.faults import Faults
from rolemesh.runtime.host import ProcessHost
from rolemesh.runtime.local import ROUNDING, Held, LocalBackend, died
from rolemesh.runtime.virtual_time import VirtualTimeLoop

T = TypeVar("T")
Duration = float | Callable[[Call, random.Random], float]
"""Seconds of a call, or a function of the call and a random generator that is seeded for this call."""
YEAR = 365 * 24 * 3600.0
MACHINE = NodeInfo(name="sim-0", cpus=8, memory_bytes=64 * 2**30)


class _Process:
    """What the backend knows of a process: its workers, the calls that it was given, and the one under way, which has the turn."""

    def __init__(self, host: ProcessHost) -> None:
        self.host, self.turn = host, asyncio.Lock()
        self.ranks: dict[str, int] = {}
        self.works: dict[asyncio.Task[None], OnAnswer] = {}
        self.call, self.since = "", 0.0


class SimulatedBackend(LocalBackend):
    """See the module docstring. `nodes` are the machines, `durations` seconds by `group.method` or `method` (others take none),
    `start_seconds` the start of a process, `limit` the virtual seconds after which `run` gives up."""

    name = "simulated"
    lacks: frozenset[Capability] = frozenset({"processes", "communicators", "preempt", "detach"})

    def __init__(
        self,
        nodes: Sequence[NodeInfo] = (MACHINE,),
        *,
        durations: Mapping[str, Duration] | None = None,
        faults: Faults | None = None,
        start_seconds: float = 0.0,
        limit: float = YEAR,
    ) -> None:
        super().__init__()
        self._nodes, self._durations, self._faults = tuple(nodes), dict(durations or {}), faults or Faults()
        self._start_seconds, self._limit = start_seconds, limit
        self._running: dict[str, _Process] = {}
        self._reserved: dict[str, dict[str, tuple[float, float]]] = {}
        """CPUs and GPUs by pool and node."""
        self._released: set[asyncio.Future[None]] = set()
        self._calls: Counter[tuple[str, str, int]] = Counter()
        self._pids = 0
        self._now = 0.0

    # -- time -----------------------------------------------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start=self._now, limit=self._limit)) as runner:
            try:
                return runner.run(main)
            finally:
                self._now = runner.get_loop().time()

    def time(self) -> float:
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:  # outside of `run` time stands still
            return self._now

    # -- resources ------------------------------------------------------------------------------------------------------------

    async def inventory(self) -> Inventory:
        nodes = []
        for node in self._nodes:
            cpus, gpus = self._free(node)
            nodes.append(replace(node, free_cpus=cpus, free_gpus=int(gpus)))
        return Inventory(nodes=tuple(nodes), origin="simulation")

    def _free(self, node: NodeInfo) -> tuple[float, float]:
        used = [shares.get(node.name, (0.0, 0)) for shares in self._reserved.values()]
        return node.cpus - sum(cpus for cpus, _ in used), node.gpus - sum(gpus for _, gpus in used)

    async def create_pool(self, name: str, bundles: Sequence[Bundle], nodes: Sequence[NodeInfo], deadline: float) -> None:
        """Waits until others give back what it needs, as on a cluster."""
        if name in self._pools:
            raise taken(name)
        wanted = _wanted(bundles, nodes)
        ends = self.time() + deadline
        while problems := self._shortage(name, wanted):
            if self.time() >= ends:
                raise ResourceError(problems=problems)
            released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._released.add(released)
            await asyncio.wait({released}, timeout=ends - self.time())
            self._released.discard(released)
        self._reserved[name], self._pools[name] = wanted, tuple(bundles)

    def _shortage(self, name: str, wanted: Mapping[str, tuple[float, float]]) -> list[Problem]:
        machines = {node.name: node for node in self._nodes}
        problems = []
        for node, (cpus, gpus) in wanted.items():
            free_cpus, free_gpus = self._free(machines[node]) if node in machines else (0.0, 0)
            if cpus - free_cpus > ROUNDING or gpus - free_gpus > ROUNDING:
                need, free = f"CPU {cpus:g}, GPU {gpus}", f"free CPU {free_cpus:g}, GPU {free_gpus}"
                problems.append(Problem(subject=f"pool {name} on node {node}", need=need, free=free, remedy="Lower pools.*.nodes"))
        return problems

    async def release_pool(self, name: str) -> None:
        await super().release_pool(name)
        self._reserved.pop(name, None)
        while self._released:
            self._released.pop().set_result(None)

    # -- processes ------------------------------------------------------------------------------------------------------------

    async def spawn(self, spec: ProcessSpec, deadline: float) -> Process:
        await asyncio.sleep(min(self._start_seconds, deadline))
        if self._start_seconds > deadline:
            raise DeadlineExceeded(waiter="the controller", subject=f"process {spec.name} to start", seconds=deadline)
        node = self._nodes[self._pools[spec.pool][spec.bundle].node].name
        self._pids += 1
        self._hosts[spec.name] = host = ProcessHost(spec.name, node, clock=self.time)
        self._running[spec.name] = _Process(host)
        return Process(spec=spec, node=node, address=node, pid=self._pids, created=self.time(), handle=host)

    async def add_worker(self, process: Process, spec: WorkerSpec, deadline: float) -> Failure | None:
        failure = await super().add_worker(process, spec, deadline)
        self._running[process.spec.name].ranks[spec.group] = spec.context.rank
        return failure

    async def kill(self, process: Process) -> None:
        if self._hosts.get(process.spec.name) is process.handle:
            self._end(process, "was ended")
        await super().kill(process)

    def _end(self, process: Process, how: str) -> None:
        """From now on it answers nothing; who waits for it is told."""
        self._hosts.pop(process.spec.name)
        for work, answered in self._running.pop(process.spec.name).works.items():
            work.cancel()
            answered(died(process, how))

    async def close(self) -> None:
        for process in self._running.values():
            for work in process.works:
                work.cancel()
        self._running.clear()
        self._reserved.clear()
        await super().close()

    # -- calls ----------------------------------------------------------------------------------------------------------------

    def call(self, process: Process, call: Call, blocks: Sequence[Any], answered: OnAnswer) -> tuple[Any, Any]:
        written = Held(None), Held(None)
        if self._hosts.get(process.spec.name) is not process.handle:
            answered(died(process, "is gone"))
        else:
            running = self._running[process.spec.name]
            work = asyncio.ensure_future(self._take_turn(process, running, call, blocks, written))
            running.works[work] = answered
        return written

    async def _take_turn(self, process: Process, running: _Process, *work: Any) -> None:
        """The compute thread: one call at a time, in the order in which they came."""
        async with running.turn:
            reply = await self._work(process, running, *work)
        answered = running.works.pop(cast("asyncio.Task[None]", asyncio.current_task()))
        if reply is not None:
            answered(reply)

    async def _work(
        self, process: Process, running: _Process, call: Call, blocks: Sequence[Any], written: tuple[Held, Held]
    ) -> Reply | None:
        """None for an answer that never arrives."""
        rank = running.ranks.get(call.group, 0)
        self._calls[call.group, call.method, rank] += 1
        nth = self._calls[call.group, call.method, rank]
        fault = self._faults.strike(call, rank, nth)
        began, seconds = self.time(), self._seconds(call, rank, nth)
        if fault == "slow":
            seconds = seconds * self._faults.slow_factor + self._faults.slow_seconds
        running.call, running.since = f"{call.group}.{call.method}", began
        if fault == "hang":
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(seconds / 2 if fault == "death" else seconds)
        if fault == "death":
            self._end(process, f"died in {call.group}.{call.method}")
            await asyncio.sleep(0)  # it ends here with all others
        reply, (written[0].value, written[1].value) = running.host.execute(call, [block.value for block in blocks])
        running.call, running.since = "", self.time()
        return reply._replace(started=began) if fault != "lost_reply" else None  # the method took no time by itself

    def _seconds(self, call: Call, rank: int, nth: int) -> float:
        duration = self._durations.get(f"{call.group}.{call.method}", self._durations.get(call.method, 0.0))
        if isinstance(duration, float | int):
            return duration
        return duration(call, random.Random(f"{self._faults.seed} duration {call.group} {call.method} {rank} {nth}"))

    async def control(self, process: Process, request: str, deadline: float, **kwargs: Any) -> Any:
        answer = await super().control(process, request, deadline, **kwargs)
        running = self._running[process.spec.name]
        if not isinstance(answer, Report):
            return answer
        stack = f"simulated call, for {self.time() - running.since:g} virtual seconds" if running.call and kwargs.get("stack") else ""
        state: Literal["idle", "computing"] = "computing" if running.call else "idle"
        return replace(answer, pid=process.pid, state=state, call=running.call, since=running.since, stack=stack)


def _wanted(bundles: Sequence[Bundle], nodes: Sequence[NodeInfo]) -> dict[str, tuple[float, float]]:
    """CPUs and GPUs that the bundles need, by node."""
    wanted = {}
    for index in sorted({bundle.node for bundle in bundles}):
        mine = [bundle for bundle in bundles if bundle.node == index]
        wanted[nodes[index].name] = sum(bundle.cpus for bundle in mine), sum(bundle.gpus for bundle in mine)
    return wanted
