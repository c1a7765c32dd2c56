"""The seam between the controller and whatever runs processes: Ray, this very process (local), or a simulation.

The controller talks to *processes*, each of which hosts one or more workers (`runtime/host.py`) and does two things side by side: it
computes one call at a time, and it always answers on a control thread. Everything here is asynchronous; time comes only from the
backend, so a simulated backend can make it virtual. Only backend files may block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from rolemesh.batch import Assembly, BlockMeta
from rolemesh.errors import ResourceError
from rolemesh.observe import Metrics, Span
from rolemesh.plan.schema import Inventory, NodeInfo
from rolemesh.protocols.store import StoreLink

T = TypeVar("T")

Capability = Literal["processes", "communicators", "preempt", "detach"]
"""`processes`: workers have processes of their own and can be killed; `communicators`: several ranks can form a process group;
`preempt`: a stuck call does not stop the control thread; `detach`: pools outlive the controller, and another one can take them over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to start: its unique name, where, and what it may use."""

    name: str
    """`POOL-BUNDLE.N`, the N-th of its bundle."""
    pool: str
    bundle: int
    """Which of the pool's bundles (slots first, then processes of their own) it occupies."""
    env: Mapping[str, str] = field(default_factory=dict)
    log_path: str = ""
    interface: str | None = None
    """Network interface whose address its workers use among each other; the node's own address when None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One place of a pool: a share of one node."""

    node: int
    cpus: float
    gpus: float
    """Whole GPUs, or the share 1/k of one."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Other resources by the cluster's name for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A started process. `handle` is the backend's own."""

    spec: ProcessSpec
    node: str
    address: str
    pid: int
    created: float = 0.0
    """When it started (psutil's create_time): with the pid, what tells it from a later process of the same number."""
    handle: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker to make in a process."""

    group: str
    worker_class: type
    context: Any
    kwargs: Mapping[str, Any]
    epoch: int = 1
    """Of the controller that asks for it."""
    make: str = ""
    """Workers with equal ones are equal as they are made; empty where nobody can tell."""


class Call(NamedTuple):
    """One method call on one worker. (epoch, generation) fence off older controllers and groups; `id` makes a repeat recognisable.

    A named tuple, like all that a call makes for each rank: it is made and pickled several times faster than a frozen dataclass."""

    id: str
    epoch: int
    generation: int
    group: str
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    assembly: Assembly | None = None
    """How to put the batch argument together from the fetched blocks; None when the method takes no batch."""
    batch_blocks: int = 0
    """How many of the blocks belong to the batch; those of other stored arguments follow."""
    writes: bool = True
    """False where the answer has no blocks, which is cheaper to know beforehand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception of a worker's method, as plain data (the exception's class may not exist on the controller)."""

    type: str
    message: str
    traceback: str
    at: float
    """Wall clock of the worker, seconds."""
    error: Exception | None = None
    """The exception itself when it is one of rolemesh's own."""


class Reply(NamedTuple):
    """What a call answers beside its blocks: small things only."""

    value: Any = None
    metas: tuple[BlockMeta | None, BlockMeta | None] = (None, None)
    """Of the blocks written: numbers (what an algorithm reads), and everything else (tokens, texts)."""
    metrics: Metrics | None = None
    spans: tuple[Span, ...] = ()
    """What the worker itself recorded."""
    started: float = 0.0
    ended: float = 0.0
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A worker as its process knows it: how it was made, and the (epoch, generation) that it serves."""

    make: str
    whole: bool
    """It was loaded, and no call that changes it has failed or begun since without ending."""
    epoch: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a control thread says of its process."""

    pid: int
    node: str
    workers: Mapping[str, Resident]
    """By group."""
    state: Literal["idle", "computing"]
    call: str
    """`group.method` under way, or empty."""
    since: float
    """Wall clock at which the state began."""
    leaving: bool = False
    """It was told to end (SIGTERM), as before its machine goes away."""
    stack: str = ""
    """Python stack of the compute thread, when asked for."""


OnAnswer = Callable[[Reply | Exception], None]
"""Is told once, on any thread, what came of a call: the Reply, or WorkerDied when the process is gone, DataLost when a block is gone,
WorkerError when the answer cannot travel, and BatchError when the arguments cannot."""


def taken(pool: str) -> ResourceError:
    """What a backend says to the second pool of a name."""
    return ResourceError.one(f"pool {pool}", "a name of its own", "a pool of this name", "Close that one first, or take another name")


class Backend(Protocol):
    """See the module docstring. Every coroutine takes its deadline in seconds and raises DeadlineExceeded naming its subject."""

    name: str
    lacks: frozenset[Capability]
    prefix: str
    """Before the names of pools, `RUN/`, so that two runs in one cluster never meet; empty where every run is alone."""

    @property
    def address(self) -> str:
        """Where others find its cluster, once it runs; empty where nobody can."""
        ...

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the controller to its end on a loop of the backend's choice."""
        ...

    def stop(self) -> None:
        """End the cluster if it is this backend's own, else leave it. Called once, after the last `run`."""
        ...

    def entrust(self, run: str, folder: str) -> None:
        """Have a folder, which may be made later, removed with everything else of the run, by `stop` or however this process ends. Raises
        RolemeshError or DeadlineExceeded."""
        ...

    def time(self) -> float:
        """Monotonic seconds; virtual in a simulation."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def inventory(self) -> Inventory:
        """Nodes in stable order, with what is free and who holds the rest. Starts nothing."""
        ...

    async def probe(self, inventory: Inventory, nodes: Collection[int], deadline: float) -> Inventory:
        """The inventory with what only processes on these nodes can tell: memory that is free, network interfaces, visible devices."""
        ...

    async def ask_for(self, wanted: Sequence[NodeInfo]) -> None:
        """Tell whoever adds machines which ones would be needed beside those in use; none takes an earlier request back."""
        ...

    async def create_pool(self, name: str, bundles: Sequence[Bundle], nodes: Sequence[NodeInfo], deadline: float) -> None:
        """Reserve the bundles. On expiry removes what it reserved and raises ResourceError with wanted and free per node; also for a name
        that a pool of this backend has already."""
        ...

    async def spawn(self, spec: ProcessSpec, deadline: float) -> Process:
        """Start an empty host in a bundle of a pool."""
        ...

    async def attach_pool(self, name: str, bundles: Sequence[Bundle], nodes: Sequence[NodeInfo], deadline: float) -> list[Process] | None:
        """Take over a pool that another controller reserved: these bundles on these nodes. Returns the newest process of each bundle
        that answers; others are killed. None when there is no such pool; one of this name that is different is given back first."""
        ...

    def detach(self, name: str) -> None:
        """Let go of a pool, or of the store of a run, by name: it stays as it is, with its processes, and `close` frees it no more."""
        ...

    async def give_back(self, keep: Collection[str]) -> None:
        """Give back the pools of this run that another controller left, with all processes, but for those to keep."""
        ...

    async def add_worker(self, process: Process, spec: WorkerSpec, deadline: float) -> None:
        """Make a worker in the process. Raises WorkerError with the original exception."""
        ...

    def call(self, process: Process, call: Call, blocks: Sequence[Any], answered: OnAnswer) -> tuple[Any, Any]:
        """Queue a call on the process's compute thread; `blocks` are fetched there, never here. Returns the references of the two tables
        that it writes (see `Reply`); a stored object is the second."""
        ...

    async def control(self, process: Process, request: str, deadline: float, **kwargs: Any) -> Any:
        """Ask the control thread (`report`, `abort`, `talk`, `take`; see `ProcessHost.control`). Answers also while a call computes."""
        ...

    def put(self, value: Any) -> Any:
        """Store a value that the controller itself made; for small columns and prompts."""
        ...

    async def fetch(self, refs: Sequence[Any], deadline: float) -> list[Any]:
        """Values of references, for the few small columns that the controller reads. Raises DataLost."""
        ...

    async def kill(self, process: Process) -> None:
        """End a process at once (SIGKILL). Idempotent."""
        ...

    async def release_pool(self, name: str) -> None:
        """Give the pool's bundles back. Processes in it must be dead."""
        ...

    async def start_store(self, run: str, deadline: float, node: NodeInfo | None = None) -> StoreLink:
        """Start the KV store of a run, on that node or else beside the controller, and return the way to it. `close` ends it. Where it
        outlives its controller, the store of an earlier one is taken over, with all that it knows."""
        ...

    def find_store(self, run: str) -> StoreLink:
        """The way to the KV store of a run that another controller of the same cluster has started."""
        ...

    async def close(self) -> None:
        """Free everything this backend made."""
        ...
