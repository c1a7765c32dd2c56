"""What `RewardScorer` hands out and gets back, and the seam to whoever runs the functions: `Executor`.

`ScoringPool` runs them in processes with deadlines, `InProcess` where it is, for a debugger. Light to import: scoring processes do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from rolemesh.protocols.reward import Sample
from rolemesh.protocols.task import dump_task, load_task

Extra: TypeAlias = float | str | None
"""A value beside the score: numbers and booleans as floats, NaN as None, text, anything else as JSON text."""
ERROR_KEY: Final = "reward_error"
"""Key of the extras that is rolemesh's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One sample for one function: the `part`-th of those of the `reward` section."""

    part: int
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a function gave no result. Equal causes have equal texts, so that they can be counted."""

    type: str
    message: str
    traceback: str = ""
    timed_out: bool = False

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a function returned for one sample, or the fault. Any number is possible, and None for both means that it abstained."""

    value: float | None = None
    extras: Mapping[str, Extra] = field(default_factory=dict)
    fault: Fault | None = None
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Usage:
    """What an executor did since it was last asked."""

    samples: list[int]
    """Answers of each process."""
    seconds: float = 0.0
    """Time that functions took, summed over the answers."""
    slowest: float = 0.0
    """Longest time that one answer took."""
    replaced: int = 0
    """Processes that were replaced: after a timeout, a crash, or because of their memory."""

    def count(self, process: int, seconds: float) -> None:
        self.samples[process] += 1
        self.seconds += seconds
        self.slowest = max(self.slowest, seconds)


class Executor(Protocol):
    """Runs the functions of the `reward` section it was made with."""

    def run(self, works: Sequence[Work]) -> list[Answer]:
        """One answer for each work, in their order. A function's failure is its answer and disturbs no other."""
        ...

    def take_usage(self) -> Usage:
        """What was done since the last call."""
        ...

    def close(self) -> None:
        """End all that was started. Idempotent; nothing can be run afterwards."""
        ...


def dump_sample(sample: Sample) -> dict[str, Any]:
    """Plain data of a sample, for JSON."""
    return {name: getattr(sample, name) for name in sample.__slots__} | {"task": dump_task(sample.task)}


def load_sample(fields: Mapping[str, Any]) -> Sample:
    """The sample that `dump_sample` was given."""
    return Sample(**{**fields, "task": load_task(fields["task"]), "turns": tuple(fields["turns"])})


def load_answer(fields: Mapping[str, Any]) -> Answer:
    """The answer whose `asdict` came as JSON with NaN, perhaps with more beside it."""
    fault = fields["fault"]
    return Answer(value=fields["value"], extras=fields["extras"], fault=fault and Fault(**fault), seconds=fields["seconds"])
