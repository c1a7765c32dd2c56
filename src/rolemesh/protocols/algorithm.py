"""The seam between the trainer and an algorithm. The trainer is blind to algorithms: it is fed tokens with advantages and weights.

An algorithm works in several places. On the controller, `prepare` turns small scalar columns (rewards, lengths, ids) of the whole step
into token weights and mini-batches (and advantages, where one answer has one), and `terms` into the few numbers that hold for all
tokens of the step. In the actor, `loss` turns log-probabilities of a micro-batch into a number to minimise. An algorithm with a critic
(`ActorCritic`) also makes the advantages of single tokens in a worker (`estimate`), because the controller never holds token data, and
has a loss of the critic (`value_loss`). Because every normalizer is already inside `token_weight` and the terms, a loss is a plain sum
and does not depend on how a batch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from rolemesh.batch import Batch
    from rolemesh.observe import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """Numbers that hold for all tokens of one step. The controller finds them and gives them to the workers with the call."""

    kl_coefficient: float = 0.0
    """Factor of the divergence from the reference model in this step."""
    advantage_shift: float = 0.0
    """Advantages enter the loss as (advantage - shift) * scale."""
    advantage_scale: float = 1.0


@dataclass(slots=True, kw_only=True)
class TokenBatch:
    """The response tokens of a micro-batch, flattened: every field has shape [T], T = sum of response lengths (no padding)."""

    logprobs: torch.Tensor
    """Log-probability of each sampled token under the current weights, after temperature; carries the gradient."""
    entropy: torch.Tensor
    """Entropy of the distribution at each token; carries a gradient only if the engine was asked for it."""
    old_logprobs: torch.Tensor
    """Log-probability of each token in the engine that sampled it."""
    advantages: torch.Tensor
    """Advantage of each token, before the shift and scale of `StepTerms`."""
    weights: torch.Tensor
    """Weight of each token in the loss; 0 for masked tokens, also for those that the policy did not sample. The only mask there is."""
    row: torch.Tensor
    """Row of the micro-batch that the token belongs to, int64."""
    ref_logprobs: torch.Tensor | None = None
    """Log-probability of each token under the reference model, after temperature; None without one."""


@dataclass(slots=True, kw_only=True)
class ValueBatch:
    """What the critic sees of a micro-batch: every field has shape [T], T = sum of response lengths (no padding)."""

    values: torch.Tensor
    """Value under the current weights of the state before each token is sampled; carries the gradient."""
    old_values: torch.Tensor
    """The same under the weights that the step began with (column `values`)."""
    returns: torch.Tensor
    """What the value should have been (column `returns`)."""
    weights: torch.Tensor
    """Weight of each token in the loss, equal to those of `TokenBatch.weights`."""
    row: torch.Tensor
    """Row of the micro-batch that the token belongs to, int64."""


class Algorithm(Protocol):
    """How rewards become gradients. Implementations live in `algorithms/`, one file each."""

    name: ClassVar[str]

    @property
    def needs(self) -> tuple[str, ...]:
        """Roles without which it cannot work, beside actor, rollout and reward: some of `ref` and `critic`."""
        ...

    @property
    def kl_coefficient(self) -> float:
        """Coefficient of the first step; the run keeps the current one (see `next_kl_coefficient`)."""
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """Scalar columns that `prepare`, `terms` and `next_kl_coefficient` need, ids aside. They get `kl` too wherever there is a ref."""
        ...

    @property
    def writes(self) -> tuple[str, ...]:
        """Scalar columns that `prepare` adds."""
        ...

    @property
    def actor_reads(self) -> tuple[str, ...]:
        """Columns that an update of the actor needs."""
        ...

    def prepare(self, batch: Batch, metrics: Metrics) -> Batch:
        """Rows of one step -> the same rows (same ids) with the columns of `writes`: at least `token_weight` and `minibatch`.

        Rows whose reward is null get token_weight 0 and take no part in any baseline or statistic."""
        ...

    def terms(self, prepared: Batch, metrics: Metrics, *, kl_coefficient: float) -> StepTerms:
        """Numbers of the whole prepared step for its updates."""
        ...

    def next_kl_coefficient(self, prepared: Batch, kl_coefficient: float) -> float:
        """Coefficient of the next step, given that of this one."""
        ...

    def has_signal(self, prepared: Batch) -> bool:
        """Whether training on a prepared step can change anything; when not, `algorithm.no_signal` decides."""
        ...

    def loss(self, tokens: TokenBatch, metrics: Metrics, terms: StepTerms | None = None) -> torch.Tensor:
        """Scalar: the sum over tokens of weight * loss. Records its metrics weighted by `tokens.weights` or token counts."""
        ...


class ActorCritic(Algorithm, Protocol):
    """An algorithm whose advantages come, token by token, from a critic."""

    @property
    def estimate_reads(self) -> tuple[str, ...]:
        """Columns that `estimate` needs."""
        ...

    @property
    def estimate_writes(self) -> tuple[str, ...]:
        """Columns that `estimate` makes."""
        ...

    @property
    def critic_reads(self) -> tuple[str, ...]:
        """Columns that an update of the critic needs."""
        ...

    def estimate(self, batch: Batch, *, kl_coefficient: float) -> Batch:
        """In any worker: advantages and returns of the tokens of some rows, and their sums by row for `terms`."""
        ...

    def value_loss(self, tokens: ValueBatch, metrics: Metrics) -> torch.Tensor:
        """Scalar: the sum over tokens of weight * loss of the critic."""
        ...
