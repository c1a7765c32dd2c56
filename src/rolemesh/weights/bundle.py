"""All weights of one version as one flat buffer, and a manifest that says what lies where.

The actor packs, the buffer travels as numpy bytes (shared memory inside a node, the object store across nodes), and each rollout
worker unpacks views of it without a copy. A reader refuses a buffer that is cut, changed, or of another version than its manifest:
weights are served whole or not at all.

Layout: a header of one alignment unit (magic, version, size), then each tensor at a multiple of `ALIGNMENT` bytes, zeros between.
"""

from __future__ import annotations

import math
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from rolemesh.errors import StaleWeights

Buffer = npt.NDArray[np.uint8]

ALIGNMENT: Final = 64
"""Bytes; a cache line, and enough for any dtype and vector load."""

_HEADER: Final = struct.Struct("<8sqq")
_MAGIC: Final = b"RMWGHT01"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """What a buffer holds. Small and picklable; entry i of every tuple describes tensor i."""

    version: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Torch names without the prefix, such as `bfloat16`."""
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    """Bytes from the start of the buffer. Tied tensors share one."""
    nbytes: int
    """Size of the whole buffer."""
    checksum: int | None
    """CRC-32 of the whole buffer, None when it was not asked for."""


def pack(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    version: int,
    *,
    checksum: bool = True,
    like: Iterable[tuple[str, torch.Tensor]] | None = None,
) -> tuple[WeightManifest, Buffer]:
    """Copy tensors (any device, dtype and layout) into one new buffer.

    Names of the same memory (tied weights) are all listed, the bytes are there once. With `like`, tensors of the same names, shapes and
    formats but perhaps without contents, the given ones are taken one by one and need not all exist at a time. Raises ValueError for a
    repeated name, or one that is not in `like`.
    """
    given = list(named_tensors) if like is None else named_tensors
    forms = list(given if like is None else like)
    names = tuple(name for name, _ in forms)
    if len(set(names)) != len(names):
        raise ValueError(f"each weight must be given once, found twice: {sorted({name for name in names if names.count(name) > 1})}")
    offsets, nbytes = _offsets([form for _, form in forms])
    buffer = np.zeros(nbytes, dtype=np.uint8)
    flat = torch.from_numpy(buffer)
    for (name, tensor), (expected, form), offset in zip(given, forms, offsets, strict=True):
        if name != expected:
            raise ValueError(f"weights must come in the order of `like`: expected {expected}, found {name}")
        _view(flat, offset, form.dtype, tuple(form.shape)).copy_(tensor.detach())
    _HEADER.pack_into(buffer.data, 0, _MAGIC, version, nbytes)
    manifest = WeightManifest(
        version=version,
        names=names,
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in forms),
        shapes=tuple(tuple(tensor.shape) for _, tensor in forms),
        offsets=offsets,
        nbytes=nbytes,
        checksum=zlib.crc32(buffer.data) if checksum else None,
    )
    return manifest, buffer


def unpack(manifest: WeightManifest, buffer: Buffer, *, verify_checksum: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Each name with a view of its bytes in `buffer`. The views are for reading only: the memory may be shared with other processes.

    The buffer is checked before the first view is given out. Raises ValueError when it is cut or its bytes have changed (a half-written
    buffer), StaleWeights when it holds another version than the manifest.
    """
    verify(manifest, buffer, checksum=verify_checksum)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)  # shared memory is mapped read-only
        flat = torch.from_numpy(buffer)
    entries = zip(manifest.names, manifest.offsets, manifest.dtypes, manifest.shapes, strict=True)
    return ((name, _view(flat, offset, getattr(torch, dtype), shape)) for name, offset, dtype, shape in entries)


def verify(manifest: WeightManifest, buffer: Buffer, *, checksum: bool = True) -> None:
    """Check that `buffer` is the one that `manifest` describes: size, header and, where there is one and it is wanted, checksum."""
    what = f"buffer of weight version {manifest.version}"
    if buffer.nbytes != manifest.nbytes:
        raise ValueError(f"{what} must have {manifest.nbytes} bytes, found {buffer.nbytes}; send it again")
    magic, version, nbytes = _HEADER.unpack_from(buffer.data, 0)
    if magic != _MAGIC or nbytes != manifest.nbytes:
        raise ValueError(f"{what} has no valid header: it is half-written, or no weights; send it again")
    if version != manifest.version:
        raise StaleWeights(where="weight buffer", holds=version, asked=manifest.version)
    if checksum and manifest.checksum is not None and (found := zlib.crc32(buffer.data)) != manifest.checksum:
        raise ValueError(
            f"{what} must have checksum {manifest.checksum:#010x}, found {found:#010x}: it is half-written or was changed; send it again"
        )


def _offsets(tensors: list[torch.Tensor]) -> tuple[tuple[int, ...], int]:
    """Place of each tensor, the same for tensors of the same memory, and the size of the whole."""
    end = ALIGNMENT
    placed: dict[tuple[object, ...], int] = {}
    offsets = []
    for tensor in tensors:
        place = id(tensor) if tensor.is_meta else tensor.data_ptr()
        memory = (tensor.device, place, tensor.dtype, tuple(tensor.shape), tensor.stride())
        if memory not in placed:
            placed[memory] = end
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        offsets.append(placed[memory])
    return tuple(offsets), end


def _view(flat: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return flat[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
