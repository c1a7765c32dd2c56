"""`Sandbox` runs model-written code in confined processes beside the event loop of the episodes. See `sandbox_process.py` for these.

Sandbox (on the event loop)  --code-->  keeper  --forks-->  a confined process for each program
                             <--text--
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

from rolemesh.environments.sandbox_process import SECONDS
from rolemesh.environments.waiting import in_line
from rolemesh.errors import ConfigError, DeadlineExceeded
from rolemesh.rewards.wire import CHUNK, Inbox, frame

PROCESSES: Final = min(8, os.cpu_count() or 1)
"""Programs that run side by side, for one event loop; further ones wait for their turn."""
START_SECONDS: Final = 120.0
"""For the keeper to import what it preloads."""
GRACE: Final = 20.0
"""Seconds beyond a program's own in which its result has to come."""
_KEPT: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "ROLEMESH_RUN", "ROLEMESH_PROCESS")
"""Variables that the keeper gets: no secrets, and the marks by which a run's processes are found."""
_FIXED: Final = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Sets have the same order in every run, and a process without threads can be forked."""

Outcome = Literal["ok", "error", "timeout", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a program. `output` holds at most `sandbox_process.OUTPUT_BYTES`, `error` what it raised or how it ended."""

    outcome: Outcome
    output: str
    error: str


class Sandbox:
    """For one event loop, which it ends with: the keeper starts with the first program, and anew when it was lost."""

    def __init__(self, *, preload: bool = True) -> None:
        self._preload = preload
        self._free = asyncio.Semaphore(PROCESSES)
        self._starting = asyncio.Lock()
        self._results: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._asked = 0
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None

    async def run(self, code: str) -> Result:
        """Run a program. Waiting for its turn does not count for the deadline of a step. Raises ConnectionError when the sandbox itself
        fails, DeadlineExceeded when nothing is heard of the program."""
        with in_line():
            await self._free.acquire()
        try:
            with in_line():
                writer = await self._connected()
            self._asked += 1
            return await self._ask(writer, self._asked, code)
        finally:
            self._free.release()

    async def _ask(self, writer: asyncio.StreamWriter, number: int, code: str) -> Result:
        future = self._results[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(SECONDS + GRACE):
                writer.write(frame({"id": number, "code": code}))
                found = await future
        except TimeoutError:
            raise DeadlineExceeded(waiter="tool python", subject=f"program {number} in the sandbox", seconds=SECONDS + GRACE) from None
        finally:
            del self._results[number]
            if not future.done() or future.cancelled():
                writer.write(frame({"end": number}))
        if found["outcome"] == "failed":
            raise ConnectionError(f"the sandbox cannot run programs: {found['error']}")
        return Result(outcome=found["outcome"], output=found["output"], error=found["error"])

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._writer is None:
                ours, theirs = socket.socketpair()
                with theirs:
                    process = _start(theirs.fileno(), preload=self._preload)
                reader, writer = await asyncio.open_unix_connection(sock=ours)
                ready = asyncio.get_running_loop().create_future()
                self._listener = asyncio.create_task(self._listen(process, reader, writer, ready))
                try:
                    async with asyncio.timeout(START_SECONDS):
                        await asyncio.shield(ready)
                except BaseException as error:
                    self._listener.cancel()
                    if isinstance(error, TimeoutError):
                        raise DeadlineExceeded(waiter="tool python", subject="the sandbox to start", seconds=START_SECONDS) from None
                    raise
                self._writer = writer
            return self._writer

    async def _listen(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ready: asyncio.Future[None]
    ) -> None:
        """Take results in until the keeper is gone, or the loop ends; then end the keeper, and with it all that came from it."""
        inbox = Inbox()
        try:
            while data := await reader.read(CHUNK):
                inbox.feed(data)
                for message in inbox.take():
                    if not ready.done():
                        ready.set_result(None)
                    elif (future := self._results.get(message["id"])) is not None and not future.done():
                        future.set_result(message)
        except ConnectionError:
            pass
        finally:
            self._writer = None
            process.kill()
            code = process.wait(GRACE)
            writer.close()
            lost = ConnectionError(f"the sandbox's process ended: exit code {code}; the log has what it printed")
            for future in self._results.values():
                if not future.done():
                    future.set_exception(lost)
            if not ready.done():
                ready.set_exception(lost)
            ready.cancelled() or ready.exception()  # nobody may be waiting for it any more


_sandboxes: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, Sandbox]] = WeakKeyDictionary()


def sandbox_of_loop() -> Sandbox:
    """The one of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _sandboxes:
        _sandboxes[loop] = Sandbox()
    return _sandboxes[loop]


def _start(descriptor: int, *, preload: bool) -> subprocess.Popen[bytes]:
    path = [entry or os.getcwd() for entry in sys.path]
    call = f"main({descriptor}, preload={preload})"
    boot = f"import sys; sys.path[:] = {path!r}; from rolemesh.environments.sandbox_process import main; {call}"
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | _FIXED
    command = [sys.executable, "-P", "-s", "-c", boot]
    return subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL, env=environment, cwd="/", start_new_session=True)


_PROBE: Final = """
import os, socket
def refused(what):
    try:
        what()
    except OSError:
        return True
for name, what in {
    "network": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "reading files": lambda: open("/proc/self/environ"),
    "writing files": lambda: open(own := f"/tmp/rolemesh-probe-{os.getpid()}", "w").close() or os.remove(own),
    "processes": lambda: os.fork() or os._exit(0),
}.items():
    if not refused(what):
        print(name)
"""


@cache
def check_sandbox() -> None:
    """Raise ConfigError unless code can be run here, and is kept from what it must not do. Tried once in a process."""
    need = "the tool python needs to confine what a model wrote (Linux from 5.13 on with Landlock and seccomp)"
    remedy = "Leave this tool out, or run where containers and kernel allow both"
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="sandbox") as apart:  # an event loop may be running here
            found = apart.submit(lambda: asyncio.run(Sandbox(preload=False).run(_PROBE))).result(START_SECONDS + SECONDS + GRACE)
    except (ConnectionError, DeadlineExceeded) as error:
        raise ConfigError.one("environment.tools", need, str(error), remedy) from error
    if found.outcome != "ok" or found.output:
        raise ConfigError.one("environment.tools", need, f"not kept from: {found.output.split() or found.error}", remedy)
