"""What scoring processes ask of the operating system. Each function does nothing where the system cannot (all but Linux)."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

_LINUX: Final = sys.platform == "linux"
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def die_with(parent: int) -> None:
    """End this process at once when `parent`, which has started it, ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before this was set


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found and ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def be_first_to_go() -> None:
    """When the machine runs out of memory, the kernel shall end this process and not one that trains. Leave no core file either."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def kill_group(pid: int) -> None:
    """SIGKILL a process and the process group that it leads, if it does (and is not ours)."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) != os.getpgrp():
            os.killpg(os.getpgid(pid), signal.SIGKILL)


def children() -> list[int]:
    """Process ids of the children of this process, zombies included."""
    return [child.pid for child in psutil.Process().children()]


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants; 0 when it is gone."""
    return sum(_resident(member) for member in (pid, *_descendants(pid)))


def own_resident_bytes() -> int:
    """Resident memory of this process alone."""
    return _resident(os.getpid())


def _resident(pid: int) -> int:
    try:
        if _LINUX:  # many times faster than psutil, and asked often
            return int(_read(f"/proc/{pid}/statm").split()[1]) * _PAGE
        return int(psutil.Process(pid).memory_info().rss)
    except (OSError, IndexError, psutil.Error):
        return 0


def _read(path: str) -> bytes:
    """A small file of the kernel, at a tenth of the cost of a file object."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)


def _descendants(pid: int) -> Iterator[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        found = [child for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()]
    except OSError:
        return
    for child in found:
        yield int(child)
        yield from _descendants(int(child))


def signal_name(number: int) -> str:
    """`SIGSEGV`, or the number of a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
