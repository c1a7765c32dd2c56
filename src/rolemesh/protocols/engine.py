"""The seam between the rollout role and an inference engine. `engines/rollout/` holds the engines; one contract suite tests all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort"]
InFlight = Literal["refuse", "resume", "abort"]
"""What becomes of sequences that run when weights change. `refuse`: the weights are refused. `resume`: they go on over the change, with
the keys and values that the old weights made. `abort`: they end with what they have. Requests that have not begun wait, in any case."""
LogprobsKind = Literal["after_temperature", "raw", "filtered"]
"""Of which distribution an engine's log-probabilities are: after temperature over all tokens, as a trainer computes them; of T=1; or of
what top-k and top-p leave."""
EngineState = Literal["empty", "serving", "paused", "asleep"]


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
    """One answer to make. `id` is (draw, sample)."""

    id: tuple[int, int]
    prompt_ids: Sequence[int]
    counter: tuple[int, int] | None = None
    """Decides, with the seed, the random numbers, in place of the id: for requests that are repeated, or that differ in their ids alone."""
    start: int = 0
    """How many tokens at the end of `prompt_ids` belong to the answer already, where one turn of an episode follows another: they count
    against the length of the answer, and its random numbers go on behind them."""


class WeightSpan(NamedTuple):
    """Tokens `start` to `stop - 1` of an answer were sampled by weights of this version."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished answer: sampled ids (the end token included), a log-probability each, and the weights that made them."""

    id: tuple[int, int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    spans: tuple[WeightSpan, ...]
    """In order and without gaps over all tokens; an answer without tokens has one empty span."""

    @property
    def weight_version(self) -> int:
        """The oldest of the versions: the answer is as stale as that."""
        return min(span.version for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """What an engine says of itself."""

    state: EngineState
    weight_version: int
    queued: int
    """Requests that have not begun."""
    running: int
    tokens: int
    """Sampled since the engine was made."""


class LastingWeights:
    """Weights for `load_weights` that stay where they are, in memory for reading only, until the engine is given others: it may keep the
    tensors in place of parameters of its own, and sets `kept` then. Of any other iterator a tensor is only valid until the next is asked
    for."""

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._weights = weights
        self.kept = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._weights)


class RolloutEngine(Protocol):
    """Token ids in, token ids out. Not thread safe: one thread drives it."""

    name: str
    sampling_kind: Literal["counter", "seeded"]
    """`counter`: a token depends only on (seed, id, position, weights); `seeded`: also on what else is generated."""
    logprobs_kind: LogprobsKind
    """`after_temperature`, or the engine is refused when it is made: training compares them with its own."""
    in_flight: frozenset[InFlight]
    """What `load_weights` can do with running sequences."""
    filters: bool
    """Whether top-k and top-p are served, with log-probabilities over all tokens all the same; else `add` refuses them."""
    sleeps: bool
    """Whether `sleep` gives memory back; else it raises NotImplementedError."""
    needs_contents: bool
    """Whether the model that the engine is made with must hold numbers; else config, names and shapes are enough (`meta` device)."""

    @property
    def weight_version(self) -> int:
        """Version of the weights held; -1 before the first load and while there are none to serve."""
        ...

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, *, in_flight: InFlight = "refuse"
    ) -> list[Completion]:
        """Replace all weights; returns the answers that ended by it (`abort`), and by loads before it that failed. Nothing computed by
        old weights is used for a request that begins later. Raises ValueError, and changes nothing, for running sequences under `refuse`,
        an `in_flight` that the engine does not have, and an engine asleep. A name or shape that does not fit, or a missing one, raises
        ValueError and leaves the engine refusing to generate (version -1), never half updated and serving."""
        ...

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Queue requests, in any state. Requests with equal prompts that follow each other may share their prefill."""
        ...

    def step(self) -> list[Completion]:
        """Advance all running sequences by one token (or prefill); return those that finished. Does nothing while paused. Raises
        StaleWeights at version -1. Whatever else it raises, no request is lost: each is still queued or running."""
        ...

    @property
    def unfinished(self) -> int:
        """Requests queued or running."""
        ...

    def so_far(self, ids: Iterable[tuple[int, int]]) -> list[Completion]:
        """What `abort` would return for those of the given requests that have begun; they go on."""
        ...

    def abort(self, ids: Iterable[tuple[int, int]] | None = None) -> list[Completion]:
        """End the given requests (all when None) and return what they have so far, finish_reason `abort`."""
        ...

    def pause(self) -> None:
        """Stop where it stands: sequences and queue stay. Idempotent, as `resume`."""
        ...

    def resume(self) -> None:
        """Go on after `pause` or `drain`."""
        ...

    def drain(self, seconds: float = math.inf) -> list[Completion]:
        """Begin nothing new, run what runs to its end, or for so long, and return what has ended. The engine is paused then. Raises
        StaleWeights at version -1."""
        ...

    def sleep(self, *, keep_weights: bool) -> None:
        """Give memory back: keys and values, and the weights, which are kept in host memory or dropped. Version -1 from now on.
        Raises ValueError while sequences run, and NotImplementedError as `sleeps` says. Idempotent."""
        ...

    def wake(self) -> None:
        """Bring the weights back. Dropped ones have to be loaded before anything is generated; memory for keys and values is taken when
        it is first used, so that the order is weights, publication, cache. Nothing to do when awake."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget what was computed for prompts; running sequences keep theirs. Raises NotImplementedError if the engine keeps such things
        and cannot forget them."""
        ...

    def health(self) -> EngineHealth:
        """State and counts, without computing anything."""
        ...
