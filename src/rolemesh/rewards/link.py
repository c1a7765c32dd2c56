"""The pool's end of the nursery: start it, command it, hear from it, end it. Called by `rewards.pool`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from rolemesh.errors import ConfigError, Problem, RolemeshError
from rolemesh.protocols.task import dump_task
from rolemesh.rewards.functions import FunctionSpec
from rolemesh.rewards.nursery import COMMAND, ENDING_SECONDS, KILL, START, command_line
from rolemesh.rewards.system import signal_name
from rolemesh.rewards.wire import CHUNK, Inbox

START_SECONDS: Final = 240.0
"""How long importing the functions may take, and starting one scoring process."""
ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""There is a process for each CPU already; and forking is safe only without threads. What the user has set stays."""


class ScoringPoolError(RolemeshError):
    """Scoring processes cannot be started. Says what happened; the log of the worker has what they printed."""

    exit_code = 4

    def __init__(self, text: str) -> None:
        super().__init__(text=text)


class NurseryLink:
    """A running nursery that has imported the functions. Ends with `close`, or when nothing refers to it any more.

    Raises ConfigError when a function cannot be found, ScoringPoolError when importing fails otherwise or takes too long.
    """

    def __init__(self, specs: Sequence[FunctionSpec]) -> None:
        self._names = ", ".join(spec.name for spec in specs)
        self._inbox = Inbox()
        setup = {
            "path": [entry or os.getcwd() for entry in sys.path],
            "functions": [[spec.name, _dump_options(part, spec), spec.deadline] for part, spec in enumerate(specs)],
        }
        self.control, theirs = socket.socketpair()
        with theirs:
            self._process = _start(setup, theirs)
        self._finalizer = weakref.finalize(self, _end, self._process, self.control)
        try:
            ready = self._hello()
        except BaseException:
            self.close()
            raise
        self.held: int = ready["held"]
        """Resident memory of a process that has imported the functions and done nothing yet."""
        self.asynchronous: list[bool] = ready["asynchronous"]
        """For each part, whether its function is asynchronous."""

    def _hello(self) -> dict[str, Any]:
        """Its first message: ready, or why not."""
        ends = time.monotonic() + START_SECONDS
        while not (messages := self._inbox.take()):
            self.control.settimeout(max(ends - time.monotonic(), 0.001))
            try:
                data = self.control.recv(CHUNK)
            except TimeoutError:
                raise ScoringPoolError(f"importing {self._names} took more than {START_SECONDS:g} s") from None
            if not data:
                raise ScoringPoolError(f"importing {self._names} ended the process: {self._how_it_ended()}")
            self._inbox.feed(data)
        self.control.setblocking(False)
        hello: dict[str, Any] = messages[0]
        if "problems" in hello:
            raise ConfigError(problems=[Problem(**fields) for fields in hello["problems"]])
        if "failed" in hello:
            raise ScoringPoolError(f"importing {self._names} failed: {hello['failed']}\n{hello['traceback']}")
        return hello

    def start(self, number: int) -> socket.socket:
        """Have a scoring process made; returns our end of the stream to it. Raises OSError when the nursery is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [COMMAND.pack(START, number)], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        return ours

    def kill(self, number: int) -> None:
        """Have a scoring process killed with its process group. Its end is reported, unless the nursery is gone."""
        with suppress(OSError):
            self.control.send(COMMAND.pack(KILL, number))

    def hear(self) -> list[dict[str, Any]] | None:
        """What it reported since the last call, without waiting; None when it is gone."""
        try:
            while data := self.control.recv(CHUNK):
                self._inbox.feed(data)
        except BlockingIOError:
            return self._inbox.take()
        except ConnectionError:
            return None
        return None

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(ENDING_SECONDS)
            return signal_name(-code) if code < 0 else f"exit code {code}"
        return "it closed its socket"

    def close(self) -> None:
        """End the nursery and all that came from it, within seconds."""
        self._finalizer()


def _start(setup: Mapping[str, Any], theirs: socket.socket) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile("w+") as file:
        json.dump(setup, file)
        file.seek(0)
        return subprocess.Popen(
            command_line("be_nursery", theirs.fileno()),
            stdin=file,
            pass_fds=[theirs.fileno()],
            env=dict.fromkeys(ONE_THREAD, "1") | dict(os.environ),
            start_new_session=True,
        )


def _dump_options(part: int, spec: FunctionSpec) -> str | None:
    try:
        return dump_task(spec.options)
    except TypeError as error:
        raise ConfigError.one(
            f"reward.{part}.options", "must be text, numbers, booleans, null, lists and mappings", str(error), "Write the value as text"
        ) from error


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(2 * ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(ENDING_SECONDS)
