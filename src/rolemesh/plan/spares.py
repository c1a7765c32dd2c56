"""Spare slots (`pools.<pool>.capacity_factor`): how many, where, and what to say about them. Called by `placement.py` and `build.py`.

A pool of n slots with factor f has ceil((f - 1) n) spares. An explicit pool gets them beside its slots, first on nodes that hold none
of those, because they survive the loss of a node that does. An `auto` pool takes all it can get and sets its last slots aside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rolemesh.config.schema import PoolConfig
from rolemesh.errors import Problem
from rolemesh.plan.ledger import Ledger, Want, many, misfit, number, slot_demand

if TYPE_CHECKING:
    from rolemesh.plan.placement import Placement


def spare_count(slots: int, factor: float) -> int:
    """Spares of a pool with `slots` slots in use: 2 for ten slots and a factor of 1.2."""
    return math.ceil((factor - 1) * slots - 1e-9)


def place_spares(want: Want, name: str, pool: PoolConfig, allowed: list[Ledger], result: Placement) -> None:
    """Find places for the spares of an explicit pool; a problem when there are too few."""
    slots = result.slots[name]
    needed = left = spare_count(sum(slots.values()), pool.capacity_factor)
    counts: dict[int, int] = {}
    for ledger in sorted(allowed, key=lambda ledger: (ledger.index in slots, ledger.index)):
        if count := min(left, ledger.fits(slot_demand(pool, ledger))):
            ledger.take(f"spares of pool {name}", slot_demand(pool, ledger), count)
            counts[ledger.index] = count
            left -= count
    if left:
        best = max(allowed, key=lambda ledger: (ledger.fits(slot_demand(pool, ledger)), ledger.gpus, ledger.cpus, -ledger.index))
        full = misfit(want, best.fits(slot_demand(pool, best)) + 1, best)
        result.problems.append(_too_few(name, pool, sum(slots.values()), needed, needed - left, full))
    result.spares[name] = dict(sorted(counts.items()))


def split_off_spares(name: str, pool: PoolConfig, unit: int, ledgers: list[Ledger], result: Placement) -> None:
    """Of the slots that an `auto` pool got, keep as many in use as leave enough spares; the last ones become those.

    `unit` slots have to be used together. What is neither used nor spare is given back.
    """
    counts = result.slots[name]
    total = sum(counts.values())
    used = max(size for size in range(0, total + 1, unit) if size + spare_count(size, pool.capacity_factor) <= total)
    if used == 0:
        full = Problem(subject="", need="", free=f"{many(total, 'slot')} in all")
        result.problems.append(_too_few(name, pool, unit, spare_count(unit, pool.capacity_factor), total - unit, full))
        return
    keep, spares = used, spare_count(used, pool.capacity_factor)
    kept: dict[int, int] = {}
    aside: dict[int, int] = {}
    for node, count in counts.items():
        kept[node] = min(count, keep)
        aside[node] = min(count - kept[node], spares)
        keep -= kept[node]
        spares -= aside[node]
        ledgers[node].take(f"pool {name}", slot_demand(pool, ledgers[node]), kept[node] + aside[node] - count)
    result.slots[name] = {node: count for node, count in kept.items() if count}
    result.spares[name] = {node: count for node, count in aside.items() if count}


def _too_few(name: str, pool: PoolConfig, slots: int, needed: int, placed: int, full: Problem) -> Problem:
    """`full` is why there is no place for one more."""
    largest = 1 + placed / slots if slots else 1.0
    return replace(
        full,
        subject=f"pools.{name}.capacity_factor",
        need=f"{number(pool.capacity_factor)} of {many(slots, 'slot')} needs {many(needed, 'spare slot')}, {placed} fit"
        + (f"; {full.need}" if full.need else ""),
        remedy=f"Lower pools.{name}.capacity_factor to {number(math.floor(100 * largest) / 100)} or less, use fewer slots, or add nodes",
    )


def spare_advice(placement: Placement, pools: Mapping[str, PoolConfig]) -> Iterator[str]:
    """What the factors buy: the loss of how many processes, and whether that of a node."""
    for name, spares in placement.spares.items():
        slots, count = placement.slots[name], sum(spares.values())
        total, factor = sum(slots.values()), pools[name].capacity_factor
        if not count:
            continue
        # A node takes its own spares with it, so the others must hold enough for its slots.
        covered = all(count - spares.get(node, 0) >= lost for node, lost in slots.items())
        text = f"pool {name}: {many(count, 'spare slot')} for {total} in use (capacity_factor {number(factor)})"
        largest = max(slots.values())
        if covered:
            enough = 1 + largest / total
            if spare_count(total, factor) > largest and len(slots) > 1:
                yield f"{text} cover more than the loss of any one node; {number(math.ceil(100 * enough) / 100)} would do for that"
        else:
            wanted = number(math.ceil(100 * (1 + largest / total)) / 100)
            remedy = f"with {wanted} and spares on other nodes it would" if len(slots) > 1 else "that takes spares on another node"
            yield f"{text} replace {many(count, 'process')}, but not a node with {largest} slots; {remedy}"


def starved(full: Placement, without: Placement) -> Iterator[str]:
    """Pools and roles that got less because other pools hold spares: `without` is the same placement without any."""
    holders = [name for name, counts in full.spares.items() if counts]
    for kind, ours, theirs in (("pool", full.slots, without.slots), ("role", full.processes, without.processes)):
        for name, counts in theirs.items():
            had, has = sum(counts.values()), sum(ours.get(name, {}).values())
            has += sum(full.spares.get(name, {}).values()) if kind == "pool" else 0
            others = [holder for holder in holders if (kind, holder) != ("pool", name)]
            if has < had and others:
                what = "slots" if kind == "pool" else "processes"
                yield (
                    f"{kind} {name} gets {has} of {had} {what} because spare slots of other pools take the rest; lower "
                    + " or ".join(f"pools.{holder}.capacity_factor" for holder in others)
                )
