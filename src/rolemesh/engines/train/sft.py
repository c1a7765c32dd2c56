"""The loss of supervised fine-tuning, in the form that the train engine takes from any algorithm."""

from __future__ import annotations

import torch

from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import TokenBatch


def sft_loss(tokens: TokenBatch, metrics: Metrics) -> torch.Tensor:
    """Cross-entropy: the sum over tokens of weight * -log p. Records the mean over tokens with a weight as `sft/loss`."""
    kept = tokens.weights != 0
    logprobs = tokens.logprobs[kept]
    if len(logprobs):
        metrics.mean("sft/loss", -logprobs.detach().mean(), len(logprobs))
    return -(tokens.weights[kept] * logprobs).sum()
