"""`Assembly`: the recipe by which a worker makes its batch out of stored objects. Made by `BatchRef.assembly` on the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rolemesh.batch.arrays import numpy_scalars, take_rows
from rolemesh.batch.batch import Batch
from rolemesh.batch.columns import ARROW_TYPES, ID, Kind
from rolemesh.batch.layer import Layer
from rolemesh.batch.rows import Ints, describe
from rolemesh.errors import BatchError


class Piece(NamedTuple):
    """The columns of one layer: row i lies in object `objects[block_of_row[i]]` at position `row_in_block[i]`."""

    columns: Mapping[str, Kind]
    objects: tuple[int, ...]
    block_of_row: NDArray[np.int32]
    row_in_block: Ints


class Assembly(NamedTuple):
    """Where the rows of one batch lie in a list of stored objects. Small; pickles; names no reference."""

    ids: Ints
    columns: tuple[str, ...]
    object_rows: tuple[int, ...]
    """Rows that each object must have, for a check that the right ones came."""
    pieces: tuple[Piece, ...]


def assembly_of(ids: Ints, layers: Sequence[Layer], columns: tuple[str, ...]) -> tuple[list[Any], Assembly]:
    """(distinct refs, assembly) of the given layers, which together hold `columns`."""
    rows: dict[Any, int] = {}
    number: dict[Any, int] = {}
    pieces = []
    for layer in layers:
        objects = []
        for block in layer.blocks:
            rows[block.ref] = block.rows
            objects.append(number.setdefault(block.ref, len(number)))
        pieces.append(Piece(layer.columns, tuple(objects), layer.block_of_row, layer.row_in_block))
    return list(rows), Assembly(ids, columns, tuple(rows.values()), tuple(pieces))


def assemble(assembly: Assembly, objects: Sequence[Batch]) -> Batch:
    """The batch of an assembly, from the objects of its refs in their order. Pure.

    Rows that are neighbours in one object share its memory, others are copied. Raises BatchError when the objects are not those that the
    assembly was made for."""
    tables = [stored.table for stored in objects]
    found = tuple(stored.num_rows for stored in objects)
    if found != assembly.object_rows:
        raise BatchError(
            f"the objects given have {list(found)} rows, the assembly was made for objects of {list(assembly.object_rows)} rows"
        )
    built: dict[str, pa.ChunkedArray] = {}
    for piece in assembly.pieces:
        built |= _columns_of(piece, tables, assembly.ids)
    ids = {name: pa.chunked_array([pa.array(column.copy())]) for name, column in zip(ID, assembly.ids.T, strict=True)}
    return Batch.of_checked(ids | {name: built[name] for name in assembly.columns})


def _columns_of(piece: Piece, tables: Sequence[pa.Table], ids: Ints) -> dict[str, pa.ChunkedArray]:
    if not piece.objects:
        return {name: pa.chunked_array([], ARROW_TYPES[kind]) for name, kind in piece.columns.items()}
    # repeating and renumbering rows changes `sample`, never `draw`: it tells a wrong object of the same size
    names = ["draw", *piece.columns]
    whole = pa.concat_tables([tables[position].select(names) for position in piece.objects])
    starts = np.cumsum([0, *(tables[position].num_rows for position in piece.objects[:-1])])
    part = take_rows(whole, starts[piece.block_of_row] + piece.row_in_block)
    wrong = np.flatnonzero(numpy_scalars(part.column("draw")) != ids[:, 0])
    if len(wrong):
        raise BatchError(f"the objects given are not those of the assembly: row {describe(ids[wrong[0]])} holds another draw")
    return {name: part.column(name) for name in piece.columns}
