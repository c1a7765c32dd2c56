"""Memory for two buckets, so that one is written while the other is read: private, or shared by the processes of a node."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import numpy as np

from rolemesh.errors import RolemeshError
from rolemesh.weights.buckets import Buffer

SLOTS = 2


class Ring:
    """Bucket n lies in slot n % 2. Whoever drives a publication sees to it that all have read bucket n before n + 2 is written.

    With a `path` it is a file that other processes map with `Ring.open`, and that stays until its owner or the run's janitor removes it.
    The memory is reserved at once: raises RolemeshError where the node's shared memory has no room for it.
    """

    def __init__(self, slot_bytes: int, path: str = "") -> None:
        self.slot_bytes, self.path, self.inode = slot_bytes, path, 0
        if not path:
            self._memory = np.empty(SLOTS * slot_bytes, dtype=np.uint8)
            return
        with suppress(FileNotFoundError):  # of one that had this place before
            os.unlink(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(descriptor, SLOTS * slot_bytes, path)
            self._map(descriptor, writing=True)
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: str) -> Ring:
        """For reading, of another process. Raises OSError when there is none, or it is another user's."""
        ring = cls.__new__(cls)
        ring.path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")
            ring._map(descriptor, writing=False)
        finally:
            os.close(descriptor)
        ring.slot_bytes = ring._memory.nbytes // SLOTS
        return ring

    def _map(self, descriptor: int, *, writing: bool) -> None:
        self.inode = os.fstat(descriptor).st_ino
        self._memory = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writing else 0)), dtype=np.uint8)

    def slot(self, number: int) -> Buffer:
        """Where bucket `number` lies."""
        first = number % SLOTS * self.slot_bytes
        return self._memory[first : first + self.slot_bytes]

    @property
    def is_current(self) -> bool:
        """The file of this name is still the one that is mapped: its owner has not been replaced."""
        try:
            return os.stat(self.path).st_ino == self.inode
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Take the file away; memory that is mapped stays until the last lets go of it."""
        if self.path:
            with suppress(FileNotFoundError):
                os.unlink(self.path)


def _reserve(descriptor: int, size: int, path: str) -> None:
    """Without this, the first write beyond the last free page would kill the process."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.unlink(path)
        found = os.statvfs(os.path.dirname(path))
        free = found.f_bavail * found.f_frsize
        raise RolemeshError(
            text=f"publishing weights needs {size} bytes of shared memory for {path}, free are {free}. Make room there (a container's "
            "--shm-size), or lower trainer.bucket_mib"
        ) from error
