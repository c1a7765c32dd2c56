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
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolemesh.batch import BatchRef
from rolemesh.errors import DeadlineExceeded, RolemeshError, WorkerDied, WorkerError
from rolemesh.observe import Metrics
from rolemesh.protocols.backend import Call, Failure, Pending, Process, Reply, Report
from rolemesh.runtime.dispatch import Answer, Request, Share, Topology
from rolemesh.runtime.pool import Pool
from rolemesh.runtime.stored import Stored, take_out
from rolemesh.runtime.worker import Registered, Worker, WorkerContext, registered_methods

UNWIND_SECONDS = 10.0
"""How long the other ranks of a failed call get to come back after their communicators were cut."""


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


@dataclass(slots=True)
class _Member:
    rank: int
    bundle: int
    process: Process | None = None

    def started(self) -> Process:
        if self.process is None:
            raise RuntimeError(f"rank {self.rank} has no process yet: await group.create() first")
        return self.process


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
    pool: Pool
    bundles: Sequence[int]
    worker_kwargs: Mapping[str, Any] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    epoch: int = 1
    tensor_parallel: int = 1
    run_dir: str = ""
    observer: Callable[[CallRecord], None] = _observe_nothing
    generation: int = field(default=0, init=False)
    _members: list[_Member] = field(init=False)
    _methods: dict[str, Registered] = field(init=False)

    def __post_init__(self) -> None:
        self._members = [_Member(rank, bundle) for rank, bundle in enumerate(self.bundles)]
        self._methods = registered_methods(self.worker_class)

    # -- create, init ---------------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return len(self._members)

    @property
    def topology(self) -> Topology:
        return Topology(world_size=self.world_size, tensor_parallel=self.tensor_parallel)

    @property
    def processes(self) -> list[Process]:
        """The processes of the ranks, in rank order."""
        return [member.started() for member in self._members]

    async def create(self, deadline: float = 60.0) -> None:
        """Start the processes and make the workers in them. Raises DeadlineExceeded, ResourceError or the worker's own error."""
        await _all(self._create_member(member, deadline) for member in self._members)

    async def _create_member(self, member: _Member, deadline: float) -> None:
        member.process = await self.pool.process(member.bundle, deadline)
        await self.pool.backend.add_worker(
            member.process, self.name, self.worker_class, self._context(member), self.worker_kwargs, deadline
        )

    def _context(self, member: _Member) -> WorkerContext:
        nodes = [self.pool.bundles[other.bundle].node for other in self._members]
        node, process = nodes[member.rank], member.started()
        return WorkerContext(
            group=self.name,
            rank=member.rank,
            world_size=self.world_size,
            local_rank=nodes[: member.rank].count(node),
            local_world_size=nodes.count(node),
            node=process.node,
            address=process.address,
            process=process.spec.name,
            gpus=self.pool.bundles[member.bundle].gpus,
            run_dir=self.run_dir,
        )

    async def init(self, retries: int = 1) -> None:
        """Load models (each worker retried by itself), then form the communicator (retried as a group, each time anew)."""
        await _all(self._load(member, retries) for member in self._members)
        if self.worker_class.communicates and self.world_size > 1:
            await self._join(retries)

    async def _load(self, member: _Member, retries: int) -> None:
        for attempt in range(retries + 1):
            try:
                await self.call("load", ranks=(member.rank,), deadline=self.deadlines.load)
                return
            except WorkerDied:
                raise
            except WorkerError:
                if attempt == retries:
                    raise

    async def _join(self, retries: int) -> None:
        for attempt in range(retries + 1):
            self.generation += 1
            try:
                rendezvous = await self.call("open_rendezvous", self.generation, self.deadlines.join, deadline=self.deadlines.join)
                await self.call("join", rendezvous, self.deadlines.join, self.deadlines.call, deadline=self.deadlines.join * 2)
                return
            except WorkerDied:
                raise
            except RolemeshError:
                if attempt == retries:
                    raise

    async def rejoin(self, retries: int = 1) -> None:
        """Form the communicator anew under a new generation, for example after a rank was replaced."""
        await self._join(retries)

    async def replace(self, rank: int, deadline: float = 60.0) -> None:
        """Kill a rank's process and start a new one in its place, its worker created and loaded; `rejoin` afterwards."""
        member = self._members[rank]
        await self.pool.kill(member.bundle)
        await self._create_member(member, deadline)
        await self._load(member, retries=0)

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

        A `BatchRef` as first argument is sharded by the dispatch. `ranks` restricts the call to a chosen subset. With a `call_id` of
        an earlier call of a mutating method, workers that have run it answer again without running it twice. When a rank fails or
        dies, the others' communicators are cut, they get 10 s to come back, and the first cause is raised. Raises WorkerError,
        WorkerDied, or DeadlineExceeded naming the ranks that did not answer and what they were doing.
        """
        registered = self._methods[method]
        batch, rest = (args[0], args[1:]) if args and isinstance(args[0], BatchRef) else (None, args)
        request = Request(method=method, batch=batch, args=rest, kwargs=kwargs, ranks=tuple(ranks) if ranks is not None else None)
        shares = registered.dispatch.split(self.topology, request)
        called = [rank for rank, share in enumerate(shares) if share is not None and (ranks is None or rank in ranks)]
        started = self.pool.backend.time()
        identity = call_id or uuid.uuid4().hex
        pending = [self._submit(rank, shares[rank], registered, method, identity) for rank in called]
        replies = await self._gather(pending, method, deadline or self.deadlines.call)
        self._record(method, started, replies)
        answers = [self._answer(rank, reply, sent, registered) for rank, reply, sent in zip(called, replies, pending, strict=True)]
        return registered.dispatch.collect(self.topology, request, answers)

    def _submit(self, rank: int, share: Share | None, registered: Registered, method: str, identity: str) -> Pending:
        assert share is not None
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
        return self.pool.backend.call(self._members[rank].started(), call, [*refs, *stored])

    def _answer(self, rank: int, reply: Reply, pending: Pending, registered: Registered) -> Answer:
        value = (reply.value, Stored(pending.blocks[1])) if registered.stores else reply.value
        parts = [BatchRef.from_blocks([(ref, meta)]) for ref, meta in zip(pending.blocks, reply.metas, strict=True) if meta is not None]
        batch = parts[0].join(parts[1]) if len(parts) == 2 else parts[0] if parts else None
        return Answer(rank=rank, value=value, batch=batch)

    def _record(self, method: str, started: float, replies: Sequence[Reply]) -> None:
        metrics = Metrics()
        for reply in replies:
            metrics.merge(reply.metrics)
        ended = self.pool.backend.time()
        self.observer(CallRecord(group=self.name, method=method, started=started, ended=ended, replies=tuple(replies), metrics=metrics))

    # -- waiting and failing --------------------------------------------------------------------------------------------------

    async def _gather(self, pending: Sequence[Pending], method: str, deadline: float) -> list[Reply]:
        waiting = {item.reply for item in pending}
        ends = self.pool.backend.time() + deadline
        while waiting:
            remaining = ends - self.pool.backend.time()
            done, waiting = await asyncio.wait(waiting, timeout=max(remaining, 0), return_when=asyncio.FIRST_COMPLETED)
            if any(future.exception() is not None or future.result().failure is not None for future in done):
                await self._unwind(waiting)
                raise self._first_cause(pending, method)
            if not done:
                raise await self._expired([item for item in pending if item.reply in waiting], method, deadline)
        return [item.reply.result() for item in pending]

    async def _unwind(self, waiting: set[asyncio.Future[Reply]]) -> None:
        """Free the ranks that may hang in a collective with the failed one, and wait for them."""
        if not waiting:
            return
        if self.worker_class.communicates and self.world_size > 1:
            await asyncio.gather(*(self._control(member, "abort") for member in self._members), return_exceptions=True)
        await asyncio.wait(waiting, timeout=UNWIND_SECONDS)

    async def _control(self, member: _Member, request: str, **kwargs: Any) -> Any:
        return await self.pool.backend.control(member.started(), request, self.deadlines.control, **kwargs)

    def _first_cause(self, pending: Sequence[Pending], method: str) -> RolemeshError:
        """A death comes before an exception (which may only be its echo in a collective); of exceptions the earliest counts."""
        failures: list[tuple[float, RolemeshError]] = []
        for item in pending:
            if not item.reply.done():
                continue
            error = item.reply.exception()
            if isinstance(error, RolemeshError):
                rank = self._rank_of(item.process)
                failures.append((0.0, _named(error, self.name, rank, method)))
            elif error is not None:
                raise error
            elif (failure := item.reply.result().failure) is not None:
                failures.append((failure.at, self._worker_error(item, failure, method)))
        return min(failures, key=lambda found: found[0])[1]

    def _worker_error(self, item: Pending, failure: Failure, method: str) -> WorkerError:
        error = WorkerError(
            group=self.name,
            rank=self._rank_of(item.process),
            node=item.process.node,
            pid=item.process.pid,
            method=method,
            original_type=failure.type,
            original_message=failure.message,
            original_traceback=failure.traceback,
            log_path=item.process.spec.log_path,
        )
        error.__cause__ = failure.error
        return error

    def _rank_of(self, process: Process) -> int:
        return next(member.rank for member in self._members if member.process is process)

    async def _expired(self, late: Sequence[Pending], method: str, deadline: float) -> DeadlineExceeded:
        ranks = [self._rank_of(item.process) for item in late]
        reports = await asyncio.gather(
            *(self._control(self._members[rank], "report", stack=True) for rank in ranks), return_exceptions=True
        )
        told = "; ".join(f"rank {rank}: {_tell(report)}" for rank, report in zip(ranks, reports, strict=True))
        subject = f"{self.name}.{method}() on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        return DeadlineExceeded(waiter="the controller", subject=subject, seconds=deadline, last_report=told)

    async def reports(self, *, stack: bool = False) -> list[Report | BaseException]:
        """What every rank's control thread says, in rank order; an exception where it does not answer."""
        asked = (self._control(member, "report", stack=stack) for member in self._members)
        found: list[Report | BaseException] = await asyncio.gather(*asked, return_exceptions=True)
        return found

    async def abort(self) -> None:
        """Free every rank that is blocked in a collective (control threads cut the communicators)."""
        await asyncio.gather(*(self._control(member, "abort") for member in self._members), return_exceptions=True)


def _tell(report: Report | BaseException) -> str:
    if isinstance(report, BaseException):
        return f"its control thread does not answer ({report})"
    stack = f"\n{report.stack}" if report.stack else ""
    return f"{report.state} {report.call} (pid {report.pid} on {report.node}){stack}"


def _named(error: RolemeshError, group: str, rank: int, method: str) -> RolemeshError:
    if not isinstance(error, WorkerError):
        return error
    return type(error)(**{**error.fields, "group": group, "rank": rank, "method": method})


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines side by side; on the first error the others are cancelled and awaited, and that error is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
