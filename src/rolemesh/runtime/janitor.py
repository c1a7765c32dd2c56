"""The way to the janitor of a run on this machine (`runtime/janitor_process.py`), which is started when there is none yet."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rolemesh.errors import DeadlineExceeded, RolemeshError
from rolemesh.runtime import janitor_process
from rolemesh.runtime.janitor_process import PROCESS, RUN, clean, folder_of, peer, socket_of

START_SECONDS = 20.0
BYE_SECONDS = 90.0
"""More than the janitor takes at most, with a cluster that does not answer."""


class JanitorLink:
    """A connection, held as long as this process works for the run. Forked children may inherit it: the janitor watches the process."""

    def __init__(self, run: str, say: str, **message: Any) -> None:
        self.run, self.folder = run, Path(folder_of(run))
        ends = time.monotonic() + START_SECONDS
        while True:
            try:
                self._connection = self._connect()
                self.answer = self._ask(say, message)
                break
            except ConnectionError:  # none yet, or one that has just ended
                self._start(ends)
            except TimeoutError as error:  # one that still cleans up after an earlier driver
                subject = f"the janitor of run {run} to answer"
                raise DeadlineExceeded(waiter="a process", subject=subject, seconds=START_SECONDS) from error
        if "refused" in self.answer:
            self.close()
            text = f"run {run} is driven by process {self.answer['refused']} already. Stop that one, or start a new run"
            raise RolemeshError(text=text)
        if "failed" in self.answer:
            self.close()
            text = f"the janitor of run {run} cannot keep its record in {self.folder}: {self.answer['failed']}"
            raise RolemeshError(text=f"{text}. Make room there, or remove the folder")

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(START_SECONDS)
        try:
            connection.connect(socket_of(self.run))
            if peer(connection)[1] != os.getuid():
                raise RolemeshError(text=f"the janitor of run {self.run} belongs to another user")
        except BaseException:
            connection.close()
            raise
        return connection

    def _start(self, ends: float) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in (RUN, PROCESS)}
        command = [sys.executable, "-I", "-S", janitor_process.__file__, self.run]
        try:
            nothing = subprocess.DEVNULL
            subprocess.run(
                command, stdin=nothing, stdout=nothing, stderr=nothing, env=environment, cwd="/", start_new_session=True,
                timeout=max(ends - time.monotonic(), 0), check=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(waiter="a process", subject=f"the janitor of run {self.run} to start", seconds=START_SECONDS) from error
        except subprocess.CalledProcessError as error:
            text = f"the janitor of run {self.run} did not start (exit code {error.returncode}). To see why: {' '.join(command)}"
            raise RolemeshError(text=text) from error

    def _ask(self, say: str, message: dict[str, Any]) -> dict[str, Any]:
        self.tell(say, **message)
        with self._connection.makefile("rb") as answers:
            line = answers.readline()
        if not line:
            self._connection.close()
            raise ConnectionResetError
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, say: str, **message: Any) -> None:
        self._connection.sendall(json.dumps({"say": say, **message}).encode() + b"\n")

    def entrust(self, folder: str) -> None:
        """Have a folder removed with the run, however that ends. Raises RolemeshError, or DeadlineExceeded."""
        try:
            self._ask("entrust", {"folder": folder})
        except TimeoutError as error:
            subject = f"the janitor of run {self.run} to answer"
            raise DeadlineExceeded(waiter="a process", subject=subject, seconds=START_SECONDS) from error
        except ConnectionError as error:
            text = f"the janitor of run {self.run} is gone, so nobody would remove {folder} with the run. Start it again"
            raise RolemeshError(text=text) from error

    def bye(self, say: str = "bye") -> None:
        """The run is over here: returns when nothing of it is left on this machine."""
        self._connection.settimeout(BYE_SECONDS)
        try:
            self.tell(say)
            while self._connection.recv(4096):
                pass
        except TimeoutError as error:
            subject = f"the janitor to end what is left of run {self.run}"
            raise DeadlineExceeded(waiter="the controller", subject=subject, seconds=BYE_SECONDS) from error
        except ConnectionError:  # somebody has killed it
            clean(self.run, politely=say == "bye")
        finally:
            self._connection.close()

    def close(self) -> None:
        """Without a good-bye: what is left lives on for the run's time to live."""
        with suppress(OSError):  # it may be gone
            self._connection.shutdown(socket.SHUT_RDWR)  # also where a forked child holds the connection
        self._connection.close()


def is_watched(run: str) -> bool:
    """True when a janitor of the run is alive on this machine."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        return connection.connect_ex(socket_of(run)) == 0


def waits_until(run: str) -> float | None:
    """Until when what a run has on this machine waits for its next driver, in seconds of the wall clock; None where nothing waits."""
    record = janitor_process.read_record(folder_of(run))
    if not record.get("ttl") or record["left"] is None or not is_watched(run):
        return None
    return float(record["left"] + record["ttl"])


def shared_file(name: str) -> str:
    """Path of a file in this machine's shared memory for the run that this process works for; the janitor removes it with the run."""
    return f"/dev/shm/rolemesh-{janitor_process.key_of(os.environ.get(RUN, ''))}-{name}"
