"""Gradients of a mini-batch: added up over micro-batches, summed over the ranks, measured and scaled. Used by the engines.

A loss is a plain sum with global weights, so the sum over micro-batches and ranks is the gradient of the whole mini-batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rolemesh.engines.train.groups import all_reduce
from rolemesh.engines.train.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_CHUNK = 2**20
"""Elements whose squares are summed in float64 at a time."""


class Gradients(ABC):
    """The `.grad` of this rank's parts of the parameters, and two sums: trained tokens and loss."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], layout: Layout, partial: Collection[str], device: torch.device) -> None:
        """`partial` names parameters of which each rank of a row has a part of the gradient."""
        self._parameters, self._layout, self._partial = parameters, layout, partial
        self._sums = torch.zeros(2, device=device)

    @property
    def trained_tokens(self) -> float:
        """Tokens with a weight other than 0 since `zero`; after `reduce` those of all workers."""
        return float(self._sums[0])

    @property
    def loss(self) -> float:
        """Sum of the losses since `zero`; after `reduce` that of all workers."""
        return float(self._sums[1])

    def backward(self, loss: Tensor, trained_tokens: int) -> None:
        """Add the gradient of the scalar `loss` of a micro-batch."""
        loss.backward()  # type: ignore[no-untyped-call]
        self._sums[0] += trained_tokens
        self._sums[1] += loss.detach()

    @abstractmethod
    def zero(self) -> None: ...

    @abstractmethod
    def reduce(self) -> None:
        """Sum over the ranks. Collective."""

    def named(self) -> dict[str, Tensor]:
        """This rank's parts by parameter name."""
        return {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}

    def norm(self) -> float:
        """Euclidean norm over all parameters of all ranks; nan or inf when any element is. Collective."""
        layout, named = self._layout, self.named()
        split = [gradient for name, gradient in named.items() if name in layout.tensor_dims]
        whole = [gradient for name, gradient in named.items() if name not in layout.tensor_dims]
        squares = torch.stack([_square_sum(split, self._sums.device), _square_sum(whole, self._sums.device)])
        all_reduce(layout.shards, squares, "sum")
        all_reduce(layout.groups.tensor, squares[:1], "sum")
        return math.sqrt(float(squares.sum()))

    def scale(self, factor: float) -> None:
        torch._foreach_mul_(list(self.named().values()), factor)

    def _reduce_partial(self) -> None:
        for name in self._partial:
            if (gradient := self._parameters[name].grad) is not None:
                all_reduce(self._layout.groups.tensor, gradient, "sum")


class FlatGradients(Gradients):
    """Of whole parameters: views into one vector with the two sums behind them.

    Backward adds into the views, so nothing is copied before or after the one all-reduce. Nobody else may set these `.grad`s to None.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], layout: Layout, partial: Collection[str], device: torch.device) -> None:
        super().__init__(parameters, layout, partial, device)
        sizes = [parameter.numel() for parameter in parameters.values()]
        self._flat = torch.zeros(sum(sizes) + 2, device=self._sums.device)
        gradients, self._sums = self._flat[:-2], self._flat[-2:]
        for parameter, part in zip(parameters.values(), torch.split(gradients, sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def zero(self) -> None:
        self._flat.zero_()

    def reduce(self) -> None:
        all_reduce(self._layout.groups.data, self._flat, "sum")
        self._reduce_partial()


class ShardedGradients(Gradients):
    """Of sharded parameters, which FSDP2 reduces in every backward pass; here they become those of this rank's plain parts."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        partial: Collection[str],
        device: torch.device,
        sharded: Mapping[str, DTensor],
    ) -> None:
        super().__init__(parameters, layout, partial, device)
        self._sharded = sharded

    def zero(self) -> None:
        self._sums.zero_()
        for name, parameter in self._parameters.items():
            parameter.grad = self._sharded[name].grad = None

    def reduce(self) -> None:
        for name, parameter in self._parameters.items():
            gradient = self._sharded[name].grad
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient.to_local()  # type: ignore[attr-defined]
        all_reduce(self._layout.groups.data, self._sums, "sum")
        self._reduce_partial()


def _square_sum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """In float64, of which only a chunk exists at a time."""
    found = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        for chunk in torch.split(tensor.reshape(-1), _CHUNK):
            found += torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
    return found
