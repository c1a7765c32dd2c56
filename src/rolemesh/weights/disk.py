"""Weights of a version as files in a folder that all nodes see: each bucket is written once, by the actor, and read by every taker.

    RUN'S FOLDER/version-000012-9f3c01aa/
        model-00001-of-00003.safetensors    a bucket: its tensors without the zeros between them, its header among the metadata
        model.safetensors.index.json        written last: without it the version is not whole

A reader has the bucket in memory as it was packed, header and all, so what refuses a cut, stale or changed one is `unpack`, as for every
route. For others these are the files of a Hugging Face folder.

What is relied on is what NFS promises too (close-to-open): who opens a file after it was synced and closed reads what was written. So a
reader is told of a file only then; it opens each once, copies it and closes it. Nothing is mapped, locked or looked at while it is written:
between machines none of these is dependable, and a mapped file that is removed kills who reads it. A name is never used twice, not for a
repeated publication either, so no reader can have an older file, or the lack of one, in its cache.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from rolemesh.errors import RolemeshError
from rolemesh.models.formats import FORMATS
from rolemesh.weights.buckets import ALIGNMENT, Bucket, Buffer, WeightManifest, check_header

VISIBLE_SECONDS: Final = 10.0
"""How long a file that was written may take to appear on another machine, whose client may remember its folder without it."""
_INDEX: Final = "model.safetensors.index.json"
_HEADER = "rolemesh.bucket"
"""Key in a file's metadata: the bucket's header in hexadecimal digits."""
_ORDER: Final = [str(dtype).removeprefix("torch.") for dtype in FORMATS]


def new_name(version: int) -> str:
    """Of the folder of a version; no other publication has it."""
    return f"version-{version:06d}-{secrets.token_hex(4)}"


def file_name(manifest: WeightManifest, number: int) -> str:
    """Of bucket `number`, as Hugging Face names parts of a model."""
    return f"model-{number + 1:05d}-of-{len(manifest.buckets):05d}.safetensors"


class WrittenVersion:
    """The folder of one version, as who writes it sees it. There is one writer in a run's folder.

    Removes what other publications have left there but for the last whole one, `keep`, which readers from outside may have open. Raises
    RolemeshError where the run's folder is gone, is not writable or has too little room.
    """

    def __init__(self, manifest: WeightManifest, keep: Collection[str] = ()) -> None:
        self.folder, self._manifest = Path(manifest.folder), manifest
        with _told(f"publish weight version {manifest.version}", self.folder.parent):
            self._clear(keep)
            _check_room(self.folder.parent, manifest)
            self.folder.mkdir()

    def write(self, number: int, buffer: Buffer) -> None:
        """A bucket that was packed; after the last one the version is whole, and the one before it goes. Raises RolemeshError; nothing of
        the version stays then."""
        bucket, count = self._manifest.buckets[number], len(self._manifest.buckets)
        head = _head(bucket, bytes(buffer[:ALIGNMENT]))
        parts: list[bytes | memoryview] = [head, *(buffer[begin:end].data for _, begin, end in _pieces(bucket))]
        what = f"write bucket {number + 1} of {count} of weight version {self._manifest.version}, {sum(map(len, parts))} bytes,"
        try:
            with _told(what, self.folder):
                _write(self.folder / file_name(self._manifest, number), parts)
                if number == count - 1:
                    _write(self.folder / _INDEX, [self._index()])
        except RolemeshError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        if number == count - 1:
            self._clear([self.folder.name])

    def _index(self) -> bytes:
        manifest = self._manifest
        total = sum(end - begin for bucket in manifest.buckets for _, begin, end in _pieces(bucket))
        where = {name: file_name(manifest, number) for number, bucket in enumerate(manifest.buckets) for name in bucket.names}
        about = {"total_size": total, "version": manifest.version, "content": manifest.content}
        return json.dumps({"metadata": about, "weight_map": where}, indent=2).encode()

    def _clear(self, keep: Collection[str]) -> None:
        for path in self.folder.parent.glob("version-*"):
            if path.name not in keep:
                shutil.rmtree(path, ignore_errors=True)  # one that cannot be removed yet is tried again by the next version


class FileReader:
    """Reads the buckets of one version into memory of its own, one at a time. `waiter` names the reader in what is raised."""

    def __init__(self, manifest: WeightManifest, *, waiter: str) -> None:
        self._manifest, self._waiter, self._folder = manifest, waiter, Path(manifest.folder)
        self._memory: Buffer = np.empty(manifest.largest, dtype=np.uint8)

    def read(self, number: int) -> Buffer:
        """Bucket `number` as it was packed, in memory that the next one takes over. Raises RolemeshError where its file does not appear or
        cannot be read, ValueError for one that is cut or of another publication, and what `check_header` raises."""
        bucket, path = self._manifest.buckets[number], self._folder / file_name(self._manifest, number)
        buffer, head = self._memory[: bucket.nbytes], _head(bucket, bytes(ALIGNMENT))
        pieces = list(_pieces(bucket))
        size = len(head) + sum(end - begin for _, begin, end in pieces)
        with _told(f"read {path.name} for {self._waiter}", self._folder), self._open(path) as file:
            if (found := os.fstat(file.fileno()).st_size) != size:
                raise ValueError(f"{path} must have {size} bytes, found {found}: it is half-written, or another file; publish again")
            text = file.read(len(head))
            buffer[:ALIGNMENT] = np.frombuffer(_header_of(text, path), dtype=np.uint8)
            check_header(self._manifest, number, buffer)
            if text != _head(bucket, bytes(buffer[:ALIGNMENT])):
                raise ValueError(f"{path} does not have the tensors of its manifest: it was changed; publish again")
            for _, begin, end in pieces:
                if (count := file.readinto(buffer[begin:end].data)) != end - begin:
                    raise ValueError(f"{path} has lost {end - begin - count} bytes while it was read; publish again")
                buffer[end : -(-end // ALIGNMENT) * ALIGNMENT] = 0
        return buffer

    def _open(self, path: Path) -> BufferedReader:
        if not _appears(path):
            raise RolemeshError(
                text=f"{self._waiter} does not see {path}, which the actor has written, after {VISIBLE_SECONDS:g} s: its node has another "
                "file system there, or somebody has removed it. trainer.publish_folder must be one that all nodes share"
            )
        return path.open("rb")


# -- proof that all nodes see the folder ----------------------------------------------------------------------------------------


def leave_token(folder: str) -> tuple[str, str]:
    """(token, "") once a file with it lies in the folder, or ("", what is wrong)."""
    token = secrets.token_hex(16)
    try:
        for path in Path(folder).glob("token-*"):
            path.unlink(missing_ok=True)
        _write(Path(folder) / f"token-{token}", [token.encode()])
    except OSError as error:
        return "", f"{type(error).__name__}: {error}"
    return token, ""


def find_token(folder: str, token: str) -> str:
    """Empty where the file of `leave_token` appears and says the same; else what is wrong."""
    path = Path(folder) / f"token-{token}"
    try:
        if not _appears(path):
            return f"{path} is not there after {VISIBLE_SECONDS:g} s"
        found = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if found == token else f"{path} holds {found[:40]!r}"


# -- files -----------------------------------------------------------------------------------------------------------------------


@contextmanager
def _told(what: str, folder: Path) -> Iterator[None]:
    """Say of an error of the file system what could not be done, and how much room there is."""
    try:
        yield
    except OSError as error:
        free = ""
        with suppress(OSError):
            free = f"; free there are {shutil.disk_usage(folder).free} bytes"
        text = f"could not {what} in {folder}: {type(error).__name__}: {error}{free}"
        raise RolemeshError(text=f"{text}. See to trainer.publish_folder, which all nodes must be able to use") from error


def _appears(path: Path) -> bool:
    ends = time.monotonic() + VISIBLE_SECONDS
    while not path.exists():
        if time.monotonic() > ends:
            return False
        with suppress(OSError):
            os.listdir(path.parent)  # a network file system's client asks anew for a folder that is opened, and forgets what it lacked
        time.sleep(0.05)
    return True


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """A file that has its name once all of it is where others read it."""
    hidden = path.with_name(f".{path.name}.part")
    with hidden.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())  # a server tells here, or when the file is closed, that it has no room
    hidden.rename(path)


def _pieces(bucket: Bucket) -> Iterator[tuple[int, int, int]]:
    """(number, begin, end) in the bucket of each tensor, in their order in the file: the widest first, as safetensors files have them."""
    for number in sorted(range(len(bucket.names)), key=lambda number: _ORDER.index(bucket.dtypes[number])):
        dtype: torch.dtype = getattr(torch, bucket.dtypes[number])
        begin = bucket.offsets[number]
        yield number, begin, begin + math.prod(bucket.shapes[number]) * dtype.itemsize


def _head(bucket: Bucket, header: bytes) -> bytes:
    """What a safetensors file begins with: where each tensor lies behind it."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt", _HEADER: header.hex()}}
    end = 0
    for number, first, last in _pieces(bucket):
        begin, end = end, end + last - first
        form = FORMATS[getattr(torch, bucket.dtypes[number])]
        head[bucket.names[number]] = {"dtype": form, "shape": list(bucket.shapes[number]), "data_offsets": [begin, end]}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _header_of(text: bytes, path: Path) -> bytes:
    """The bucket's header in the head of a file."""
    try:
        header = bytes.fromhex(json.loads(text[8:])["__metadata__"][_HEADER])
    except (ValueError, KeyError, TypeError):
        header = b""
    if len(header) != ALIGNMENT:
        raise ValueError(f"{path} does not begin as a file of a publication does: it is half-written, or another file; publish again")
    return header


def _check_room(folder: Path, manifest: WeightManifest) -> None:
    room = shutil.disk_usage(folder)
    if room.total and room.free < manifest.nbytes:  # some file systems do not say
        raise RolemeshError(
            text=f"publishing weight version {manifest.version} needs {manifest.nbytes} bytes in {folder}, free are {room.free}. Make room "
            "there for two versions at a time, or set trainer.publish_folder to a folder that has it"
        )
