"""Beside the loop: `status.json` is kept fresh for `rolemesh status`, and a call that takes long is told of with what it is doing."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from rolemesh.observe import RunDirectory
from rolemesh.runtime import WorkerGroup, beside
from rolemesh.training import serving
from rolemesh.training.run import TrainingRun

STATUS_SECONDS: Final = 1.0
SLOW_SECONDS: Final = 60.0
"""A call that takes so long is told of, and again each time it has taken twice as long."""


def watched(run: TrainingRun) -> AbstractAsyncContextManager[None]:
    """Watch over a run meanwhile."""
    return beside(_watch(run), run.recorder.note, "status.json is not kept up to date")


async def _watch(run: TrainingRun) -> None:
    slow = SlowCalls()
    while True:
        workers = await run.session.status()
        run.directory.write_status(
            status_of(run, "running", workers) | {"pools": run.session.devices(), "memory": memory(run.recorder.row)} | serving.told(run)
        )
        _leave_in_time(run, workers)
        for group in slow.due(workers, time.time()):
            run.recorder.note(await describe(run.session.groups[group], run.config.deadlines.call))
        await run.session.backend.sleep(STATUS_SECONDS)


def _leave_in_time(run: TrainingRun, workers: Sequence[Mapping[str, Any]]) -> None:
    """A worker that was told to end (its machine is about to go) ends the run as a signal to the driver does: after the step, saved."""
    leaving = [f"{entry['group']} rank {entry['rank']}" for entry in workers if entry["leaving"]]
    if leaving and not run.interrupted:
        run.interrupted = True
        run.recorder.note(f"{', '.join(leaving)} got SIGTERM: finishing this step, then saving")


def memory(row: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """By role, bytes of the largest rank's weights and so on, as the last step's metrics have them."""
    found: dict[str, dict[str, int]] = {}
    for name, value in row.items():
        if name.startswith("memory/"):
            _, role, what = name.split("/")
            found.setdefault(role, {})[what] = int(value)
    return found


class SlowCalls:
    """Which groups have a call that was told of too long ago."""

    def __init__(self, first: float = SLOW_SECONDS) -> None:
        self._first = first
        self._next: dict[tuple[str, float], float] = {}

    def due(self, workers: Sequence[Mapping[str, Any]], now: float) -> list[str]:
        """Groups to tell of now, given their workers' entries in the status."""
        computing = {(entry["group"], entry["since"]) for entry in workers if entry["state"] == "computing"}
        self._next = {call: self._next.get(call, self._first) for call in computing}
        due = [call for call in sorted(computing) if now - call[1] >= self._next[call]]
        for call in due:
            self._next[call] = 2 * (now - call[1])
        return list(dict.fromkeys(group for group, _ in due))


async def describe(group: WorkerGroup, deadline: float) -> str:
    """What the ranks of a group compute, since when and where in the code."""
    lines = []
    for rank, report in enumerate(await group.reports(stack=True)):
        if isinstance(report, BaseException):
            lines.append(f"rank {rank} does not answer: {report}")
        elif report.call:
            seconds = time.time() - report.since
            lines.append(f"rank {rank} (pid {report.pid} on {report.node}) has computed {report.call} for {seconds:.0f} s, now in")
            lines.append("  " + " <- ".join(_innermost(report.stack)))
    return f"{group.name} takes long; its calls end after {deadline:.0f} s (deadlines.call)\n" + "\n".join(lines)


def _innermost(stack: str) -> list[str]:
    """`loss.py:12 backward` of the last three frames of a stack, the innermost first."""
    found = re.findall(r'File "(?:[^"]*/)?([^"/]+)", line (\d+), in (\S+)', stack)
    return [f"{file}:{line} {name}" for file, line, name in reversed(found[-3:])]


def status_of(run: TrainingRun, state: str, workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `status.json` holds of a run that has begun. Only one that trains has steps."""
    steps = {"step": run.progress.step, "steps": run.config.trainer.steps} if run.trains else {}
    return status(run.directory, state, run.recorder.phase, workers) | steps


def status(directory: RunDirectory, state: str, phase: str, workers: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """What it holds of any."""
    return {"run": directory.name, "state": state, "pid": os.getpid(), "time": time.time(), "phase": phase, "workers": list(workers)}
