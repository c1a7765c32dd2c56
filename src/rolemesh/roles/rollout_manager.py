"""The rollout's replicas behind one handle: a worker group whose `generate` deals prompts out by load instead of in equal shares.

Each replica has one call under way. Prompts of a replica that dies, raises or is late go to others, and it serves no more until it has
a new process, or is idle again, and has taken the weights that the others serve. That is tried when weights are published, when a round
begins, and when no replica is left. With an engine that samples by counter, in its deterministic mode, the answers are the same, bit
for bit, whoever makes them.

Between rounds, beside them, and between the calls of other roles it also answers single requests: `answer`, see `rollout_requests.py`.

A process that other roles live in too is not replaced here, since they hold more than published weights.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from rolemesh.batch import BatchRef
from rolemesh.errors import DeadlineExceeded, ResourceError, RolemeshError, WorkerDied, WorkerError
from rolemesh.observe import Metrics
from rolemesh.protocols.backend import Report
from rolemesh.protocols.engine import Sampling
from rolemesh.protocols.requests import Growing, News
from rolemesh.roles.rollout_requests import LATER, Requests
from rolemesh.roles.rollout_round import Round
from rolemesh.runtime import CallRecord, WorkerGroup, together
from rolemesh.runtime.calls import named

PIECEWISE: Final = frozenset({"take_on", "hand_in"})
"""Methods of a worker by which it can generate in pieces."""
REPLACEMENTS = 3
"""New processes that a replica gets in a run."""
SLICE_SECONDS, SLICES = 0.05, 20
"""How long a worker goes on with single requests before it takes up what else it is to do; and how often that is told as one call."""
FAULTS = 2
"""Replicas that may raise in a round; the last one's error is then taken for the request's."""


@dataclass(slots=True)
class Replica:
    """One engine: a rank, or the tensor-parallel ranks of one."""

    ranks: tuple[int, ...]
    out: RolemeshError | None = None
    """Why it serves no more."""
    replaced: int = 0


Give = Callable[[Sequence[int]], Awaitable[Mapping[int, int]]]
"""Has these ranks take the weights that are to be served, unless they hold them; returns the version that each holds then."""


@dataclass(slots=True)
class RolloutManager(WorkerGroup):
    """See the module docstring. With one replica, or a worker class without `PIECEWISE`, `generate` is one call."""

    replicas: list[Replica] = field(init=False)
    _turn: asyncio.Lock = field(init=False)
    _give: Give | None = field(default=None, init=False)
    _open: dict[str, list[CallRecord]] = field(default_factory=dict, init=False)
    """Calls so far, by the id of the one call that they are told as."""
    _answer_tokens: float | None = field(default=None, init=False)
    """Mean length of the answers of the last round."""
    _round: Round | None = field(default=None, init=False)
    requests: Requests = field(init=False)

    def __post_init__(self) -> None:
        WorkerGroup.__post_init__(self)
        size = self.tensor_parallel
        self.replicas = [Replica(tuple(range(first, first + size))) for first in range(0, self.world_size, size)]
        self._turn = asyncio.Lock()
        rollout = self.worker_kwargs["config"].rollout
        self.requests = Requests(
            most=rollout.serve.requests if rollout.serve is not None else sys.maxsize,
            slots=rollout.slots,
            serving=lambda: [index for index, replica in enumerate(self.replicas) if replica.out is None],
            loads=lambda: self._round.loads if self._round is not None else {},
            talk=self._talk,
            pump=self._pump,
            lost=lambda index, error: self._put_out(self.replicas[index], error),
        )

    # -- weights --------------------------------------------------------------------------------------------------------------

    async def serve(self, give: Give) -> list[int]:
        """Have all replicas take weights; returns the versions held by the ranks that serve. One that was out comes back; one that dies or
        is late is left out, and the others are given them anew. `give` stays here for those that catch up. Raises its first error of any
        other kind, and that of the last replica when none is left."""
        self._give = give
        await self._bring_back()
        while True:
            await self._require_one()
            serving = [rank for replica in self._serving() for rank in replica.ranks]
            try:
                held = await give(serving)
                return [held[rank] for rank in serving]
            except (WorkerDied, DeadlineExceeded) as error:
                if not (lost := self._lost(error)):
                    raise
                for replica in lost:
                    self._put_out(replica, error)

    def _lost(self, error: WorkerError | DeadlineExceeded) -> list[Replica]:
        """Whose fault it is; nobody's here when it is another group's."""
        fields = error.fields
        ranks = fields["ranks"] if isinstance(error, DeadlineExceeded) else (fields["rank"],)
        return [replica for replica in self.replicas if fields["group"] == self.name and set(replica.ranks) & set(ranks)]

    async def load_weights(self, *args: Any, **kwargs: Any) -> list[int]:
        """`serve` what one call of the workers' `load_weights` takes over."""
        return await self.serve(partial(self._call_on, "load_weights", args, kwargs))

    async def serve_folder(self, *args: Any, **kwargs: Any) -> list[int]:
        """`serve` the weights of the model folder."""
        return await self.serve(partial(self._call_on, "serve_folder", args, kwargs))

    async def _call_on(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks: Sequence[int]) -> dict[int, int]:
        return dict(zip(ranks, await self.call(method, *args, ranks=ranks, **kwargs), strict=True))

    # -- replicas -------------------------------------------------------------------------------------------------------------

    def _serving(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.out is None]

    async def _require_one(self) -> None:
        """Raises the last replica's error when none serves and none can come back."""
        if not self._serving():
            await self._bring_back()
        error = self.replicas[-1].out
        if not self._serving() and error is not None:
            raise error

    def _put_out(self, replica: Replica, error: RolemeshError) -> None:
        if replica.out is not None:
            return
        replica.out = error
        self.requests.move_from(self.replicas.index(replica), error)
        self.tell(f"{self._name_of(replica)} serves no more, {len(self._serving())} of {len(self.replicas)} do: {error}")

    def _name_of(self, replica: Replica) -> str:
        return f"{self.name} rank {', '.join(map(str, replica.ranks))}"

    async def _bring_back(self) -> None:
        """Let replicas serve again that can: those that are ready take the weights together."""
        out = [replica for replica in self.replicas if replica.out is not None]
        ready = [replica for replica, is_ready in zip(out, await together(map(self._is_ready, out)), strict=True) if is_ready]
        try:
            if ready and self._give is not None:
                await self._give([rank for replica in ready for rank in replica.ranks])
        except (WorkerError, DeadlineExceeded) as error:
            if not self._lost(error):
                raise  # the actor's, who gives the weights
            for replica in ready:
                self.tell(f"{self._name_of(replica)} stays out: {error}")
            return
        for replica in ready:
            replica.out = None
            self.tell(f"{self._name_of(replica)} serves again")
        self.requests.place_waiting()

    async def _is_ready(self, replica: Replica) -> bool:
        try:
            return await self._ready(replica)
        except (WorkerError, DeadlineExceeded, ResourceError) as error:
            self.tell(f"{self._name_of(replica)} stays out: {error}")
            return False

    async def _ready(self, replica: Replica) -> bool:
        """True when its processes are new, or idle. Those that are the rollout's alone are replaced, whatever they do."""
        if self._alone(replica) and replica.replaced < REPLACEMENTS:
            replica.replaced += 1
            for rank in replica.ranks:
                await self.replace(rank, self.worker_kwargs["config"].deadlines.create)
            return True
        reports = [report for rank, report in enumerate(await self.reports()) if rank in replica.ranks]
        return all(isinstance(report, Report) and report.state == "idle" for report in reports)

    def _alone(self, replica: Replica) -> bool:
        """Its processes are the rollout's alone."""
        return all(self.pool.tenants(self.bundles[rank]) == {self.name} for rank in replica.ranks)

    # -- generation -----------------------------------------------------------------------------------------------------------

    async def generate(self, batch: BatchRef, **settings: Any) -> BatchRef:
        """Answer every row; `settings` are those of the workers' `generate`. Rows come back in the order sent.

        Raises what a single call would raise: the last error when no replica is left, or when a second one raises. One round goes on at
        a time; others wait for it as long as a call may take (DeadlineExceeded)."""
        alone = len(self.replicas) == 1 and self.worker_kwargs["config"].rollout.serve is None  # else others wait for the whole round
        if alone or not self._methods.keys() >= PIECEWISE or not len(batch):
            return await self._generate_at_once(batch, settings)
        try:
            async with asyncio.timeout(self.deadlines.call):
                await self._turn.acquire()
        except TimeoutError:
            subject = f"the {self.name} round under way"
            raise DeadlineExceeded(waiter="a round of generate", subject=subject, seconds=self.deadlines.call) from None
        try:
            return await self._generate_in_pieces(batch, settings)
        finally:
            self._turn.release()

    async def _generate_at_once(self, batch: BatchRef, settings: Mapping[str, Any]) -> BatchRef:
        """In one call of all replicas, and again if one that died could be replaced."""
        while True:
            try:
                answered: BatchRef = await self.call("generate", batch, **settings)
                return answered
            except WorkerDied as error:
                self._put_out(self.replicas[error.fields["rank"] // self.tensor_parallel], error)
                await self._bring_back()
                if len(self._serving()) < len(self.replicas):
                    raise

    async def _generate_in_pieces(self, batch: BatchRef, settings: Mapping[str, Any]) -> BatchRef:
        config, name = self.worker_kwargs["config"], uuid.uuid4().hex
        await self._bring_back()
        await self._require_one()
        expected = self._answer_tokens or config.data.max_response_tokens
        slots = config.rollout.slots
        if config.environment is not None:  # most of an episode may be waiting, so that a replica holds its share of all at once
            slots = max(slots, -(-len(batch) // len(self.replicas)))
        round_ = Round(batch, replicas=len(self.replicas), slots=slots, answer=expected)
        self._round = round_
        try:
            with self._as_one(name, "generate") as metrics:
                await self._run(round_, batch, {"round": name, **settings}, config.rollout.deadline)
                metrics.merge(round_.metrics())
        finally:
            self._round = None
        self._answer_tokens = round_.tokens.total() / len(batch)
        if warning := round_.uneven():
            self.tell(warning)
        return batch.select([]).join(BatchRef.concat(round_.answers))

    async def _run(self, round_: Round, batch: BatchRef, settings: Mapping[str, Any], deadline: float) -> None:
        """Until every row is answered."""
        busy: dict[asyncio.Future[BatchRef], int] = {}
        faults = 0
        try:
            while not round_.done:
                free = [index for index, one in enumerate(self.replicas) if one.out is None and index not in busy.values()]
                for index, rows in round_.assign(free).items():
                    part = batch.take(rows) if rows else None
                    asked = self._ask(self.replicas[index], part, settings, round_.at_least(), deadline)
                    busy[asyncio.ensure_future(asked)] = index
                ended, _ = await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)  # each has its deadline
                for task in ended:
                    index, error = busy.pop(task), task.exception()
                    if error is None:
                        round_.take(index, task.result())
                        if self.replicas[index].out is not None:  # a single request has found it late
                            round_.give_back(index)
                    elif isinstance(error, WorkerError | DeadlineExceeded):
                        round_.give_back(index)
                        self._put_out(self.replicas[index], error)
                        faults += isinstance(error, WorkerError) and not isinstance(error, WorkerDied)
                    if error is not None and (faults == FAULTS or self.replicas[index].out is None):
                        raise error
                await self._require_one()
        finally:
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)

    async def _ask(self, replica: Replica, rows: BatchRef | None, settings: Mapping[str, Any], at_least: int, deadline: float) -> BatchRef:
        """Give a replica more rows, if any, and wait for what it hands in."""
        common: dict[str, Any] = {"ranks": replica.ranks, "deadline": deadline, "call_id": settings["round"]}
        if rows is not None:
            await self.call("take_on", rows, **common, **settings)
        answers: BatchRef = await self.call("hand_in", **common, round=settings["round"], at_least=at_least)
        return answers

    # -- single requests ------------------------------------------------------------------------------------------------------

    @property
    def takes_requests(self) -> bool:
        """Whether single requests can be answered: each replica has to be one worker, whose class has all that it takes."""
        return self.tensor_parallel == 1 and self._methods.keys() >= {"go_on", *PIECEWISE}

    def answer(self, prompt_ids: Sequence[int], sampling: Sampling, *, count: int = 1, deadline: float) -> Growing:
        """See `protocols/requests.py`."""
        return self.requests.answer(prompt_ids, sampling, count=count, deadline=deadline)

    async def bring_back(self) -> None:
        """Let replicas serve again that can. For those who serve no rounds: what is given to them has to be what the others have. Raises
        the last replica's error when none serves and none gets a new process any more."""
        if any(replica.out is not None for replica in self.replicas):
            await self._bring_back()
        error = self.replicas[-1].out
        if error is not None and not self._serving() and all(replica.replaced >= REPLACEMENTS for replica in self.replicas):
            raise error

    async def _talk(self, index: int, message: object) -> list[News]:
        (rank,) = self.replicas[index].ranks
        try:
            news: list[News] = await self._control(rank, "talk", group=self.name, message=message)
        except WorkerError as error:
            raise named(error, self.name, rank, "talk") from error.__cause__
        return news

    async def _pump(self, index: int, wanted: Callable[[], bool]) -> None:
        """Have a replica go on. Calls that wait for its thread come in between."""
        name = uuid.uuid4().hex
        with self._as_one(name, "go_on"):
            for _ in range(SLICES):
                able = await self.call("go_on", SLICE_SECONDS, ranks=self.replicas[index].ranks, call_id=name)
                if not able:
                    await self.pool.backend.sleep(LATER)
                if not (able and wanted()):
                    return

    # -- what is told ---------------------------------------------------------------------------------------------------------

    def _observe(self, record: CallRecord) -> None:
        if record.id in self._open:
            self._open[record.id].append(record)
        else:
            WorkerGroup._observe(self, record)

    @contextmanager
    def _as_one(self, call_id: str, method: str) -> Iterator[Metrics]:
        """Calls of this id are told as one, with the metrics given here."""
        started, metrics = self.pool.backend.time(), Metrics()
        pieces = self._open[call_id] = []
        try:
            yield metrics
        finally:
            del self._open[call_id]
        for piece in pieces:
            metrics.merge(piece.metrics)
        record = CallRecord(
            id=call_id,
            group=self.name,
            method=method,
            started=started,
            ended=self.pool.backend.time(),
            replies=tuple(reply for piece in pieces for reply in piece.replies),
            processes=tuple(process for piece in pieces for process in piece.processes),
            metrics=metrics,
        )
        WorkerGroup._observe(self, record)
