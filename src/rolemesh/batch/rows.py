"""Rows by id and by position: what `Batch` (the data) and `BatchRef` (its metadata) have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from rolemesh.batch.balance import balance
from rolemesh.batch.columns import ARROW_TYPES, COUNTED, ID, Kind, missing_columns
from rolemesh.errors import BatchError

Ints = NDArray[np.int64]
Indices = Sequence[int] | NDArray[Any]


def describe(row_id: Ints) -> str:
    """A row id for an error message."""
    return f"(draw {row_id[0]}, sample {row_id[1]})"


def sorted_order(ids: Ints) -> Ints:
    """Positions [N] that sort ids [N, 2] by draw, then sample; equal ids keep their order."""
    return np.lexsort((ids[:, 1], ids[:, 0])).astype(np.int64, copy=False)


def match_rows(left: Ints, right: Ints) -> Ints:
    """Positions [N] in `right` of the ids of `left`, both [N, 2].

    Raises BatchError when an id occurs twice on one side or is missing on the other."""
    if _ascending(left) and np.array_equal(left, right):  # what most calls return, known without sorting
        return np.arange(len(left), dtype=np.int64)
    left_order, right_order = sorted_order(left), sorted_order(right)
    left_sorted, right_sorted = left[left_order], right[right_order]
    _refuse_duplicates(left_sorted, "left")
    _refuse_duplicates(right_sorted, "right")
    if not np.array_equal(left_sorted, right_sorted):
        raise BatchError(_missing_text(left_sorted, right_sorted))
    positions = np.empty(len(left), dtype=np.int64)
    positions[left_order] = right_order
    return positions


def _ascending(ids: Ints) -> bool:
    """Whether each id comes after the one before it, so that none occurs twice."""
    (draws, samples), (next_draws, next_samples) = ids[:-1].T, ids[1:].T
    return bool(((next_draws > draws) | ((next_draws == draws) & (next_samples > samples))).all())


def _refuse_duplicates(ids: Ints, side: str) -> None:
    twice = np.flatnonzero((ids[1:] == ids[:-1]).all(axis=1))
    if len(twice):
        raise BatchError(
            f"cannot join by id: {len(twice)} duplicate row(s) in the {side} batch, first {describe(ids[twice[0]])}. "
            "Rows are joined by (draw, sample), which must occur once"
        )


def _missing_text(left: Ints, right: Ints) -> str:
    left_set, right_set = set(map(tuple, left.tolist())), set(map(tuple, right.tolist()))
    found = []
    for absent, side in ((left_set - right_set, "right"), (right_set - left_set, "left")):
        if absent:
            found.append(f"{len(absent)} row(s) missing from the {side} batch, first {describe(np.array(min(absent)))}")
    return f"cannot join {len(left)} and {len(right)} rows by id: {'; '.join(found)}"


class Rows:
    """Rows with ids and columns. Its methods return new objects; a subclass says how rows are taken, cut and put together."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def ids(self) -> Ints:
            """(draw, sample) of each row, int64 [N, 2]."""

        @property
        def names(self) -> tuple[str, ...]:
            """Column names, the ids first."""

        def kinds(self) -> dict[str, Kind]: ...
        def lengths(self, name: str) -> Ints: ...
        def select(self, names: Iterable[str]) -> Self: ...
        def _take(self, indices: Ints) -> Self: ...
        def _runs(self, spans: Sequence[tuple[int, int]]) -> list[Self]: ...
        def _numbered(self, ids: Ints) -> Self: ...
        @classmethod
        def _concat(cls, batches: Sequence[Self]) -> Self: ...

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    def __len__(self) -> int:
        return self.num_rows

    @property
    def token_counts(self) -> Ints:
        """Tokens of each row, int64 [N]: lengths of prompt_ids and response_ids, of those that are there (none: zeros)."""
        counts, names = np.zeros(self.num_rows, dtype=np.int64), self.names
        for name in COUNTED:
            if name in names:
                counts += self.lengths(name)
        return counts

    def drop(self, names: Iterable[str]) -> Self:
        """All columns but these. Raises BatchError for a missing column and for an id."""
        dropped = set(names)
        self._require(dropped)
        refuse_ids(dropped, "dropped")
        return self.select(name for name in self.names if name not in dropped)

    def take(self, indices: Indices) -> Self:
        """Rows by position, in the given order. Raises BatchError for masks, negative positions and those beyond the end."""
        return self._take(_checked(indices, self.num_rows))

    def slice(self, start: int, length: int) -> Self:
        """`length` neighbouring rows from `start`, sharing memory. Raises BatchError when they do not all exist."""
        if start < 0 or length < 0 or start + length > self.num_rows:
            raise BatchError(f"slice of {length} rows from row {start} does not lie within the batch of {self.num_rows} rows")
        return self._runs([(start, length)])[0]

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """The rows of all batches, which must have the same columns (in any order and grouping). Raises BatchError."""
        if not batches:
            raise BatchError("cannot concatenate no batches: the columns would be unknown")
        first = batches[0].kinds()
        for number, batch in enumerate(batches):
            refuse_other_columns(first, batch.kinds(), number)
        return cls._concat(batches)

    def repeat(self, n: int) -> Self:
        """Every row n times in a row, `sample` numbered 0..n-1. Raises BatchError when a prompt (draw) has several rows already: its
        samples would get the same numbers."""
        if n < 1:
            raise BatchError(f"rows can be repeated 1 or more times, got {n}")
        ids = self.ids
        draws, counts = np.unique(ids[:, 0], return_counts=True)
        if len(draws) != len(ids):
            first = draws[np.argmax(counts > 1)]
            raise BatchError(
                f"cannot repeat {len(ids)} rows {n} times: draw {first} already has {counts.max()} rows, "
                f"and a prompt must have one. Expected {len(draws)} rows, one a prompt; were they repeated before?"
            )
        positions = np.repeat(np.arange(len(ids), dtype=np.int64), n)
        samples = np.tile(np.arange(n, dtype=np.int64), len(ids))
        return self._take(positions)._numbered(np.column_stack((ids[positions, 0], samples)))

    def split_rows(self, n: int) -> list[Self]:
        """n runs of neighbouring rows: 10 over 4 -> 3, 3, 2, 2. With fewer rows than n the last parts are empty."""
        if n < 1:
            raise BatchError(f"a batch can be split into 1 or more parts, got {n}")
        small, longer = divmod(self.num_rows, n)
        return self._runs([(part * small + min(part, longer), small + (part < longer)) for part in range(n)])

    def split_tokens(self, n: int, counts: Indices | NDArray[np.float64] | None = None) -> list[Self]:
        """n parts of about equal token counts (`balance`), rows in their order within a part. `counts` [N] replaces token_counts."""
        weights = self.token_counts if counts is None else np.asarray(counts)
        if weights.shape != (self.num_rows,):
            raise BatchError(f"counts must give one number a row: expected {self.num_rows}, got shape {weights.shape}")
        return [self._take(part) for part in balance(weights, n)]

    def sort_by_id(self) -> Self:
        """Rows in the order of draw, then sample."""
        return self._take(sorted_order(self.ids))

    def _require(self, names: Iterable[str]) -> None:
        present = self.names
        missing = [name for name in names if name not in present]
        if missing:
            raise missing_columns(missing, present)


def _checked(indices: Indices, rows: int) -> Ints:
    """Row positions as int64 [M]. Raises BatchError for a mask, a fraction or a position outside 0..rows-1."""
    array = np.asarray(indices)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        hint = "; pass np.flatnonzero(mask) for a mask" if array.dtype.kind == "b" else ""
        raise BatchError(f"row positions must be a flat list of integers, got {array.dtype} of shape {array.shape}{hint}")
    outside = array[(array < 0) | (array >= rows)]
    if len(outside):
        raise BatchError(f"row position {outside[0]} is outside the batch of {rows} rows (positions run from 0; negative ones are refused)")
    return array.astype(np.int64)


def refuse_ids(names: Iterable[str], verb: str) -> None:
    """Raise BatchError when an id is among the names."""
    ids = [name for name in names if name in ID]
    if ids:
        raise BatchError(f"id column {ids[0]!r} cannot be {verb}: rows are known by their ids")


def refuse_other_columns(first: Mapping[str, Kind], part: Mapping[str, Kind], number: int) -> None:
    """Raise BatchError when part `number` of a concatenation has other columns, or other kinds, than the first part."""
    if part == first:
        return
    lacking, unexpected = [name for name in first if name not in part], [name for name in part if name not in first]
    if lacking or unexpected:
        found = [f"lacks {', '.join(lacking)}"] * bool(lacking) + [f"has {', '.join(unexpected)} that the first lacks"] * bool(unexpected)
        raise BatchError(f"cannot concatenate: part {number} {' and '.join(found)}")
    for name, kind in part.items():
        if kind != first[name]:
            raise BatchError(
                f"cannot concatenate: column {name!r} is {ARROW_TYPES[first[name]]} in part 0 and {ARROW_TYPES[kind]} in part {number}"
            )
