"""`Batch`: the data of some samples, one row each, ragged and without padding. What roles give each other.

Workers hold batches; the controller holds `BatchRef`s. `tensors` turns columns of a batch into torch tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, SupportsIndex

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rolemesh.batch import arrays
from rolemesh.batch.arrays import Values
from rolemesh.batch.columns import ARROW_TYPES, ID, RAGGED_KINDS, Kind, kind_of
from rolemesh.batch.rows import Ints, Rows, describe, match_rows, refuse_ids
from rolemesh.errors import BatchError


class Batch(Rows):
    """Immutable rows of declared columns (`columns.COLUMNS`) and of a user's own `extra/...` scalars, on an Arrow table.

    Every batch has the id columns `draw` and `sample`, which stand first. Every method returns a new batch; slices, selections and
    concatenations share memory. What is handed out as numpy is a private copy. Pickling ships the rows of the batch, no more.
    """

    __slots__ = ("_table",)
    _table: pa.Table

    def __init__(self, table: pa.Table) -> None:
        """Check types, ids and nulls. Raises BatchError."""
        columns = dict(zip(table.column_names, table.columns, strict=True))
        if len(columns) != table.num_columns:
            raise BatchError(f"column names occur twice in {', '.join(table.column_names)}")
        absent = [name for name in ID if name not in columns]
        if absent:
            raise BatchError(
                f"a batch needs the id columns {' and '.join(ID)}; {' and '.join(absent)} missing in {', '.join(columns) or 'none'}"
            )
        for name in ID:
            kind_of(name, columns[name].type)
            if columns[name].null_count:
                raise BatchError(f"id column {name!r} has a null; every row needs an id")
        self._table = _table_of(columns)
        for name, column in columns.items():
            arrays.refuse_nulls(name, column, lambda: self.ids)

    @classmethod
    def from_columns(cls, columns: Mapping[str, Values]) -> Self:
        """A batch from values by column name; see `arrays.build_column` for what is converted. Raises BatchError."""
        built = {name: arrays.build_column(name, values) for name, values in columns.items()}
        lengths = {name: len(column) for name, column in built.items()}
        if len(set(lengths.values())) > 1:
            raise BatchError(f"columns differ in length: {', '.join(f'{name} {length}' for name, length in lengths.items())}")
        return cls(pa.table(built))

    @classmethod
    def of_checked(cls, columns: Mapping[str, pa.ChunkedArray]) -> Self:
        """A batch of columns that come out of batches, ids among them: nothing is checked again."""
        batch = cls.__new__(cls)
        batch._table = _table_of(columns)
        return batch

    # -- what is there ------------------------------------------------------------------------------------------------------

    @property
    def table(self) -> pa.Table:
        """The Arrow table. Do not pickle it: a slice would ship the buffers of its parent."""
        return self._table

    @property
    def num_rows(self) -> int:
        return int(self._table.num_rows)

    def __repr__(self) -> str:
        return f"Batch({self.num_rows} rows: {', '.join(self.names)})"

    @property
    def names(self) -> tuple[str, ...]:
        """Column names, the ids first."""
        return tuple(self._table.column_names)

    @property
    def nbytes(self) -> int:
        """Bytes of these rows (of a slice: without the rest of its parent)."""
        return int(self._table.nbytes)

    def kind(self, name: str) -> Kind:
        """Kind of a column. Raises BatchError for a column that is not there."""
        self._require([name])
        return kind_of(name, self._table.column(name).type)

    @property
    def ids(self) -> Ints:
        """(draw, sample) of each row, int64 [N, 2]."""
        return np.column_stack([arrays.numpy_scalars(self._table.column(name)) for name in ID])

    def lengths(self, name: str) -> Ints:
        """Lengths of the lists of a ragged column, int64 [N]."""
        self._require_ragged(name)
        return arrays.ragged_lengths(self._table.column(name))

    def scalars(self, name: str) -> NDArray[Any] | list[Any]:
        """A scalar column: numpy [N] for numbers (null floats are NaN), a list (null is None) for strings and binary.

        Raises BatchError for a ragged column and for nulls among ints and bools."""
        kind, column = self.kind(name), self._table.column(name)
        if kind in RAGGED_KINDS:
            raise BatchError(f"column {name!r} is ragged ({kind}); read it with ragged() or rows()")
        if kind in ("string", "binary"):
            return list(column.to_pylist())
        if kind != "float" and column.null_count:
            row = int(np.argmax(column.is_null().to_numpy()))
            raise BatchError(f"{kind} column {name!r} has no value (null) in {column.null_count} row(s), first {describe(self.ids[row])}")
        return arrays.numpy_scalars(column)

    def ragged(self, name: str) -> tuple[NDArray[Any], Ints]:
        """(values [sum of lengths] int32 or float32, offsets [N + 1] int64 from 0) of a ragged column; private copies."""
        self._require_ragged(name)
        return arrays.ragged_parts(self._table.column(name))

    def rows(self, name: str) -> list[list[Any]]:
        """A ragged column as one Python list a row."""
        self._require_ragged(name)
        return list(self._table.column(name).to_pylist())

    def equals(self, other: Batch) -> bool:
        """Same columns (in any order) and the same rows in the same order; null equals null and NaN equals NaN."""
        if self.num_rows != other.num_rows or set(self.names) != set(other.names):
            return False
        return all(self.kind(name) == other.kind(name) and not self._differing(other, name).any() for name in self.names)

    # -- columns ------------------------------------------------------------------------------------------------------------

    def select(self, names: Iterable[str]) -> Self:
        """These columns; the ids always stay. Raises BatchError naming missing columns and the roles that write them."""
        wanted = list(dict.fromkeys((*ID, *names)))
        self._require(wanted)
        return self.of_checked({name: self._table.column(name) for name in wanted})

    def with_columns(self, columns: Mapping[str, Values]) -> Self:
        """These columns added, or in place of those of the same name. Ids cannot be replaced. Raises BatchError."""
        refuse_ids(columns, "replaced")
        table = self._columns()
        for name, values in columns.items():
            column = arrays.build_column(name, values)
            if len(column) != self.num_rows:
                raise BatchError(f"column {name!r} has {len(column)} values, the batch has {self.num_rows} rows")
            arrays.refuse_nulls(name, column, lambda: self.ids)
            table[name] = column
        return self.of_checked(table)

    def join(self, other: Batch, *, replace: bool = False) -> Self:
        """The columns of both, matched by id in the row order of this batch.

        Both must have the same ids, each once. A column in both must hold the same values; with `replace` the other's win.
        Raises BatchError naming missing or duplicate ids, or the columns that differ with the first differing row and both values.
        """
        matched = Batch._take(other, match_rows(self.ids, other.ids))
        if not replace:
            self._refuse_conflicts(matched)
        return self.of_checked(self._columns() | matched._columns())

    def _refuse_conflicts(self, other: Batch) -> None:
        """Raise BatchError when a column in both batches, whose rows are matched, differs."""
        first: dict[str, int] = {}
        for name in self.names:
            if name in other.names:
                if self.kind(name) != other.kind(name):
                    raise BatchError(
                        f"cannot join: column {name!r} is of kind {self.kind(name)} on the left and {other.kind(name)} on the right"
                    )
                differing = self._differing(other, name)
                if differing.any():
                    first[name] = int(np.argmax(differing))
        if first:
            name = min(first, key=lambda column: first[column])
            row = first[name]
            raise BatchError(
                f"cannot join: column(s) {', '.join(map(repr, first))} differ; first in row {describe(self.ids[row])}, where {name!r} is "
                f"{arrays.shown(self._table.column(name), row)} on the left and {arrays.shown(other._table.column(name), row)} on the right"
            )

    # -- storage ------------------------------------------------------------------------------------------------------------

    def compact(self) -> Self:
        """The same rows in one piece and in memory that holds little else: a slice no longer keeps its parent alive. Copies only then."""
        return self if arrays.is_compact(self._table) else self._of(arrays.from_ipc(arrays.to_ipc(self._table)))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        whole = self.compact()._table
        return _unpacked, (
            type(self),
            {name: (kind, arrays.pack(whole.column(name), int(protocol))) for name, kind in self.kinds().items()},
        )

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file; it appears whole or not at all."""
        partial = Path(f"{os.fspath(path)}.partial")
        pq.write_table(self._table, partial)
        partial.replace(path)

    @classmethod
    def from_parquet(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `to_parquet` wrote. Raises BatchError when the columns are not those of a batch."""
        # not pq.read_table: it would add columns for directories named like key=value
        with pq.ParquetFile(path) as file:
            return cls(file.read())

    # -- inside -------------------------------------------------------------------------------------------------------------

    def kinds(self) -> dict[str, Kind]:
        """Kind of every column."""
        return {name: kind_of(name, self._table.column(name).type) for name in self.names}

    def _columns(self) -> dict[str, pa.ChunkedArray]:
        return {name: self._table.column(name) for name in self.names}

    @classmethod
    def _of(cls, table: pa.Table) -> Self:
        return cls.of_checked({name: table.column(name) for name in table.column_names})

    def _take(self, indices: Ints) -> Self:
        return self._of(arrays.take_rows(self._table, indices))

    def _runs(self, spans: Sequence[tuple[int, int]]) -> list[Self]:
        return [self._of(self._table.slice(start, length)) for start, length in spans]

    def _numbered(self, ids: Ints) -> Self:
        return self.of_checked(self._columns() | {"sample": pa.chunked_array([pa.array(ids[:, 1].copy())])})

    @classmethod
    def _concat(cls, batches: Sequence[Self]) -> Self:
        return cls._of(pa.concat_tables([batch._table.select(batches[0].names) for batch in batches]))

    def _differing(self, other: Batch, name: str) -> NDArray[np.bool_]:
        return arrays.differing_rows(self._table.column(name), other._table.column(name))

    def _require_ragged(self, name: str) -> None:
        kind = self.kind(name)
        if kind not in RAGGED_KINDS:
            raise BatchError(f"column {name!r} holds scalars ({kind}), not lists; read it with scalars()")


def _table_of(columns: Mapping[str, pa.ChunkedArray]) -> pa.Table:
    """A table with the ids first and a schema of names and types alone: no metadata that parts could share or differ in."""
    order = [*ID, *(name for name in columns if name not in ID)]
    return pa.table([columns[name] for name in order], names=order)


def _unpacked(cls: type[Batch], columns: Mapping[str, tuple[Kind, Sequence[arrays.Packed]]]) -> Batch:
    return cls.of_checked({name: arrays.unpack(ARROW_TYPES[kind], packed) for name, (kind, packed) in columns.items()})
