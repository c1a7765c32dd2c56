"""Token losses and their diagnostics: pure torch, every argument and result of shape [T]. The algorithms call it in the actor.

Torch is imported by whoever calls: the controller, which makes an algorithm too, does without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolemesh.algorithms.kl import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


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
    import torch

    # cut, because an infinite ratio that the clip discards would still turn its gradient into 0 * inf = nan
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Loss of the critic at each token, and where its clip was at work."""

    loss: Tensor
    """To be minimised; carries the gradient."""
    clipped: Tensor
    """bool: the value has moved by more than the clip since the step began."""


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> ValueLoss:
    """max((V - R)^2, (V_clip - R)^2) / 2 with V_clip = V_old + clamp(V - V_old, -clip, clip); without a clip (V - R)^2 / 2.

    The value loss of PPO2 in OpenAI Baselines (Dhariwal et al. 2017, https://github.com/openai/baselines, ppo2/model.py).
    """
    import torch

    errors = (values - returns).square()
    moved = values.detach() - old_values
    if clip is None:
        return ValueLoss(loss=errors / 2, clipped=torch.zeros_like(moved, dtype=torch.bool))
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return ValueLoss(loss=torch.maximum(errors, (clipped - returns).square()) / 2, clipped=moved.abs() > clip)
