"""Rows by id and by position: matching, checking and splitting. Shared by `Batch` (the data) and `BatchRef` (its metadata)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    left_order, right_order = sorted_order(left), sorted_order(right)
    left_sorted, right_sorted = left[left_order], right[right_order]
    _refuse_duplicates(left_sorted, "left")
    _refuse_duplicates(right_sorted, "right")
    if not np.array_equal(left_sorted, right_sorted):
        raise BatchError(_missing_text(left_sorted, right_sorted))
    positions = np.empty(len(left), dtype=np.int64)
    positions[left_order] = right_order
    return positions


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


def checked_indices(indices: Indices, rows: int) -> Ints:
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


def checked_span(start: int, length: int, rows: int) -> None:
    """Raise BatchError unless rows start..start+length-1 exist."""
    if start < 0 or length < 0 or start + length > rows:
        raise BatchError(f"slice of {length} rows from row {start} does not lie within the batch of {rows} rows")


def spans(rows: int, parts: int) -> list[tuple[int, int]]:
    """(start, length) of each of `parts` runs of neighbouring rows, the longer ones first: 10 over 4 -> 3, 3, 2, 2."""
    if parts < 1:
        raise BatchError(f"a batch can be split into 1 or more parts, got {parts}")
    small, longer = divmod(rows, parts)
    return [(part * small + min(part, longer), small + (part < longer)) for part in range(parts)]


def repeated(ids: Ints, times: int) -> tuple[Ints, Ints]:
    """(positions [N * times], new ids [N * times, 2]) of every row `times` in a row, `sample` numbered from 0.

    Raises BatchError when a prompt (draw) already has several rows: its samples would get the same numbers."""
    if times < 1:
        raise BatchError(f"rows can be repeated 1 or more times, got {times}")
    draws, counts = np.unique(ids[:, 0], return_counts=True)
    if len(draws) != len(ids):
        first = draws[np.argmax(counts > 1)]
        raise BatchError(
            f"cannot repeat {len(ids)} rows {times} times: draw {first} already has {counts.max()} rows, "
            f"and a prompt must have one. Expected {len(draws)} rows, one a prompt; were they repeated before?"
        )
    positions = np.repeat(np.arange(len(ids), dtype=np.int64), times)
    samples = np.tile(np.arange(times, dtype=np.int64), len(ids))
    return positions, np.column_stack((ids[positions, 0], samples))


def row_counts(counts: Indices | NDArray[np.float64], rows: int) -> NDArray[Any]:
    """Given token counts as an array [N]. Raises BatchError when they are not one a row."""
    array = np.asarray(counts)
    if array.shape != (rows,):
        raise BatchError(f"counts must give one number a row: expected {rows}, got shape {array.shape}")
    return array
