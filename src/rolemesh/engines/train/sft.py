"""The loss of supervised fine-tuning. Used by the train engine."""

from __future__ import annotations

import torch

from rolemesh.observe import Metrics


def sft_loss(logprobs: torch.Tensor, weights: torch.Tensor, metrics: Metrics) -> torch.Tensor:
    """Cross-entropy: the sum over tokens [T] of weight * -log p. Records the mean over tokens with a weight as `sft/loss`."""
    kept = weights != 0
    logprobs = logprobs[kept]
    if len(logprobs):
        metrics.mean("sft/loss", -logprobs.detach().mean(), len(logprobs))
    return -(weights[kept] * logprobs).sum()
