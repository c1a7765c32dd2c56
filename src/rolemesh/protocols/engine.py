"""The seam between the rollout role and an inference engine. `engines/rollout/` holds the engines; one contract suite tests all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy. Log-probabilities are those of the distribution after temperature (greedy: of T=1)."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer to make. `id` is (draw, sample) and, with the seed, decides the random numbers."""

    id: tuple[int, int]
    prompt_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished answer: sampled ids (the end token included), a log-probability each, and the weights that made them."""

    id: tuple[int, int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version: int


class RolloutEngine(Protocol):
    """Token ids in, token ids out. Not thread safe: one thread drives it."""

    name: str
    sampling_kind: Literal["counter", "seeded"]
    """`counter`: a token depends only on (seed, id, position, weights); `seeded`: also on what else is generated."""

    @property
    def weight_version(self) -> int:
        """Version of the weights held; -1 before the first load."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights. A name or shape that does not fit, or a missing one, raises ValueError and leaves the engine refusing
        to generate (version -1), never half updated and serving."""
        ...

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Queue requests. Requests with equal prompts that follow each other may share their prefill."""
        ...

    def step(self) -> list[Completion]:
        """Advance all running sequences by one token (or prefill); return those that finished. Raises StaleWeights at version -1."""
        ...

    @property
    def unfinished(self) -> int:
        """Requests queued or running."""
        ...

    def abort(self, ids: Iterable[tuple[int, int]] | None = None) -> list[Completion]:
        """End the given requests (all when None) and return what they have so far, finish_reason `abort`."""
        ...
