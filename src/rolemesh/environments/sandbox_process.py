"""The process that model-written code comes from, and the confined processes themselves. `sandbox.py` starts it and talks to it.

It is a fresh interpreter with nothing of the run in its memory or environment, and forks a process for each program: within milliseconds,
from the same state every time, so that nothing passes from one program to the next. It ends, with all of them, when its socket closes.
"""

from __future__ import annotations

import ast
import gc
import importlib
import os
import random
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from rolemesh.environments.confinement import CannotConfine, confine, library_paths
from rolemesh.rewards.system import be_first_to_go, die_with, signal_name
from rolemesh.rewards.wire import CHUNK, Inbox, frame

SECONDS: Final = 20.0
"""That a program may take by the clock: more than of processor time, as others compute beside it."""
CPU_SECONDS: Final = 5
"""Of processor time that it may take."""
MEMORY_MIB: Final = 512
"""That it may take beyond what Python itself and the preloaded packages do."""
OUTPUT_BYTES: Final = 8192
"""Of output that are kept; a program that writes more is ended."""
PRELOADED: Final = ("numpy", "numpy.random", "numpy.linalg", "sympy")
"""Packages that are imported ahead, where they are installed: each program would need seconds for them."""
ERROR_BYTES: Final = 1000
DESCRIPTORS: Final = 64
NICENESS: Final = 5
"""Whoever trains or generates goes first."""
_FILE: Final = "<code>"
_NOT_CONFINED: Final = 3
"""Exit status of a process that could not give up its rights, and has run nothing."""


def main(descriptor: int, *, preload: bool) -> None:
    """Be the keeper, who talks through the socket with this descriptor."""
    for name in PRELOADED if preload else ():
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that collections in forked processes copy no shared pages
    os.nice(NICENESS)
    with socket.socket(fileno=descriptor) as control:
        Keeper(control).serve()


@dataclass(slots=True, eq=False)
class _Program:
    """One that runs. Times are readings of a monotonic clock."""

    id: int
    pid: int
    ended: int
    """Descriptor that can be read when the process has ended."""
    output: int
    verdict: int
    """What it raised: separate, so that it is known however long the output is."""
    began: float
    outcome: str = ""
    """Why it was killed: `timeout` or `cut`."""
    texts: dict[int, bytearray] = field(default_factory=dict)
    """What came from each pipe."""


class Keeper:
    """Runs programs that come through the socket, all at once (who asks keeps to a number), and answers each when it has ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._inbox = control, Inbox()
        self._selector = selectors.DefaultSelector()
        self._programs: dict[int, _Program] = {}
        self._readable = library_paths()

    def serve(self) -> None:
        """Until the other side is gone. The programs end with this process (`die_with`)."""
        self._selector.register(self._control, selectors.EVENT_READ)
        self._control.sendall(frame({"ready": os.getpid()}))
        with suppress(ConnectionError):
            while self._turn():
                pass

    def _turn(self) -> bool:
        now = time.monotonic()
        due = [program.began + SECONDS - now for program in self._programs.values() if not program.outcome]
        for key, _ in self._selector.select(max(0.0, min(due, default=60.0))):
            if key.fileobj is self._control:
                data = self._control.recv(CHUNK)
                if not data:
                    return False
                self._inbox.feed(data)
                for message in self._inbox.take():
                    self._obey(message)
            elif key.data.id in self._programs:
                self._hear(key.data, key.fd)
        now = time.monotonic()
        for program in self._programs.values():
            if not program.outcome and now > program.began + SECONDS:
                self._kill(program, "timeout")
        return True

    def _obey(self, message: Mapping[str, Any]) -> None:
        if "end" in message:
            if (program := self._programs.get(message["end"])) is not None:
                self._kill(program, "timeout")
            return
        try:
            program = self._start(message["id"], message["code"])
        except OSError as error:
            self._control.sendall(frame({"id": message["id"], "outcome": "failed", "output": "", "error": f"cannot fork: {error}"}))
            return
        self._programs[program.id] = program
        for descriptor in (program.ended, program.output, program.verdict):
            self._selector.register(descriptor, selectors.EVENT_READ, program)

    def _start(self, number: int, code: str) -> _Program:
        output, verdict = os.pipe(), os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_program(code, output[1], verdict[1], parent, self._readable)
        for ours, theirs in (output, verdict):
            os.close(theirs)
            os.set_blocking(ours, False)
        return _Program(
            id=number, pid=pid, ended=os.pidfd_open(pid), output=output[0], verdict=verdict[0], began=time.monotonic(),
            texts={output[0]: bytearray(), verdict[0]: bytearray()},
        )  # fmt: skip

    def _hear(self, program: _Program, descriptor: int) -> None:
        if descriptor != program.ended:
            self._read(program, descriptor)
            return
        for pipe in (program.output, program.verdict):
            self._read(program, pipe)
        _, status, usage = os.wait4(program.pid, 0)
        for one in (program.ended, program.output, program.verdict):
            with suppress(KeyError):
                self._selector.unregister(one)
            os.close(one)
        del self._programs[program.id]
        self._control.sendall(frame({"id": program.id, **_result(program, status, usage)}))

    def _read(self, program: _Program, descriptor: int) -> None:
        """What a pipe holds; beyond what is kept it ends the program."""
        text = program.texts[descriptor]
        most = OUTPUT_BYTES if descriptor == program.output else ERROR_BYTES
        with suppress(BlockingIOError):
            while data := os.read(descriptor, CHUNK):
                text += data[: most + 1 - len(text)]
                if len(text) > most and not program.outcome:
                    self._kill(program, "cut")
            with suppress(KeyError):
                self._selector.unregister(descriptor)

    def _kill(self, program: _Program, outcome: str) -> None:
        program.outcome = outcome
        os.kill(program.pid, signal.SIGKILL)  # not reaped yet, so that the id is still its own


def _result(program: _Program, status: int, usage: resource.struct_rusage) -> dict[str, str]:
    """How it ended: `ok`, `error`, `timeout`, `cut`, or `failed` where the sandbox is to blame."""
    kept = bytes(program.texts[program.output][:OUTPUT_BYTES])
    # A character that is cut in its middle is left out, which only bytes at the end can be.
    output, error = kept.decode(errors="replace"), bytes(program.texts[program.verdict]).decode(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    outcome = program.outcome or "ok"
    if len(program.texts[program.output]) > OUTPUT_BYTES:
        outcome, error, output = "cut", "", kept.decode(errors="ignore")
    elif not program.outcome:
        if code == _NOT_CONFINED:
            outcome = "failed"
        elif code in (-signal.SIGKILL, -signal.SIGXCPU) and usage.ru_utime + usage.ru_stime >= CPU_SECONDS - 0.5:
            outcome = "timeout"
        elif code or error:
            how = f"the program was ended by {signal_name(-code)}" if code < 0 else f"exit code {code}"
            outcome, error = "error", error or how
    return {"outcome": outcome, "output": output, "error": error}


# -- in the process of a program ----------------------------------------------------------------------------------------------------


def _be_program(code: str, output: int, verdict: int, parent: int, readable: list[str]) -> NoReturn:
    """Confined from here on. The exit status is 0, 1 where the code raised something, or `_NOT_CONFINED`."""
    status = _NOT_CONFINED
    try:
        os.setsid()
        die_with(parent)
        be_first_to_go()
        _leave_descriptors(output, verdict)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the life of the process
        sys.stdout = sys.stderr = open(1, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.path[:] = [path for path in sys.path if path.startswith(tuple(readable))]
        os.environ.clear()
        confine(readable, memory_bytes=MEMORY_MIB * 2**20, cpu_seconds=CPU_SECONDS, descriptors=DESCRIPTORS)
        status = 1 if (error := _run(code)) else 0
        os.write(3, error.encode(errors="backslashreplace")[:ERROR_BYTES])
    except (CannotConfine, OSError) as error:
        with suppress(OSError):
            os.write(3, str(error).encode()[:ERROR_BYTES])
    finally:
        os._exit(status)  # never back into what the keeper does


def _leave_descriptors(output: int, verdict: int) -> None:
    """Keep nothing that the keeper has open: 0 is empty, 1 and 2 are the output, 3 what was raised."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    high = [os.dup(one) for one in (nothing, output, output, verdict)]
    for place, one in enumerate(high):
        os.dup2(one, place)
    os.closerange(len(high), os.sysconf("SC_OPEN_MAX"))


def _run(code: str) -> str:
    """Run it as a script, and show the value of an expression at its end as an interpreter would. Returns what it raised, or nothing."""
    random.seed(0)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(0)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        body = ast.parse(code, _FILE).body
        last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
        for part, mode in ((ast.Module(body, []), "exec"), (ast.Interactive(last), "single")):
            exec(compile(part, _FILE, mode, dont_inherit=True), module.__dict__)
    except SystemExit as error:
        return "" if error.code in (None, 0) else f"SystemExit: {error.code}"
    except BaseException as error:  # noqa: BLE001 - the program's own, which it is told
        return _describe(error)
    finally:
        with suppress(Exception):
            sys.stdout.flush()
    return ""


def _describe(error: BaseException) -> str:
    """Its type, text and line of the program."""
    if isinstance(error, SyntaxError) and error.filename == _FILE:
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == _FILE]
    text = traceback.format_exception_only(error)[-1].strip()
    return f"{text} (line {lines[-1]})" if lines else text
