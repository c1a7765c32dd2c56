"""Which part of each weight a rank holds, and the whole of it from all ranks. Used by the train engines.

Tensor parallelism gives each rank of a row an equal block along one dimension; sharding cuts what is left along the first dimension as
`torch.chunk` does, which is how FSDP2 cuts it. Parts follow from sizes and ranks alone, so every rank knows those of the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

from rolemesh.engines.train.groups import Groups, all_gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Shape = tuple[int, ...]


class Sliceable(Protocol):
    """A tensor, or one in a file of which parts can be read (safetensors' slices)."""

    def __getitem__(self, index: Any, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a tensor."""

    whole: Shape
    """Shape of the tensor."""
    start: Shape
    """Where the block begins, in each dimension."""
    shape: Shape

    @classmethod
    def all_of(cls, shape: Shape) -> Self:
        return cls(shape, (0,) * len(shape), shape)

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    def cut(self, index: int, count: int) -> Part:
        """One of `count` pieces along the first dimension, as `torch.chunk` has them: of equal sizes but for the last ones, which may be
        empty. A single number cannot be cut: all pieces are it."""
        if not self.shape:
            return self
        rows = -(-self.shape[0] // count)
        first, last = min(index * rows, self.shape[0]), min((index + 1) * rows, self.shape[0])
        return Part(self.whole, (self.start[0] + first, *self.start[1:]), (last - first, *self.shape[1:]))

    def within(self, holds: Part) -> tuple[slice, ...] | None:
        """Where this block lies in another one; None when that does not hold all of it."""
        offsets = [mine - theirs for mine, theirs in zip(self.start, holds.start, strict=True)]
        index = tuple(slice(offset, offset + size) for offset, size in zip(offsets, self.shape, strict=True))
        if not math.prod(self.shape):
            return (slice(0, 0), *index[1:])
        return index if all(cut.start >= 0 and cut.stop <= size for cut, size in zip(index, holds.shape, strict=True)) else None

    def read(self, source: Sliceable, holds: Part) -> Tensor:
        """This block from a source that holds another one around it. A copy, unless it is all of a tensor."""
        index = self.within(holds)
        assert index is not None
        return source[index or ...] if self == holds else source[index].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the weights of a model lie on the ranks of `groups`."""

    groups: Groups
    sharded: bool
    """Whether the ranks of a column hold different parts of their weights."""
    tensor_dims: Mapping[str, int]
    """Dimension along which a row splits a weight; weights that are not named are whole on each rank of the row."""
    buffers: Collection[str] = ()
    """Weights that are never split, since nobody trains them."""

    @property
    def shards(self) -> ProcessGroup | None:
        """The group whose ranks hold different parts, and therefore run every pass together; None where each has the whole column."""
        return self.groups.data if self.sharded else None

    def part(self, name: str, whole: Shape, rank: int | None = None) -> Part:
        """What a rank of the world (this one when not said) holds of a weight, or of a moment of it."""
        if name in self.buffers:
            return Part.all_of(whole)
        data, tensor = divmod(self.groups.rank if rank is None else rank, self.groups.tensor_size)
        start, shape = [0] * len(whole), list(whole)
        dim = self.tensor_dims.get(name)
        if dim is not None:
            shape[dim] //= self.groups.tensor_size
            start[dim] = tensor * shape[dim]
        part = Part(whole, tuple(start), tuple(shape))
        return part.cut(data, self.groups.data_size) if self.sharded else part

    def own(self, name: str, whole: Shape) -> Part:
        """What this rank answers for: ranks that hold the same part divide it, so that together they have every number once."""
        part = self.part(name, whole)
        data, tensor = divmod(self.groups.rank, self.groups.tensor_size)
        rows = 1 if self.sharded and name not in self.buffers else self.groups.data_size
        columns = 1 if name in self.tensor_dims and name not in self.buffers else self.groups.tensor_size
        return part.cut((data if rows > 1 else 0) * columns + (tensor if columns > 1 else 0), rows * columns)

    def gathered(self, name: str, tensor: Tensor, whole: Shape) -> Tensor:
        """The whole of a weight, of its gradient or of a moment, of which every rank gives its part. Collective, unless nothing is
        split: then it is `tensor` itself."""
        size = self.groups.tensor_size
        everyone, row, column = range(size * self.groups.data_size), self.groups.rank // size * size, self.groups.rank % size
        split, sharded = name in self.tensor_dims, self.sharded and name not in self.buffers
        if split and sharded:
            group, ranks = self.groups.world, everyone
        elif sharded:
            group, ranks = self.groups.data, everyone[column::size]
        else:
            group, ranks = self.groups.tensor if split else None, everyone[row : row + size]
        if group is None:
            return tensor
        parts = [self.part(name, whole, other) for other in ranks]
        padded = tensor.new_zeros(max(math.prod(part.shape) for part in parts))
        padded[: tensor.numel()] = tensor.reshape(-1)
        found = tensor.new_empty(whole)
        for part, got in zip(parts, all_gather(group, padded), strict=True):
            found[part.index] = got[: math.prod(part.shape)].view(part.shape)
        return found
