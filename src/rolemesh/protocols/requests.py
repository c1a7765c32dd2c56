"""The seam between those who ask the policy one question at a time (the HTTP server, environments) and the rollout that answers.

Token ids in, samples out: `Answering.answer` is all that a caller needs. `Ask` and `News` are what the rollout's manager and its workers
say to each other about it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rolemesh.protocols.engine import FinishReason, Request, Sampling, WeightSpan

FIRST_DRAW = 2**63
"""Ids of requests from outside have draws from here on; prompts of the data are counted from 0."""


class Ask(NamedTuple):
    """Requests for a worker: answers to one prompt."""

    requests: tuple[Request, ...]
    sampling: Sampling
    alone: bool = False
    """No other request from outside may be in the engine meanwhile."""


class News(NamedTuple):
    """What a worker has of a request that was not told before: tokens from `start` on, all spans."""

    id: tuple[int, int]
    start: int
    token_ids: list[int]
    logprobs: list[float]
    spans: tuple[WeightSpan, ...]
    finish_reason: FinishReason | None
    """None while it goes on."""
    refused: str = ""
    """Why the engine does not take it."""
    raised: tuple[str, str] | None = None
    """Type and message of what the engine has raised while it had this request; it has it no more."""


@dataclass(slots=True)
class Answer:
    """One answer so far: ids, a log-probability each, the weights that made them, and how it ended, if it has."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: tuple[WeightSpan, ...] = ()
    finish_reason: FinishReason | None = None


Growing = AsyncGenerator[Sequence[Answer], None]


class Answering(Protocol):
    """What answers single requests."""

    def answer(self, prompt_ids: Sequence[int], sampling: Sampling, *, count: int = 1, deadline: float) -> Growing:
        """`count` answers to one prompt, as they grow: yields all of them whenever some have more tokens, and ends when all are finished.
        What was yielded grows meanwhile. An answer whose replica is lost begins anew elsewhere, as another `Answer` in its place.

        The same seed gives the same random numbers, whatever else is asked for. Whoever stops early has to close the iterator
        (`contextlib.aclosing`): the requests end then. Raises Overloaded when too many are open, Unavailable when nobody answers any
        more, RequestRefused when the engine cannot serve it, RequestFailed when engines raise with it, DeadlineExceeded after `deadline`
        seconds, and the last error when one replica after the other is lost."""
        ...
