"""Pools, worker groups, the resource guard, the KV store and backends: everything between the controller and its workers. Stands alone,
without any role."""

from rolemesh.protocols.backend import Backend, Bundle, Process
from rolemesh.protocols.store import KvChange, KvEntry, OpenWait, StoreLink, Waits, WaitStatistic
from rolemesh.runtime.beside import beside
from rolemesh.runtime.calls import CallRecord, together
from rolemesh.runtime.communicator import Communicator, Rendezvous
from rolemesh.runtime.dispatch import DISPATCHES, Answer, Dispatch, Request, Share, Topology
from rolemesh.runtime.faults import Fault, Faults
from rolemesh.runtime.group import Deadlines, WorkerGroup
from rolemesh.runtime.guard import ResourceGuard
from rolemesh.runtime.janitor import shared_file
from rolemesh.runtime.kv_blocking import BlockingKvStore
from rolemesh.runtime.kv_keeper import kept_alive
from rolemesh.runtime.kv_store import KvLease, KvStore, KvWatch
from rolemesh.runtime.ledger import Holding, Lease, PoolStatus, Waiting
from rolemesh.runtime.local import LocalBackend
from rolemesh.runtime.pool import Pool
from rolemesh.runtime.pool_view import PoolView, merge, split
from rolemesh.runtime.simulated import SimulatedBackend
from rolemesh.runtime.stored import Stored
from rolemesh.runtime.worker import Worker, WorkerContext, register

__all__ = [
    "DISPATCHES",
    "Answer",
    "Backend",
    "BlockingKvStore",
    "Bundle",
    "CallRecord",
    "Communicator",
    "Deadlines",
    "Dispatch",
    "Fault",
    "Faults",
    "Holding",
    "KvChange",
    "KvEntry",
    "KvLease",
    "KvStore",
    "KvWatch",
    "Lease",
    "LocalBackend",
    "OpenWait",
    "Pool",
    "PoolStatus",
    "PoolView",
    "Process",
    "Rendezvous",
    "Request",
    "ResourceGuard",
    "Share",
    "SimulatedBackend",
    "StoreLink",
    "Stored",
    "Topology",
    "WaitStatistic",
    "Waiting",
    "Waits",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "beside",
    "create_backend",
    "kept_alive",
    "merge",
    "register",
    "shared_file",
    "split",
    "together",
]


def create_backend(name: str, **options: object) -> Backend:
    """The backend called `ray`, `local` or `simulated`. Ray is imported only here."""
    if name == "local":
        return LocalBackend()
    if name == "simulated":
        return SimulatedBackend(**options)  # type: ignore[arg-type]
    if name == "ray":
        from rolemesh.runtime.ray import RayBackend

        return RayBackend(**options)  # type: ignore[arg-type]
    raise ValueError(f"backend must be ray, local or simulated, got {name!r}")
