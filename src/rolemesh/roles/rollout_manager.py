"""The rollout's replicas behind one handle: a worker group whose `generate` deals prompts out by load instead of in equal shares.

Each replica has one call under way. Prompts of a replica that dies, raises or is late go to others, and it serves no more until it has
a new process, or is idle again, and has taken the weights that the others serve. That is tried when weights are published, when a round
begins, and when no replica is left. With an engine that samples by counter, in its deterministic mode, the answers are the same, bit
for bit, whoever makes them.

A process that other roles live in too is not replaced here, since they hold more than published weights.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from rolemesh.batch import BatchRef
from rolemesh.errors import DeadlineExceeded, ResourceError, RolemeshError, WorkerDied, WorkerError
from rolemesh.observe import Metrics
from rolemesh.protocols.backend import Report
from rolemesh.roles.rollout_round import Round
from rolemesh.runtime import CallRecord, WorkerGroup, together

PIECEWISE: Final = frozenset({"take_on", "hand_in"})
"""Methods of a worker by which it can generate in pieces."""
REPLACEMENTS = 3
"""New processes that a replica gets in a run."""
FAULTS = 2
"""Replicas that may raise in a round; the last one's error is then taken for the request's."""


@dataclass(slots=True)
class Replica:
    """One engine: a rank, or the tensor-parallel ranks of one."""

    ranks: tuple[int, ...]
    out: RolemeshError | None = None
    """Why it serves no more."""
    holds: list[int] = field(default_factory=list)
    """Weight version of each rank."""
    replaced: int = 0


class _Weights(NamedTuple):
    """The call by which replicas get the weights that they serve; it stays here, with what it refers to, for those that catch up."""

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call_id: str


@dataclass(slots=True)
class RolloutManager(WorkerGroup):
    """See the module docstring. With one replica, or a worker class without `PIECEWISE`, `generate` is one call."""

    replicas: list[Replica] = field(init=False)
    _turn: asyncio.Lock = field(init=False)
    _weights: _Weights | None = field(default=None, init=False)
    _open: dict[str, list[CallRecord]] = field(default_factory=dict, init=False)
    """Calls so far, by the id of the one call that they are told as."""
    _answer_tokens: float | None = field(default=None, init=False)
    """Mean length of the answers of the last round."""

    def __post_init__(self) -> None:
        WorkerGroup.__post_init__(self)
        size = self.tensor_parallel
        self.replicas = [Replica(tuple(range(first, first + size))) for first in range(0, self.world_size, size)]
        self._turn = asyncio.Lock()

    # -- weights --------------------------------------------------------------------------------------------------------------

    async def load_weights(self, *args: Any, **kwargs: Any) -> list[int]:
        """Have all replicas take published weights; returns the versions held by the ranks that serve. One that was out comes back; one
        that dies or is late is left out. Raises the first error of any other kind, and WorkerDied or DeadlineExceeded of the last
        replica when none is left."""
        return await self._serve("load_weights", args, kwargs)

    async def serve_folder(self, *args: Any, **kwargs: Any) -> list[int]:
        """As `load_weights`, of the model folder."""
        return await self._serve("serve_folder", args, kwargs)

    async def _serve(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
        weights = _Weights(method, args, kwargs, uuid.uuid4().hex)
        if len(self.replicas) > 1 or self._alone(self.replicas[0]):  # where one can come back
            self._weights = weights
        await self._bring_back()
        with self._as_one(weights.call_id, method):
            serving = self._serving()
            errors = await asyncio.gather(*(self._load_into(replica, weights) for replica in serving), return_exceptions=True)
        for replica, error in zip(serving, errors, strict=True):
            if isinstance(error, WorkerDied | DeadlineExceeded):
                self._put_out(replica, error)
            elif error is not None:
                raise error
        await self._require_one()
        return [version for replica in self._serving() for version in replica.holds]

    async def _load_into(self, replica: Replica, weights: _Weights) -> None:
        replica.holds = await self.call(weights.method, *weights.args, ranks=replica.ranks, call_id=weights.call_id, **weights.kwargs)

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
        replica.out = error
        self.tell(f"{self._name_of(replica)} serves no more, {len(self._serving())} of {len(self.replicas)} do: {error}")

    def _name_of(self, replica: Replica) -> str:
        return f"{self.name} rank {', '.join(map(str, replica.ranks))}"

    async def _bring_back(self) -> None:
        """Let replicas serve again that can."""
        await together(self._revive(replica) for replica in self.replicas if replica.out is not None)

    async def _revive(self, replica: Replica) -> None:
        try:
            if not await self._ready(replica):
                return
            if self._weights is not None:
                await self._load_into(replica, self._weights)
        except (WorkerError, DeadlineExceeded, ResourceError) as error:
            self.tell(f"{self._name_of(replica)} stays out: {error}")
            return
        replica.out = None
        self.tell(f"{self._name_of(replica)} serves again")

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
        if len(self.replicas) == 1 or not self._methods.keys() >= PIECEWISE or not len(batch):
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
        round_ = Round(batch, replicas=len(self.replicas), slots=config.rollout.slots, answer=expected)
        with self._as_one(name, "generate") as metrics:
            await self._run(round_, batch, {"round": name, **settings}, config.rollout.deadline)
            metrics.merge(round_.metrics())
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
