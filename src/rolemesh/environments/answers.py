"""What environments return, checked as it comes: foreign code may return anything, and must not get it into a batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, SupportsFloat

from rolemesh.protocols.environment import Message, Step

OWN_METRICS: Final = frozenset(
    {"turns/mean", "turns/max", "observation_tokens", "observations_cut", "failed", "seconds/mean", "seconds/max", "engine_idle_seconds"}
)
"""Of `environment/...`, recorded by the rollout role itself."""


def checked_messages(messages: Any, what: str) -> list[Message]:
    """Messages that can be told: of a role that is not the model's, with content that has a UTF-8 form. Raises TypeError or ValueError,
    naming `what` returned them."""
    if not isinstance(messages, Sequence | None):
        raise TypeError(f"{what} returned messages as {type(messages).__name__}, expected a list of Message objects")
    return [_checked_message(message, what) for message in messages or ()]


def _checked_message(message: Any, what: str) -> Message:
    if not isinstance(message, Message):
        raise TypeError(f"{what} returned messages with {type(message).__name__}, expected Message objects")
    if not isinstance(message.content, str):
        raise TypeError(f"{what} returned a message with content of {type(message.content).__name__}, expected str")
    if message.role not in ("tool", "user"):
        raise ValueError(f"{what} returned a message with the role {message.role!r}, expected 'tool' or 'user'")
    return replace(message, content=as_text(message.content))


def checked_step(step: Any, what: str) -> Step:
    """The step with its numbers as such. Raises TypeError or ValueError."""
    if not isinstance(step, Step):
        raise TypeError(f"{what} returned {type(step).__name__}, expected a Step")
    for name, count in step.counts.items():
        if _number(count) is None:
            raise TypeError(f"{what} returned the count {name}={count!r}, expected a number")
        if name in OWN_METRICS:
            raise ValueError(f"{what} returned the count {name!r}, which is a metric of rolemesh's own")
    reward = None if step.reward is None else _number(step.reward)
    if reward is None and step.reward is not None:
        raise TypeError(f"{what} returned the reward {step.reward!r}, expected a number or None")
    counts = {name: count if isinstance(count, int) else float(count) for name, count in step.counts.items()}
    return replace(step, messages=checked_messages(step.messages, what), reward=reward, counts=counts)


def _number(value: Any) -> float | None:
    """As a plain number, whichever library made it; None for anything else."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError, RuntimeError):  # of several numbers
        return None


def as_text(text: str) -> str:
    """With escapes for what UTF-8 does not have: halves of surrogate pairs, which JSON and file names may bring."""
    return text.encode("utf-8", "backslashreplace").decode()


def describe_error(error: BaseException) -> str:
    """Type and text of what an environment raised, for the row's `environment_error`."""
    try:
        return as_text(f"{type(error).__name__}: {error}")
    except Exception as second:  # noqa: BLE001 - an exception that cannot even be shown
        return f"{type(error).__name__} (its message cannot be shown: {type(second).__name__})"
