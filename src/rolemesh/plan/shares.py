"""CPUs of every slot and process once all are placed: typed sizes as typed, derived ones from what the node has left. Called by
`build.py`.

A derived size is 1 CPU. On a small node all derived sizes shrink together until their sum fits, with a warning; on others a slot
with GPUs shrinks (never below half a CPU) or, where the reserve allows, grows to as many as 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from rolemesh.config.schema import Config
from rolemesh.plan.ledger import USABLE_SHARE, Ledger, number
from rolemesh.plan.placement import Placement, process_cpus

GPU_SLOT_CPUS: Final = 4
"""CPUs that a slot with GPUs gets when there are plenty: its own thread, and helpers for data and engine."""


@dataclass(slots=True)
class Shares:
    """CPUs of one slot of (pool, node) and of one process of (role, node), and what the user should know."""

    slots: dict[tuple[str, int], float] = field(default_factory=dict)
    processes: dict[tuple[str, int], float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Group:
    """Equal places on one node."""

    count: int
    typed: float | None
    gpus: int


def divide_cpus(config: Config, placement: Placement, ledgers: list[Ledger]) -> Shares:
    """CPU sizes of everything placed."""
    result = Shares()
    nodes: dict[int, dict[tuple[str, str], _Group]] = {}
    for name, counts in placement.slots.items():
        pool = config.pools[name]
        for node, count in counts.items():
            nodes.setdefault(node, {})["pool", name] = _Group(count=count, typed=pool.cpus, gpus=pool.gpus)
    for role, counts in placement.processes.items():
        for node, count in counts.items():
            nodes.setdefault(node, {})["role", role] = _Group(count=count, typed=process_cpus(config, role), gpus=0)
    squeezed: dict[str, list[str]] = {}
    for node, groups in sorted(nodes.items()):
        flexible, fixed = _divide(list(groups.values()), ledgers[node])
        for (kind, name), group in groups.items():
            cpus = group.typed if group.typed is not None else (flexible if _is_flexible(group, ledgers[node]) else fixed)
            (result.slots if kind == "pool" else result.processes)[name, node] = cpus
        if flexible < 1 and any(_is_flexible(group, ledgers[node]) for group in groups.values()):
            squeezed.setdefault(_squeezed(list(groups.values()), flexible, ledgers[node]), []).append(ledgers[node].node.name)
    result.warnings = [f"{_named(names)}: {text}" for text, names in squeezed.items()]
    return result


def _is_flexible(group: _Group, ledger: Ledger) -> bool:
    """Derived, and allowed to be less than one CPU."""
    return group.typed is None and (ledger.small or group.gpus > 0)


def _divide(groups: list[_Group], ledger: Ledger) -> tuple[float, float]:
    """(CPUs of a flexible place, CPUs of another derived place)."""
    free = ledger.node.cpus if ledger.node.free_cpus is None else ledger.node.free_cpus
    flexible = sum(group.count for group in groups if _is_flexible(group, ledger))
    others = sum(group.count * (group.typed or 1.0) for group in groups if not _is_flexible(group, ledger))
    if not flexible:
        return 1.0, 1.0
    left = free - others
    if left < flexible:
        # Rounded down, so that the sum never exceeds the node; the small term undoes binary rounding of exact hundredths.
        return math.floor(100 * left / flexible + 1e-6) / 100, 1.0
    if ledger.small:
        return 1.0, 1.0
    roomy = (min(free, USABLE_SHARE * ledger.node.cpus) - others) / flexible
    return float(max(1, min(GPU_SLOT_CPUS, math.floor(roomy)))), 1.0


def _squeezed(groups: list[_Group], share: float, ledger: Ledger) -> str:
    processes = sum(group.count for group in groups)
    free = ledger.node.cpus if ledger.node.free_cpus is None else ledger.node.free_cpus
    return (
        f"{processes} processes share {number(free)} CPUs ({number(share)} each where not set), so phases that overlap slow each other down"
    )


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more nodes"
