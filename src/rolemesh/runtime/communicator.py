"""A process group between the ranks of a worker group, which another thread can take apart at any time, also while it forms.

Losing a rank leaves the others blocked in a collective: with gloo two neighbours fail at once, the farthest waits for the group's
timeout, and `abort()` frees nobody. So the ranks tell each other where they listen before they connect; `cut()` shuts down exactly the
connections to and from these addresses from the control thread, the blocked collective raises at once, and the ranks re-form under a
new generation. Nothing here is global: each communicator has a process group of its own, so several roles of one process do not meet.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rolemesh.errors import DeadlineExceeded

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore
    from torch.distributed import ProcessGroup

Connect = Callable[["Store", int, int, float], "ProcessGroup"]
"""Store, rank, size and when to give up -> a group that has connected."""
End = tuple[str, int]
"""Address and port that a socket is bound to."""
REPORT_SECONDS = 1.0
"""A wait inside torch that has ended at the deadline gets this long to say what it waited for."""
_OPENING = threading.Lock()
"""Held while gloo opens its port, which it does not tell: it is the one that listens afterwards and did not before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one generation of a group meet."""

    address: str
    port: int
    generation: int


class Communicator:
    """One rank's end of a process group: gloo for a worker on the CPU, NCCL for one on a GPU. The groups are there once `form` returned.

    `address` is this worker's own: the network interface that the ranks talk over. `owner` is the group's name, for messages. With
    `tensor_parallel` the ranks stand in a grid of so many columns, and there is a group for each row and column beside that of all ranks.
    """

    group: ProcessGroup
    """Of all ranks."""
    data_group: ProcessGroup | None
    """Of this rank's column; None where it would be alone."""
    tensor_group: ProcessGroup | None
    """Of this rank's row; None where it would be alone."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        rank: int,
        world_size: int,
        address: str,
        device: str = "cpu",
        owner: str = "",
        tensor_parallel: int = 1,
    ) -> None:
        self.rendezvous, self.rank, self.world_size = rendezvous, rank, world_size
        self._owner, self._row = owner, tensor_parallel
        self._address, self._device = address, device
        self._ends: set[End] = {(rendezvous.address, rendezvous.port)}
        self._forming: Future[tuple[ProcessGroup, ProcessGroup | None, ProcessGroup | None]] = Future()

    @staticmethod
    def open_store(address: str, world_size: int, deadline: float) -> TCPStore:
        """A store on a port that the system picks and this process holds from now on, so nobody can take it in between."""
        from torch._C._distributed_c10d import TCPStore

        return TCPStore(address, 0, world_size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline), use_libuv=True)

    def form(self, *, deadline: float, timeout: float, store: TCPStore | None = None) -> None:
        """Meet the other ranks within `deadline` seconds; `timeout` is that of each collective from then on.

        Forming blocks where nothing can interrupt it (waiting to be connected to), so it runs in a thread of its own, which is left
        behind on a cut. Raises DeadlineExceeded when the ranks do not meet, or when `cut` ends the attempt.
        """
        started = time.monotonic()
        threading.Thread(target=self._form, args=(started + deadline, store), daemon=True, name="rolemesh-join").start()
        try:
            self.group, self.data_group, self.tensor_group = self._forming.result(deadline + REPORT_SECONDS)
        except (CancelledError, RuntimeError, OSError) as error:  # OSError: also TimeoutError
            self._forming.cancel()
            met = self.rendezvous
            subject = f"{self.world_size} ranks at {met.address}:{met.port} (generation {met.generation})"
            report = "the attempt was cut" if isinstance(error, CancelledError) else str(error)
            waited = time.monotonic() - started
            raise DeadlineExceeded(
                waiter=f"{self._owner} rank {self.rank}".lstrip(), subject=subject, seconds=waited, last_report=report
            ) from error
        for group in filter(None, (self.group, self.data_group, self.tensor_group)):
            group.set_timeout(timedelta(seconds=timeout))

    def _form(self, ends: float, store: TCPStore | None) -> None:
        with suppress(InvalidStateError):  # nobody waits for it any more
            try:
                self._forming.set_result(self._connect(ends, store))
            except (RuntimeError, OSError, ValueError) as error:  # torch's own are RuntimeErrors
                self._forming.set_exception(error)

    def _connect(self, ends: float, store: TCPStore | None) -> tuple[ProcessGroup, ProcessGroup | None, ProcessGroup | None]:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        met, wait = self.rendezvous, _until(ends)
        scoped = PrefixStore(
            f"generation-{met.generation}",
            store or TCPStore(met.address, met.port, self.world_size, is_master=False, timeout=wait),
        )
        scoped.set_timeout(_until(ends))
        connect = self._gloo(scoped) if self._device == "cpu" else self._nccl
        everyone = range(self.world_size)
        row = everyone[self.rank // self._row * self._row :][: self._row]
        column = everyone[self.rank % self._row :: self._row]

        def group_of(name: str, ranks: range) -> ProcessGroup:
            import torch

            group = connect(PrefixStore(name, scoped), ranks.index(self.rank), len(ranks), ends)
            group.allreduce([torch.ones(1, device=self._device)]).wait(_until(ends))  # NCCL connects here
            return group

        whole = group_of("all", everyone)
        data = whole if self._row == 1 else group_of(f"column-{column[0]}", column) if len(column) > 1 else None
        tensor = None if self._row == 1 else whole if len(column) == 1 else group_of(f"row-{row[0]}", row)
        return whole, data, tensor

    def _gloo(self, store: Store) -> Connect:
        """All groups of this rank listen at one place, which the ranks tell each other first."""
        from torch.distributed import ProcessGroupGloo

        with _OPENING:
            others = _listening()
            device = ProcessGroupGloo.create_device(hostname=self._address)
            mine = next(end for end in _listening() if end not in others)
        store.set(f"end-{self.rank}", f"{mine[0]} {mine[1]}")
        for rank in range(self.world_size):
            address, port = store.get(f"end-{rank}").decode().split()
            self._ends.add((address, int(port)))

        def connect(store: Store, rank: int, size: int, ends: float) -> ProcessGroup:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the only way to give the address
            options._devices, options._timeout = [device], _until(ends)
            group: ProcessGroup = ProcessGroupGloo(store, rank, size, options)  # type: ignore[assignment]
            return group

        return connect

    def _nccl(self, store: Store, rank: int, size: int, ends: float) -> ProcessGroup:
        from torch._C import _distributed_c10d

        options = _distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout = _until(ends)
        group: ProcessGroup = _distributed_c10d.ProcessGroupNCCL(store, rank, size, options)  # type: ignore[assignment]
        return group

    def cut(self) -> int:
        """Take the connections down (any thread): forming, or a collective under way on any rank, then raises. Returns how many."""
        formed = not self._forming.cancel() and self._forming.exception(0) is None
        if formed and self._device != "cpu":
            for group in filter(None, self._forming.result(0)):
                group.abort()  # NCCL's own connections (shared memory, other sockets) are not ours to know
        ends, shut = set(self._ends), 0
        for connection in _sockets():
            if ends & _ends(connection):
                with suppress(OSError):  # closed since
                    connection.shutdown(socket.SHUT_RDWR)
                    shut += 1
        return shut


def _until(ends: float) -> timedelta:
    return timedelta(seconds=max(ends - time.monotonic(), 0.01))


def _sockets() -> Iterator[socket.socket]:
    """A duplicate of each internet socket of this process: unlike the descriptor, no other thread can close and reuse it meanwhile."""
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:
            continue  # closed since
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            continue
        with socket.socket(fileno=descriptor) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                yield copy


def _listening() -> list[End]:
    return [_end(copy.getsockname()) for copy in _sockets() if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]


def _ends(connection: socket.socket) -> set[End]:
    try:
        return {_end(connection.getsockname()), _end(connection.getpeername())}
    except OSError:
        return set()  # listening, or not connected any more


def _end(name: tuple[str, int]) -> End:
    return name[0].removeprefix("::ffff:"), name[1]  # an IPv4 address on a socket that takes both
