"""Matrices in the layout that products with them are fastest in. Called by `fast.py`.

On CPUs matrices are packed once by oneDNN, for the instructions that the CPU has. In float32 products take 0.6 (8 rows) to 0.9 (256
rows) of the time of MKL, measured on a Zen 4 with matrices of 0.1 to 1.6 million numbers that do not stay in the caches; a small matrix is
left to MKL as [in, out], since a packed product costs 10 us more to call. In bfloat16 products of activations in float32 come back as such;
a CPU without instructions for it multiplies in float32, which is faster there than imitating them.

OneDNN makes code for each number of rows that it meets with a shape of matrix, half a MB, and keeps the last thousand. Products are
therefore taken in blocks of few different numbers of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F

_ROWS = 64  # of a block, and what oneDNN packs for
_PACKED_FROM = 1 << 17  # numbers of a matrix: what is smaller gains nothing


class Matrix(Protocol):
    """A linear map of rows [n, in], n at least 1."""

    width: int
    """out."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, out]."""
        ...

    def into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """The same, written to `out`."""
        ...

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """The same, added to `total`."""
        ...


def activation_format(weights: torch.dtype, device: torch.device) -> torch.dtype:
    """The number format of what is multiplied with weights of that format, and of keys and values: on CPUs float32."""
    return torch.float32 if device.type == "cpu" else weights


def make_matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    """x @ weight.t() + bias for a `weight` [out, in] and a `bias` [out]. Copies the weight, but for devices."""
    if weight.device.type != "cpu":
        return _Plain(weight.t(), bias)
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return _Packed(weight, bias)
    weight, bias = weight.float(), None if bias is None else bias.float()
    if weight.numel() >= _PACKED_FROM and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return _Packed(weight, bias)
    return _Plain(weight.t().contiguous(), bias)


class _Plain:
    def __init__(self, matrix: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._matrix, self._bias = matrix, bias
        self.width = matrix.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self._matrix) if self._bias is None else torch.addmm(self._bias, x, self._matrix)

    def into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        if self._bias is None:
            torch.mm(x, self._matrix, out=out)
        else:
            torch.addmm(self._bias, x, self._matrix, out=out)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        total.addmm_(x, self._matrix)
        if self._bias is not None:
            total.add_(self._bias)


class _Packed:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        operators: Any = torch.ops.mkldnn
        self._format = weight.dtype
        self._packed, self._bias = operators._reorder_linear_weight(weight.contiguous(), _ROWS), bias
        self._multiply = operators._linear_pointwise.default
        self.width = weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        products = [product for _, product in self._products(x)]
        return (products[0] if len(products) == 1 else torch.cat(products)).float()

    def into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        for rows, product in self._products(x):
            out[rows].copy_(product)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        for rows, product in self._products(x):
            total[rows].add_(product)

    def _products(self, x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Block by block: which rows, and their products."""
        for start in range(0, len(x), _ROWS):
            part = x[start : start + _ROWS].to(self._format)
            count = len(part)
            if spare := _filled(count) - count:
                part = F.pad(part, (0, 0, 0, spare))
            product = self._multiply(part, self._packed, self._bias, "none", [], "")
            yield slice(start, start + count), product[:count] if spare else product


def _filled(rows: int) -> int:
    """The number of rows that a block of so many is filled up to: 1, 2, 4, 8, and then each multiple of 8."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8
