"""The seam between the reward role and a scoring function, built-in or the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a reward function sees of one answer."""

    draw: int
    sample: int
    source: str
    prompt: str
    response: str
    answer: str | None
    task: Mapping[str, Any]
    """What the verifier of the source needs beyond the answer (for reasoning-gym: the whole entry)."""
    finish_reason: str


class RewardFunction(Protocol):
    """Scores one sample. Returns a finite number, or None to abstain (the row is then masked and counted)."""

    def __call__(self, sample: Sample, /, **options: Any) -> float | None: ...
