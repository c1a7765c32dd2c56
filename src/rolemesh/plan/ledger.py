"""What is left of each node while pools and processes are placed on it, and how a misfit is told. Used by `placement.py` and `shares.py`.

Sizes that the user typed count in full. Derived CPU sizes count with their least acceptable value here; what they get in the end is
decided by `shares.py` when everything is placed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rolemesh.errors import Problem
from rolemesh.plan.schema import NodeInfo

if TYPE_CHECKING:
    from rolemesh.config.schema import PoolConfig

SMALL_NODE_CPUS: Final = 8
"""Below this a node is a laptop: processes may share CPUs, with a warning. From here on oversubscription is refused."""
USABLE_SHARE: Final = 0.7
"""Part of a node's CPUs that derived sizes use at most, from `SMALL_NODE_CPUS` on."""
LEAST_SHARE: Final = 0.1
"""Least CPU share of a process on a small node."""
LEAST_DEVICE_SLOT_CPUS: Final = 0.5
"""Least CPUs of a slot with a device on other nodes; its process mostly waits for the device."""
CPU: Final = "CPU"
GPU: Final = "GPU"
DEVICES: Final = (GPU, "NPU", "TPU", "HPU", "neuron_cores")
"""Resources that stand for whole devices, by the names that Ray gives them; anything else is a plain number."""

_SLACK: Final = 1e-6
"""CPU sums are sums of hundredths; this is far below one and far above rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one place takes."""

    cpus: float
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    share: int = 1
    """Places that share one device."""

    def amounts(self) -> Iterator[tuple[str, float]]:
        """(name, amount) of everything but CPUs; a shared device counts with its share."""
        if self.gpus:
            yield GPU, self.gpus / self.share
        for name, amount in self.resources.items():
            yield name, amount / self.share if name in DEVICES else amount


def slot_resources(pool: PoolConfig) -> dict[str, float]:
    """What one slot takes beside CPUs and GPUs."""
    return dict(Demand(cpus=0, resources=pool.resources, share=int(pool.share)).amounts())


def slot_gpus(pool: PoolConfig) -> float:
    """GPUs of one slot: whole, or its share of one."""
    return int(pool.gpus) if pool.share == 1 else pool.gpus / pool.share


def has_device(pool: PoolConfig) -> bool:
    """Whether the slots of the pool compute on a device beside the CPU."""
    return pool.gpus > 0 or any(name in DEVICES for name in pool.resources)


@dataclass(slots=True)
class Ledger:
    """One node: what is left, and which pools and roles hold the rest."""

    index: int
    node: NodeInfo
    cpus: float
    left: dict[str, float]
    """GPUs and other resources by name; of devices the whole ones."""
    opened: dict[tuple[str, int], int] = field(default_factory=dict)
    """(device, places that share one) -> places left on a device that others of this kind use already."""
    holders: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def small(self) -> bool:
        return self.node.cpus < SMALL_NODE_CPUS

    @property
    def gpus(self) -> float:
        """Whole GPUs left."""
        return self.left.get(GPU, 0)

    def fits(self, demand: Demand) -> int:
        """How many places of this demand still fit."""
        counts = [math.floor((self.cpus + _SLACK) / demand.cpus)]
        for name, amount in demand.amounts():
            if name in DEVICES and demand.share > 1:
                counts.append(self.opened.get((name, demand.share), 0) + math.floor(self.left.get(name, 0)) * demand.share)
            else:
                counts.append(math.floor((self.left.get(name, 0) + _SLACK) / amount))
        return max(0, min(counts))

    def take(self, holder: str, demand: Demand, count: int) -> None:
        """Take `count` places, which must fit; a negative count gives places back that were just taken."""
        held = self.holders.setdefault(holder, {})
        held[CPU] = held.get(CPU, 0.0) + count * demand.cpus
        self.cpus -= count * demand.cpus
        for name, amount in demand.amounts():
            held[name] = held.get(name, 0.0) + count * amount
            if name in DEVICES and demand.share > 1:
                self._take_shares(name, demand.share, count)
            else:
                self.left[name] = self.left.get(name, 0) - count * amount

    def _take_shares(self, name: str, share: int, count: int) -> None:
        free = self.opened.get((name, share), 0) - count
        fresh = -(free // share)  # devices to open; below 0 some are whole again
        self.opened[name, share] = free + fresh * share
        self.left[name] -= fresh

    def held(self) -> str:
        """Who holds what is not free: other pools of this plan, and whatever ran before."""
        texts = [f"{name} {amounts_text(amounts)}" for name, amounts in self.holders.items() if any(amounts.values())]
        if self.node.holders:
            texts += [f"{name} {amounts_text(amounts)}" for name, amounts in self.node.holders.items()]
        elif others := _held_before(self.node):
            texts.append(f"others outside this run {amounts_text(others)}")
        return ", ".join(texts)


def _held_before(node: NodeInfo) -> dict[str, float]:
    totals = {CPU: node.cpus, GPU: node.gpus, **node.resources}
    return {name: total - node.usable(name) for name, total in totals.items() if total - node.usable(name) > _SLACK}


def open_ledgers(nodes: tuple[NodeInfo, ...]) -> list[Ledger]:
    return [
        Ledger(index=index, node=node, cpus=node.usable(CPU), left={name: node.usable(name) for name in (GPU, *node.resources)})
        for index, node in enumerate(nodes)
    ]


def slot_demand(pool: PoolConfig, ledger: Ledger) -> Demand:
    """What one slot of the pool needs at least on this node."""
    cpus = pool.cpus
    if cpus is None:
        cpus = LEAST_SHARE if ledger.small else LEAST_DEVICE_SLOT_CPUS if has_device(pool) else 1.0
    return Demand(cpus=cpus, gpus=int(pool.gpus), resources=pool.resources, share=int(pool.share))


def process_demand(cpus: float | None, ledger: Ledger) -> Demand:
    """What one process outside the slots (a reward worker) needs at least on this node."""
    if cpus is not None:
        return Demand(cpus=cpus)
    return Demand(cpus=LEAST_SHARE if ledger.small else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Places of one kind that somebody wants: whose, what they are called, what one needs on a node, and what to do when `count` of them
    do not fit there (by `CPU`, `GPU` or name of a resource)."""

    subject: str
    thing: str
    demand: Callable[[Ledger], Demand]
    remedies: Callable[[Ledger, int], dict[str, str]]


def misfit(want: Want, count: int, ledger: Ledger, which: str = "largest node") -> Problem:
    """The problem of `count` places that do not fit on `ledger`, the best node there is (`which` says best of what).

    Names each resource that is short with its numbers, what the node has and who holds it.
    """
    demand, remedies = want.demand(ledger), want.remedies(ledger, count)
    amounts = dict(demand.amounts())
    short = {}
    for name, amount in amounts.items():
        free = ledger.left.get(name, 0) + ledger.opened.get((name, demand.share), 0) / demand.share
        if count * amount > free + _SLACK:
            short[name] = f"{name}: needs {number(count * amount)}, free {number(free)}"
    if count * demand.cpus > ledger.cpus + _SLACK:
        short[CPU] = f"CPU: needs {number(count * demand.cpus)}, free {number(ledger.cpus)}"
    held = ledger.held()
    visible = ledger.node.visible_devices if GPU in short else None
    return Problem(
        subject=want.subject,
        need=f"{'; '.join(short.values())} ({many(count, want.thing)} of {amounts_text({CPU: demand.cpus, **amounts})} on one node)",
        free=f"{which} {ledger.node.name}: {_free(ledger, amounts)}"
        + (f"; held by {held}" if held else "")
        + (f"; {visible} is set there" if visible else ""),
        remedy=" ".join(remedies[name] for name in short),
    )


def _free(ledger: Ledger, names: Iterable[str]) -> str:
    node = ledger.node
    texts = [f"{number(ledger.cpus)} of {number(node.cpus)} CPUs"]
    texts += [f"{number(ledger.left.get(name, 0))} of {number(node.resources.get(name, 0))} {name}" for name in names if name != GPU]
    return f"{', '.join(texts)} and {number(ledger.gpus)} of {node.gpus} GPUs free"


def amounts_text(amounts: Mapping[str, float]) -> str:
    """`3 CPUs and 1 GPU`; zeros are left out, except when there is nothing else."""
    texts = [
        many(amount, name) if name in (CPU, GPU) else f"{number(amount)} {name}" for name, amount in amounts.items() if amount > _SLACK
    ]
    return " and ".join(texts) or "nothing"


def many(count: float, thing: str) -> str:
    """`1 slot`, `2 slots`, `3 processes`."""
    plural = "" if count == 1 else "es" if thing.endswith("s") else "s"
    return f"{number(count)} {thing}{plural}"


def number(value: float) -> str:
    """`6` for 6.0 and `0.66` for 0.66."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
