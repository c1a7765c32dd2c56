"""The plan: plain data that says what starts where. `build_plan` makes it, `rolemesh plan` prints it, a session launches exactly it.

Neither torch nor Ray is imported here or anywhere in `plan/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rolemesh.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """One machine: what it has, and what is free of it now."""

    name: str
    cpus: float
    memory_bytes: int
    gpus: int = 0
    gpu_memory_bytes: int = 0
    gpu_type: str = ""
    free_cpus: float | None = None
    free_gpus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The machines of a cluster, in stable numeric order of their names or addresses."""

    nodes: tuple[NodeInfo, ...]
    origin: str
    """Where the numbers come from: `this machine`, `ray cluster`, or `--nodes 2x8`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One process place of a pool. Rank i of every role of the pool that is not spread otherwise shares slot i."""

    index: int
    node: int
    """Index into `Plan.nodes`."""
    local_index: int
    """Number of this slot among the pool's slots on its node."""
    cpus: float
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A pool: its slots, ordered by node so that neighbours share a node."""

    name: str
    slots: tuple[Slot, ...]


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
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """One line of the memory estimate of one process: what it is for, and bytes."""

    role: str
    what: str
    bytes: int
    on_gpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """Estimated memory of one slot's process of a pool, or of one process beside the slots."""

    pool: str
    lines: tuple[MemoryLine, ...]
    process: str = "slot"
    """`slot`, or the role that has processes of its own (reward)."""

    @property
    def total_bytes(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def gpu_bytes(self) -> int:
        return sum(line.bytes for line in self.lines if line.on_gpu)

    @property
    def host_bytes(self) -> int:
        return self.total_bytes - self.gpu_bytes


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
    warnings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = field(default=())

    def of_role(self, role: str) -> tuple[WorkerPlan, ...]:
        """The role's workers in rank order."""
        return tuple(worker for worker in self.workers if worker.role == role)
