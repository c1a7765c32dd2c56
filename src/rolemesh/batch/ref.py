"""`BatchRef`: what the controller holds of a batch - ids, token lengths and where each column lies, never the data.

A worker returns its columns as a stored object and, beside it, the small `BlockMeta` of it. The controller puts these together
(`from_blocks`), joins, takes and splits them as metadata, and gives each worker the references and the `Assembly` (`assembly`) from which
the worker makes its batch (`assemble`). Every operation equals the operation of the same name on the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np

from rolemesh.batch.assembly import Assembly, assembly_of
from rolemesh.batch.batch import Batch
from rolemesh.batch.columns import COUNTED, ID, Kind, missing_columns, readable
from rolemesh.batch.layer import Block, Layer, common_groups
from rolemesh.batch.rows import Ints, Rows, describe, match_rows, refuse_other_columns
from rolemesh.errors import BatchError


class BlockMeta(NamedTuple):
    """The small thing that a worker returns beside its object. Pickles."""

    ids: Ints
    """(draw, sample) of each row of the object, [N, 2]."""
    tokens: Mapping[str, Ints]
    """Lengths [N] of the counted columns (`columns.COUNTED`) in the object."""
    columns: Mapping[str, Kind]
    """Columns of the object, without the ids."""
    nbytes: int


def block_meta(batch: Batch, ids: Ints | None = None) -> BlockMeta:
    """What the controller needs to know of a batch that is about to be stored. `ids` are the batch's, where they are at hand."""
    columns = {name: kind for name, kind in batch.kinds().items() if name not in ID}
    tokens = {name: batch.lengths(name) for name in COUNTED if name in columns}
    return BlockMeta(ids=batch.ids if ids is None else ids, tokens=tokens, columns=columns, nbytes=batch.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class BatchRef(Rows):
    """Rows by id and, for each set of columns, the stored objects that hold them. Immutable; its methods return new ones."""

    ids: Ints
    """(draw, sample) of each row, int64 [N, 2], read-only."""
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        self.ids.setflags(write=False)

    @classmethod
    def from_blocks(cls, blocks: Sequence[tuple[Any, BlockMeta]]) -> Self:
        """The rows of stored objects with the same columns, one after the other. Raises BatchError.

        References are hashable and equal when they are the same object."""
        if not blocks:
            raise BatchError("cannot make a batch of no blocks: the columns would be unknown")
        first = blocks[0][1]
        for number, (_, meta) in enumerate(blocks):
            refuse_other_columns(first.columns, meta.columns, number)
        ids = np.concatenate([meta.ids for _, meta in blocks])
        if not first.columns:
            return cls(ids, ())
        stored = [Block(ref, len(meta.ids), meta.nbytes) for ref, meta in blocks]
        tokens = {name: np.concatenate([meta.tokens[name] for _, meta in blocks]) for name in first.tokens}
        return cls(ids, (Layer.of_blocks(first.columns, stored, tokens),))

    @classmethod
    def of_written(cls, written: Sequence[Sequence[tuple[Any, BlockMeta]]]) -> Self:
        """The rows that several workers wrote, one after the other; each has stored objects with the same rows and different columns,
        the same columns as the others."""
        sides = [cls.from_blocks(blocks) for blocks in zip(*written, strict=True)]
        return cls(sides[0].ids, tuple([layer for side in sides for layer in side.layers]))

    # -- what is there ------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"BatchRef({self.num_rows} rows: {', '.join(self.names)}; {len(self.refs)} objects)"

    @property
    def names(self) -> tuple[str, ...]:
        """Column names, the ids first."""
        return (*ID, *self.kinds())

    @property
    def refs(self) -> list[Any]:
        """The stored objects that some row needs, each once."""
        return list(self._blocks())

    @property
    def nbytes(self) -> int:
        """Bytes of these objects, which may hold more rows and columns than this batch."""
        return sum(block.nbytes for block in self._blocks().values())

    def lengths(self, name: str) -> Ints:
        """Lengths [N] of prompt_ids or response_ids, known without the data. Raises BatchError for a column that is not there."""
        for layer in self.layers:
            if name in layer.tokens:
                return layer.tokens[name].copy()
        self._require([name])
        raise BatchError(f"lengths of column {name!r} are not kept in the metadata; those of {' and '.join(COUNTED)} are")

    # -- columns ------------------------------------------------------------------------------------------------------------

    def select(self, names: Iterable[str]) -> Self:
        """These columns; the ids always stay. Raises BatchError naming missing columns and the roles that write them."""
        wanted = set(names)
        self._require(wanted)
        return type(self)(self.ids, tuple(kept for layer in self.layers if (kept := layer.keep(wanted)) is not None))

    def reading(self, reads: Iterable[str]) -> Self:
        """What a worker gets that reads these columns: a declared optional column is left out where this batch has none."""
        return self.select(readable(reads, self.kinds()))

    def join(self, other: BatchRef, *, replace: bool = False) -> Self:
        """The columns of both, matched by id in the row order of this batch.

        Both must have the same ids, each once. A column in both must be the same stored data; with `replace` the other's wins. (The data
        is not here to compare: equal values in another object count as different.) Raises BatchError."""
        indices = match_rows(self.ids, other.ids)
        matched = tuple(layer.take(indices) for layer in other.layers)
        shared = [name for name in other.kinds() if name in self.kinds()]
        if not replace:
            self._refuse_conflicts(matched)
        return type(self)(self.ids, (*self.drop(shared).layers, *matched))

    def _refuse_conflicts(self, matched: Sequence[Layer]) -> None:
        """Raise BatchError when a column of these layers, whose rows are matched, is here too but lies elsewhere."""
        first: dict[str, int] = {}
        for mine in self.layers:
            for theirs in matched:
                shared = [name for name in mine.columns if name in theirs.columns]
                differing = mine.differing_rows(theirs) if shared else np.zeros(0, dtype=np.bool_)
                if differing.any():
                    first |= dict.fromkeys(shared, int(np.argmax(differing)))
        if first:
            row = min(first.values())
            raise BatchError(
                f"cannot join: column(s) {', '.join(map(repr, first))} are in both batches and were written separately, first in row "
                f"{describe(self.ids[row])}. Drop them from one batch, or join with replace=True to let the other win"
            )

    # -- towards the data ---------------------------------------------------------------------------------------------------

    def assembly(self, reads: Iterable[str]) -> tuple[list[Any], Assembly]:
        """(refs, assembly) for a worker that reads these columns: `assemble(assembly, objects of refs)` is its batch.

        Only objects that hold such a column are among the refs, each once. Ids come from here and need not be asked for, and a declared
        optional column is left out where this batch has none. Raises BatchError naming missing columns and the roles that write them."""
        wanted, others = _wanted(tuple(reads), tuple([name for layer in self.layers for name in layer.columns]))
        return assembly_of(self.ids, self.select(wanted).layers if others else self.layers, wanted)

    # -- inside -------------------------------------------------------------------------------------------------------------

    def kinds(self) -> dict[str, Kind]:
        return {name: kind for layer in self.layers for name, kind in layer.columns.items()}

    def _blocks(self) -> dict[Any, Block]:
        return {block.ref: block for layer in self.layers for block in layer.blocks}

    def _runs(self, spans: Sequence[tuple[int, int]]) -> list[Self]:
        cut = [layer.runs(spans) for layer in self.layers]
        return [
            type(self)(self.ids[start : start + length], tuple([runs[part] for runs in cut])) for part, (start, length) in enumerate(spans)
        ]

    def _take(self, indices: Ints) -> Self:
        return type(self)(self.ids[indices], tuple(layer.take(indices) for layer in self.layers))

    def _numbered(self, ids: Ints) -> Self:
        return type(self)(ids, self.layers)

    @classmethod
    def _concat(cls, batches: Sequence[Self]) -> Self:
        groups = common_groups([batch.layers for batch in batches])
        return cls(np.concatenate([batch.ids for batch in batches]), tuple(Layer.concat(group) for group in groups))


@lru_cache(maxsize=256)  # all parts of a batch have the same columns
def _wanted(reads: tuple[str, ...], present: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """What a worker gets that reads these, and whether others are present. Raises BatchError for missing columns."""
    wanted = readable(reads, present)
    if missing := [name for name in wanted if name not in present]:
        raise missing_columns(missing, (*ID, *present))
    return wanted, len(wanted) < len(present)
