"""Divergence of the policy from a reference model: estimates from sampled tokens, and the coefficient of the penalty.

The ref role calls `reference_columns`; the losses and the controller's half of the algorithms call the rest. Equal log-probabilities
give exactly 0 by every estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import numpy.typing as npt

from rolemesh.algorithms.whitening import row_moments
from rolemesh.batch import Batch
from rolemesh.batch.tokens import refuse_nonfinite, sampled_tokens, token_column

if TYPE_CHECKING:
    from torch import Tensor

KlKind = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO: Final = 20.0
"""Log-ratios are cut here, far outside anything that means something: it only keeps numbers and gradients finite."""

REFERENCE_READS: Final = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs")
"""Columns that the ref role needs to make its own."""
REFERENCE_WRITES: Final = ("ref_logprobs", "kl")

STEP: Final = 0.1
"""Share of the error by which the adaptive coefficient moves in a step (K_beta of the source)."""
MAX_ERROR: Final = 0.2
"""Largest error, as a share of the target, that counts: no step moves the coefficient by more than 2 %."""


def kl_estimate(kind: KlKind, logprobs: Tensor, other: Tensor) -> Tensor:
    """Per-token estimates [T] of KL(p || q) from tokens sampled from p: `logprobs` [T] are log p, `other` [T] log q of these tokens.

    With d = log p - log q: k1 = d is unbiased and may be negative; k2 = d^2 / 2 is biased and never negative; k3 = exp(-d) - 1 + d is
    unbiased and never negative (Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html). Their gradients
    with respect to log p are 1, d and 1 - exp(-d). As a loss k1 therefore pulls in no direction on average, and k2 has the gradient of
    the divergence itself; in the reward it is k1 that has it (Tang & Munos 2025, arXiv:2506.09477).
    """
    difference = (logprobs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            # expm1 keeps the few digits that exp(x) - 1 - x loses near 0, where this estimate lives; clamped against their last rounding.
            return ((-difference).expm1() + difference).clamp_min(0.0)
        case _:
            raise ValueError(f"unknown estimate {kind!r}; use k1, k2 or k3")


def token_kl(batch: Batch, kind: KlKind, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Estimates [T] for the tokens of `kept`, 0 elsewhere: the engine's log-probabilities against those of the reference model.

    Reads rollout_logprobs and ref_logprobs. Raises BatchError, naming the row, when one of these tokens has no finite log-probability."""
    import torch

    columns = {name: token_column(batch, name, "ref_logprobs").astype(np.float64) for name in ("rollout_logprobs", "ref_logprobs")}
    row = np.repeat(np.arange(len(batch)), batch.lengths("ref_logprobs"))
    for name, values in columns.items():
        refuse_nonfinite(batch, name, values[kept], row[kept])
    policy, reference = (torch.from_numpy(values[kept]) for values in columns.values())
    found = np.zeros(len(kept))
    found[kept] = kl_estimate(kind, policy, reference).numpy()
    return found


def reference_columns(batch: Batch, logprobs: Sequence[npt.NDArray[np.float32]], kind: KlKind) -> Batch:
    """What the ref role writes: its `logprobs` of each row, and `kl`, the row's mean estimate over the tokens that the policy sampled."""
    scored = batch.with_columns({"ref_logprobs": list(logprobs)})
    sampled = sampled_tokens(scored, "ref_logprobs")
    estimates = token_kl(scored, kind, sampled)
    row = np.repeat(np.arange(len(batch)), scored.lengths("ref_logprobs"))
    mean, _ = row_moments(estimates[sampled], row[sampled], len(batch))
    return scored.with_columns({"kl": mean}).select(REFERENCE_WRITES)


def adapted_coefficient(coefficient: float, measured: float, target: float) -> float:
    """Coefficient of the next step: raised while the `measured` mean KL of a token is above `target`, lowered below it.

    coefficient * (1 + 0.1 clip(measured / target - 1, -0.2, 0.2)): Ziegler et al. 2019, arXiv:1909.08593, section 2. There the KL is
    that of a whole answer; here it is that of a token, so that a target does not depend on how long answers are.
    """
    error = min(max(measured / target - 1.0, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1.0 + STEP * error)
