"""What the beginning of a GGUF file says of its model: sizes, token ids, and which tensors there are. Used by `model_files`.

Read here in a few milliseconds, with nothing but the standard library, so that plans and checks need neither torch nor `gguf`; whoever
loads the weights leaves that to `transformers`. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
STRING: Final = 8
ARRAY: Final = 9
NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of `struct` by value type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata and table of tensors of one file."""

    values: dict[str, Any]
    """Metadata by key: numbers, texts and lists of numbers. A list of texts (the vocabulary) is given by its length."""
    tensors: dict[str, int]
    """Number of elements by the tensor's name."""
    least_bytes: int
    """The file must be longer than this to hold the beginning of every tensor."""

    @property
    def family(self) -> str:
        """Architecture, such as `llama`: the first part of the keys that give the sizes."""
        return str(self.values["general.architecture"])

    def size(self, key: str) -> Any:
        """The value of a key of the architecture, such as `block_count`; None without it, and the largest of one value for each layer."""
        found = self.values.get(f"{self.family}.{key}")
        return max(found, default=None) if isinstance(found, list) else found


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and table of tensors. Raises ValueError for a file that is no GGUF file or ends too early, and OSError."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).header()
            except (struct.error, IndexError) as error:
                raise ValueError("it ends before its own table of tensors does") from error


class _Reader:
    """A place in a file, and what lies there."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, len(MAGIC)

    def header(self) -> GgufHeader:
        version, tensors, entries = self._take("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, and {' and '.join(map(str, VERSIONS))} are known")
        values = {}
        for _ in range(entries):
            key = self._text()
            values[key] = self._value(self._number("I"))
        if "general.architecture" not in values:
            raise ValueError("it does not name its general.architecture")
        found = [self._tensor() for _ in range(tensors)]
        unit = int(values.get("general.alignment") or 32)
        start = -(-self._at // unit) * unit
        least = start + max(place for _, _, place in found) if found else 0
        return GgufHeader(values=values, tensors={name: size for name, size, _ in found}, least_bytes=least)

    def _tensor(self) -> tuple[str, int, int]:
        """(name, number of elements, place behind the beginning of the data)."""
        name = self._text()
        shape = self._take(f"{self._number('I')}Q")
        _, place = self._take("IQ")  # the first is the format of the numbers
        return name, math.prod(shape), place

    def _value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            return self._array(*self._take("IQ"))
        raise ValueError(f"it holds a value of the unknown type {kind}")

    def _array(self, kind: int, count: int) -> Any:
        if kind in NUMBERS:
            return list(self._take(f"{count}{NUMBERS[kind]}"))
        for _ in range(count):
            if kind == STRING:
                length = self._number("Q")
                self._at += length
            else:
                self._value(kind)
        return count

    def _text(self) -> str:
        length = self._number("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise IndexError
        return self._data[start : self._at].decode("utf-8", errors="replace")

    def _number(self, code: str) -> Any:
        return self._take(code)[0]

    def _take(self, codes: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{codes}", self._data, self._at)
        self._at += struct.calcsize(f"<{codes}")
        return found
