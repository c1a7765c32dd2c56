"""Weights of one version as a stream of buckets, and a manifest that says what lies where.

The actor packs bucket by bucket; the bytes travel by whatever route; who takes them over unpacks views of them without a copy. A reader
refuses a bucket that is cut, half-written, changed, out of turn, or of another version than its manifest. A number of a version may be used
again, by a publisher that was started anew or by another one: the manifest and each header also have a random number, the nonce, which is
another for other contents.

Layout of a bucket: a header of one alignment unit (magic, version, number, size, checksum, nonce), then each tensor at a multiple of
`ALIGNMENT` bytes, zeros between. The header is wiped before the first byte is written and completed after the last. The checksum is of one
64-bit word in every 4 KiB, which costs next to nothing and shows memory that was not written, or of all of them.
"""

from __future__ import annotations

import math
import secrets
import struct
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from rolemesh.errors import StaleWeights
from rolemesh.models.copying import copy_into

Buffer = npt.NDArray[np.uint8]
Weights = Iterator[tuple[str, torch.Tensor]]
"""Names and tensors, one after the other. A tensor is only valid until the next is asked for."""

Content = Literal["merged", "base", "adapter"]
"""What is published: the weights that an engine serves; or, of a model with an adapter, its own weights and those of the adapter apart,
or the latter alone, for who merges them itself (`models/lora.py`)."""

ALIGNMENT: Final = 64
"""Bytes; a cache line, and enough for any dtype and vector load."""

_HEADER: Final = struct.Struct("<8sqqqqq")
_MAGIC: Final = b"RMWGHT04"
_GIVEN_UP: Final = b"RMGIVNUP"
_PIECE: Final = 2**17
"""Numbers that are copied and summed at a time: their target fits into a processor's own cache."""
_SAMPLED: Final = 512
"""Every which word a sampled checksum sums: one a page."""


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


def new_nonce() -> int:
    """For a publication with contents of its own."""
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """All buckets of a version, in the order in which they come. Small and picklable."""

    version: int
    buckets: tuple[Bucket, ...]
    content: Content = "merged"
    shared: str = ""
    """File in the node's shared memory where they lie (see `SharedFile`), if they do."""
    folder: str = ""
    """Folder of files, one for each of them (see `disk.py`), if they are written there."""
    full: bool = False
    """Whether checksums are of every word."""
    nonce: int = field(default_factory=new_nonce)
    """Equal for publications with equal contents alone."""

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max(bucket.nbytes for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)


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
    Those in another format than the manifest says are cast, as `Tensor.to` does.

    They are taken one by one and need not all exist at a time. Raises ValueError for another name or shape than comes next in the
    manifest.
    """
    bucket = manifest.buckets[number]
    buffer = memory[: bucket.nbytes]
    wipe(buffer)
    flat = torch.from_numpy(buffer)
    words, sums = flat.view(torch.int64), torch.zeros((), dtype=torch.int64)
    for expected, view, offset in zip(bucket.names, _views(bucket, flat), bucket.offsets, strict=True):
        name, tensor = next(weights, ("nothing more", view))
        if name != expected:
            raise ValueError(f"weights must come in the order of the manifest: expected {expected}, found {name}")
        if tensor.shape != view.shape:
            raise ValueError(f"{name} must have the shape {list(view.shape)} of the manifest, found {list(tensor.shape)}")
        end = -(-(offset + view.nbytes) // ALIGNMENT) * ALIGNMENT
        flat[offset + view.nbytes : end] = 0
        if manifest.full:
            _copy_summing(view, tensor.detach(), words[offset // 8 : end // 8], sums)
        else:
            copy_into(view, tensor.detach())
    checksum = int(sums) if manifest.full else _checksum(flat, full=False)
    _write_header(buffer, _MAGIC, manifest.version, number, bucket.nbytes, checksum, manifest.nonce)
    return buffer


def _copy_summing(target: torch.Tensor, source: torch.Tensor, words: torch.Tensor, sums: torch.Tensor) -> None:
    """Copy piece by piece, and add each to `sums` while it is in the processor's cache. `words` are those of the target, with padding."""
    target, source, item = target.view(-1), source.reshape(-1), target.element_size()
    for begin in range(0, len(target), _PIECE):
        piece = slice(begin, begin + _PIECE)
        copy_into(target[piece], source[piece])
        sums += words[begin * item // 8 : -(-min(begin + _PIECE, len(target)) * item // 8)].sum()


def unpack(manifest: WeightManifest, number: int, buffer: Buffer) -> Weights:
    """Each name of bucket `number` with a view of its bytes in `buffer`, for reading only: other processes may share the memory.

    Everything is checked before the first view is given out. Raises ValueError when the bucket is cut or changed or another one, and
    StaleWeights when it is of another version than the manifest.
    """
    bucket, buffer = manifest.buckets[number], buffer[: manifest.buckets[number].nbytes]
    checksum = check_header(manifest, number, buffer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)  # shared memory is mapped read-only
        flat = torch.from_numpy(buffer)
    if checksum != _checksum(flat, manifest.full):
        what = _what(manifest, number)
        raise ValueError(f"{what} does not have the checksum that it was written with: it is half-written or was changed; publish again")
    return zip(bucket.names, _views(bucket, flat), strict=True)


def check_header(manifest: WeightManifest, number: int, buffer: Buffer) -> int:
    """The checksum that bucket `number` was written with. Raises ValueError for a bucket that is cut, half-written, another one or of
    another publication, StaleWeights for one of another version, and ConnectionAbortedError when the publication was given up."""
    bucket, what = manifest.buckets[number], _what(manifest, number)
    if buffer.nbytes != bucket.nbytes:
        raise ValueError(f"{what} must have {bucket.nbytes} bytes, found {buffer.nbytes}; publish again")
    magic, version, found, nbytes, checksum, nonce = _HEADER.unpack_from(buffer.data, 0)
    if magic == _GIVEN_UP:
        raise ConnectionAbortedError(f"weight version {version} was given up before {what}; publish again")
    if magic != _MAGIC:
        raise ValueError(f"{what} has no valid header: it is half-written, or holds no weights; publish again")
    if version != manifest.version:
        raise StaleWeights(where=what, holds=version, asked=manifest.version)
    if nonce != manifest.nonce:
        raise ValueError(f"{what} is of another publication than its manifest: two have used this number of a version; publish again")
    if found != number:
        raise ValueError(f"{what} must come next, found bucket {found + 1}: one is missing or came twice; publish again")
    if nbytes != bucket.nbytes:
        raise ValueError(f"{what} must have {bucket.nbytes} bytes, its header says {nbytes}; publish again")
    return int(checksum)


def is_written(manifest: WeightManifest, number: int, buffer: Buffer) -> bool:
    """Whether the header of bucket `number` says that it is whole, and of this version with these contents."""
    *head, _, nonce = _HEADER.unpack_from(buffer.data, 0)
    return [*head, nonce] == [_MAGIC, manifest.version, number, manifest.buckets[number].nbytes, manifest.nonce]


def wipe(buffer: Buffer) -> None:
    """Let a bucket hold nothing."""
    buffer[:ALIGNMENT] = 0


def give_up(manifest: WeightManifest, buffer: Buffer) -> None:
    """Tell who waits for a bucket that it will not come."""
    _write_header(buffer, _GIVEN_UP, manifest.version, 0, 0, 0, manifest.nonce)


def is_empty(buffer: Buffer) -> bool:
    """Whether nothing has been written into a bucket since it was wiped, or not all of it."""
    return not buffer[:8].view(np.int64)[0]


def _write_header(buffer: Buffer, magic: bytes, *numbers: int) -> None:
    """The first word last, at once: other processes look at it."""
    _HEADER.pack_into(buffer.data, 0, bytes(8), *numbers)
    buffer[:8].view(np.int64)[0] = int.from_bytes(magic, sys.byteorder)


def _what(manifest: WeightManifest, number: int) -> str:
    return f"bucket {number + 1} of {len(manifest.buckets)} of weight version {manifest.version}"


def _checksum(flat: torch.Tensor, full: bool) -> int:
    """Sum of the 64-bit words behind the header: as fast as memory is read, and different when any one of them is."""
    return int(flat[ALIGNMENT:].view(torch.int64)[:: 1 if full else _SAMPLED].sum())


def _views(bucket: Bucket, flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for dtype, shape, offset in zip(bucket.dtypes, bucket.shapes, bucket.offsets, strict=True):
        form: torch.dtype = getattr(torch, dtype)
        yield flat[offset : offset + math.prod(shape) * form.itemsize].view(form).view(shape)
