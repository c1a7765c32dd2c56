"""Files of whole tensors that several ranks write together and read in parts: safetensors, as its specification says.

Where a tensor lies in such a file follows from the names, formats and shapes of all of them, which every rank knows. So each rank writes
its own blocks in their places, nothing is gathered anywhere, and the file is one that everybody reads: transformers a model, and ranks of
any other layout their parts. A file for each rank would need an index, and a merge before anybody else could read it.

Ranks write with `pwrite` into a file opened for writing alone: pages of a memory map, which are written as a whole, would carry old bytes
of other ranks over a network file system.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import safe_open
from torch import Tensor

from rolemesh.engines.train.layout import Part
from rolemesh.errors import DeadlineExceeded
from rolemesh.models.formats import FORMATS

COPY_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True)
class Block:
    """What a rank writes of a tensor."""

    part: Part
    dtype: torch.dtype
    contents: Callable[[], Tensor]
    """Gives them, of the part's shape, when they are copied or written."""

    @classmethod
    def of(cls, part: Part, tensor: Tensor) -> Self:
        """One with contents that are there."""
        return cls(part, tensor.dtype, lambda: tensor)


class TensorFile:
    """A file to be written: every rank makes one with the same names, formats and whole shapes, and its own blocks."""

    def __init__(self, blocks: Mapping[str, Block], *, leads: bool) -> None:
        """Of several ranks one leads: it writes the head of the file. Raises ValueError for a number format that the file has not."""
        self._blocks, self._leads = blocks, leads
        if foreign := {block.dtype for block in blocks.values()} - FORMATS.keys():
            raise ValueError(f"tensors in {', '.join(map(str, foreign))} cannot be saved; formats are {', '.join(FORMATS.values())}")
        order = list(FORMATS)  # the widest first, so that every number lies at a multiple of its size
        self._offsets, end, head = dict[str, int](), 0, dict[str, Any](__metadata__={"format": "pt"})
        for name, block in sorted(blocks.items(), key=lambda item: (order.index(item[1].dtype), item[0])):
            begin, end = end, end + math.prod(block.part.whole) * block.dtype.itemsize
            head[name] = {"dtype": FORMATS[block.dtype], "shape": block.part.whole, "data_offsets": (begin, end)}
            self._offsets[name] = begin
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self.size = len(self._head) + end
        """Bytes of the whole file."""

    @classmethod
    def of_whole(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Of a rank that has everything."""
        return cls({name: Block.of(Part.all_of(tuple(tensor.shape)), tensor) for name, tensor in tensors.items()}, leads=True)

    def snapshot(self) -> TensorFile:
        """The same with copies of the blocks in host memory, which later steps do not change."""
        found = copy.copy(self)
        found._blocks = {name: Block.of(block.part, block.contents().to("cpu", copy=True)) for name, block in self._blocks.items()}
        return found

    def write(self, path: Path) -> None:
        """Write and sync this rank's blocks. The file is complete when all ranks have done so. Raises OSError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, self.size)
            if self._leads:
                _write(descriptor, memoryview(self._head), 0)
            for name, block in self._blocks.items():
                data = block.contents().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                for offset, begin, end in runs(block.part, block.dtype.itemsize):
                    _write(descriptor, data[begin:end], len(self._head) + self._offsets[name] + offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Copying:
    """Whether a thread still copies tensors for a file: they are changed in place only when it is done."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.end()

    def begin(self) -> None:
        self.wait()
        self._done.clear()

    def end(self) -> None:
        self._done.set()

    def wait(self) -> None:
        """Raises DeadlineExceeded when the thread takes too long."""
        if not self._done.wait(COPY_SECONDS):
            raise DeadlineExceeded(waiter="a change of weights", subject="the copy of them for a checkpoint", seconds=COPY_SECONDS)


def runs(part: Part, item: int) -> Iterator[tuple[int, int, int]]:
    """(where in the whole tensor, begin and end in the block) of the pieces of a block that lie in one, in bytes; `item` is those of one
    number."""
    cut = [dim for dim, (size, whole) in enumerate(zip(part.shape, part.whole, strict=True)) if size != whole]
    last = cut[-1] if cut else 0  # behind this dimension everything is whole
    length = math.prod(part.shape[last:]) * item
    if not length:
        return
    strides = [math.prod(part.whole[dim + 1 :]) * item for dim in range(len(part.whole))]
    outer = itertools.product(*(range(start, start + size) for start, size in zip(part.start[:last], part.shape[:last], strict=True)))
    for number, index in enumerate(outer):
        place = sum(at * stride for at, stride in zip((*index, *part.start[last : last + 1]), strides, strict=False))
        yield place, number * length, (number + 1) * length


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


class StoredTensor:
    """A tensor in a file, of which parts can be read."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        self.shape = torch.Size(file.get_slice(name).get_shape())

    def __getitem__(self, index: Any, /) -> Tensor:
        whole = index is ... or not self.shape
        found: Tensor = self._file.get_tensor(self._name) if whole else self._file.get_slice(self._name)[index]
        return found


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name; nothing is read yet. Raises OSError, and SafetensorError for another kind of file."""
    file: Any = safe_open(path, framework="pt")
    return {name: StoredTensor(file, name) for name in file.keys()}  # noqa: SIM118 - no mapping
