"""`Layer`: where one set of columns of some rows lies. `BatchRef` is ids plus layers; everything here is metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from rolemesh.batch.columns import Kind
from rolemesh.batch.rows import Ints

T = TypeVar("T", bound=np.generic)


class Block(NamedTuple):
    """One stored object: the rows that a worker returned, ids included."""

    ref: Any
    """Opaque and hashable; equal refs are the same object (a Ray reference, a key of a dict)."""
    rows: int
    nbytes: int


class Layer(NamedTuple):
    """Some columns of the N rows of a batch, spread over blocks. Holds only blocks that a row needs, so others can be freed."""

    columns: Mapping[str, Kind]
    blocks: tuple[Block, ...]
    block_of_row: NDArray[np.int32]
    """Position in `blocks` of each row, [N]."""
    row_in_block: Ints
    """Position of each row in its block, [N]."""
    tokens: Mapping[str, Ints]
    """Lengths [N] of the counted columns (`columns.COUNTED`) that are here."""

    @classmethod
    def of_blocks(cls, columns: Mapping[str, Kind], blocks: Sequence[Block], tokens: Mapping[str, Ints]) -> Self:
        """All rows of these objects, one after the other; an object that comes twice becomes one block."""
        present = [block for block in blocks if block.rows]
        rows = np.array([block.rows for block in present], dtype=np.int64)
        number: dict[Any, int] = {}
        of_object = np.array([number.setdefault(block.ref, len(number)) for block in present], dtype=np.int32)
        row_in_block = np.arange(rows.sum(), dtype=np.int64) - np.repeat(np.cumsum(rows) - rows, rows)
        distinct = {block.ref: block for block in present}
        sealed = {name: read_only(lengths) for name, lengths in tokens.items()}
        return cls(columns, tuple(distinct.values()), read_only(np.repeat(of_object, rows)), read_only(row_in_block), sealed)

    def keep(self, names: Set[str]) -> Self | None:
        """The layer with these of its columns; None when none is left."""
        if self.columns.keys() <= names:
            return self
        columns = {name: kind for name, kind in self.columns.items() if name in names}
        if not columns:
            return None
        tokens = {name: lengths for name, lengths in self.tokens.items() if name in names}
        return type(self)(columns, self.blocks, self.block_of_row, self.row_in_block, tokens)

    def take(self, indices: Ints) -> Self:
        """The rows at these positions [M]."""
        block_of_row = self.block_of_row[indices]
        used = np.flatnonzero(np.bincount(block_of_row, minlength=len(self.blocks)))
        renumbered = np.empty(len(self.blocks), dtype=np.int32)
        renumbered[used] = np.arange(len(used))
        blocks = tuple([self.blocks[block] for block in used.tolist()])
        tokens = {name: read_only(lengths[indices]) for name, lengths in self.tokens.items()}
        return type(self)(self.columns, blocks, read_only(renumbered[block_of_row]), read_only(self.row_in_block[indices]), tokens)

    def runs(self, spans: Sequence[tuple[int, int]]) -> list[Self]:
        """Neighbouring rows, for each (start, length). Without a copy where the blocks of neighbours are neighbours too."""
        if (self.block_of_row[1:] < self.block_of_row[:-1]).any():
            return [self.take(np.arange(start, start + length)) for start, length in spans]
        return [self._run(start, start + length) for start, length in spans]

    def _run(self, start: int, stop: int) -> Self:
        block_of_row, blocks = self.block_of_row[start:stop], self.blocks
        if len(blocks) > 1:
            first, last = (int(block_of_row[0]), int(block_of_row[-1])) if start < stop else (0, -1)
            block_of_row, blocks = read_only(block_of_row - np.int32(first)), blocks[first : last + 1]
        elif start == stop:
            blocks = ()
        tokens = {name: lengths[start:stop] for name, lengths in self.tokens.items()}
        return type(self)(self.columns, blocks, block_of_row, self.row_in_block[start:stop], tokens)

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
        renumbered: list[int] = []
        starts = []
        """Where in `renumbered` the blocks of each layer begin."""
        for layer in layers:
            starts.append(len(renumbered))
            for block in layer.blocks:
                blocks.setdefault(block.ref, block)
                renumbered.append(number.setdefault(block.ref, len(number)))
        first = layers[0]
        place = np.concatenate([layer.block_of_row for layer in layers])
        place += np.repeat(np.array(starts, dtype=np.int32), [len(layer.block_of_row) for layer in layers])
        return cls(
            first.columns,
            tuple(blocks.values()),
            read_only(np.array(renumbered, dtype=np.int32)[place]),
            read_only(np.concatenate([layer.row_in_block for layer in layers])),
            {name: read_only(np.concatenate([layer.tokens[name] for layer in layers])) for name in first.tokens},
        )


def read_only(array: NDArray[T]) -> NDArray[T]:
    array.setflags(write=False)
    return array


def common_groups(parts: Sequence[Sequence[Layer]]) -> list[list[Layer]]:
    """Layers of several batches with the same columns, cut so that they can be concatenated: a list of one layer a batch each.

    Batches may group the same columns into layers differently; columns stay together where all batches keep them together."""
    home = [{name: position for position, layer in enumerate(layers) for name in layer.columns} for layers in parts]
    groups: dict[tuple[int, ...], list[str]] = {}
    for layer in parts[0]:
        for name in layer.columns:
            groups.setdefault(tuple(homes[name] for homes in home), []).append(name)
    return [
        [kept for layers, position in zip(parts, where, strict=True) if (kept := layers[position].keep(set(names))) is not None]
        for where, names in groups.items()
    ]
