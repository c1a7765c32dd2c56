"""Files that stay readable when the process dies at any moment: whole files are replaced, JSON lines are appended one by one.

Used by the run directory, the event log and the sinks; checkpoints and the plan use `write_text` for their small files too.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self


def write_text(path: Path, text: str) -> None:
    """Replace the file as a whole: a reader, or a run after a crash, sees the old text or the new one and never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make names that were created, renamed or removed in a folder survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON."""
    write_text(path, json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """The value as plain JSON data. Numbers that are not finite, which JSON does not know, and foreign objects become text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, numbers.Integral):  # numpy's, for instance
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return [plain(item) for item in value]
    return str(value)


class Closing:
    """What is closed at the end of a `with` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines(Closing):
    """A file of one JSON object a line, opened for appending; each line reaches the operating system before `write` returns.

    A last line without its end, left by a crash in mid-write, is cut off first, so that the next line does not run into it. With `sync`
    each line is on disk before `write` returns.
    """

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        self._file: IO[bytes] = path.open("a+b")
        self._sync = sync
        self._file.seek(0)
        self._file.truncate(sum(len(line) for line in self._file if line.endswith(b"\n")))

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(plain(record), allow_nan=False).encode() + b"\n")
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a `JsonLines` file; empty when there is no file. A last line without its end is not counted as one."""
    if not path.exists():
        return []
    complete, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in complete.splitlines() if line]
