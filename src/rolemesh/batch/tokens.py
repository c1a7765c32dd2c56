"""Columns with one number for each response token, checked against each other. Called by algorithms and train engines."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rolemesh.batch.batch import Batch
from rolemesh.batch.rows import describe
from rolemesh.errors import BatchError

MASK: Final = "response_mask"


def token_column(batch: Batch, name: str, like: str = "response_ids") -> NDArray[Any]:
    """The numbers of a ragged column, row after row [T]. Raises BatchError, naming the row, where it has more or fewer than `like`."""
    values, offsets = batch.ragged(name)
    lengths, expected = np.diff(offsets), batch.lengths(like)
    wrong = np.flatnonzero(lengths != expected)
    if len(wrong):
        row = wrong[0]
        raise BatchError(
            f"row {describe(batch.ids[row])} has {lengths[row]} {name} for {expected[row]} {like}; "
            "there must be one for each token of the response"
        )
    return values


def sampled_tokens(batch: Batch, like: str = "response_ids") -> NDArray[np.bool_]:
    """Which of the response tokens the policy sampled, row after row [T]: `response_mask` where the batch has it, else all.

    `like` is a column with one entry for each response token. Everything that leaves out tokens asks here, so that no two masks differ.
    """
    if MASK not in batch.names:
        return np.ones(int(batch.lengths(like).sum()), dtype=np.bool_)
    return token_column(batch, MASK, like).astype(np.bool_)


def refuse_nonfinite(batch: Batch, name: str, values: NDArray[Any], row: NDArray[np.int64]) -> None:
    """Raise BatchError naming the first row when one of `values` [K] of column `name` is no finite number; `row` [K] says whose it is."""
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise BatchError(
            f"{name} of row {describe(batch.ids[row[wrong[0]]])} holds {values[wrong[0]]}, expected finite numbers; "
            "look at the engine or model that made them"
        )
