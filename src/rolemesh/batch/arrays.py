"""Values into Arrow columns and back, without sharing memory with the caller. Used by `Batch` alone.

Two traps of Arrow are closed here: an array built over numpy memory changes with it, so values are copied on the way in and out; and
`.values` of a sliced list column returns the values of its parent, so `flatten()` is used.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rolemesh.batch.columns import ARROW_TYPES, COLUMNS, EXTRA_KINDS, RAGGED_KINDS, Kind, check_name, is_nullable, kind_of
from rolemesh.batch.rows import Ints, describe
from rolemesh.errors import BatchError

Packed: TypeAlias = tuple[int, int, list[Any], Any]
"""Of an array: length, offset, buffers, and the same of its values where it is one of lists."""
Values: TypeAlias = Sequence[Any] | NDArray[Any] | pa.Array | pa.ChunkedArray


def build_column(name: str, values: Values) -> pa.ChunkedArray:
    """A column of the declared type from Python or numpy values (copied) or an Arrow array (shared, Arrow memory is immutable).

    NaN becomes null in nullable columns, where both mean missing. Raises BatchError for values of another kind, or that do not fit
    the type: fractions in an int column, token ids beyond int32. Kinds are never converted into each other, except whole numbers
    between int and float.
    """
    check_name(name)
    array = values if isinstance(values, pa.Array | pa.ChunkedArray) else _inferred(name, values)
    kind = COLUMNS[name].kind if name in COLUMNS else _extra_kind(name, array.type)
    target = ARROW_TYPES[kind]
    if not _castable(array.type, target):
        raise BatchError(f"column {name!r} is of kind {kind} ({target}), but was given {array.type}")
    try:
        array = array.cast(target)
    except pa.ArrowInvalid as error:
        raise BatchError(f"values of column {name!r} do not fit {kind} ({target}): {error}") from error
    return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


def _inferred(name: str, values: Sequence[Any] | NDArray[Any]) -> pa.Array:
    # `pa.array(values, type)` would cut 1.5 to 1 without a word, so Arrow infers the type and the checked cast follows
    rows = values.copy() if isinstance(values, np.ndarray) and values.ndim == 1 else list(values)
    try:
        return pa.array(rows, from_pandas=is_nullable(name))
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise BatchError(f"values of column {name!r} cannot be stored: {error}. Give Python values or numpy arrays") from error


def _extra_kind(name: str, given: pa.DataType) -> Kind:
    types = pa.types
    if types.is_integer(given):
        return "int"
    if types.is_floating(given):
        return "float"
    if types.is_boolean(given):
        return "bool"
    if types.is_string(given) or types.is_large_string(given):
        return "string"
    raise BatchError(
        f"column {name!r} holds {given}; expected scalars of one kind: {', '.join(EXTRA_KINDS)}. "
        "Where there are no values, or all are missing, give a numpy or Arrow array that has a type"
    )


def _castable(given: pa.DataType, target: pa.DataType) -> bool:
    types = pa.types
    if types.is_null(given):
        return True
    if types.is_large_list(target):
        return bool(types.is_list(given) or types.is_large_list(given)) and _castable(given.value_type, target.value_type)
    families = (
        (types.is_integer, types.is_floating),
        (types.is_boolean,),
        (types.is_string, types.is_large_string),
        (types.is_binary, types.is_large_binary),
    )
    return any(any(test(target) for test in family) and any(test(given) for test in family) for family in families)


def refuse_nulls(name: str, column: pa.ChunkedArray, ids: Callable[[], Ints]) -> None:
    """Raise BatchError, naming the first row, for a null in a column that may not lack values, or inside a list."""
    kind = kind_of(name, column.type)
    if not is_nullable(name) and column.null_count:
        row = int(np.argmax(column.is_null().to_numpy()))
        raise BatchError(
            f"column {name!r} has no value (null) in {column.null_count} row(s), first {describe(ids()[row])}; it may not lack any"
        )
    if kind in RAGGED_KINDS and any(chunk.flatten().null_count for chunk in column.chunks):
        row = next(row for row, value in enumerate(column) if None in value.as_py())
        raise BatchError(f"column {name!r} has a null inside the list of row {describe(ids()[row])}")


def numpy_scalars(column: pa.ChunkedArray) -> NDArray[Any]:
    """A private, writable copy [N]; null floats become NaN. The column has no other nulls."""
    if pa.types.is_floating(column.type):
        column = column.fill_null(float("nan"))
    return np.array(column.to_numpy(), dtype=column.type.to_pandas_dtype())


def ragged_lengths(column: pa.ChunkedArray) -> Ints:
    """Lengths [N] of the lists of a ragged column."""
    return np.array(pc.list_value_length(column).to_numpy(), dtype=np.int64)


def ragged_parts(column: pa.ChunkedArray) -> tuple[NDArray[Any], Ints]:
    """(values [sum of lengths], offsets [N + 1] from 0) of a ragged column: private, writable copies."""
    values = [np.empty(0, dtype=column.type.value_type.to_pandas_dtype()), *(chunk.flatten().to_numpy() for chunk in column.chunks)]
    offsets = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(ragged_lengths(column))))
    return np.concatenate(values), offsets


def differing_rows(left: pa.ChunkedArray, right: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Mask [N] of the rows whose values differ between two columns of one type; null equals null and NaN equals NaN."""
    if left.equals(right):
        return np.zeros(len(left), dtype=np.bool_)
    pairs = zip(left.to_pylist(), right.to_pylist(), strict=True)
    return np.array([not _same(mine, theirs) for mine, theirs in pairs], dtype=np.bool_)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right or (left != left and right != right))


def shown(column: pa.ChunkedArray, row: int) -> str:
    """The value of a row for an error message, shortened."""
    return reprlib.repr(column[row].as_py())


def take_rows(table: pa.Table, indices: Ints) -> pa.Table:
    """Rows of a table by position [M]; neighbouring rows are a slice, which copies nothing."""
    if len(indices) and np.array_equal(indices, np.arange(indices[0], indices[0] + len(indices))):
        return table.slice(int(indices[0]), len(indices))
    positions = pa.array(indices)
    taken = [_take_lists(column, indices) if pa.types.is_large_list(column.type) else column.take(positions) for column in table.columns]
    return pa.table(taken, names=table.column_names)


def _take_lists(column: pa.ChunkedArray, indices: Ints) -> pa.ChunkedArray:
    # Arrow's own take moves lists value by value; copying whole rows is some 40 times faster for rows of thousands of tokens, and
    # needs no copy of all chunks in one piece before
    values = [chunk.flatten().to_numpy() for chunk in column.chunks]
    chunk_of_row = np.repeat(np.arange(len(values)), [len(chunk) for chunk in column.chunks])
    lengths = ragged_lengths(column)
    ends = np.cumsum(lengths)
    ends -= np.cumsum([0, *(len(part) for part in values)])[chunk_of_row]
    spans = zip(chunk_of_row[indices].tolist(), (ends - lengths)[indices].tolist(), ends[indices].tolist(), strict=True)
    rows = [values[chunk][start:end] for chunk, start, end in spans]
    flat = np.concatenate([np.empty(0, dtype=column.type.value_type.to_pandas_dtype()), *rows])
    offsets = np.concatenate(([0], np.cumsum(lengths[indices])))
    return pa.chunked_array([pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))])


def is_compact(table: pa.Table) -> bool:
    """True for a table of whole columns whose buffers hold hardly more than its rows."""
    whole = all(column.num_chunks == 1 for column in table.columns)
    return whole and bool(table.get_total_buffer_size() <= 1.125 * table.nbytes)


def pack(column: pa.ChunkedArray, protocol: int) -> list[Packed]:
    """A column as what pickle needs no help with. From protocol 5 on the buffers can travel beside the pickle, without a copy; before, they
    are copied into it."""
    return [_pack(chunk, protocol) for chunk in column.chunks]


def unpack(target: pa.DataType, packed: Sequence[Packed]) -> pa.ChunkedArray:
    """The column of this type that was packed, over the memory that came."""
    return pa.chunked_array([_unpack(target, chunk) for chunk in packed], target)


def _pack(array: pa.Array, protocol: int) -> Packed:
    nested = pa.types.is_large_list(array.type)
    own = array.buffers()[: 2 if nested else None]
    buffers = [buffer and (PickleBuffer(buffer) if protocol >= 5 else buffer.to_pybytes()) for buffer in own]
    return len(array), array.offset, buffers, _pack(array.values, protocol) if nested else None


def _unpack(target: pa.DataType, packed: Packed) -> pa.Array:
    length, offset, buffers, values = packed
    children = None if values is None else [_unpack(target.value_type, values)]
    return pa.Array.from_buffers(target, length, [buffer and pa.py_buffer(buffer) for buffer in buffers], -1, offset, children)


def to_ipc(table: pa.Table) -> pa.Buffer:
    """The rows of a table, and no more, as one Arrow IPC stream. Pickling a slice itself would ship the whole buffers of its parent."""
    sink = pa.BufferOutputStream()
    whole = table.combine_chunks()
    with pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole)
    return sink.getvalue()


def from_ipc(buffer: pa.Buffer) -> pa.Table:
    """The table written by `to_ipc`, over the memory of `buffer`."""
    return pa.ipc.open_stream(buffer).read_all()
