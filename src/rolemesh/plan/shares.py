"""CPUs of every slot and process once all are placed: typed sizes as typed, derived ones from what the node has left. Called by
`build.py`.

A derived size is 1 CPU, which every process can use: engines and trainers compute in one thread. On a small node all derived sizes
shrink together until their sum fits, with a warning; on others a slot with a device shrinks (never below half a CPU) or, where the
reserve allows, grows to as many as 4, and a reward worker grows to one CPU for each of its scoring processes and one for itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from rolemesh.config.schema import Config
from rolemesh.names import REWARD
from rolemesh.plan.ledger import CPU, USABLE_SHARE, Ledger, amounts_text, has_device, number
from rolemesh.plan.placement import Placement, process_cpus

DEVICE_SLOT_CPUS: Final = 4
"""CPUs that a slot with a device gets when there are plenty: its own thread, and helpers for data and engine."""


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
    device: bool = False
    wish: float = 1.0
    """CPUs that a derived size grows to where the reserve allows."""


def divide_cpus(config: Config, placement: Placement, ledgers: list[Ledger]) -> Shares:
    """CPU sizes of everything placed."""
    result = Shares()
    squeezed: dict[str, list[str]] = {}
    for node, groups in sorted(_groups(config, placement).items()):
        flexible, grown = _divide(list(groups.values()), ledgers[node])
        for (kind, name), group in groups.items():
            derived = flexible if _is_flexible(group, ledgers[node]) else group.wish if grown else 1.0
            (result.slots if kind == "pool" else result.processes)[name, node] = group.typed if group.typed is not None else derived
        if flexible < 1 and any(_is_flexible(group, ledgers[node]) for group in groups.values()):
            squeezed.setdefault(_squeezed(list(groups.values()), flexible, ledgers[node]), []).append(ledgers[node].node.name)
    result.warnings = [f"{_named(names)}: {text}" for text, names in squeezed.items()]
    return result


def _groups(config: Config, placement: Placement) -> dict[int, dict[tuple[str, str], _Group]]:
    """Node -> equal places on it, by (kind, name); the spares of a pool are slots like others."""
    nodes: dict[int, dict[tuple[str, str], _Group]] = {}
    for counts_by_pool in (placement.slots, placement.spares):
        for name, counts in counts_by_pool.items():
            pool = config.pools[name]
            for node, count in counts.items():
                empty = _Group(count=0, typed=pool.cpus, device=has_device(pool), wish=1.0 + _scoring_beside(config, name))
                nodes.setdefault(node, {}).setdefault(("pool", name), empty).count += count
    for role, counts in placement.processes.items():
        wish = 1.0 + (config.roles[role].processes or 0)
        for node, count in counts.items():
            nodes.setdefault(node, {})["role", role] = _Group(count=count, typed=process_cpus(config, role), wish=wish)
    return nodes


def _scoring_beside(config: Config, pool: str) -> int:
    """Scoring processes that were asked for beside the model of a reward worker in a slot of the pool."""
    here = config.slot_roles(pool).get(REWARD)
    return (here.processes or 0) if here is not None else 0


def _is_flexible(group: _Group, ledger: Ledger) -> bool:
    """Derived, and allowed to be less than one CPU."""
    return group.typed is None and (ledger.small or group.device)


def _divide(groups: list[_Group], ledger: Ledger) -> tuple[float, bool]:
    """(CPUs of a flexible place, whether the other derived places get what they wish)."""
    free = ledger.node.usable(CPU)
    usable = min(free, USABLE_SHARE * ledger.node.cpus)
    flexible = sum(group.count for group in groups if _is_flexible(group, ledger))
    fixed = [group for group in groups if not _is_flexible(group, ledger)]
    others = sum(group.count * (group.typed or 1.0) for group in fixed)
    wishes = sum(group.count * (group.typed or group.wish) for group in fixed)
    grown = not ledger.small and wishes + flexible <= usable
    if not flexible:
        return 1.0, grown
    left = free - others
    if left < flexible:
        # Rounded down, so that the sum never exceeds the node; the small term undoes binary rounding of exact hundredths.
        return math.floor(100 * left / flexible + 1e-6) / 100, False
    if ledger.small:
        return 1.0, False
    roomy = (usable - (wishes if grown else others)) / flexible
    return float(max(1, min(DEVICE_SLOT_CPUS, math.floor(roomy)))), grown


def _squeezed(groups: list[_Group], share: float, ledger: Ledger) -> str:
    processes, cpus = sum(group.count for group in groups), amounts_text({CPU: ledger.node.usable(CPU)})
    who = f"{processes} processes share {cpus} ({number(share)} each where not set)" if processes > 1 else f"one process has {cpus}"
    return f"{who}, so phases that overlap slow each other down"


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more nodes"
