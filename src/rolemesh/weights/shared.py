"""All buckets of a version in one file in a node's shared memory: written once by the actor, read or kept by every process of the node.

    actor            wipes all headers, then packs bucket after bucket; a header is the last thing written of each
    readers          wait for the header of the next bucket, and look at it again when they have read what is behind it

So nobody waits for a reader, and one that dies or stands still holds up nobody else. Who reads while another version is written, because
it was too late for its own, finds other headers and refuses. The kernel drops the writer's lock on the file with its process: readers see
that nothing more will come.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import time
from contextlib import suppress
from itertools import accumulate

import numpy as np

from rolemesh.errors import DeadlineExceeded, RolemeshError
from rolemesh.protocols.engine import LastingWeights
from rolemesh.weights.buckets import Buffer, WeightManifest, Weights, check_header, is_empty, is_written, unpack

_POLL_SECONDS = 0.0005
_LOOK_SECONDS = 0.05
"""How often a reader that waits looks whether there is still a writer."""


class SharedFile:
    """Memory that other processes of the node map with `SharedFile.open`, and that stays until its owner or the run's janitor removes it.

    It is reserved at once: raises RolemeshError where the node's shared memory has no room for it.
    """

    _descriptor = -1

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        with suppress(FileNotFoundError):  # of one that had this place before
            os.unlink(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            _reserve(self._descriptor, size, path)
            self._map(mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: str) -> SharedFile:
        """For reading, of another process. Raises OSError when there is none, or it is another user's."""
        file = cls.__new__(cls)
        file.path = path
        file._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(file._descriptor).st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")
            file._map(mmap.PROT_READ)
        except BaseException:
            file.close()
            raise
        return file

    def _map(self, protection: int) -> None:
        self._inode = os.fstat(self._descriptor).st_ino
        self._memory: Buffer = np.frombuffer(mmap.mmap(self._descriptor, 0, prot=protection), dtype=np.uint8)

    @property
    def size(self) -> int:
        return self._memory.nbytes

    def buckets(self, manifest: WeightManifest) -> list[Buffer]:
        """Where each bucket of a version lies."""
        ends = list(accumulate(bucket.nbytes for bucket in manifest.buckets))
        return [self._memory[end - bucket.nbytes : end] for end, bucket in zip(ends, manifest.buckets, strict=True)]

    @property
    def is_current(self) -> bool:
        """The file of this name is still the one that is mapped: its owner has not been replaced."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except FileNotFoundError:
            return False

    @property
    def has_writer(self) -> bool:
        """For a reader: the process that made it lives, and has not removed it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Let go of the file. Memory that is mapped stays until the last view of it is gone."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # the mapping keeps a descriptor of its own
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Take the file away; the memory stays as after `close`."""
        self.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def __del__(self) -> None:
        self.close()


class SharedWeights(LastingWeights):
    """One version as a process of the node reads it, bucket by bucket as they are written.

    Waits at most `deadline` seconds from now; `waiter` names the reader in what is raised then. Raises what `unpack` raises, and
    ConnectionAbortedError when the actor gives up or dies.
    """

    def __init__(self, file: SharedFile, manifest: WeightManifest, *, waiter: str, deadline: float) -> None:
        super().__init__(self._read())
        self._file, self._manifest, self._waiter = file, manifest, waiter
        self._seconds, self._ends = deadline, time.monotonic() + deadline
        self._buckets = file.buckets(manifest)

    @property
    def intact(self) -> bool:
        """Whether all of it is still there: false as soon as the actor begins to write something else in its place."""
        return all(is_written(self._manifest, number, buffer) for number, buffer in enumerate(self._buckets))

    def _read(self) -> Weights:
        for number, buffer in enumerate(self._buckets):
            self._wait(number, buffer)
            yield from unpack(self._manifest, number, buffer)
            check_header(self._manifest, 0, self._buckets[0])  # of whatever is written here, this is wiped first

    def _wait(self, number: int, buffer: Buffer) -> None:
        subject = f"bucket {number + 1} of {len(self._buckets)} of weight version {self._manifest.version} from the actor"
        look = time.monotonic() + _LOOK_SECONDS
        while is_empty(buffer):
            now = time.monotonic()
            if now > self._ends:
                raise DeadlineExceeded(waiter=self._waiter, subject=subject, seconds=self._seconds)
            if now > look:
                look = now + _LOOK_SECONDS
                if not self._file.has_writer:
                    raise ConnectionAbortedError(f"the actor's process is gone, {self._waiter} waited for {subject}; publish again")
            time.sleep(_POLL_SECONDS)


def _reserve(descriptor: int, size: int, path: str) -> None:
    """Without this, the first write beyond the last free page would kill the process."""
    free, cause = shutil.disk_usage(path).free, None
    if free >= size:
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            cause = error
    os.unlink(path)
    raise RolemeshError(
        text=f"publishing weights needs {size} bytes of shared memory for {path}, free are {free}. Make room there (a container's "
        "--shm-size), or let weights go through a folder: trainer.publish_folder"
    ) from cause
