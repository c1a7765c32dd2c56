"""Columns of a batch as torch tensors: the edge where torch begins. Called by the workers that compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rolemesh.batch.batch import Batch
from rolemesh.batch.columns import RAGGED_KINDS, Kind
from rolemesh.errors import BatchError

if TYPE_CHECKING:
    import torch

Layout = Literal["padded", "packed"]

_TYPES: dict[Kind, type[np.generic]] = {
    "tokens": np.int64,
    "token_floats": np.float32,
    "int": np.int64,
    "float": np.float32,
    "bool": np.bool_,
}


def tensors(batch: Batch, names: Iterable[str], layout: Layout = "padded", pad_value: float = 0) -> dict[str, torch.Tensor]:
    """Columns as CPU tensors in memory of their own: changing one in place changes neither the batch nor any other reader.

    Integers become int64 (what indexing takes), floats float32 (what losses are computed in), bools bool. Scalar columns: [N], null
    floats NaN. Ragged columns, by `layout`:

    - ``padded``: [N, longest row], padded on the right with `pad_value`, and `<name>/lengths` int64 [N]
    - ``packed``: flat [sum of lengths], and `<name>/offsets` int64 [N + 1] from 0

    Raises BatchError for an unknown layout, missing columns, strings and binary, and nulls among ints and bools.
    """
    import torch

    if layout not in get_args(Layout):
        raise BatchError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r}")
    found: dict[str, NDArray[Any]] = {}
    for name in names:
        kind = batch.kind(name)
        if kind not in _TYPES:
            raise BatchError(f"column {name!r} is of kind {kind} and cannot become a tensor")
        if kind not in RAGGED_KINDS:
            found[name] = np.asarray(batch.scalars(name)).astype(_TYPES[kind], copy=False)
            continue
        values, offsets = batch.ragged(name)
        if layout == "packed":
            found |= {name: values.astype(_TYPES[kind], copy=False), f"{name}/offsets": offsets}
        else:
            lengths = np.diff(offsets)
            found |= {name: _padded(values, lengths, pad_value, _TYPES[kind]), f"{name}/lengths": lengths}
    return {name: torch.from_numpy(array) for name, array in found.items()}


def _padded(values: NDArray[Any], lengths: NDArray[np.int64], pad_value: float, dtype: type[np.generic]) -> NDArray[Any]:
    width = int(lengths.max(initial=0))
    padded = np.full((len(lengths), width), pad_value, dtype=dtype)
    padded[np.arange(width) < lengths[:, None]] = values
    return padded
