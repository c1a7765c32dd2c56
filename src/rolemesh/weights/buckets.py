"""Weights of one version as a stream of buckets, and a manifest that says what lies where.

The actor packs bucket by bucket; the bytes travel by whatever route; who takes them over unpacks views of them without a copy. A reader
refuses a bucket that is cut, half-written, changed, out of turn, or of another version than its manifest.

Layout of a bucket: a header of one alignment unit (magic, version, number, size, checksum), then each tensor at a multiple of `ALIGNMENT`
bytes, zeros between. The header is wiped before the first byte is written and completed after the last.
"""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from rolemesh.errors import StaleWeights

Buffer = npt.NDArray[np.uint8]
Weights = Iterator[tuple[str, torch.Tensor]]
"""Names and tensors, one after the other. A tensor is only valid until the next is asked for."""

ALIGNMENT: Final = 64
"""Bytes; a cache line, and enough for any dtype and vector load."""

_HEADER: Final = struct.Struct("<8sqqqq")
_MAGIC: Final = b"RMWGHT02"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What a bucket holds; entry i of every tuple describes its tensor i."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Torch names without the prefix, such as `bfloat16`."""
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    """Bytes from the start of the bucket."""
    nbytes: int
    """Size of the bucket, header and all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """All buckets of a version, in the order in which they come. Small and picklable."""

    version: int
    buckets: tuple[Bucket, ...]
    shared: str = ""
    """File in the node's shared memory where they appear in turn (see `Ring`), if they do."""

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max(bucket.nbytes for bucket in self.buckets)


def plan_buckets(forms: Iterable[tuple[str, torch.Tensor]], limit: int) -> tuple[Bucket, ...]:
    """Divide tensors, of which only names, shapes and formats count, into buckets of at most `limit` bytes; a larger tensor has one of its
    own. There is at least one bucket. Raises ValueError for a name given twice."""
    buckets: list[list[tuple[str, torch.Tensor, int]]] = [[]]
    end, seen = ALIGNMENT, set[str]()
    for name, form in forms:
        if name in seen:
            raise ValueError(f"each weight must be given once, found twice: {name}")
        seen.add(name)
        room = -(-form.numel() * form.element_size() // ALIGNMENT) * ALIGNMENT
        if buckets[-1] and end + room > limit:
            buckets.append([])
            end = ALIGNMENT
        buckets[-1].append((name, form, end))
        end += room
    return tuple(map(_bucket, buckets))


def _bucket(entries: list[tuple[str, torch.Tensor, int]]) -> Bucket:
    ends = (offset + form.numel() * form.element_size() for _, form, offset in entries)
    return Bucket(
        names=tuple(name for name, _, _ in entries),
        dtypes=tuple(str(form.dtype).removeprefix("torch.") for _, form, _ in entries),
        shapes=tuple(tuple(form.shape) for _, form, _ in entries),
        offsets=tuple(offset for _, _, offset in entries),
        nbytes=-(-max(ends, default=ALIGNMENT) // ALIGNMENT) * ALIGNMENT,
    )


def pack(manifest: WeightManifest, number: int, weights: Weights, memory: Buffer) -> Buffer:
    """Copy the next tensors (any device and layout), those of bucket `number`, to the beginning of `memory`, and return that part of it.

    They are taken one by one and need not all exist at a time. Raises ValueError for another name than comes next in the manifest.
    """
    bucket = manifest.buckets[number]
    buffer = memory[: bucket.nbytes]
    buffer[:ALIGNMENT] = 0
    flat, end = torch.from_numpy(buffer), ALIGNMENT
    for expected, view, offset in zip(bucket.names, _views(bucket, flat), bucket.offsets, strict=True):
        name, tensor = next(weights, ("nothing more", view))
        if name != expected:
            raise ValueError(f"weights must come in the order of the manifest: expected {expected}, found {name}")
        flat[end:offset] = 0
        view.copy_(tensor.detach())
        end = offset + view.nbytes
    flat[end:] = 0
    _HEADER.pack_into(buffer.data, 0, _MAGIC, manifest.version, number, bucket.nbytes, _checksum(flat))
    return buffer


def unpack(manifest: WeightManifest, number: int, buffer: Buffer) -> Weights:
    """Each name of bucket `number` with a view of its bytes in `buffer`, for reading only: other processes may share the memory.

    Everything is checked before the first view is given out. Raises ValueError when the bucket is cut or changed or another one, and
    StaleWeights when it is of another version than the manifest.
    """
    bucket, count = manifest.buckets[number], len(manifest.buckets)
    what = f"bucket {number + 1} of {count} of weight version {manifest.version}"
    buffer = buffer[: bucket.nbytes]
    if buffer.nbytes != bucket.nbytes:
        raise ValueError(f"{what} must have {bucket.nbytes} bytes, found {buffer.nbytes}; publish again")
    magic, version, found, nbytes, checksum = _HEADER.unpack_from(buffer.data, 0)
    if magic != _MAGIC:
        raise ValueError(f"{what} has no valid header: it is half-written, or holds no weights; publish again")
    if version != manifest.version:
        raise StaleWeights(where=what, holds=version, asked=manifest.version)
    if found != number:
        raise ValueError(f"{what} must come next, found bucket {found + 1}: one is missing or came twice; publish again")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)  # shared memory is mapped read-only
        flat = torch.from_numpy(buffer)
    if nbytes != bucket.nbytes or checksum != _checksum(flat):
        raise ValueError(f"{what} does not have the checksum that it was written with: it is half-written or was changed; publish again")
    return zip(bucket.names, _views(bucket, flat), strict=True)


def _checksum(flat: torch.Tensor) -> int:
    """Sum of all 64-bit words behind the header: as fast as memory is read, and different when any one word is."""
    return int(flat[ALIGNMENT:].view(torch.int64).sum())


def _views(bucket: Bucket, flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for dtype, shape, offset in zip(bucket.dtypes, bucket.shapes, bucket.offsets, strict=True):
        form: torch.dtype = getattr(torch, dtype)
        yield flat[offset : offset + math.prod(shape) * form.itemsize].view(form).view(shape)
