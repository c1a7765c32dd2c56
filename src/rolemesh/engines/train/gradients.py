"""Gradients of all parameters in one flat buffer: accumulated in place, summed over the workers in one all-reduce. Used by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rolemesh.engines.train.collective import all_reduce

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FlatGradients:
    """Owns the `.grad` of the given float32 parameters: views into one vector, with two sums behind them, trained tokens and loss.

    Backward adds into the views, so nothing is copied before or after the all-reduce, and norm, scaling and zeroing are one
    operation each. Nobody else may set these `.grad`s to None.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self._flat = torch.zeros(sum(sizes) + 2, dtype=torch.float32, device=parameters[0].device)
        self._gradients, self._sums = self._flat[:-2], self._flat[-2:]
        for parameter, part in zip(parameters, torch.split(self._gradients, sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    @property
    def trained_tokens(self) -> float:
        """Tokens with a weight other than 0 since `zero`; after `all_reduce` those of all workers."""
        return float(self._sums[0])

    @property
    def loss(self) -> float:
        """Sum of the losses since `zero`; after `all_reduce` that of all workers."""
        return float(self._sums[1])

    def backward(self, loss: torch.Tensor, trained_tokens: int) -> None:
        """Add the gradient of the scalar `loss` of a micro-batch."""
        loss.backward()  # type: ignore[no-untyped-call]
        self._sums[0] += trained_tokens
        self._sums[1] += loss.detach()

    def zero(self) -> None:
        self._flat.zero_()

    def all_reduce(self, group: ProcessGroup | None) -> None:
        """Sum over the workers of `group`; loss weights are global, so a sum is the gradient of the whole mini-batch."""
        if group is not None:
            all_reduce(group, self._flat, "sum")

    def norm(self) -> float:
        """Euclidean norm over all parameters, computed in float64; nan or inf when any element is."""
        return float(torch.linalg.vector_norm(self._gradients, dtype=torch.float64))

    def scale(self, factor: float) -> None:
        self._gradients.mul_(factor)
