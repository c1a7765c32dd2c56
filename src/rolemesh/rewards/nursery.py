"""The nursery: a process that imports the reward functions once and from which scoring processes are forked within milliseconds.

The pool starts it (`rewards/link.py`) as a fresh interpreter, so it inherits neither threads nor Ray nor torch, and commands it through
a socket; it ends, with all that came from it, when that socket closes. It is the parent of the scoring processes: it alone signals and
reaps them, so a process id is never mistaken for another's.

If an import leaves threads running, forking would not be safe; then each scoring process is a fresh interpreter that imports for itself.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

from rolemesh.errors import ConfigError
from rolemesh.protocols.task import load_task
from rolemesh.rewards.functions import FunctionSpec, ScoringFunctions
from rolemesh.rewards.process import live
from rolemesh.rewards.system import adopt_orphans, children, kill_group, own_resident_bytes, signal_name
from rolemesh.rewards.wire import frame

COMMAND: Final = struct.Struct("!cI")
"""START (with the descriptor of a stream) or KILL, and the number of the scoring process."""
START: Final = b"s"
KILL: Final = b"k"
BOOT: Final = (
    "import importlib, json, sys; setup = json.load(sys.stdin); sys.path[:] = setup['path']; "
    "getattr(importlib.import_module('rolemesh.rewards.nursery'), sys.argv[1])(setup, int(sys.argv[2]))"
)
"""Program of a fresh interpreter: `be_nursery` or `be_scoring_process`, told on its standard input where to import from and what."""
ENDING_SECONDS: Final = 3.0
"""How long the nursery tries to end what came from it before it ends itself."""


def command_line(entry: str, descriptor: int) -> list[str]:
    """How to start BOOT. -P: the working directory counts only if it did where the pool was made."""
    return [sys.executable, "-P", "-c", BOOT, entry, str(descriptor)]


def be_nursery(setup: Mapping[str, Any], descriptor: int) -> None:
    """The nursery from its start to its end."""
    control = socket.socket(fileno=descriptor)
    _leave_stdin()
    try:
        functions = _import_watched(setup, control)
    except ConfigError as error:
        control.sendall(frame({"problems": [asdict(problem) for problem in error.problems]}))
    except BaseException as error:  # foreign code is imported here
        control.sendall(frame({"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}))
        raise
    else:
        Nursery(control, setup, functions).serve()


def be_scoring_process(setup: Mapping[str, Any], descriptor: int) -> None:
    """A scoring process that was not forked: it imports for itself."""
    parent = os.getppid()
    _leave_stdin()
    live(socket.socket(fileno=descriptor), _import(setup), parent)


def _leave_stdin() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _import(setup: Mapping[str, Any]) -> ScoringFunctions:
    specs = [FunctionSpec(name=name, options=load_task(options), deadline=deadline) for name, options, deadline in setup["functions"]]
    functions = ScoringFunctions(specs)
    functions.prepare()
    return functions


def _import_watched(setup: Mapping[str, Any], control: socket.socket) -> ScoringFunctions:
    """Import, and end at once if the pool goes away meanwhile: it says nothing before we are ready, so what can be read is its end."""
    done, stop = socket.socketpair()

    def watch() -> None:
        if control in select.select([control, done], [], [])[0]:
            os._exit(1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return _import(setup)
    finally:
        stop.close()
        watcher.join()
        done.close()


class Nursery:
    """Starts, ends and reaps scoring processes on command, and reports each end."""

    def __init__(self, control: socket.socket, setup: Mapping[str, Any], functions: ScoringFunctions) -> None:
        self._control, self._setup, self._functions = control, setup, functions
        self._numbers: dict[int, int] = {}
        """Number of each living scoring process by process id."""
        self._pool = os.getppid()
        self._forks = threading.active_count() == 1
        self._wakeup, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._wakeup.setblocking(False)

    def serve(self) -> None:
        """Until the pool is gone."""
        adopt_orphans()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()  # so that collections in forked processes copy no shared pages
        self._tell({"held": own_resident_bytes(), "asynchronous": self._functions.asynchronous})
        try:
            while os.getppid() == self._pool:
                readable, _, _ = select.select([self._control, self._wakeup], [], [], 1.0)
                self._reap()
                if self._control in readable and not self._obey():
                    break
        except ConnectionError:
            pass  # the pool went away while we told it something
        finally:
            self._end_all()

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._control.sendall(frame(message))

    def _obey(self) -> bool:
        """Run one command; False when there will be no more."""
        data, descriptors, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
        while data and len(data) < COMMAND.size:
            data += self._control.recv(COMMAND.size - len(data))
        if not data:
            return False
        order, number = COMMAND.unpack(data)
        if order == KILL:
            for pid in [pid for pid, known in self._numbers.items() if known == number]:
                kill_group(pid)
            return True
        os.set_inheritable(descriptors[0], False)
        with socket.socket(fileno=descriptors[0]) as stream:
            try:
                self._numbers[self._fork(stream) if self._forks else self._spawn(stream)] = number
            except OSError as error:
                self._tell({"ended": number, "how": f"could not be started: {error}"})
        return True

    def _fork(self, stream: socket.socket) -> int:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for mine in (self._control, self._wakeup, self._waker):
                mine.close()
            live(stream, self._functions, parent)
        return pid

    def _spawn(self, stream: socket.socket) -> int:
        with tempfile.TemporaryFile("w+") as setup:
            json.dump(self._setup, setup)
            setup.seek(0)
            stream.set_inheritable(True)
            duplicate = [(os.POSIX_SPAWN_DUP2, setup.fileno(), 0)]
            return os.posix_spawn(
                sys.executable,
                command_line("be_scoring_process", stream.fileno()),
                os.environ,
                file_actions=duplicate,
                setsigdef=[signal.SIGCHLD],
            )

    def _reap(self) -> None:
        """Take note of ended processes. What one leaves behind is ended too: its group, and descendants that are now our children."""
        with suppress(BlockingIOError):
            self._wakeup.recv(4096)
        ended = {}
        while (info := self._next_ended()) is not None:
            if info.si_pid in self._numbers:
                kill_group(info.si_pid)  # its id is not free for others before it is reaped
            pid, status = os.waitpid(info.si_pid, 0)
            if pid in self._numbers:
                ended[self._numbers.pop(pid)] = status
        if ended:
            self._end_strays()
        for number, status in ended.items():
            self._tell({"ended": number, "how": _how_it_ended(status)})

    @staticmethod
    def _next_ended() -> os.waitid_result | None:
        try:
            return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None

    def _end_strays(self) -> None:
        for pid in children():
            if pid not in self._numbers:
                kill_group(pid)

    def _end_all(self) -> None:
        """End every process that came from here; the sweeps go on until nothing appears any more."""
        ends = time.monotonic() + ENDING_SECONDS
        while (left := children()) and time.monotonic() < ends:
            for pid in left:
                kill_group(pid)
            while (info := self._next_ended()) is not None:
                os.waitpid(info.si_pid, 0)
            time.sleep(0.005)


def _how_it_ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    name = signal_name(-code)
    if name == "SIGKILL":
        return "SIGKILL (the kernel sends it when memory is short)"
    return name
