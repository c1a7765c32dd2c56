"""What is left of each node while pools and processes are placed on it, and how a misfit is told. Used by `placement.py` and `shares.py`.

Sizes that the user typed count in full. Derived CPU sizes count with their least acceptable value here; what they get in the end is
decided by `shares.py` when everything is placed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from rolemesh.config.schema import PoolConfig
from rolemesh.errors import Problem
from rolemesh.plan.schema import NodeInfo

SMALL_NODE_CPUS: Final = 8
"""Below this a node is a laptop: processes may share CPUs, with a warning. From here on oversubscription is refused."""
USABLE_SHARE: Final = 0.7
"""Part of a node's CPUs that derived sizes use at most, from `SMALL_NODE_CPUS` on."""
LEAST_SHARE: Final = 0.1
"""Least CPU share of a process on a small node."""
LEAST_GPU_SLOT_CPUS: Final = 0.5
"""Least CPUs of a slot with GPUs on other nodes; its process mostly waits for the device."""

_SLACK: Final = 1e-6
"""CPU sums are sums of hundredths; this is far below one and far above rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """CPUs and GPUs of one place."""

    cpus: float
    gpus: int = 0


@dataclass(slots=True)
class Ledger:
    """One node: what is left, and which pools and roles hold the rest."""

    index: int
    node: NodeInfo
    cpus: float
    gpus: int
    holders: dict[str, Demand] = field(default_factory=dict)

    @property
    def small(self) -> bool:
        return self.node.cpus < SMALL_NODE_CPUS

    def fits(self, demand: Demand) -> int:
        """How many places of this demand still fit."""
        counts = [math.floor((self.cpus + _SLACK) / demand.cpus)]
        if demand.gpus:
            counts.append(self.gpus // demand.gpus)
        return max(0, min(counts))

    def take(self, holder: str, demand: Demand, count: int) -> None:
        old = self.holders.get(holder, Demand(cpus=0.0))
        self.holders[holder] = Demand(cpus=old.cpus + count * demand.cpus, gpus=old.gpus + count * demand.gpus)
        self.cpus -= count * demand.cpus
        self.gpus -= count * demand.gpus

    def held(self) -> str:
        """Who holds what is not free: other pools of this plan, and whatever ran before."""
        texts = [f"{name} {_amount(demand)}" for name, demand in self.holders.items()]
        cpus = self.node.cpus - (self.node.cpus if self.node.free_cpus is None else self.node.free_cpus)
        gpus = self.node.gpus - (self.node.gpus if self.node.free_gpus is None else self.node.free_gpus)
        if cpus > _SLACK or gpus:
            texts.append(f"others outside this run {_amount(Demand(cpus=cpus, gpus=gpus))}")
        return ", ".join(texts)


def open_ledgers(nodes: tuple[NodeInfo, ...]) -> list[Ledger]:
    return [
        Ledger(
            index=index,
            node=node,
            cpus=node.cpus if node.free_cpus is None else node.free_cpus,
            gpus=node.gpus if node.free_gpus is None else node.free_gpus,
        )
        for index, node in enumerate(nodes)
    ]


def slot_demand(pool: PoolConfig, ledger: Ledger) -> Demand:
    """What one slot of the pool needs at least on this node."""
    if pool.cpus is not None:
        return Demand(cpus=pool.cpus, gpus=pool.gpus)
    if ledger.small:
        return Demand(cpus=LEAST_SHARE, gpus=pool.gpus)
    return Demand(cpus=LEAST_GPU_SLOT_CPUS if pool.gpus else 1.0, gpus=pool.gpus)


def process_demand(cpus: float | None, ledger: Ledger) -> Demand:
    """What one process outside the slots (a reward worker) needs at least on this node."""
    if cpus is not None:
        return Demand(cpus=cpus)
    return Demand(cpus=LEAST_SHARE if ledger.small else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Places of one kind that somebody wants: whose, what they are called, what one needs on a node, and what to do when `count` of them
    do not fit there (for `CPU` and for `GPU`)."""

    subject: str
    thing: str
    demand: Callable[[Ledger], Demand]
    remedies: Callable[[Ledger, int], dict[str, str]]

    def many(self, count: int) -> str:
        plural = "es" if self.thing.endswith("s") else "s"
        return f"{count} {self.thing}{'' if count == 1 else plural}"


def misfit(want: Want, count: int, ledger: Ledger, which: str = "largest node") -> Problem:
    """The problem of `count` places that do not fit on `ledger`, the best node there is (`which` says best of what).

    Names each resource that is short with its numbers, what the node has and who holds it.
    """
    demand, remedies = want.demand(ledger), want.remedies(ledger, count)
    short = {}
    if count * demand.gpus > ledger.gpus:
        short["GPU"] = f"GPU: needs {count * demand.gpus}, free {ledger.gpus}"
    if count * demand.cpus > ledger.cpus + _SLACK:
        short["CPU"] = f"CPU: needs {number(count * demand.cpus)}, free {number(ledger.cpus)}"
    held = ledger.held()
    return Problem(
        subject=want.subject,
        need=f"{'; '.join(short.values())} ({want.many(count)} of {_amount(demand)} on one node)",
        free=f"{which} {ledger.node.name}: {_free(ledger)}" + (f"; held by {held}" if held else ""),
        remedy=" ".join(remedies[name] for name in short),
    )


def _free(ledger: Ledger) -> str:
    cpus = f"{number(ledger.cpus)} of {number(ledger.node.cpus)} CPUs"
    return f"{cpus} and {ledger.gpus} of {ledger.node.gpus} GPUs free"


def _amount(demand: Demand) -> str:
    cpus = f"{number(demand.cpus)} CPU{'' if demand.cpus == 1 else 's'}"
    return f"{cpus} and {demand.gpus} GPU{'' if demand.gpus == 1 else 's'}" if demand.gpus else cpus


def number(value: float) -> str:
    """`6` for 6.0 and `0.66` for 0.66."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
