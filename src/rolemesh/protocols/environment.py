"""The seam between the rollout role and an environment: what happens between two turns of the model. `environments/` has built-in ones.

An environment sees the model's tokens and their text, and answers with messages. It never makes token ids: messages become ids once, when
they are put behind the sampled ones, and sampled ids are never made from text again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The row that an episode is about. Its prompt is before the model already."""

    draw: int
    sample: int
    seed: int
    """For all that is random: the same for all answers to a prompt, and when an episode is repeated elsewhere."""
    source: str
    prompt: str
    answer: str | None
    task: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model wrote in one turn."""

    number: int
    """From 1."""
    token_ids: Sequence[int]
    """As sampled, the end token included."""
    text: str
    """Without special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What the model is told. With `data.chat` it is a message of this role, by the tokenizer's template; else plain text."""

    content: str
    role: Literal["tool", "user"] = "tool"
    name: str = ""
    """Of the tool, which some templates want."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What follows a turn."""

    messages: Sequence[Message] = ()
    reward: float | None = None
    """Earned by this turn. The rewards of an episode add up; one in which all are None has none."""
    done: bool = False
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to add up over all episodes, as metrics `environment/NAME`."""


class Environment(Protocol):
    """One episode. Made for it by a class or function that is called with `environment.options`; episodes by the thousand share one event
    loop, so that whoever has to wait awaits.

    What `reset` or `step` raises, or a wait beyond `environment.deadline`, ends the episode; its row has no reward then, and is counted."""

    async def reset(self, start: Start) -> Sequence[Message]:
        """Begin. Returns what the model is told beyond the row's prompt, most often nothing."""
        ...

    async def step(self, turn: Turn) -> Step:
        """Answer a turn. Not called for a turn that was cut at the length of the answer."""
        ...

    async def close(self) -> None:
        """The episode is over, however it ended."""
        ...
