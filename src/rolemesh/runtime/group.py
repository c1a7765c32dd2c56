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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rolemesh.batch import BatchRef
from rolemesh.errors import BatchError, ConfigError, DeadlineExceeded, NotJoined, RolemeshError, WorkerError
from rolemesh.observe import Journal, Metrics
from rolemesh.protocols.backend import Call, Process, Reply, Report, WorkerSpec
from rolemesh.protocols.store import StoreLink
from rolemesh.runtime.calls import Called, CallRecord, answer_of, first_cause, named, retried, silent, tell, together, worker_error
from rolemesh.runtime.dispatch import Request, Share, Topology
from rolemesh.runtime.making import make_of
from rolemesh.runtime.pool import Pool
from rolemesh.runtime.pool_view import PoolView
from rolemesh.runtime.stored import take_out
from rolemesh.runtime.worker import Settled, Worker, WorkerContext, registered_methods, settled_methods

UNWIND_SECONDS = 10.0
"""How long the other ranks of a failed call get to come back after their communicators were cut."""
LIFE = frozenset(registered_methods(Worker))
"""Methods that make a communicator, and so need none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds for each kind of wait of a group."""

    load: float = 300.0
    join: float = 60.0
    call: float = 1800.0
    control: float = 10.0


async def _moved_nowhere() -> None:
    """Default for `moved`."""


@dataclass(slots=True)
class WorkerGroup:
    """Workers of one class, rank i in `bundles[i]` of the pool. Subclass it to add calls of your own.

    `worker_kwargs` go to every worker's constructor. `epoch` is the controller's; the group's `generation` rises with every `init` of
    its communicator, and workers refuse calls of older ones. With a `journal` both are the journal's: so they rise over the death of a
    controller too, and the next one can take over pool and workers.
    """

    name: str
    worker_class: type[Worker]
    pool: Pool | PoolView
    bundles: Sequence[int]
    worker_kwargs: Mapping[str, Any] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    epoch: int = 1
    journal: Journal | None = None
    tensor_parallel: int = 1
    run_dir: str = ""
    store: StoreLink | None = None
    """The way to the run's KV store, for workers that use it."""
    observer: Callable[[CallRecord], None] = lambda record: None
    tell: Callable[[str], None] = lambda text: None
    """Hears what the group does of its own accord, and what a user should know."""
    moved: Callable[[], Awaitable[None]] = _moved_nowhere
    """Called after a rank has got another process."""
    generation: int = field(default=0, init=False)
    _joined: bool = field(default=False, init=False)
    """The ranks have a communicator that was not cut."""
    _methods: dict[str, Settled] = field(init=False)
    _places: list[tuple[Pool, int]] = field(init=False)
    """Pool and place of each rank."""
    _heard: dict[int, tuple[float, str]] = field(default_factory=dict, init=False)
    """By rank, when its control thread has last answered (backend clock), and what the process did then."""
    _found: set[int] = field(default_factory=set, init=False)
    """Ranks whose worker was found as it would be made, and loaded."""

    def __post_init__(self) -> None:
        if self.journal is not None:
            self.epoch, self.generation = self.journal.epoch, self.journal.generation(self.name)
        self._check_places()
        places = self.pool.places
        self._places = [places[bundle] for bundle in self.bundles]
        self._methods = settled_methods(self.worker_class, self.worker_kwargs)
        taken = sorted(set(self._methods) & set(dir(WorkerGroup)))
        if taken:
            raise ConfigError.one(
                f"worker class {self.worker_class.__qualname__}",
                "registered methods must have other names than what a group itself has",
                ", ".join(taken),
                "Rename them",
            )

    def _check_places(self) -> None:
        """Two ranks in one place would be one worker."""
        there, unit = len(self.pool.bundles), self.tensor_parallel
        wanted, known = list(self.bundles), set(range(there))
        if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= known or unit < 1 or len(wanted) % unit:
            need = f"some of the places 0 to {there - 1} of pool {self.pool.name}, each once, in whole tensor-parallel groups of {unit}"
            raise ConfigError.one(f"group {self.name}", need, f"bundles {wanted}", "Give one place for each rank")

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
        pool, place = self._places[rank]
        process = pool.latest(place)
        if process is None:
            raise RuntimeError(f"{self.name} rank {rank} has no process yet: await group.create() first")
        return process

    async def create(self, deadline: float = 60.0) -> None:
        """Start the processes and make the workers in them. In processes that the pool took over, workers stay that are as they would be
        made, loaded and in order. Raises DeadlineExceeded, ResourceError or the worker's own error."""
        await together(self._create(rank, deadline) for rank in range(self.world_size))
        for rank, (pool, place) in enumerate(self._places):
            pool.move_in(place, self.name, partial(self._restore, rank))

    async def _create(self, rank: int, deadline: float) -> None:
        pool, place = self._places[rank]
        try:
            process = await pool.process(place, deadline)
            self._heard[rank] = (pool.backend.time(), "had just started")
            context = self._context(rank, process)
            make = make_of(self.worker_class, context, self.worker_kwargs)
            found = pool.resident(place, self.name)
            if found is not None and found.whole and make and found.make == make:
                self._found.add(rank)
                return
            kwargs, epoch = self.worker_kwargs, self.epoch
            spec = WorkerSpec(group=self.name, worker_class=self.worker_class, context=context, kwargs=kwargs, epoch=epoch, make=make)
            failure = await pool.backend.add_worker(process, spec, deadline)
        except WorkerError as error:
            raise named(error, self.name, rank, "__init__") from error.__cause__
        if failure is not None:
            raise worker_error(process, failure, self.name, rank, "__init__")

    def _context(self, rank: int, process: Process) -> WorkerContext:
        there = self.pool.bundles
        places = [there[bundle] for bundle in self.bundles]
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
        """Load models (each worker retried by itself; not those that were found loaded), then form the communicator (retried as a group,
        each time anew)."""
        await together(self._load(rank, retries) for rank in range(self.world_size) if rank not in self._found)
        self._found.clear()
        if self._communicates:
            await self.rejoin(retries)

    async def _load(self, rank: int, retries: int) -> None:
        await retried(partial(self.call, "load", ranks=(rank,), deadline=self.deadlines.load), retries, WorkerError)

    async def rejoin(self, retries: int = 1) -> None:
        """Form the communicator anew under a new generation, for example after a rank was replaced."""
        await retried(self._meet, retries, RolemeshError)

    async def _meet(self) -> None:
        self.generation = self.journal.next_generation(self.name) if self.journal is not None else self.generation + 1
        within = self.deadlines.join
        rendezvous = await self.call("open_rendezvous", self.generation, within, deadline=within)
        await self.call("join", rendezvous, within, self.deadlines.call, deadline=within * 2)
        self._joined = True

    async def replace(self, rank: int, deadline: float = 60.0) -> None:
        """Kill a rank's process and start a new one in its place, with the workers of all groups in it created and loaded.

        Each of these groups that has a communicator needs `rejoin` afterwards.
        """
        pool, place = self._places[rank]
        await pool.replace(place, deadline)

    async def _restore(self, rank: int, deadline: float) -> None:
        self._joined = False
        await self._create(rank, deadline)
        await self._load(rank, retries=0)
        await self.moved()

    # -- calls ----------------------------------------------------------------------------------------------------------------

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        self._registered(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self.call(method, *args, **kwargs)

        return call

    def _registered(self, method: str) -> Settled:
        if method not in self._methods:
            raise AttributeError(f"group {self.name!r} has no registered method {method!r}; it has {', '.join(sorted(self._methods))}")
        return self._methods[method]

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
        registered = self._registered(method)
        batch, rest = (args[0], args[1:]) if args and isinstance(args[0], BatchRef) else (None, args)
        chosen = self._chosen(ranks, method, batch)
        topology = Topology(world_size=len(chosen), tensor_parallel=self.tensor_parallel)
        request = Request(method=method, batch=batch, args=rest, kwargs=kwargs, reads=registered.reads)
        split = registered.dispatch.split(topology, request)
        if len(split) != len(chosen):
            must = f"its dispatch {registered.dispatch.name!r} must return a share, or None, for each of {len(chosen)} ranks"
            raise BatchError(f"{self.name}.{method}(): {must}, got {len(split)}")
        shares = {rank: share for rank, share in zip(chosen, split, strict=True) if share is not None}
        if self._communicates and not self._joined and len(shares) == self.world_size and method not in LIFE:
            raise NotJoined(group=self.name, method=method)
        started = self.pool.backend.time()
        identity = call_id or uuid.uuid4().hex
        distinct = {id(share): share for share in shares.values()}  # ranks may share one
        calls = {key: self._call_of(share, registered, method, identity) for key, share in distinct.items()}
        called, submit = Called({rank: self._process(rank) for rank in shares}), self.pool.backend.call
        for rank, process in called.processes.items():
            called.blocks[rank] = submit(process, *calls[id(shares[rank])], partial(called.answer, rank))
        replies = await self._gather(called, method, self.deadlines.call if deadline is None else deadline)
        self._record(identity, method, started, called, replies)
        place = {rank: place for place, rank in enumerate(chosen)}
        answers = [answer_of(place[rank], reply, called.blocks[rank], registered) for rank, reply in replies.items()]
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

    def _call_of(self, share: Share, registered: Settled, method: str, identity: str) -> tuple[Call, list[Any]]:
        """The call, and the stored objects that it needs."""
        refs: list[Any] = []
        assembly = None
        if share.batch is not None:
            refs, assembly = share.batch.assembly(registered.reads)
        args, kwargs, stored = take_out(share.args, share.kwargs, len(refs))
        writes = bool(registered.writes) or registered.stores
        call = Call(identity, self.epoch, self.generation, self.name, method, args, kwargs, assembly, len(refs), writes)
        return call, [*refs, *stored]

    def _record(self, identity: str, method: str, started: float, called: Called, replies: Mapping[int, Reply]) -> None:
        metrics = Metrics()
        for reply in replies.values():
            if reply.metrics is not None:
                metrics.merge(reply.metrics)
        record = CallRecord(
            id=identity,
            group=self.name,
            method=method,
            started=started,
            ended=self.pool.backend.time(),
            replies=tuple(replies.values()),
            processes=tuple([process.spec.name for process in called.processes.values()]),
            metrics=metrics,
        )
        self._observe(record)

    def _observe(self, record: CallRecord) -> None:
        """A call has been made. Subclasses may put several together."""
        self.observer(record)

    # -- waiting and failing --------------------------------------------------------------------------------------------------

    async def _gather(self, called: Called, method: str, deadline: float) -> dict[int, Reply]:
        """The replies by rank. Ranks left waiting by a failure, a death or the deadline are freed before it is raised."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                await called.settled()
        if (replies := called.replies()) is not None:
            return replies
        late = [] if called.failed else called.late
        expired = await self._expired(late, method, deadline) if late else None
        await self._unwind(called)
        raise expired or first_cause(called, self.name, method)

    async def _unwind(self, called: Called) -> None:
        """Free the ranks that may hang in a collective with one that failed or is late, and wait for them."""
        if not called.late:
            return
        cutting = asyncio.ensure_future(self.abort())  # beside the wait: a stopped process does not answer
        with suppress(TimeoutError):
            async with asyncio.timeout(UNWIND_SECONDS):
                await called.over()
        await cutting

    async def _control(self, rank: int, request: str, **kwargs: Any) -> Any:
        return await self.pool.backend.control(self._process(rank), request, self.deadlines.control, **kwargs)

    async def _expired(self, late: Sequence[int], method: str, deadline: float) -> DeadlineExceeded:
        reports = await self.reports(late, stack=True)
        told = "; ".join(f"rank {rank}: {tell(report)}" for rank, report in zip(late, reports, strict=True))
        subject = f"{self.name}.{method}() on rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        return DeadlineExceeded(
            waiter="the controller", subject=subject, seconds=deadline, last_report=told, group=self.name, ranks=tuple(late)
        )

    async def reports(self, ranks: Iterable[int] | None = None, *, stack: bool = False) -> list[Report | BaseException]:
        """What every rank's control thread says, in rank order, or that of these ranks; an exception where it does not answer."""
        chosen = list(range(self.world_size) if ranks is None else ranks)
        asked = (self._control(rank, "report", stack=stack) for rank in chosen)
        found: list[Report | BaseException] = await asyncio.gather(*asked, return_exceptions=True)
        for rank, report in zip(chosen, found, strict=True):
            if isinstance(report, Report):
                self._heard[rank] = (self.pool.backend.time(), f"computed {report.call}" if report.call else "did nothing")
        return found

    async def unready(self) -> str:
        """For a group that is being created or initialised: which ranks have no process yet, and what the others compute; empty when
        nothing is under way."""
        missing = [str(rank) for rank in range(self.world_size) if rank not in self._heard]
        started = sorted(self._heard)
        reports = await self.reports(started)
        told = [f"rank {', '.join(missing)} has not started"] if missing else []
        for rank, report in zip(started, reports, strict=True):
            if isinstance(report, DeadlineExceeded):
                since, did = self._heard[rank]
                told.append(f"rank {rank} {silent(self._process(rank), self.pool.backend.time() - since, did)}")
            elif isinstance(report, BaseException) or report.call:
                told.append(f"rank {rank} {tell(report)}")
        return "; ".join(told)

    async def abort(self) -> None:
        """Free every rank that is blocked in a collective: control threads cut this group's communicator. `rejoin` makes a new one."""
        if self._communicates:
            self._joined = False
            aborts = (self._control(rank, "abort", group=self.name) for rank in range(self.world_size))
            await asyncio.gather(*aborts, return_exceptions=True)
