"""A worker group: the workers of one role, called as one. `create` (processes), `init` (load, then join), then calls.

Works alone, without any role or reinforcement learning:

    pool = await Pool.of_slots(backend, "main", [2])
    await pool.create(deadline=30)
    group = WorkerGroup("adder", Adder, pool, bundles=[0, 1])
    await group.create(deadline=30)
    await group.init()
    sums = await group.add(batch)
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from rolemesh.batch import BatchRef
from rolemesh.errors import BatchError, ConfigError, DeadlineExceeded, NotJoined, RolemeshError, WorkerDied, WorkerError
from rolemesh.observe import Metrics
from rolemesh.protocols.backend import Call, Failure, Pending, Process, Reply, Report
from rolemesh.protocols.store import StoreLink
from rolemesh.runtime.dispatch import Answer, Request, Share, Topology
from rolemesh.runtime.pool import Pool
from rolemesh.runtime.pool_view import PoolView
from rolemesh.runtime.stored import Stored, take_out
from rolemesh.runtime.worker import Settled, Worker, WorkerContext, registered_methods, settled_methods

T = TypeVar("T")
UNWIND_SECONDS = 10.0
"""How long the other ranks of a failed call get to come back after their communicators were cut."""
LIFE = frozenset(registered_methods(Worker))
"""Methods that make a communicator, and so need none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One finished call of a group, for whoever observes: controller wall time in seconds (backend clock) and the ranks' replies."""

    group: str
    method: str
    started: float
    ended: float
    replies: tuple[Reply, ...]
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds for each kind of wait of a group."""

    load: float = 300.0
    join: float = 60.0
    call: float = 1800.0
    control: float = 10.0


Called = Mapping[int, Pending]
"""The calls under way, by rank."""


def _observe_nothing(record: CallRecord) -> None:
    """Default observer."""


@dataclass(slots=True)
class WorkerGroup:
    """Workers of one class, rank i in `bundles[i]` of the pool. Subclass it to add calls of your own.

    `worker_kwargs` go to every worker's constructor. `epoch` is the controller's; the group's `generation` rises with every `init` of
    its communicator, and workers refuse calls of older ones.
    """

    name: str
    worker_class: type[Worker]
    pool: Pool | PoolView
    bundles: Sequence[int]
    worker_kwargs: Mapping[str, Any] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    epoch: int = 1
    tensor_parallel: int = 1
    run_dir: str = ""
    store: StoreLink | None = None
    """The way to the run's KV store, for workers that use it."""
    observer: Callable[[CallRecord], None] = _observe_nothing
    generation: int = field(default=0, init=False)
    _joined: bool = field(default=False, init=False)
    """The ranks have a communicator that was not cut."""
    _methods: dict[str, Settled] = field(init=False)

    def __post_init__(self) -> None:
        self._methods = settled_methods(self.worker_class, self.worker_kwargs)
        taken = sorted(set(self._methods) & set(dir(WorkerGroup)))
        if taken:
            raise ConfigError.one(
                f"worker class {self.worker_class.__qualname__}",
                "registered methods must have other names than what a group itself has",
                ", ".join(taken),
                "Rename them",
            )

    # -- create, init ---------------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return len(self.bundles)

    @property
    def _communicates(self) -> bool:
        return self.worker_class.communicates and self.world_size > 1

    @property
    def processes(self) -> list[Process]:
        """The processes of the ranks, in rank order."""
        return [self._process(rank) for rank in range(self.world_size)]

    def _process(self, rank: int) -> Process:
        process = self.pool.latest(self.bundles[rank])
        if process is None:
            raise RuntimeError(f"{self.name} rank {rank} has no process yet: await group.create() first")
        return process

    async def create(self, deadline: float = 60.0) -> None:
        """Start the processes and make the workers in them. Raises DeadlineExceeded, ResourceError or the worker's own error."""
        await together(self._create(rank, deadline) for rank in range(self.world_size))
        for rank, bundle in enumerate(self.bundles):
            self.pool.move_in(bundle, self.name, partial(self._restore, rank))

    async def _create(self, rank: int, deadline: float) -> None:
        process = await self.pool.process(self.bundles[rank], deadline)
        context = self._context(rank, process)
        await self.pool.backend.add_worker(process, self.name, self.worker_class, context, self.worker_kwargs, deadline)

    def _context(self, rank: int, process: Process) -> WorkerContext:
        places = [self.pool.bundles[bundle] for bundle in self.bundles]
        nodes = [place.node for place in places]
        return WorkerContext(
            group=self.name,
            rank=rank,
            world_size=self.world_size,
            local_rank=nodes[:rank].count(nodes[rank]),
            local_world_size=nodes.count(nodes[rank]),
            node=process.node,
            address=process.address,
            process=process.spec.name,
            gpus=places[rank].gpus,
            tensor_parallel=self.tensor_parallel,
            run_dir=self.run_dir,
            store=self.store,
        )

    async def init(self, retries: int = 1) -> None:
        """Load models (each worker retried by itself), then form the communicator (retried as a group, each time anew)."""
        await together(self._load(rank, retries) for rank in range(self.world_size))
        if self._communicates:
            await self.rejoin(retries)

    async def _load(self, rank: int, retries: int) -> None:
        for attempt in range(retries + 1):
            try:
                await self.call("load", ranks=(rank,), deadline=self.deadlines.load)
                return
            except WorkerDied:
                raise
            except WorkerError:
                if attempt == retries:
                    raise

    async def rejoin(self, retries: int = 1) -> None:
        """Form the communicator anew under a new generation, for example after a rank was replaced."""
        for attempt in range(retries + 1):
            self.generation += 1
            try:
                rendezvous = await self.call("open_rendezvous", self.generation, self.deadlines.join, deadline=self.deadlines.join)
                await self.call("join", rendezvous, self.deadlines.join, self.deadlines.call, deadline=self.deadlines.join * 2)
                self._joined = True
                return
            except WorkerDied:
                raise
            except RolemeshError:
                if attempt == retries:
                    raise

    async def replace(self, rank: int, deadline: float = 60.0) -> None:
        """Kill a rank's process and start a new one in its place, with the workers of all groups in it created and loaded.

        Each of these groups that has a communicator needs `rejoin` afterwards.
        """
        await self.pool.replace(self.bundles[rank], deadline)

    async def _restore(self, rank: int, deadline: float) -> None:
        self._joined = False
        await self._create(rank, deadline)
        await self._load(rank, retries=0)

    # -- calls ----------------------------------------------------------------------------------------------------------------

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_") or method not in self._methods:
            known = ", ".join(sorted(self._methods)) if not method.startswith("_") else ""
            raise AttributeError(f"group {self.name!r} has no registered method {method!r}; it has {known}")

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self.call(method, *args, **kwargs)

        return call

    async def call(
        self,
        method: str,
        *args: Any,
        deadline: float | None = None,
        ranks: Sequence[int] | None = None,
        call_id: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a registered method on its ranks and join the answers as its dispatch says.

        A `BatchRef` as first argument is sharded by the dispatch. `ranks` restricts the call to a chosen subset: the dispatch then
        splits over these as if they were the whole group. With a `call_id` of an earlier call of a mutating method, workers that have
        run it answer again without running it twice. When a rank fails, dies or is late, the others' communicators are cut, they get
        10 s to come back, and the first cause is raised. Raises WorkerError, WorkerDied, DeadlineExceeded naming the ranks that did
        not answer and what they were doing, NotJoined, or BatchError for arguments that do not fit.
        """
        registered = self._methods[method]
        batch, rest = (args[0], args[1:]) if args and isinstance(args[0], BatchRef) else (None, args)
        chosen = self._chosen(ranks, method, batch)
        topology = Topology(world_size=len(chosen), tensor_parallel=self.tensor_parallel)
        request = Request(method=method, batch=batch, args=rest, kwargs=kwargs)
        split = zip(chosen, registered.dispatch.split(topology, request), strict=True)
        shares = {rank: share for rank, share in split if share is not None}
        if self._communicates and not self._joined and len(shares) == self.world_size and method not in LIFE:
            raise NotJoined(group=self.name, method=method)
        started = self.pool.backend.time()
        identity = call_id or uuid.uuid4().hex
        called = {rank: self._submit(rank, share, registered, method, identity) for rank, share in shares.items()}
        replies = await self._gather(called, method, self.deadlines.call if deadline is None else deadline)
        self._record(method, started, list(replies.values()))
        answers = [_answer(chosen.index(rank), reply, called[rank], registered) for rank, reply in replies.items()]
        return registered.dispatch.collect(topology, request, answers)

    def _chosen(self, ranks: Sequence[int] | None, method: str, batch: BatchRef | None) -> list[int]:
        """The ranks to call, ascending. Raises BatchError for ranks that do not exist, and for rows to half a tensor-parallel group."""
        everyone = range(self.world_size)
        chosen = sorted(set(everyone if ranks is None else ranks))
        if not chosen or not set(chosen) <= set(everyone):
            raise BatchError(f"{self.name}.{method}(): ranks must be some of 0 to {self.world_size - 1}, got {ranks}")
        groups = {rank // self.tensor_parallel for rank in chosen}
        if batch is not None and len(groups) * self.tensor_parallel != len(chosen):
            raise BatchError(
                f"{self.name}.{method}() on ranks {chosen}: a batch goes to whole tensor-parallel groups of {self.tensor_parallel} "
                "neighbouring ranks"
            )
        return chosen

    def _submit(self, rank: int, share: Share, registered: Settled, method: str, identity: str) -> Pending:
        refs: list[Any] = []
        assembly = None
        if share.batch is not None:
            refs, assembly = share.batch.assembly(registered.reads)
        args, kwargs, stored = take_out(share.args, share.kwargs, len(refs))
        call = Call(
            id=identity,
            epoch=self.epoch,
            generation=self.generation,
            group=self.name,
            method=method,
            args=args,
            kwargs=kwargs,
            assembly=assembly,
            batch_blocks=len(refs),
        )
        pending = self.pool.backend.call(self._process(rank), call, [*refs, *stored])
        pending.reply.add_done_callback(_look_at)
        return pending

    def _record(self, method: str, started: float, replies: Sequence[Reply]) -> None:
        metrics = Metrics()
        for reply in replies:
            metrics.merge(reply.metrics)
        ended = self.pool.backend.time()
        self.observer(CallRecord(group=self.name, method=method, started=started, ended=ended, replies=tuple(replies), metrics=metrics))

    # -- waiting and failing --------------------------------------------------------------------------------------------------

    async def _gather(self, called: Called, method: str, deadline: float) -> dict[int, Reply]:
        """The replies by rank. Ranks left waiting by a failure, a death or the deadline are freed before it is raised."""
        waiting = {pending.reply for pending in called.values()}
        ends = self.pool.backend.time() + deadline
        while waiting:
            remaining = ends - self.pool.backend.time()
            done, waiting = await asyncio.wait(waiting, timeout=max(remaining, 0), return_when=asyncio.FIRST_COMPLETED)
            if any(future.exception() is not None or future.result().failure is not None for future in done):
                await self._unwind(waiting)
                raise self._first_cause(called, method)
            if not done:
                error = await self._expired([rank for rank, pending in called.items() if pending.reply in waiting], method, deadline)
                await self._unwind(waiting)
                raise error
        return {rank: pending.reply.result() for rank, pending in called.items()}

    async def _unwind(self, waiting: set[asyncio.Future[Reply]]) -> None:
        """Free the ranks that may hang in a collective with one that failed or is late, and wait for them."""
        if not waiting:
            return
        cutting = asyncio.ensure_future(self.abort())  # beside the wait: a stopped process does not answer
        await asyncio.wait(waiting, timeout=UNWIND_SECONDS)
        await cutting

    async def _control(self, rank: int, request: str, **kwargs: Any) -> Any:
        return await self.pool.backend.control(self._process(rank), request, self.deadlines.control, **kwargs)

    def _first_cause(self, called: Called, method: str) -> RolemeshError:
        """A death comes before an exception (which may only be its echo in a collective); of exceptions the earliest counts."""
        failures: list[tuple[float, RolemeshError]] = []
        for rank, pending in called.items():
            if not pending.reply.done():
                continue
            error = pending.reply.exception()
            if isinstance(error, RolemeshError):
                failures.append((0.0, _named(error, self.name, rank, method)))
            elif error is not None:
                raise error
            elif (failure := pending.reply.result().failure) is not None:
                failures.append((failure.at, self._worker_error(rank, pending.process, failure, method)))
        return min(failures, key=lambda found: (not isinstance(found[1], WorkerDied), found[0]))[1]

    def _worker_error(self, rank: int, process: Process, failure: Failure, method: str) -> WorkerError:
        error = WorkerError(
            group=self.name,
            rank=rank,
            node=process.node,
            pid=process.pid,
            method=method,
            original_type=failure.type,
            original_message=failure.message,
            original_traceback=failure.traceback,
            log_path=process.spec.log_path,
        )
        error.__cause__ = failure.error
        return error

    async def _expired(self, late: Sequence[int], method: str, deadline: float) -> DeadlineExceeded:
        reports = await asyncio.gather(*(self._control(rank, "report", stack=True) for rank in late), return_exceptions=True)
        told = "; ".join(f"rank {rank}: {_tell(report)}" for rank, report in zip(late, reports, strict=True))
        subject = f"{self.name}.{method}() on rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        return DeadlineExceeded(waiter="the controller", subject=subject, seconds=deadline, last_report=told)

    async def reports(self, *, stack: bool = False) -> list[Report | BaseException]:
        """What every rank's control thread says, in rank order; an exception where it does not answer."""
        asked = (self._control(rank, "report", stack=stack) for rank in range(self.world_size))
        found: list[Report | BaseException] = await asyncio.gather(*asked, return_exceptions=True)
        return found

    async def unready(self) -> str:
        """For a group that is being created or initialised: which ranks have no process yet, and what the others compute; empty when
        nothing is under way."""
        places = [self.pool.latest(bundle) for bundle in self.bundles]
        missing = [str(rank) for rank, process in enumerate(places) if process is None]
        started = [rank for rank, process in enumerate(places) if process is not None]
        reports = await asyncio.gather(*(self._control(rank, "report") for rank in started), return_exceptions=True)
        told = [f"rank {', '.join(missing)} has not started"] if missing else []
        for rank, report in zip(started, reports, strict=True):
            if isinstance(report, BaseException) or report.call:
                told.append(f"rank {rank} {_tell(report)}")
        return "; ".join(told)

    async def abort(self) -> None:
        """Free every rank that is blocked in a collective: control threads cut this group's communicator. `rejoin` makes a new one."""
        if self._communicates:
            self._joined = False
            aborts = (self._control(rank, "abort", group=self.name) for rank in range(self.world_size))
            await asyncio.gather(*aborts, return_exceptions=True)


def _answer(rank: int, reply: Reply, pending: Pending, registered: Settled) -> Answer:
    value = (reply.value, Stored(pending.blocks[1])) if registered.stores else reply.value
    parts = [BatchRef.from_blocks([(ref, meta)]) for ref, meta in zip(pending.blocks, reply.metas, strict=True) if meta is not None]
    batch = parts[0].join(parts[1]) if len(parts) == 2 else parts[0] if parts else None
    return Answer(rank=rank, value=value, batch=batch)


def _look_at(reply: asyncio.Future[Reply]) -> None:
    """Retrieve the exception of a call that nobody may wait for any more, or asyncio reports it as lost."""
    if not reply.cancelled():
        reply.exception()


def _tell(report: Report | BaseException) -> str:
    if isinstance(report, BaseException):
        return f"its control thread does not answer ({report})"
    stack = f"\n{report.stack}" if report.stack else ""
    return f"{report.state} {report.call} (pid {report.pid} on {report.node}){stack}"


def _named(error: RolemeshError, group: str, rank: int, method: str) -> RolemeshError:
    if not isinstance(error, WorkerError):
        return error
    return type(error)(**{**error.fields, "group": group, "rank": rank, "method": method})


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Await all side by side (calls of several groups, for one) and return their results in order; on the first error the others are
    cancelled and awaited, and that error is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
