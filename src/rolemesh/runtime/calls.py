"""A call that is under way on the ranks of a group: waiting for all, what went wrong first, what came of it. Used by `group.py`."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from rolemesh.errors import RolemeshError, WorkerDied, WorkerError
from rolemesh.observe import Metrics, Span
from rolemesh.protocols.backend import Failure, Process, Reply, Report
from rolemesh.runtime.dispatch import Answer
from rolemesh.runtime.stored import Stored
from rolemesh.runtime.worker import Settled

T = TypeVar("T")


class Called:
    """A call under way on some ranks. Whoever awaits it is woken once, by the last answer or by the first failure."""

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self.processes = processes
        """Of the ranks that are called, in rank order."""
        self.blocks: dict[int, tuple[Any, Any]] = {}
        """What each will have written."""
        self.answers: dict[int, Reply | Exception] = {}
        """As `failed`, it changes on the controller's loop alone, between its steps."""
        self.failed = False
        self._loop = asyncio.get_running_loop()
        self._arrived: list[tuple[int, Reply | Exception]] = []
        self._news = asyncio.Event()

    def answer(self, rank: int, answer: Reply | Exception) -> None:
        """On any thread: what came of it on a rank."""
        self._arrived.append((rank, answer))
        if failed(answer) or len(self._arrived) == len(self.processes):
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                self._loop.call_soon_threadsafe(self._news.set)

    @property
    def late(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in self.processes if rank not in self.answers]

    async def settled(self) -> None:
        """Until all have answered, or one has failed."""
        await self._until(lambda: self.failed or not self.late)

    async def over(self) -> None:
        """Until all have answered."""
        await self._until(lambda: not self.late)

    async def _until(self, done: Callable[[], bool]) -> None:
        self._look()
        while not done():
            self._news.clear()
            try:
                await self._news.wait()
            finally:  # also when the time is over
                self._look()

    def _look(self) -> None:
        """Take up what has arrived."""
        for rank, answer in self._arrived[len(self.answers) :]:
            self.answers[rank] = answer
            self.failed = self.failed or failed(answer)

    def replies(self) -> dict[int, Reply] | None:
        """By rank; None when not all are in or one has failed."""
        if self.late or self.failed:
            return None
        return {rank: answer for rank in self.processes if isinstance(answer := self.answers[rank], Reply)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One finished call of a group, for whoever observes: controller wall time in seconds (backend clock) and the ranks' replies, each
    with the name of its process. Where the call was made in pieces a process has several."""

    id: str
    group: str
    method: str
    started: float
    ended: float
    replies: tuple[Reply, ...]
    processes: tuple[str, ...]
    metrics: Metrics

    @property
    def busy(self) -> float:
        """Seconds of work of the process that worked longest, without waiting for other roles of it."""
        seconds: dict[str, float] = defaultdict(float)
        for reply, process in zip(self.replies, self.processes, strict=True):
            seconds[process] += reply.ended - reply.started
        return max(seconds.values(), default=0.0)

    @property
    def spans(self) -> list[Span]:
        """Rank after rank: the whole call, then what the worker recorded within."""
        spans = []
        for reply, process in zip(self.replies, self.processes, strict=True):
            args = {"call": self.id}
            spans.append(Span(name=self.method, start=reply.started, end=reply.ended, process=process, track=self.group, args=args))
            spans += reply.spans
        return spans


def answer_of(rank: int, reply: Reply, blocks: tuple[Any, Any], registered: Settled) -> Answer:
    value = (reply.value, Stored(blocks[1])) if registered.stores else reply.value
    written = [(ref, meta) for ref, meta in zip(blocks, reply.metas, strict=True) if meta is not None]
    return Answer(rank, value, written)


def failed(answer: Reply | Exception) -> bool:
    return not isinstance(answer, Reply) or answer.failure is not None


def first_cause(called: Called, group: str, method: str) -> RolemeshError:
    """A death comes before an exception (which may only be its echo in a collective); of exceptions the earliest counts."""
    failures: list[tuple[float, RolemeshError]] = []
    for rank, answer in sorted(called.answers.items()):
        if isinstance(answer, RolemeshError):
            failures.append((0.0, named(answer, group, rank, method)))
        elif isinstance(answer, Exception):
            raise answer
        elif answer.failure is not None:
            failures.append((answer.failure.at, worker_error(called.processes[rank], answer.failure, group, rank, method)))
    return min(failures, key=lambda found: (not isinstance(found[1], WorkerDied), found[0]))[1]


def worker_error(process: Process, failure: Failure, group: str, rank: int, method: str) -> WorkerError:
    where: dict[str, Any] = {"group": group, "rank": rank, "method": method}
    error = process.error(WorkerError, failure.type, failure.message, original_traceback=failure.traceback, **where)
    error.__cause__ = failure.error
    return error


def tell(report: Report | BaseException) -> str:
    if isinstance(report, BaseException):
        return f"its control thread does not answer ({report})"
    stack = f"\n{report.stack}" if report.stack else ""
    return f"{report.state} {report.call} (pid {report.pid} on {report.node}){stack}"


def silent(process: Process, seconds: float, did: str) -> str:
    """Of a rank that starts and has been silent for so long. That need be no failure: a process that imports large libraries, or waits for
    a CPU, does not always answer."""
    return f"(pid {process.pid} on {process.node}) has not answered yet, for {seconds:.0f} s now; when last heard of it {did}"


def named(error: RolemeshError, group: str, rank: int, method: str) -> RolemeshError:
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


async def retried(attempt: Callable[[], Awaitable[Any]], retries: int, failure: type[RolemeshError]) -> None:
    """A death is not tried again: the process has to be replaced first."""
    for left in reversed(range(retries + 1)):
        try:
            await attempt()
            return
        except failure as error:
            if isinstance(error, WorkerDied) or not left:
                raise
