"""The declared columns: names, kinds, and the reference table made from them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from rolemesh.batch import COLUMNS, Batch, columns_reference
from rolemesh.batch.columns import ARROW_TYPES, COUNTED, EXTRA_KINDS, ID, kind_of
from rolemesh.errors import BatchError


def test_every_column_is_declared_under_its_own_name_with_meaning_and_producer():
    for name, column in COLUMNS.items():
        assert column.name == name
        assert column.meaning
        assert column.producer
        assert kind_of(name, ARROW_TYPES[column.kind]) == column.kind


def test_null_is_declared_for_scalar_columns_only_and_never_for_ids():
    nullable = {column.kind for column in COLUMNS.values() if column.nullable}
    assert nullable.isdisjoint({"tokens", "token_floats"})
    assert not any(COLUMNS[name].nullable for name in ID)
    assert all(COLUMNS[name].kind == "tokens" for name in COUNTED)


def test_reference_has_one_line_a_column():
    lines = columns_reference().splitlines()
    assert lines[0] == "| column | kind | null | written by | meaning |"
    assert len(lines) == 2 + len(COLUMNS) + 1
    assert any(line.startswith("| `reward` | float | yes | reward | total reward;") for line in lines)
    assert any(line.startswith("| `draw` | int | no | data |") for line in lines)


def test_undeclared_name_is_refused_with_the_nearest_one():
    with pytest.raises(BatchError, match=r"'rewrd' is not declared\. Did you mean 'reward'"):
        Batch.from_columns({"draw": [0], "sample": [0], "rewrd": [1.0]})


@pytest.mark.parametrize("name", ["extra/", "Extra/x", "x/extra"])
def test_own_columns_need_the_prefix_and_a_name(name):
    with pytest.raises(BatchError, match="is not declared"):
        Batch.from_columns({"draw": [0], "sample": [0], name: [1.0]})


@pytest.mark.parametrize("kind", EXTRA_KINDS)
def test_own_columns_may_be_scalars_and_null(kind):
    table = pa.table({"draw": [0, 1], "sample": [0, 0], "extra/x": pa.array([None, None], ARROW_TYPES[kind])})
    assert Batch(table).kind("extra/x") == kind


@pytest.mark.parametrize("arrow_type", [pa.large_list(pa.int32()), pa.int32(), pa.string(), pa.large_binary(), pa.null()])
def test_own_columns_of_other_types_are_refused(arrow_type):
    table = pa.table({"draw": [0], "sample": [0], "extra/x": pa.array([None], arrow_type)})
    with pytest.raises(BatchError, match="column 'extra/x' has the Arrow type"):
        Batch(table)


@pytest.mark.parametrize(("name", "arrow_type"), [("reward", pa.float32()), ("response_ids", pa.list_(pa.int32())), ("draw", pa.int32())])
def test_declared_columns_of_another_type_are_refused(name, arrow_type):
    values = {"draw": pa.array([0], pa.int64()), "sample": pa.array([0], pa.int64())}
    values[name] = pa.array([[1]] if pa.types.is_list(arrow_type) else [1], arrow_type)
    with pytest.raises(BatchError, match=f"column '{name}' has the Arrow type .* expected"):
        Batch(pa.table(values))
