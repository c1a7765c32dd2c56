"""Columns with one number for each response token, and the column that a batch may lack."""

from __future__ import annotations

import numpy as np
import pytest

from rolemesh.batch import Batch, BatchRef, assemble, block_meta
from rolemesh.batch.columns import readable
from rolemesh.batch.tokens import refuse_nonfinite, sampled_tokens, token_column
from rolemesh.errors import BatchError


def rows(**columns) -> Batch:
    return Batch.from_columns({"draw": [4, 9], "sample": [0, 1], "response_ids": [[1, 2], [3]]} | columns)


def test_numbers_of_all_tokens_row_after_row():
    assert token_column(rows(values=[[0.5, 1.5], [2.5]]), "values").tolist() == [0.5, 1.5, 2.5]


def test_row_with_too_many_or_too_few_is_named():
    with pytest.raises(BatchError, match=r"row \(draw 9, sample 1\) has 0 values for 1 response_ids"):
        token_column(rows(values=[[0.5, 1.5], []]), "values")


def test_all_tokens_are_sampled_unless_a_mask_says_otherwise():
    assert sampled_tokens(rows()).tolist() == [True, True, True]
    assert sampled_tokens(rows(response_mask=[[0, 1], [1]])).tolist() == [False, True, True]
    assert sampled_tokens(rows(values=[[0.5, 1.5], [2.5]]), "values").tolist() == [True, True, True]
    with pytest.raises(BatchError, match=r"has 1 response_mask for 2 response_ids"):
        sampled_tokens(rows(response_mask=[[1], [1]]))


def test_number_that_is_not_finite_is_named_with_its_row():
    refuse_nonfinite(rows(), "values", np.array([1.0, 2.0]), np.array([0, 1]))
    with pytest.raises(BatchError, match=r"values of row \(draw 9, sample 1\) holds inf"):
        refuse_nonfinite(rows(), "values", np.array([1.0, np.inf]), np.array([0, 1]))


@pytest.mark.parametrize("masked", [False, True])
def test_optional_column_is_read_where_there_is_one(masked: bool):
    batch = rows(response_mask=[[1, 0], [1]]) if masked else rows()
    refs, assembly = BatchRef.from_blocks([("block", block_meta(batch))]).assembly(("response_ids", "response_mask"))
    assert refs == ["block"]
    assert assemble(assembly, [batch]).equals(batch)


def test_readable_leaves_out_ids_and_absent_optional_columns_alone():
    reads = ("draw", "response_ids", "response_mask", "values")
    assert readable(reads, ["response_ids"]) == ("response_ids", "values")  # a missing column that is not optional is for others to refuse
    assert readable(reads, ["response_mask"]) == ("response_ids", "response_mask", "values")


def test_other_columns_that_are_missing_are_still_refused():
    batch = rows()
    with pytest.raises(BatchError, match=r"no column 'values' \(written by critic\)"):
        BatchRef.from_blocks([("block", block_meta(batch))]).assembly(("response_mask", "values"))
