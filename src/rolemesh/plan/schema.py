"""The plan: plain data that says what starts where. `build_plan` makes it, `rolemesh plan` prints it, a session launches exactly it.

Neither torch nor Ray is imported here or anywhere in `plan/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rolemesh.errors import Problem

if TYPE_CHECKING:
    from rolemesh.plan.routes import Route

NODE_ID: Final = "ray.io/node-id"
"""Label with the id that a Ray cluster gives its nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """One machine: what it has, and what is free of it now (everything, where that is None)."""

    name: str
    cpus: float
    memory_bytes: int
    gpus: int = 0
    gpu_memory_bytes: int = 0
    """Of one device; 0 when nobody knows."""
    gpu_type: str = ""
    """Accelerator type, such as `H100`; empty when nobody knows."""
    free_cpus: float | None = None
    free_gpus: int | None = None
    address: str = ""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Everything else by name: other accelerators (`NPU`) and custom resources, without a cluster's marks of single nodes."""
    free_resources: Mapping[str, float] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    free_memory_bytes: int | None = None
    holders: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Who holds what is not free: name -> amount by `CPU`, `GPU` or the name of a resource."""
    visible_devices: str | None = None
    """The variable that limits the devices of its processes, as found (`CUDA_VISIBLE_DEVICES=0,1`); None without one."""
    interfaces: Mapping[str, str] | None = None
    """Address of each network interface by its name; None when nobody knows."""

    @property
    def identity(self) -> str:
        """What tells it from other nodes for good: the cluster's id, where it has one, as names change when others come and go."""
        return self.labels.get(NODE_ID, self.name)

    @property
    def npus(self) -> float:
        """NPUs, which clusters count as a resource of that name."""
        return self.resources.get("NPU", 0)

    def address_of(self, interface: str | None) -> str:
        """Where ranks on this node listen: at that interface, or at the address that the cluster knows the node by."""
        return (self.interfaces or {}).get(interface or "", self.address)

    def usable(self, name: str) -> float:
        """What is free of `CPU`, `GPU` or a resource by name; 0 of one that the node does not have."""
        if name == "CPU":
            return self.cpus if self.free_cpus is None else self.free_cpus
        if name == "GPU":
            return self.gpus if self.free_gpus is None else self.free_gpus
        return (self.resources if self.free_resources is None else self.free_resources).get(name, 0)

    @property
    def usable_memory(self) -> int:
        """Bytes of node memory that new processes may fill."""
        return self.memory_bytes if self.free_memory_bytes is None else self.free_memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The machines of a cluster, in stable numeric order of their names or addresses."""

    nodes: tuple[NodeInfo, ...]
    origin: str
    """Where the numbers come from: `this machine`, `ray cluster`, or `--nodes 2x8`."""
    pending: tuple[str, ...] = ()
    """Who waits for room on these nodes and holds nothing yet, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One process place of a pool. Rank i of every role of the pool that is not spread otherwise shares slot i."""

    index: int
    node: int
    """Index into `Plan.nodes`."""
    local_index: int
    """Number of this slot among the pool's slots on its node."""
    cpus: float
    gpus: float
    """GPUs of the slot: a whole number, or the share 1/k of one."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Other resources that the slot takes, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A pool: its slots, ordered by node so that neighbours share a node."""

    name: str
    slots: tuple[Slot, ...]
    spares: tuple[Slot, ...] = ()
    """Slots that hold no worker until one has to be replaced; numbered on behind `slots`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker of one role. Workers of several roles with the same (pool, slot) share one process, except reward workers, whose
    `slot` is None: each of those is a process of its own that counts against the node's CPUs."""

    role: str
    rank: int
    pool: str
    node: int
    slot: int | None
    cpus: float
    """CPUs of the process (shared with the other roles of the slot)."""
    gpus: float
    resources: Mapping[str, float] = field(default_factory=dict)
    weights: Route | None = None
    """How the actor's weights reach it, if it serves them."""
    weight_format: str | None = None
    """In which number format they are sent, if they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperPlan:
    """An actor that serves the run or one of its nodes and takes no CPU of its own, on a node that the pools allow."""

    name: str
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementGroup:
    """What is reserved at once: all places of a pool on one node. No layout asks for a group over several nodes."""

    pool: str
    node: int
    slots: tuple[int, ...]
    """Indices of the pool's slots, spares included."""
    processes: int
    """Processes beside the slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the workers of a role divide the model and the data: ranks 0..t-1 hold the parts of the first replica, and so on."""

    pool: str
    workers: int
    tensor_parallel: int
    data_parallel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Predicted cost of one call of a role in one step."""

    role: str
    call: str
    workers: int
    seconds: float
    flops: float
    """Of all workers together."""
    bytes: float
    """Read from and written to memory by all workers together."""
    bound: str
    """What it waits for most: compute, memory, overhead, transfer or functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """One line of the memory estimate of one process: what it is for, and bytes."""

    role: str
    what: str
    bytes: int
    on_gpu: bool = False
    working: bool = False
    """Taken only while the role computes; the rest as long as it is there, or awake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """Estimated memory of one slot's process of a pool, or of one process beside the slots."""

    pool: str
    lines: tuple[MemoryLine, ...]
    process: str = "slot"
    """`slot`, the role that has processes of its own (reward), or `node`: what the processes of a node share, once for each node."""
    phases: Mapping[str, tuple[MemoryLine, ...]] = field(default_factory=dict)
    """What of `lines` is on its device in each phase of a step that takes much; empty without a device or models."""

    @property
    def total_bytes(self) -> int:
        return self.host_bytes + self.gpu_bytes

    @property
    def gpu_bytes(self) -> int:
        """The most that is on its device at a time."""
        return max(self.phase_bytes.values(), default=sum(line.bytes for line in self.lines if line.on_gpu))

    @property
    def phase_bytes(self) -> dict[str, int]:
        return {phase: sum(line.bytes for line in lines) for phase, lines in self.phases.items()}

    @property
    def host_bytes(self) -> int:
        return sum(line.bytes for line in self.lines if not line.on_gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a session needs to start, and every problem that would keep it from doing so."""

    nodes: tuple[NodeInfo, ...]
    origin: str
    pools: dict[str, PoolPlan]
    workers: tuple[WorkerPlan, ...]
    memory: tuple[PoolMemory, ...]
    derived: dict[str, float | int | str]
    """Sizes that follow from the config: samples per step, steps per epoch, rows per mini-batch, parameters of the model, ..."""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """By role."""
    helpers: tuple[HelperPlan, ...] = ()
    stages: tuple[Stage, ...] = ()
    seconds_per_step: float = 0.0
    """Predicted: stages of one role after each other, and different roles side by side where the loop calls them so. 0 when unknown."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Installed libraries that the run would use."""
    warnings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = field(default=())

    def of_role(self, role: str) -> tuple[WorkerPlan, ...]:
        """The role's workers in rank order."""
        return tuple(worker for worker in self.workers if worker.role == role)

    def used_nodes(self) -> set[int]:
        """Nodes on which anything of the run lives, spare slots and helpers too."""
        slots = {slot.node for pool in self.pools.values() for slot in (*pool.slots, *pool.spares)}
        return slots | {worker.node for worker in self.workers} | {helper.node for helper in self.helpers}

    def placement_groups(self) -> Iterator[PlacementGroup]:
        """What to reserve, pool by pool and node by node."""
        for name, pool in self.pools.items():
            slots: dict[int, list[int]] = {}
            for slot in (*pool.slots, *pool.spares):
                slots.setdefault(slot.node, []).append(slot.index)
            beside: dict[int, int] = {}
            for worker in self.workers:
                if worker.pool == name and worker.slot is None:
                    beside[worker.node] = beside.get(worker.node, 0) + 1
            for node in sorted({*slots, *beside}):
                yield PlacementGroup(pool=name, node=node, slots=tuple(slots.get(node, ())), processes=beside.get(node, 0))
