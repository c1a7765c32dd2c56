"""A call that is under way on the ranks of a group: waiting for all, what went wrong first, what came of it. Used by `group.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rolemesh.errors import RolemeshError, WorkerDied, WorkerError
from rolemesh.observe import Metrics, Span
from rolemesh.protocols.backend import Failure, Pending, Process, Reply, Report
from rolemesh.runtime.dispatch import Answer
from rolemesh.runtime.stored import Stored
from rolemesh.runtime.worker import Settled

T = TypeVar("T")
Called = Mapping[int, Pending]
"""The calls under way, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One finished call of a group, for whoever observes: controller wall time in seconds (backend clock) and the ranks' replies, each
    with the name of its process."""

    id: str
    group: str
    method: str
    started: float
    ended: float
    replies: tuple[Reply, ...]
    processes: tuple[str, ...]
    metrics: Metrics

    @property
    def spans(self) -> list[Span]:
        """Rank after rank: the whole call, then what the worker recorded within."""
        spans = []
        for reply, process in zip(self.replies, self.processes, strict=True):
            args = {"call": self.id}
            spans.append(Span(name=self.method, start=reply.started, end=reply.ended, process=process, track=self.group, args=args))
            spans += reply.spans
        return spans


def answer_of(rank: int, reply: Reply, pending: Pending, registered: Settled) -> Answer:
    value = (reply.value, Stored(pending.blocks[1])) if registered.stores else reply.value
    written = [(ref, meta) for ref, meta in zip(pending.blocks, reply.metas, strict=True) if meta is not None]
    return Answer(rank, value, written)


def failed(reply: asyncio.Future[Reply]) -> bool:
    return reply.cancelled() or reply.exception() is not None or reply.result().failure is not None


async def all_well(replies: Sequence[asyncio.Future[Reply]]) -> bool:
    """Wait for all, or for the first that failed. Unlike `asyncio.wait` this wakes up once, and looks at the exceptions of calls that
    nobody waits for any more, which asyncio would report as lost."""
    left, over = len(replies), asyncio.get_running_loop().create_future()

    def look(reply: asyncio.Future[Reply]) -> None:
        nonlocal left
        left -= 1
        well = not failed(reply)
        if not (well and left) and not over.done():
            over.set_result(well)

    for reply in replies:
        reply.add_done_callback(look)
    return not replies or bool(await over)


def first_cause(called: Called, group: str, method: str) -> RolemeshError:
    """A death comes before an exception (which may only be its echo in a collective); of exceptions the earliest counts."""
    failures: list[tuple[float, RolemeshError]] = []
    for rank, pending in called.items():
        if not pending.reply.done():
            continue
        error = pending.reply.exception()
        if isinstance(error, RolemeshError):
            failures.append((0.0, named(error, group, rank, method)))
        elif error is not None:
            raise error
        elif (failure := pending.reply.result().failure) is not None:
            failures.append((failure.at, _worker_error(pending.process, failure, group, rank, method)))
    return min(failures, key=lambda found: (not isinstance(found[1], WorkerDied), found[0]))[1]


def _worker_error(process: Process, failure: Failure, group: str, rank: int, method: str) -> WorkerError:
    error = WorkerError(
        group=group,
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


def tell(report: Report | BaseException) -> str:
    if isinstance(report, BaseException):
        return f"its control thread does not answer ({report})"
    stack = f"\n{report.stack}" if report.stack else ""
    return f"{report.state} {report.call} (pid {report.pid} on {report.node}){stack}"


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
