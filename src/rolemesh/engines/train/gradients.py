"""Gradients of all parameters in one flat buffer: accumulated in place, summed over the workers in one all-reduce. Used by the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class FlatGradients:
    """Owns the `.grad` of the given float32 parameters: views into one vector, whose last element counts trained tokens.

    Backward adds into the views, so nothing is copied before or after the all-reduce, and norm, scaling and zeroing are one
    operation each. Nobody else may set these `.grad`s to None.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self._flat = torch.zeros(sum(sizes) + 1, dtype=torch.float32, device=parameters[0].device)
        for parameter, part in zip(parameters, torch.split(self._flat[:-1], sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    @property
    def trained_tokens(self) -> float:
        """Tokens with a weight other than 0 since `zero`; after `all_reduce` those of all workers."""
        return float(self._flat[-1])

    def add_trained_tokens(self, count: int) -> None:
        self._flat[-1] += count

    def zero(self) -> None:
        self._flat.zero_()

    def all_reduce(self, group: dist.ProcessGroup | None) -> None:
        """Sum over the workers of `group`; loss weights are global, so a sum is the gradient of the whole mini-batch."""
        if group is not None:
            dist.all_reduce(self._flat, op=dist.ReduceOp.SUM, group=group)

    def norm(self) -> float:
        """Euclidean norm over all parameters, computed in float64; nan or inf when any element is."""
        return float(torch.linalg.vector_norm(self._flat[:-1], dtype=torch.float64))

    def scale(self, factor: float) -> None:
        self._flat[:-1] *= factor
