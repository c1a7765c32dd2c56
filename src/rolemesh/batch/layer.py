"""`Layer`: where one set of columns of some rows lies. `BatchRef` is ids plus layers; everything here is metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rolemesh.batch.columns import Kind
from rolemesh.batch.rows import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One stored object: the rows that a worker returned, ids included."""

    ref: Any
    """Opaque and hashable; equal refs are the same object (a Ray reference, a key of a dict)."""
    columns: tuple[str, ...]
    """All columns in the object, without the ids; what is lost when the object is lost."""
    rows: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Some columns of the N rows of a batch, spread over blocks. Holds only blocks that a row needs, so others can be freed."""

    columns: Mapping[str, Kind]
    blocks: tuple[Block, ...]
    block_of_row: NDArray[np.int32]
    """Position in `blocks` of each row, [N]."""
    row_in_block: Ints
    """Position of each row in its block, [N]."""
    tokens: Mapping[str, Ints]
    """Lengths [N] of the counted columns (`columns.COUNTED`) that are here."""

    def __post_init__(self) -> None:
        self.block_of_row.setflags(write=False)
        for positions in (self.row_in_block, *self.tokens.values()):
            positions.setflags(write=False)

    def keep(self, names: Iterable[str]) -> Self | None:
        """The layer with these of its columns; None when none is left."""
        kept = set(names)
        columns = {name: kind for name, kind in self.columns.items() if name in kept}
        if not columns:
            return None
        tokens = {name: lengths for name, lengths in self.tokens.items() if name in kept}
        return type(self)(columns, self.blocks, self.block_of_row, self.row_in_block, tokens)

    def take(self, indices: Ints) -> Self:
        """The rows at these positions [M]."""
        block_of_row = self.block_of_row[indices]
        used = np.bincount(block_of_row, minlength=len(self.blocks)) > 0
        renumbered = (np.cumsum(used) - 1).astype(np.int32)
        blocks = tuple(block for block, needed in zip(self.blocks, used, strict=True) if needed)
        tokens = {name: lengths[indices] for name, lengths in self.tokens.items()}
        return type(self)(self.columns, blocks, renumbered[block_of_row], self.row_in_block[indices], tokens)

    def differing_rows(self, other: Self) -> NDArray[np.bool_]:
        """Mask [N] of the rows that do not lie at the same place of the same object in both layers."""
        number = {block.ref: position for position, block in enumerate(self.blocks)}
        renumbered = np.array([number.get(block.ref, -1) for block in other.blocks], dtype=np.int32)
        return np.asarray((renumbered[other.block_of_row] != self.block_of_row) | (other.row_in_block != self.row_in_block))

    @classmethod
    def concat(cls, layers: Sequence[Self]) -> Self:
        """The rows of layers with the same columns; an object that several of them hold becomes one block."""
        blocks: dict[Any, Block] = {}
        number: dict[Any, int] = {}
        block_of_row = []
        for layer in layers:
            for block in layer.blocks:
                blocks.setdefault(block.ref, block)
                number.setdefault(block.ref, len(number))
            renumbered = np.array([number[block.ref] for block in layer.blocks], dtype=np.int32)
            block_of_row.append(renumbered[layer.block_of_row])
        first = layers[0]
        return cls(
            first.columns,
            tuple(blocks.values()),
            np.concatenate(block_of_row),
            np.concatenate([layer.row_in_block for layer in layers]),
            {name: np.concatenate([layer.tokens[name] for layer in layers]) for name in first.tokens},
        )


def common_groups(parts: Sequence[Sequence[Layer]]) -> list[list[Layer]]:
    """Layers of several batches with the same columns, cut so that they can be concatenated: a list of one layer a batch each.

    Batches may group the same columns into layers differently; columns stay together where all batches keep them together."""
    home = [{name: position for position, layer in enumerate(layers) for name in layer.columns} for layers in parts]
    groups: dict[tuple[int, ...], list[str]] = {}
    for layer in parts[0]:
        for name in layer.columns:
            groups.setdefault(tuple(homes[name] for homes in home), []).append(name)
    return [
        [kept for layers, position in zip(parts, where, strict=True) if (kept := layers[position].keep(names)) is not None]
        for where, names in groups.items()
    ]
