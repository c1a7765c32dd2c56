"""The seam between the trainer and an algorithm. The trainer is blind to algorithms: it is fed tokens with advantages and weights.

An algorithm works twice. On the controller, `prepare` turns small scalar columns (rewards, lengths, ids) of the whole step into
advantages, token weights and mini-batches. In the actor, `loss` turns log-probabilities of a micro-batch into a number to minimise.
Because every normalizer is already inside `token_weight`, the loss is a plain sum and does not depend on how a batch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from rolemesh.batch import Batch
    from rolemesh.observe import Metrics


@dataclass(slots=True, kw_only=True)
class TokenBatch:
    """The response tokens of a micro-batch, flattened: every field has shape [T], T = sum of response lengths (no padding)."""

    logprobs: torch.Tensor
    """Log-probability of each sampled token under the current weights, after temperature; carries the gradient."""
    entropy: torch.Tensor
    """Entropy of the distribution at each token, without gradient."""
    old_logprobs: torch.Tensor
    """Log-probability of each token in the engine that sampled it."""
    advantages: torch.Tensor
    """Advantage of each token."""
    weights: torch.Tensor
    """Weight of each token in the loss; 0 for masked tokens."""
    row: torch.Tensor
    """Row of the micro-batch that the token belongs to, int64."""


class Algorithm(Protocol):
    """How rewards become gradients. Implementations live in `algorithms/`, one file each."""

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]]
    """Scalar columns that `prepare` needs, ids aside."""

    def prepare(self, batch: Batch, metrics: Metrics) -> Batch:
        """Rows of one step -> the same rows (same ids) with `advantage`, `token_weight` and `minibatch`.

        Rows whose reward is null get token_weight 0 and take no part in any baseline."""
        ...

    def has_signal(self, prepared: Batch) -> bool:
        """Whether training on a prepared step can move the policy; when not, `algorithm.no_signal` decides."""
        ...

    def loss(self, tokens: TokenBatch, metrics: Metrics) -> torch.Tensor:
        """Scalar: the sum over tokens of weight * loss. Records its metrics weighted by `tokens.weights` or token counts."""
        ...
