"""Attention over packed rows: the rows of a micro-batch lie one behind the other, without padding, and each attends to itself alone.

Rows of similar length are computed side by side (`Bucket`): one call of the kernel for each row would cost more than the padding that
is left, and rows of equal length need neither. Used by the engines of this package.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME: Final = "rolemesh_packed"
"""Of the attention in transformers' registry."""
PLAIN: Final = "sdpa"
"""Attention that models are loaded with."""
SHORTEST_SHARE: Final = 0.75
"""Rows share a bucket while the shortest has this share of the longest."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring rows that are computed side by side, padded to the longest of them."""

    start: int
    stop: int
    """Their tokens among the packed ones."""
    rows: int
    width: int
    spread: Tensor | None
    """[rows * width] int64: the token, counted from `start`, at each place; None where all rows have the full width."""
    collect: Tensor | None
    """[stop - start] int64: the place of each token."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the rows of a packed micro-batch lie."""

    position_ids: Tensor
    """[1, N] int64: each token's place in its row."""
    buckets: tuple[Bucket, ...]
    ends: Tensor
    """[B + 1] int32: where rows begin and end, for kernels that take rows of any length."""
    longest: int

    @classmethod
    def of(cls, lengths: Ints, device: torch.device) -> Self:
        """Rows of these lengths (all above 0) in this order, which should be descending."""
        ends = np.concatenate(([0], np.cumsum(lengths)))
        places = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
        return cls(
            position_ids=torch.from_numpy(places)[None].to(device),
            buckets=tuple(_bucket(lengths[first:last], int(ends[first]), device) for first, last in _cuts(lengths)),
            ends=torch.from_numpy(ends.astype(np.int32)).to(device),
            longest=int(lengths.max(initial=0)),
        )


def _cuts(lengths: Ints) -> Iterator[tuple[int, int]]:
    """(first, last + 1) row of each bucket."""
    first = 0
    while first < len(lengths):
        fits = (lengths[first:] >= SHORTEST_SHARE * lengths[first]) & (lengths[first:] <= lengths[first])
        last = first + (len(fits) if fits.all() else int(fits.argmin()))
        yield first, last
        first = last


def _bucket(lengths: Ints, start: int, device: torch.device) -> Bucket:
    rows, width, total = len(lengths), int(lengths[0]), int(lengths.sum())
    if total == rows * width:
        return Bucket(start, start + total, rows, width, None, None)
    row = np.repeat(np.arange(rows), lengths)
    begins = np.cumsum(lengths) - lengths
    collect = row * width + np.arange(total) - begins[row]
    spread = np.repeat(begins, width)  # places without a token read the row's first: causal, so no real one ever sees them
    spread[collect] = np.arange(total)
    on_device = (torch.from_numpy(array).to(device) for array in (spread, collect))
    return Bucket(start, start + total, rows, width, *on_device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a causal model as transformers calls it: query, key and value [B, heads, N, D] to [B, N, heads, D].

    With `packing` B is 1, and each packed row attends to itself; without it each of the B rows does.
    """
    if packing is None:
        return _attend(module, query, key, value, window=sliding_window, scaling=scaling, **kwargs), None
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))  # [N, heads, D]
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen(q, k, v, packing, sliding_window, scaling)[None], None
    found = []
    for bucket in packing.buckets:
        rows = (_side_by_side(part[bucket.start : bucket.stop], bucket) for part in (q, k, v))
        out = _attend(module, *rows, window=sliding_window, scaling=scaling, **kwargs).flatten(0, 1)
        found.append(out if bucket.collect is None else out.index_select(0, bucket.collect))
    return torch.cat(found)[None], None


def _side_by_side(tokens: Tensor, bucket: Bucket) -> Tensor:
    """[n, heads, D] to [rows, heads, width, D]."""
    spread = tokens if bucket.spread is None else tokens.index_select(0, bucket.spread)
    return spread.view(bucket.rows, bucket.width, *spread.shape[1:]).transpose(1, 2)


def _attend(module: nn.Module, *rows: Tensor, window: int | None, **kwargs: Any) -> Tensor:
    mask, width, device = None, rows[0].shape[2], rows[0].device
    if window is not None and window < width:
        at = torch.arange(width, device=device)
        distance = at[:, None] - at[None, :]
        mask = ((distance >= 0) & (distance < window))[None, None]
    return cast(Tensor, sdpa_attention_forward(module, *rows, mask, **kwargs)[0])


def _varlen(query: Tensor, key: Tensor, value: Tensor, packing: Packing, window: int | None, scaling: float | None) -> Tensor:
    """The kernel for rows of any length, on GPUs in half precision. Not run yet, see docs/gpu.md."""
    from torch.nn.attention.varlen import varlen_attn

    found = varlen_attn(
        query, key, value, packing.ends, packing.ends, packing.longest, packing.longest,
        scale=scaling, window_size=(-1 if window is None else window - 1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return cast(Tensor, found)


AttentionInterface.register(NAME, packed_attention)


def use_packed_attention(model: nn.Module) -> bool:
    """Put packed attention into a model of transformers, which then takes `packing` and `position_ids`. False where it computes another
    attention than `sdpa`, which cannot be replaced, or does not hand such arguments on."""
    if getattr(cast(Any, model).config, "_attn_implementation", None) != PLAIN:
        return False
    parameters = inspect.signature(cast(Any, model).base_model.forward).parameters
    if "position_ids" not in parameters or all(one.kind is not one.VAR_KEYWORD for one in parameters.values()):
        return False
    cast(Any, model).set_attn_implementation(NAME)
    return bool(cast(Any, model).config._attn_implementation == NAME)


def use_plain_attention(model: nn.Module) -> None:
    """Back to what models are loaded with."""
    cast(Any, model).set_attn_implementation(PLAIN)
