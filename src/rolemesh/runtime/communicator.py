"""A process group between the ranks of a worker group, which another thread can take apart.

Losing a rank leaves the others blocked in a collective: with gloo two neighbours fail at once, the farthest waits for the group's
timeout, and `abort()` frees nobody. So a communicator remembers the sockets that appeared while it formed; `cut()` shuts them down
from the control thread, the blocked collective raises at once, and the ranks re-form under a new generation. Nothing here is global:
each communicator has a process group of its own, so several roles of one process do not meet.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rolemesh.errors import DeadlineExceeded

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store, TCPStore
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one generation of a group meet."""

    address: str
    port: int
    generation: int


class Communicator:
    """One rank's end of a process group: gloo for a worker on the CPU, NCCL for one on a GPU.

    `deadline` bounds forming it, `timeout` each collective, both in seconds. Raises DeadlineExceeded when the ranks do not meet.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        rank: int,
        world_size: int,
        deadline: float,
        timeout: float,
        device: str = "cpu",
        store: TCPStore | None = None,
    ) -> None:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        before = _sockets()
        wait = timedelta(seconds=deadline)
        subject = f"{world_size} ranks at {rendezvous.address}:{rendezvous.port} (generation {rendezvous.generation})"
        try:
            self._store = store or TCPStore(rendezvous.address, rendezvous.port, world_size, is_master=False, timeout=wait)
            scoped = PrefixStore(f"generation-{rendezvous.generation}", self._store)
            scoped.set_timeout(wait)
            self.group: ProcessGroup = (
                _form_gloo(scoped, rank, world_size, rendezvous.address, timeout)
                if device == "cpu"
                else _form_nccl(scoped, rank, world_size, timeout)
            )
            self.group.allreduce([torch.ones(1, device=device)]).wait(wait)  # opens every connection, so that cut() knows them all
        except (dist.DistError, RuntimeError) as error:
            raise DeadlineExceeded(waiter=f"rank {rank}", subject=subject, seconds=deadline, last_report=str(error)) from error
        self.rank, self.world_size = rank, world_size
        self._links = _sockets() - before

    @staticmethod
    def open_store(address: str, world_size: int, deadline: float) -> TCPStore:
        """A store on a port that the system picks and this process holds from now on, so nobody can take it in between."""
        from torch._C._distributed_c10d import TCPStore

        return TCPStore(address, 0, world_size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline), use_libuv=True)

    @property
    def connections(self) -> int:
        return len(self._links)

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks in place."""
        self.group.allreduce([tensor]).wait()

    def cut(self) -> int:
        """Shut the connections down (any thread). A collective under way on any rank then raises. Returns how many were cut."""
        return sum(_shut(descriptor, link) for descriptor, link in self._links)

    def close(self) -> None:
        """Leave: shut connections and drop the group."""
        self.cut()
        self._links = set()
        del self.group, self._store


def _form_gloo(store: Store, rank: int, world_size: int, address: str, timeout: float) -> ProcessGroup:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the only way to give the address and a timeout
    options._timeout = timedelta(seconds=timeout)
    loopback = address.startswith("127.") or address == "::1"
    device = ProcessGroupGloo.create_device(hostname=address) if loopback else ProcessGroupGloo.create_default_device()
    options._devices = [device]
    group: ProcessGroup = ProcessGroupGloo(store, rank, world_size, options)  # type: ignore[assignment]
    return group


def _form_nccl(store: Store, rank: int, world_size: int, timeout: float) -> ProcessGroup:
    from torch._C import _distributed_c10d

    options = _distributed_c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    group: ProcessGroup = _distributed_c10d.ProcessGroupNCCL(store, rank, world_size, options)  # type: ignore[assignment]
    return group


def _sockets() -> set[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        link = _link(int(name))
        if link.startswith("socket:"):
            found.add((int(name), link))
    return found


def _link(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _shut(descriptor: int, link: str) -> bool:
    if _link(descriptor) != link:
        return False  # closed since, and perhaps opened again by somebody else
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            copy.getpeername()
            copy.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
