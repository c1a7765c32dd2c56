"""How many slots of which pool, and how many processes beside them, go to which node. Called by `build.py`.

Explicit pools are placed first, in the order of the config: each entry of `nodes` on a node of its own. What is left is shared among
the `auto` pools: all GPUs, node by node, the next slot to the pool that has fewest devices; for pools without GPUs one node's CPUs.
Processes beside the slots (reward workers) live on the nodes of their pool. A pool that only such roles use has no slots: its `nodes`
count their processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rolemesh.config.schema import Config, PoolConfig
from rolemesh.errors import Problem
from rolemesh.names import REWARD
from rolemesh.plan.ledger import USABLE_SHARE, Ledger, Want, misfit, number, process_demand, slot_demand

PROCESS_ROLES: Final = (REWARD,)
"""Roles with processes of their own instead of places in slots."""
AUTO_CPU_SLOTS: Final = 8
"""Most slots that pools without GPUs get on their own; more is the user's word."""
CPUS_PER_REWARD_PROCESS: Final = 8
AUTO_REWARD_PROCESSES: Final = 8
"""Most reward processes that a node gets on its own."""

Counts = dict[int, int]
"""Node index -> number of places, in node order."""


@dataclass(slots=True)
class Placement:
    """Slots of each pool and processes of each role that has its own, by node; and what did not fit."""

    slots: dict[str, Counts] = field(default_factory=dict)
    processes: dict[str, Counts] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def place(config: Config, ledgers: list[Ledger]) -> Placement:
    """Place all pools and processes; what they take is taken from `ledgers`."""
    result = Placement()
    homes = {role.pool for name, role in config.roles.items() if name not in PROCESS_ROLES}
    slot_pools = {name: pool for name, pool in config.pools.items() if name in homes}
    for name, pool in slot_pools.items():
        if pool.nodes != "auto":
            _place_explicit(name, pool, ledgers, result)
    process_roles = [name for name in PROCESS_ROLES if name in config.roles and config.roles[name].pool in config.pools]
    for role in process_roles:
        if config.roles[role].pool not in slot_pools and config.pools[config.roles[role].pool].nodes != "auto":
            _place_process_pool(role, config, ledgers, result)
    auto = {name: pool for name, pool in slot_pools.items() if pool.nodes == "auto"}
    wanted = {name: _wanted(config, name) for name in auto}
    _place_auto_gpus({name: pool for name, pool in auto.items() if pool.gpus}, wanted, ledgers, result)
    _place_auto_cpus({name: pool for name, pool in auto.items() if not pool.gpus}, wanted, config, ledgers, result)
    for role in process_roles:
        if role not in result.processes:
            _place_processes(role, config, ledgers, result)
    return result


def process_cpus(config: Config, role: str) -> float | None:
    """The CPUs that the user typed for one process of the role, if any: its own, or those of a pool that is its alone."""
    own = config.roles[role].cpus
    pool = config.roles[role].pool
    shared = any(other.pool == pool for name, other in config.roles.items() if name not in PROCESS_ROLES)
    return own if own is not None or shared else config.pools[pool].cpus


def auto_processes(config: Config, ledger: Ledger) -> int:
    """Reward processes that a node gets when their number is derived."""
    if ledger.small or config.backend == "local":
        return 1
    return min(AUTO_REWARD_PROCESSES, int(ledger.node.cpus) // CPUS_PER_REWARD_PROCESS)


def _wanted(config: Config, pool: str) -> float:
    """Most slots that the pool's roles can use; infinite while one takes all there are."""
    if config.backend == "local":
        return 1
    workers = [role.workers for name, role in config.roles.items() if role.pool == pool and name not in PROCESS_ROLES]
    return max(math.inf if count == "auto" else count for count in workers)


def _place_explicit(name: str, pool: PoolConfig, ledgers: list[Ledger], result: Placement) -> None:
    assert pool.nodes != "auto"
    counts = _fit(_slots_of(name, pool), pool.nodes, ledgers, result)
    if counts:
        result.slots[name] = counts


def _slots_of(name: str, pool: PoolConfig) -> Want:
    def remedies(ledger: Ledger, count: int) -> dict[str, str]:
        fewer = f"give pools.{name}.nodes fewer slots a node (at most {ledger.fits(slot_demand(pool, ledger))} here)."
        each = math.floor(100 * ledger.cpus / count + 1e-6) / 100
        if pool.cpus is None:
            cpu = f"{fewer.capitalize()} A process needs at least {number(slot_demand(pool, ledger).cpus)} of a CPU."
        else:
            to = f"to {number(each)} or less" if each > 0 else "and free CPUs on the node"
            cpu = f"Lower pools.{name}.cpus (now {number(pool.cpus)}) {to}, or {fewer}"
        return {"CPU": cpu, "GPU": f"Lower pools.{name}.gpus (now {pool.gpus}; 0 runs on CPUs), or {fewer}"}

    return Want(subject=f"pool {name}", thing="slot", demand=lambda ledger: slot_demand(pool, ledger), remedies=remedies)


def _processes_of(role: str, config: Config) -> Want:
    cpus, pool = process_cpus(config, role), config.roles[role].pool

    def remedies(ledger: Ledger, count: int) -> dict[str, str]:
        room = ledger.fits(process_demand(cpus, ledger))
        return {
            "CPU": f"Lower roles.{role}.workers or roles.{role}.cpus, or give pools.{pool}.nodes fewer places ({room} processes fit here)."
        }

    return Want(subject=f"roles.{role}", thing="process", demand=lambda ledger: process_demand(cpus, ledger), remedies=remedies)


def _place_process_pool(role: str, config: Config, ledgers: list[Ledger], result: Placement) -> None:
    """A pool without slots: its explicit nodes count the processes of its role."""
    name = config.roles[role].pool
    pool, workers = config.pools[name], config.roles[role].workers
    assert pool.nodes != "auto"
    counts = _fit(_processes_of(role, config), pool.nodes, ledgers, result)
    total = sum(pool.nodes)
    left = total if workers == "auto" else workers
    if counts is not None and left > total:
        result.problems.append(too_many_workers(role, name, left, total))
    result.processes[role] = {}
    for node, count in (counts or {}).items():
        if taken := min(count, left):
            result.processes[role][node] = taken
            left -= taken


def too_many_workers(role: str, pool: str, workers: int, places: int) -> Problem:
    return Problem(
        subject=f"roles.{role}.workers",
        need=f"{workers} workers need {workers} places in pool {pool}",
        free=f"{places} places",
        remedy=f"Lower roles.{role}.workers to {places} (or auto), or raise pools.{pool}.nodes",
    )


def _fit(want: Want, entries: Sequence[int], ledgers: list[Ledger], result: Placement) -> Counts | None:
    """A node of its own for each entry, and take the places there; None (and a problem) when that is impossible.

    All entries ask for multiples of one demand, so a node has one capacity. The order of the config is kept when first fit in that
    order works; otherwise the largest entry chooses first, which finds an assignment whenever there is one: a node that holds the
    larger entry can swap it for any smaller one.
    """
    if sum(entries) == 0:
        remedy = "Write for example [2] for one node with two"
        result.problems.append(Problem(subject=want.subject, need=f"needs at least {want.many(1)}", free="0", remedy=remedy))
        return None
    caps = [ledger.fits(want.demand(ledger)) for ledger in ledgers]
    largest_first = sorted(range(len(entries)), key=lambda entry: -entries[entry])
    chosen = _first_fit(entries, range(len(entries)), caps) or _first_fit(entries, largest_first, caps)
    if chosen is None:
        result.problems.append(_no_fit(want, entries, caps, ledgers))
        return None
    counts = {node: entries[entry] for node, entry in sorted(chosen.items()) if entries[entry]}
    for node, count in counts.items():
        ledgers[node].take(want.subject, want.demand(ledgers[node]), count)
    return counts


def _first_fit(entries: Sequence[int], order: Sequence[int], caps: list[int]) -> Counts | None:
    """Node -> entry, each entry on the first free node that holds it."""
    free = list(range(len(caps)))
    chosen: Counts = {}
    for entry in order:
        position = next((position for position, node in enumerate(free) if caps[node] >= entries[entry]), None)
        if position is None:
            return None
        chosen[free.pop(position)] = entry
    return chosen


def _no_fit(want: Want, entries: Sequence[int], caps: list[int], ledgers: list[Ledger]) -> Problem:
    """The first entry, by size, that the nodes left by larger entries cannot hold."""
    ranked = sorted(ledgers, key=lambda ledger: (-caps[ledger.index], -ledger.gpus, -ledger.cpus, ledger.index))
    sizes = sorted(entries, reverse=True)
    if len(sizes) > len(ranked):
        nodes = f"{len(ranked)} node{'' if len(ranked) == 1 else 's'}"
        return Problem(
            subject=want.subject,
            need=f"nodes: needs {len(sizes)}, one for each entry of the pool's nodes",
            free=nodes,
            remedy=f"Give the pool's nodes at most {len(ranked)} entries, or add nodes",
        )
    rank = next(rank for rank, size in enumerate(sizes) if caps[ranked[rank].index] < size)
    return misfit(want, sizes[rank], ranked[rank], "largest node" if rank == 0 else "largest node left")


def _place_auto_gpus(pools: dict[str, PoolConfig], wanted: dict[str, float], ledgers: list[Ledger], result: Placement) -> None:
    totals = dict.fromkeys(pools, 0)
    for ledger in ledgers:
        counts = dict.fromkeys(pools, 0)
        demands = {name: slot_demand(pool, ledger) for name, pool in pools.items()}
        while open_pools := [name for name in pools if totals[name] < wanted[name] and ledger.fits(demands[name])]:
            # Fewest devices first; among equals the order of the config, because `min` keeps the first.
            name = min(open_pools, key=lambda name: totals[name] * pools[name].gpus)
            ledger.take(f"pool {name}", demands[name], 1)
            counts[name] += 1
            totals[name] += 1
        for name, count in counts.items():
            if count:
                result.slots.setdefault(name, {})[ledger.index] = count
    _report_empty(pools, ledgers, result)


def _place_auto_cpus(
    pools: dict[str, PoolConfig], wanted: dict[str, float], config: Config, ledgers: list[Ledger], result: Placement
) -> None:
    if not pools:
        return
    ledger = max(ledgers, key=lambda ledger: ledger.cpus)
    budget = _auto_budget(config, ledger)
    counts = dict.fromkeys(pools, 0)
    progress = True
    while progress:
        progress = False
        for name, pool in pools.items():
            cost, demand = pool.cpus or 1.0, slot_demand(pool, ledger)
            room = cost <= budget and sum(counts.values()) < AUTO_CPU_SLOTS
            # The first slot is given even from a fraction of a CPU: every pool must be able to work.
            if counts[name] < wanted[name] and (room or counts[name] == 0) and ledger.fits(demand):
                ledger.take(f"pool {name}", demand, 1)
                counts[name] += 1
                budget -= cost
                progress = True
    result.slots.update({name: {ledger.index: count} for name, count in counts.items() if count})
    _report_empty(pools, ledgers, result)


def _auto_budget(config: Config, ledger: Ledger) -> float:
    """CPUs of the node that derived slots may use: all of a small node, else the usable share less what is taken and reserved."""
    if ledger.small:
        return ledger.cpus
    taken = sum(demand.cpus for demand in ledger.holders.values())
    reserve = 0.0
    for role in PROCESS_ROLES:
        if role in config.roles and config.roles[role].pool in config.pools:
            workers = config.roles[role].workers
            count = auto_processes(config, ledger) if workers == "auto" else workers
            reserve += count * (process_cpus(config, role) or 1.0)
    return min(ledger.cpus, USABLE_SHARE * ledger.node.cpus - taken) - reserve


def _report_empty(pools: dict[str, PoolConfig], ledgers: list[Ledger], result: Placement) -> None:
    """A problem for each pool that got no slot at all."""
    for name, pool in pools.items():
        if name not in result.slots:
            result.problems.append(misfit(_slots_of(name, pool), 1, max(ledgers, key=lambda ledger: (ledger.gpus, ledger.cpus))))


def _place_processes(role: str, config: Config, ledgers: list[Ledger], result: Placement) -> None:
    """Processes beside the slots of their pool, on its nodes (on every node when the pool has no slots)."""
    workers, want = config.roles[role].workers, _processes_of(role, config)
    slots = result.slots.get(config.roles[role].pool)
    homes = [ledgers[node] for node in slots] if slots else ledgers
    room = {ledger.index: ledger.fits(want.demand(ledger)) for ledger in homes}
    if workers == "auto":
        counts, needed = {node: min(free, auto_processes(config, ledgers[node])) for node, free in room.items()}, 1
        if config.backend == "local":
            counts = dict(list(counts.items())[:1])
    else:
        counts, needed = _spread(workers, room), workers
    if (missing := needed - sum(counts.values())) > 0:
        best = max(homes, key=lambda ledger: ledger.cpus)
        result.problems.append(misfit(want, missing + room[best.index], best))
    result.processes[role] = {node: count for node, count in counts.items() if count}
    for node, count in result.processes[role].items():
        ledgers[node].take(f"roles.{role}", want.demand(ledgers[node]), count)


def _spread(workers: int, room: Counts) -> Counts:
    """`workers` over the nodes as evenly as their room allows, earlier nodes first."""
    counts = dict.fromkeys(room, 0)
    while workers and (open_nodes := [node for node in room if counts[node] < room[node]]):
        share = max(1, workers // len(open_nodes))
        for node in open_nodes:
            more = min(share, room[node] - counts[node], workers)
            counts[node] += more
            workers -= more
    return counts
