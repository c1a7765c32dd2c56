"""Pools, worker groups and backends: everything between the controller and its workers. Stands alone, without any role."""

from rolemesh.protocols.backend import Backend, Bundle, Process
from rolemesh.runtime.communicator import Communicator, Rendezvous
from rolemesh.runtime.dispatch import DISPATCHES, Answer, Dispatch, Request, Share, Topology
from rolemesh.runtime.group import CallRecord, Deadlines, WorkerGroup, together
from rolemesh.runtime.local import LocalBackend
from rolemesh.runtime.pool import Pool
from rolemesh.runtime.stored import Stored
from rolemesh.runtime.worker import Worker, WorkerContext, register

__all__ = [
    "DISPATCHES",
    "Answer",
    "Backend",
    "Bundle",
    "CallRecord",
    "Communicator",
    "Deadlines",
    "Dispatch",
    "LocalBackend",
    "Pool",
    "Process",
    "Rendezvous",
    "Request",
    "Share",
    "Stored",
    "Topology",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "create_backend",
    "register",
    "together",
]


def create_backend(name: str, **options: object) -> Backend:
    """The backend called `ray` or `local`. Ray is imported only here."""
    if name == "local":
        return LocalBackend()
    if name == "ray":
        from rolemesh.runtime.ray import RayBackend

        return RayBackend(**options)  # type: ignore[arg-type]
    raise ValueError(f"backend must be ray or local, got {name!r}")
