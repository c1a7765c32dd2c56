"""The seam between the reward role and a scoring function, built-in or the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """All that the model wrote, and in an answer of several turns all that it was told between them."""
    answer: str | None
    task: Mapping[str, Any]
    """What the verifier of the source needs beyond the answer (for reasoning-gym: the whole entry)."""
    finish_reason: str
    turns: Sequence[Mapping[str, Any]] = ()
    """Of an answer of several turns: {"role", "text", "tokens"} each, `assistant` for the model."""
    environment_reward: float | None = None
    """What the environment gave."""

    @property
    def final(self) -> str:
        """The model's last turn: what is judged as its answer. All of the response where there are no turns."""
        return next((str(turn["text"]) for turn in reversed(self.turns) if turn["role"] == "assistant"), self.response)


class RewardFunction(Protocol):
    """Scores one sample. Returns a finite number, or None to abstain (the row is then masked and counted)."""

    def __call__(self, sample: Sample, /, **options: Any) -> float | None: ...
