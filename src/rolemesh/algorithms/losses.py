"""Token losses and their diagnostics: pure torch, every argument and result of shape [T]. The algorithms call it in the actor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""Log-ratios are cut here. Far outside any clip range, it only keeps exp() finite: an infinite ratio that the clip discards would
still turn its gradient into 0 * inf = nan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """Policy loss of each token, and where a clip took the gradient away."""

    loss: Tensor
    """To be minimised; carries the gradient."""
    ratio: Tensor
    """pi_new / pi_old, without gradient."""
    clipped_low: Tensor
    """bool: negative advantage and ratio below 1 - clip_low."""
    clipped_high: Tensor
    """bool: positive advantage and ratio above 1 + clip_high."""
    clipped_dual: Tensor
    """bool: negative advantage and ratio above dual_clip."""


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Surrogate:
    """Clipped policy surrogate -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi_new / pi_old.

    PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7; the two sides of the clip are set apart after DAPO ("clip-higher", Yu et al.
    2025, arXiv:2503.14476, eq. 10). With `dual_clip` c > 1 the loss of a negative advantage is bounded by -c A: dual-clip PPO, Ye et
    al. 2020, arXiv:1912.09729, eq. 5.
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    negative, positive = advantages < 0, advantages > 0
    ratio = ratio.detach()
    clipped_dual = torch.zeros_like(negative)
    if dual_clip is not None:
        loss = torch.where(negative, torch.minimum(loss, -dual_clip * advantages), loss)
        clipped_dual = negative & (ratio > dual_clip)
    return Surrogate(
        loss=loss,
        ratio=ratio,
        clipped_low=negative & (ratio < 1.0 - clip_low),
        clipped_high=positive & (ratio > 1.0 + clip_high),
        clipped_dual=clipped_dual,
    )


def kl_k1(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Per-token estimate -log r of KL(old || new) for tokens sampled from old, r = pi_new / pi_old: unbiased, may be negative.

    Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.
    """
    return old_logprobs - logprobs


def kl_k3(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Per-token estimate (r - 1) - log r of the same: unbiased and never negative, of lower variance than k1 (same source)."""
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the few digits that exp(x) - 1 - x loses near 0, where this estimate lives; clamped against their last rounding.
    return (torch.expm1(log_ratio) - log_ratio).clamp_min(0.0)
