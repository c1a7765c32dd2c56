"""What a user writes: a `Worker` with `@register`ed methods. `runtime/host.py` runs it, `runtime/group.py` calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from rolemesh.observe import Metrics, SpanRecorder
from rolemesh.protocols.store import StoreLink
from rolemesh.runtime.communicator import Communicator, Rendezvous
from rolemesh.runtime.dispatch import DISPATCHES, Dispatch
from rolemesh.runtime.kv_blocking import BlockingKvStore

F = TypeVar("F", bound=Callable[..., Any])

REGISTERED = "__rolemesh_registered__"


Columns = tuple[str, ...] | Callable[..., tuple[str, ...]]
"""Names of columns, or a function that makes them from the keyword settings that the worker is constructed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """How a method is called from the controller, of workers whose settings, and so columns, are known."""

    dispatch: Dispatch
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    mutates: bool
    stores: bool


def register(
    *,
    dispatch: str | Dispatch = "all",
    reads: Columns = (),
    writes: Columns = (),
    mutates: bool = False,
    stores: bool = False,
) -> Callable[[F], F]:
    """Make a method callable through a worker group.

    `dispatch` says how arguments are split over ranks and results joined: a name of `DISPATCHES` or an own `Dispatch`. A method with
    `reads` takes a `Batch` of these columns first; one with `writes` returns a `Batch` of these columns (and ids), which stays where
    it is and reaches the controller as a `BatchRef`. Where the columns depend on the worker's settings, give a function of these:
    `reads=lambda *, config: ...`. `mutates` marks a method that changes the worker: it runs once even when the
    same call arrives twice. `stores` marks one that returns `(small value, large object)`; the object stays with the worker's node
    and the controller gets `(value, Stored)`.
    """
    if isinstance(dispatch, str):
        if dispatch not in DISPATCHES:
            raise ValueError(f"dispatch must be one of {', '.join(DISPATCHES)} or a Dispatch, got {dispatch!r}")
        dispatch = DISPATCHES[dispatch]
    if writes and stores:
        raise ValueError("a method either writes columns or stores an object, not both")
    way = dispatch

    def settle(settings: Mapping[str, Any]) -> Settled:
        read, written = (columns(**settings) if callable(columns) else columns for columns in (reads, writes))
        return Settled(dispatch=way, reads=read, writes=written, mutates=mutates, stores=stores)

    def decorate(method: F) -> F:
        setattr(method, REGISTERED, settle)
        return method

    return decorate


def registered_methods(worker_class: type) -> dict[str, Callable[[Mapping[str, Any]], Settled]]:
    """The callable methods of a worker class by name, inherited ones included (an override keeps the mark of what it overrides)."""
    members = [member for base in reversed(worker_class.__mro__) for member in vars(base).items()]
    return {name: getattr(value, REGISTERED) for name, value in members if hasattr(value, REGISTERED)}


def settled_methods(worker_class: type, settings: Mapping[str, Any]) -> dict[str, Settled]:
    """The callable methods of workers that are constructed with these keyword settings."""
    return {name: settle(settings) for name, settle in registered_methods(worker_class).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Who a worker is. Never part of a config object, so it cannot travel to another worker by mistake."""

    group: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    address: str
    process: str = ""
    gpus: float = 0
    master_address: str = ""
    master_port: int = 0
    generation: int = 0
    tensor_parallel: int = 1
    run_dir: str = ""
    store: StoreLink | None = None
    """The way to the run's KV store, where it has one."""

    @property
    def device(self) -> str:
        """Where this worker computes: the one place that decides it. The index counts the visible devices, never the machine's."""
        return "cuda:0" if self.gpus else "cpu"

    def env(self) -> dict[str, str]:
        """The standard variables (torchrun's names) of this worker; the host sets them whenever one of its methods runs."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_NAME": self.group,
            "MASTER_ADDR": self.master_address or self.address,
            "MASTER_PORT": str(self.master_port),
        }

    def joined(self, rendezvous: Rendezvous) -> WorkerContext:
        return replace(self, master_address=rendezvous.address, master_port=rendezvous.port, generation=rendezvous.generation)


class Worker:
    """Base class of everything a worker group holds.

    A subclass takes the context first and its own settings as keywords; it builds nothing heavy in `__init__` but in `load`, which is
    retried worker by worker. With `communicates = True` the group forms a process group after `load` and hands it to `joined`.
    Methods run one at a time on the compute thread of the process; `abort` and `talk` run on the control thread.
    """

    communicates: ClassVar[bool] = False

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.metrics = Metrics()
        self.spans = SpanRecorder(context.process, context.group)
        self.peers: Mapping[str, Worker] = {}
        """The workers of the same process, by group name: how a hybrid engine reaches its trainer."""
        self.communicator: Communicator | None = None
        self._kv: BlockingKvStore | None = None

    @property
    def kv(self) -> BlockingKvStore:
        """The run's KV store; what is written speaks for the group's present generation. Raises RuntimeError where the run has none."""
        link, context = self.context.store, self.context
        if link is None:
            raise RuntimeError(f"{context.group} rank {context.rank} has no KV store: give its WorkerGroup one with store=...")
        if self._kv is None or self._kv.generation != context.generation:
            if self._kv is not None:
                self._kv.close()
            owner = f"{context.group} rank {context.rank}"
            self._kv = BlockingKvStore(link, owner=owner, group=context.group, generation=context.generation)
        return self._kv

    @register(dispatch="all", mutates=True)
    def load(self) -> None:
        """Build models and the like. Called once after creation, again after a failure."""

    @register(dispatch="rank_zero", mutates=True)
    def open_rendezvous(self, generation: int, deadline: float) -> Rendezvous:
        """Rank zero: hold a free port and a store on it; its address is where all ranks meet."""
        self._store = Communicator.open_store(self.context.address, self.context.world_size, deadline)
        return Rendezvous(address=self.context.address, port=self._store.port, generation=generation)

    @register(dispatch="all", mutates=True)
    def join(self, rendezvous: Rendezvous, deadline: float, timeout: float) -> None:
        """Form the communicator of this generation."""
        self.leave()
        self.context = context = self.context.joined(rendezvous)
        self.communicator = Communicator(
            rendezvous, rank=context.rank, world_size=context.world_size, address=context.address, device=context.device,
            owner=context.group, tensor_parallel=context.tensor_parallel,
        )  # fmt: skip  # from here on `abort` can cut it
        store = getattr(self, "_store", None) if context.rank == 0 else None
        self.communicator.form(deadline=deadline, timeout=timeout, store=store)
        self.joined()

    def joined(self) -> None:
        """Called after the communicator has formed, to hand it to whatever uses it."""

    @register(dispatch="all", mutates=True)
    def leave(self) -> None:
        """Drop the communicator and all that refers to it."""
        self.abort()
        self.communicator = None

    def abort(self) -> int:
        """Control thread: free a compute thread that is blocked in a collective. Returns the number of connections cut."""
        communicator = self.communicator  # the compute thread may drop it meanwhile
        return communicator.cut() if communicator is not None else 0

    def talk(self, message: Any) -> Any:
        """Control thread: answer a message at once, also while a call is under way. For workers that take on work between calls."""
        raise NotImplementedError(f"{type(self).__name__} has nothing to say: define talk(message)")
