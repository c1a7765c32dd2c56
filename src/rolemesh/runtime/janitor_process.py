"""The janitor: a small process beside a run, one on each machine, that ends what the run leaves behind. `runtime/janitor.py` starts it.

Workers and drivers hold a connection to it; the kernel says when their process ends, however that happens. Then what carries their mark in
its environment is killed, children of children included: for a worker after a moment, in which its children may go by themselves, for a
driver at once, or after the run's time to live. It belongs to no terminal and to no process group but its own, and is a program of the
standard library alone, run by its path: it starts in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

RUN, PROCESS = "ROLEMESH_RUN", "ROLEMESH_PROCESS"
"""The marks: variables in the environment of every process of a run, and of every worker process and what it starts."""
GRACE_SECONDS = 1.0
"""How long children have to go by themselves after their worker, and a run's workers after its driver said good-bye."""
END_SECONDS = 10.0
TRACKER_SECONDS = 5.0
"""How long those that remove the shared memory of others have, of these; they need milliseconds where there is a processor for them."""
SWEEP_SECONDS = 60.0
DRIVEN = 3
"""Exit code of a sweep that found a driver."""
PATIENCE_SECONDS = 10.0
"""How long a janitor waits for its first client."""
TRACKERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")


class Found(NamedTuple):
    """A process that lives. `started` counts clock ticks since the machine booted: with the pid, what tells it from a later process."""

    pid: int
    parent: int
    group: int
    started: int
    environment: frozenset[bytes]

    @property
    def is_worker(self) -> bool:
        return any(entry.startswith(PROCESS.encode() + b"=") for entry in self.environment)


def base_folder() -> str:
    return f"/tmp/rolemesh-{os.getuid()}"


def key_of(run: str) -> str:
    return hashlib.sha1(run.encode(), usedforsecurity=False).hexdigest()[:12]


def folder_of(run: str) -> str:
    """What a run keeps on this machine beside its run directory. Short: Ray puts sockets into it, whose paths are limited."""
    return f"{base_folder()}/{key_of(run)}"


def socket_of(run: str) -> str:
    """Of the abstract kind: no file, the second of two that start at once cannot have it, and it ends with the janitor."""
    return f"\0rolemesh-{os.getuid()}-{key_of(run)}"


def peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, user) at the other end, from the kernel."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


# -- processes ----------------------------------------------------------------------------------------------------------------


def read_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def find(pid: int) -> Found | None:
    """A living process whose environment this user may read."""
    try:
        _, _, tail = read_bytes(f"/proc/{pid}/stat").rpartition(b") ")
        environment = frozenset(read_bytes(f"/proc/{pid}/environ").split(b"\0"))
    except OSError:
        return None
    fields = tail.split()
    return None if fields[0] in (b"Z", b"X") else Found(pid, int(fields[1]), int(fields[2]), int(fields[19]), environment)


def processes() -> list[Found]:
    return [found for name in os.listdir("/proc") if name.isdigit() and (found := find(int(name))) is not None]


def owned(run: str, process: str = "", group: int = 0) -> list[Found]:
    """What carries the mark of a run and all that descends from it; or of these what has the mark, or is of the process group, of a worker
    process: a forked child has the environment that its parent was started with."""
    mark, narrower = f"{RUN}={run}".encode(), f"{PROCESS}={process}".encode()
    table = processes()
    of_run = [found for found in table if mark in found.environment]
    mine = {found.pid for found in of_run if not process or narrower in found.environment or found.group == group}
    while more := {found.pid for found in table if found.parent in mine} - mine:
        mine |= more
    return [found for found in table if found.pid in mine - {os.getpid()}]


def is_alive(pid: int, started: int) -> bool:
    found = find(pid)
    return found is not None and found.started == started


def kill(pid: int, started: int) -> None:
    """SIGKILL, if the pid is still that process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with suppress(ProcessLookupError):
            if is_alive(pid, started):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)


def end_all(search: Callable[[], Iterable[Found]]) -> None:
    """Kill until the search finds nothing. Those that remove the shared memory of others come last: they end by themselves then."""
    began = time.monotonic()
    while (left := list(search())) and time.monotonic() < began + END_SECONDS:
        for found in left:
            if time.monotonic() > began + TRACKER_SECONDS or not is_tracker(found.pid):
                kill(found.pid, found.started)
        time.sleep(0.02)


def is_tracker(pid: int) -> bool:
    """A process of Python or torch that waits for the end of others and then removes what they have left in shared memory."""
    with suppress(OSError):
        return any(name in read_bytes(f"/proc/{pid}/cmdline") for name in TRACKERS)
    return False


# -- what is known of a run ---------------------------------------------------------------------------------------------------


def read_record(folder: str) -> dict[str, Any]:
    """Who drives the run of this folder and which cluster it is on; empty when that is not known."""
    try:
        record = json.loads(read_bytes(f"{folder}/run.json"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(folder: str, record: dict[str, Any]) -> None:
    for path in (base_folder(), folder):
        os.makedirs(path, mode=0o700, exist_ok=True)
        if os.stat(path, follow_symlinks=False).st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to somebody else")
    with open(f"{folder}/run.json.new", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(f"{folder}/run.json.new", f"{folder}/run.json")


def note(folder: str, text: str) -> None:
    """Nobody listens to a janitor: what went wrong goes to its log, if it can be written."""
    with suppress(OSError), open(f"{folder}/janitor.log", "a", encoding="utf-8") as log:
        log.write(text)


def removed(folder: str) -> bool:
    """Remove what a run has on a file system that it shares with other machines. There a process may go on for a moment longer than here:
    it does not find the folder again under another name."""
    aside, ends = os.path.join(os.path.dirname(folder), f".{os.path.basename(folder)}.gone"), time.monotonic() + END_SECONDS
    while os.path.isdir(folder) or os.path.isdir(aside):
        if time.monotonic() > ends:
            return False
        with suppress(OSError):  # it has the other name already, or what had it is not gone yet
            os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)
        time.sleep(0.02)
    return True


def clean(run: str, *, politely: bool = False, orphaned: bool = False) -> bool:
    """End everything of a run on this machine, and what it left detached in a cluster that is not its own. If it is to be `orphaned` and
    has a driver there, one on another machine then, nothing is ended, and the answer is False."""
    folder = folder_of(run)
    record, swept = read_record(folder), True
    if record.get("ttl") and not record["own"]:
        command = [sys.executable, "-m", "rolemesh.runtime.ray.sweep", record["address"], run, *(["orphaned"] if orphaned else [])]
        with suppress(subprocess.TimeoutExpired):  # a cluster that does not answer has nothing left of it
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SWEEP_SECONDS, check=False)
            if orphaned and done.returncode == DRIVEN:
                return False
            swept = done.returncode in (0, DRIVEN)
            if not swept:  # what is known of the run stays, for `rolemesh clean`
                note(folder, done.stderr.decode(errors="replace"))
    if politely:
        ends = time.monotonic() + GRACE_SECONDS
        while any(found.is_worker or not record.get("own") for found in owned(run)) and time.monotonic() < ends:
            time.sleep(0.02)
    end_all(partial(owned, run))
    for path in record.get("folders", []):
        swept = removed(path) and swept
    if swept:
        shutil.rmtree(folder, ignore_errors=True)
    for name in os.listdir("/dev/shm"):
        if name.startswith(f"rolemesh-{key_of(run)}"):
            with suppress(OSError):  # gone since, or another user's
                os.unlink(f"/dev/shm/{name}")
    return True


# -- the janitor --------------------------------------------------------------------------------------------------------------


class Client:
    """Who holds a connection."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid, self.alive = connection, pid, os.pidfd_open(pid)
        self.heard = b""
        self.drives = False
        self.process = ""


class Janitor:
    """`listener` is bound to the run's name."""

    def __init__(self, run: str, listener: socket.socket) -> None:
        self._run, self._folder = run, folder_of(run)
        self._listener, self._selector = listener, selectors.DefaultSelector()
        self._clients: list[Client] = []
        self._due: dict[tuple[str, int], float] = {}
        """Worker processes that have ended (mark, pid), and when what they left is killed."""
        self._ends: float | None = None
        """When the run is cleaned away, unless a driver comes."""
        self._until = time.monotonic() + PATIENCE_SECONDS
        self._record = read_record(self._folder)
        self._over = False

    def serve(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._greet)
        while not self._over and (self._clients or self._due or self._ends or time.monotonic() < self._until):
            timers = [*self._due.values(), *([self._ends] if self._ends else []), *([] if self._clients else [self._until])]
            for key, _ in self._selector.select(max(min(timers) - time.monotonic(), 0) if timers else None):
                key.data()
            now = time.monotonic()
            for process, pid in [ended for ended, due in self._due.items() if due <= now]:
                del self._due[process, pid]
                end_all(partial(owned, self._run, process, pid))
            if self._ends is not None and self._ends <= now:
                self._expire()

    def _expire(self) -> None:
        """Nobody has come back, here; a driver on another machine may have the run by now, and its workers are our clients then."""
        self._ends, self._over = None, clean(self._run, orphaned=True)
        if not self._over:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._record = {}

    def _note(self, **news: Any) -> None:
        """Keep it, and on disk for whoever comes later; a full disk must not keep the run from ending."""
        self._record |= news
        with suppress(OSError):
            write_record(self._folder, self._record)

    def _greet(self) -> None:
        connection, _ = self._listener.accept()
        pid, user = peer(connection)
        try:
            if user != os.getuid():
                raise ProcessLookupError
            client = Client(connection, pid)
        except ProcessLookupError:
            connection.close()
            return
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, client))
        self._selector.register(client.alive, selectors.EVENT_READ, partial(self._lose, client))

    def _hear(self, client: Client) -> None:
        if client not in self._clients:  # its end was told of in the same moment
            return
        try:
            data = client.connection.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            self._lose(client)
            return
        *lines, client.heard = (client.heard + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            answer = getattr(self, "_on_" + message.pop("say"))(client, **message)
            if answer is not None:
                try:
                    client.connection.sendall(json.dumps(answer).encode() + b"\n")
                except ConnectionError:
                    self._lose(client)

    def _lose(self, client: Client) -> None:
        """Its process has ended, or it has closed the connection."""
        if client not in self._clients:
            return
        self._clients.remove(client)
        for source in (client.connection, client.alive):
            self._selector.unregister(source)
        client.connection.close()
        os.close(client.alive)
        if client.process:
            self._due[client.process, client.pid] = time.monotonic() + GRACE_SECONDS
        if client.drives and not self._over:
            self._ends = time.monotonic() + self._record["ttl"]
            self._note(left=time.time())

    # -- what clients say: methods `_on_<word>` -------------------------------------------------------------------------------

    def _on_look(self, client: Client) -> dict[str, Any]:
        """Whoever asks what is known."""
        return self._record

    def _on_work(self, client: Client, process: str) -> dict[str, Any]:
        """A worker process."""
        client.process = process
        return {}

    def _on_drive(self, client: Client, own: bool, address: str, ttl: float) -> dict[str, Any]:
        """A driver. A cluster that an earlier driver of this run has started is still `own`, at the address that is answered."""
        others = [other.pid for other in self._clients if other.drives]
        if others:
            return {"refused": others[0]}
        if not self._record.get("ttl", 0 if own else ttl):  # without a record there may be workers of a driver elsewhere, to be taken over
            clean(self._run)  # an earlier driver left it, and nobody was there to see to it
            self._record = {}
        if own:
            address = self._record.get("address", "") if owned(self._run) else ""
        found = find(client.pid)
        record = {
            "run": self._run, "pid": client.pid, "started": found.started if found else 0, "own": own, "address": address, "ttl": ttl,
            "since": self._record.get("since", time.time()), "left": None, "folders": self._record.get("folders", []),
        }  # fmt: skip
        try:
            write_record(self._folder, record)
        except OSError as error:
            return {"failed": f"{type(error).__name__}: {error}"}
        self._record, self._ends, client.drives = record, None, True
        return {"address": address}

    def _on_address(self, client: Client, address: str) -> None:
        """The driver is in its cluster, which is there."""
        self._note(address=address)

    def _on_entrust(self, client: Client, folder: str) -> dict[str, Any]:
        """The driver has, or will have, a folder elsewhere that is to go with the run."""
        self._note(folders=sorted({*self._record.get("folders", []), folder}))
        return {}

    def _on_bye(self, client: Client) -> None:
        """The driver is done; it waits until nothing is left."""
        self._over = clean(self._run, politely=True)

    def _on_free(self, client: Client) -> None:
        """`rolemesh clean`: end the run, and its driver if there is one."""
        if self._record.get("pid"):
            kill(self._record["pid"], self._record["started"])
        self._over = clean(self._run)


def main(run: str) -> None:
    """Bind, then go on in the background; whoever started this may connect as soon as it returns, also if another one was first."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(socket_of(run))
    except OSError:
        return
    listener.listen(128)
    if os.fork():
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        Janitor(run, listener).serve()
    except Exception:
        note(folder_of(run), traceback.format_exc())
        raise


if __name__ == "__main__":
    main(sys.argv[1])
