"""What a process may no longer do before it runs code that a model wrote: Linux only, and without any privilege. Called by
`sandbox_process.py`, in the process itself.

Three mechanisms, since none is enough alone: resource limits bound memory and processor time; Landlock opens no file but those of Python's
own libraries, for reading; a seccomp filter refuses sockets, new processes, other programs, and all that reaches other processes or
outlives this one. None can be undone, by whatever the process does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

_MACHINES: Final = ("x86_64", "aarch64")
"""Numbers that differ between them stand side by side, in this order; None is a call that there is not."""
_PR_SET_SECCOMP: Final = 22
_PR_SET_NO_NEW_PRIVS: Final = 38
_SECCOMP_MODE_FILTER: Final = 2
_LANDLOCK: Final = (444, 445, 446)
"""System calls, the same on all architectures: create a ruleset, add a rule, restrict oneself."""
_CAPSET: Final = (126, 91)
_CAPABILITY_VERSION_3: Final = 0x20080522
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_ACCESS_BY_ABI: Final = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All that Landlock can refuse of files, by the version that brought it."""

_AUDIT_ARCH: Final = (0xC000003E, 0xC00000B7)
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE: Final = _ERRNO | errno.EPERM
_Step = tuple[int, int, int, int]
"""Of a filter's program: operation, steps to skip if true, if false, value."""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
"""Offsets in what a filter looks at."""
_X32_BIT: Final = 0x40000000
_CLONE_THREAD: Final = 0x10000
_OWNER_COMMANDS: Final = (8, 10, 15)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX: have the kernel signal another process."""

_REFUSED: Final[dict[str, tuple[int, int | None]]] = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "io_uring_setup": (425, 425),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "setrlimit": (160, 164), "prlimit64": (302, 261), "setpriority": (141, 140), "ioprio_set": (251, 30), "setpgid": (109, 154),
    "setsid": (112, 157), "prctl": (157, 167),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "truncate": (76, 45),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
}  # fmt: skip
_LOOKED_AT: Final = {"clone": (56, 220), "clone3": (435, 435), "kill": (62, 129), "tgkill": (234, 131), "fcntl": (72, 25)}
"""Refused or not by their arguments."""


class CannotConfine(Exception):
    """This system lacks a part of it; the text says which."""


def library_paths() -> list[str]:
    """What confined code may read: Python's libraries, what is installed beside them, and shared libraries."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    shared = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/urandom"]
    return sorted({path for path in (*own, f"{sys.base_prefix}/lib", *shared) if path and os.path.exists(path)})


def confine(readable: Iterable[str], *, memory_bytes: int, cpu_seconds: int, descriptors: int) -> None:
    """Give up everything else, for good. `memory_bytes` is beyond what the process has now. Raises CannotConfine; the process must end
    then, as it may be half way."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        raise CannotConfine(f"Linux on {' or '.join(_MACHINES)}, found {sys.platform} on {platform.machine()}")
    machine = _MACHINES.index(platform.machine())
    libc = ctypes.CDLL(None, use_errno=True)
    _limit(memory_bytes, cpu_seconds, descriptors)
    _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1, 0, "the kernel's no_new_privs")
    _restrict_files(libc, readable)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _called(libc.syscall(_CAPSET[machine], header, bytes(24)), "giving up capabilities")  # of the superuser of a container
    _install(libc, _filter(machine, os.getpid()))


def _limit(memory_bytes: int, cpu_seconds: int, descriptors: int) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for what, most in (
        (resource.RLIMIT_AS, held + memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, descriptors),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _restrict_files(libc: ctypes.CDLL, readable: Iterable[str]) -> None:
    create, add, restrict = _LANDLOCK
    version = libc.syscall(create, None, 0, 1)
    if version < 1:
        raise CannotConfine(f"Landlock, in Linux from 5.13 on where it is switched on: {os.strerror(ctypes.get_errno())}")
    handled = _ACCESS_BY_ABI[max(abi for abi in _ACCESS_BY_ABI if abi <= version)]
    ruleset = _called(libc.syscall(create, struct.pack("=Q", handled), 8, 0), "a Landlock ruleset")
    for path in readable:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        _called(libc.syscall(add, ruleset, 1, struct.pack("=Qi", allowed, parent), 0), f"a Landlock rule for {path}")
        os.close(parent)
    _called(libc.syscall(restrict, ruleset, 0), "restriction by Landlock")
    os.close(ruleset)


def _install(libc: ctypes.CDLL, steps: Iterable[_Step]) -> None:
    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    code = [struct.pack("=HBBI", *step) for step in steps]
    program = Program(len(code), b"".join(code))
    _prctl(libc, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), "a seccomp filter")


def _filter(machine: int, pid: int) -> Iterator[_Step]:
    """The filter's program. `machine` is the place in `_MACHINES`."""
    special = {name: numbers[machine] for name, numbers in _LOOKED_AT.items()}
    yield _LOAD, 0, 0, _ARCH
    yield _EQUAL, 1, 0, _AUDIT_ARCH[machine]
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    if _MACHINES[machine] == "x86_64":
        yield _AT_LEAST, 0, 1, _X32_BIT
        yield _RETURN, 0, 0, _REFUSE
    yield from _answer([special["clone3"]], errno.ENOSYS)  # its flags cannot be seen; the C library then uses clone
    refused = [number for numbers in _REFUSED.values() if (number := numbers[machine]) is not None]
    yield from _answer(refused, errno.EPERM)
    for name in ("kill", "tgkill"):  # itself alone
        yield from _by_argument(special[name], 0, _EQUAL, [pid])
    yield from _by_argument(special["clone"], 0, _ANY_BIT, [_CLONE_THREAD])
    yield from _by_argument(special["fcntl"], 1, _EQUAL, _OWNER_COMMANDS, refuses=True)
    yield _RETURN, 0, 0, _ALLOW


def _answer(numbers: Iterable[int], error: int) -> Iterator[_Step]:
    for number in numbers:
        yield _EQUAL, 0, 1, number
        yield _RETURN, 0, 0, _ERRNO | error


def _by_argument(number: int, argument: int, test: int, values: Sequence[int], *, refuses: bool = False) -> Iterator[_Step]:
    """Allow the call where the low word of its argument meets the test with one of the values, and refuse it else (`refuses`: the other
    way round)."""
    met, unmet = (_REFUSE, _ALLOW) if refuses else (_ALLOW, _REFUSE)
    yield _EQUAL, 0, len(values) + 3, number
    yield _LOAD, 0, 0, _ARGUMENTS + 8 * argument
    for place, value in enumerate(values):
        yield test, len(values) - place, 0, value
    yield _RETURN, 0, 0, unmet
    yield _RETURN, 0, 0, met


def _prctl(libc: ctypes.CDLL, option: int, second: int, third: object, what: str) -> None:
    _called(libc.prctl(option, second, third, 0, 0), what)


def _called(result: int, what: str) -> int:
    if result < 0:
        raise CannotConfine(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result
