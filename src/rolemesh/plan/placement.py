"""How many slots of which pool, and how many processes beside them, go to which node. Called by `build.py`.

Explicit pools are placed first, in the order of the config: each entry of `nodes` on a node of its own. What is left is shared among
the `auto` pools: all devices, node by node, the next slot to the pool that has fewest; for pools without devices one node's CPUs.
Processes beside the slots (reward workers) live on the nodes of their pool. A pool that only such roles use has no slots: its `nodes`
count their processes. Only nodes that meet a pool's constraints hold any of it. Spare slots are dealt with in `spares.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rolemesh.config.schema import Config, PoolConfig
from rolemesh.errors import Problem
from rolemesh.plan.constraints import eligible, unmet
from rolemesh.plan.ledger import CPU, GPU, USABLE_SHARE, Ledger, Want, has_device, many, misfit, number, process_demand, slot_demand
from rolemesh.plan.spares import place_spares, spare_count, split_off_spares

AUTO_CPU_SLOTS: Final = 8
"""Most slots that pools without devices get on their own; more is the user's word."""
CPUS_PER_REWARD_PROCESS: Final = 8
AUTO_REWARD_PROCESSES: Final = 8
"""Most reward processes that a node gets on its own."""

Counts = dict[int, int]
"""Node index -> number of places, in node order."""


@dataclass(slots=True)
class Placement:
    """Slots and spare slots of each pool and processes of each role that has its own, by node; and what did not fit."""

    slots: dict[str, Counts] = field(default_factory=dict)
    spares: dict[str, Counts] = field(default_factory=dict)
    processes: dict[str, Counts] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def place(config: Config, ledgers: list[Ledger]) -> Placement:
    """Place all pools and processes; what they take is taken from `ledgers`."""
    result = Placement()
    slot_pools = {name: pool for name, pool in config.pools.items() if config.slot_roles(name)}
    explicit = {name: pool for name, pool in slot_pools.items() if pool.nodes != "auto"}
    for name, pool in explicit.items():
        if counts := _fit(slots_of(name, pool), name, pool, ledgers, result):
            result.slots[name] = counts
    process_roles = [name for name in config.process_roles if name in config.roles and config.roles[name].pool in config.pools]
    for role in process_roles:
        if config.roles[role].pool not in slot_pools and config.pools[config.roles[role].pool].nodes != "auto":
            _place_process_pool(role, config, ledgers, result)
    for name, pool in explicit.items():
        if name in result.slots and pool.capacity_factor > 1:
            place_spares(slots_of(name, pool), name, pool, _open(name, pool, ledgers), result)
    _place_auto({name: pool for name, pool in slot_pools.items() if pool.nodes == "auto"}, config, ledgers, result)
    for role in process_roles:
        if role not in result.processes:
            _place_processes(role, config, ledgers, result)
    return result


def process_cpus(config: Config, role: str) -> float | None:
    """The CPUs that the user typed for one process of the role, if any: its own, or those of a pool that is its alone."""
    own, pool = config.roles[role].cpus, config.roles[role].pool
    return own if own is not None or config.slot_roles(pool) else config.pools[pool].cpus


def scoring_processes(config: Config, role: str) -> int:
    """Processes in which one reward worker scores: as many as asked for, else one for each whole CPU that was typed."""
    return config.roles[role].processes or max(1, int(config.roles[role].cpus or 1))


def auto_processes(config: Config, ledger: Ledger) -> int:
    """Reward processes that a node gets when their number is derived."""
    if ledger.small or config.backend == "local":
        return 1
    return min(AUTO_REWARD_PROCESSES, int(ledger.node.cpus) // CPUS_PER_REWARD_PROCESS)


def parallel_unit(config: Config, pool: str) -> int:
    """Slots of the pool that have to lie on one node together: what the tensor-parallel sizes of its roles have in common as multiple."""
    return math.lcm(*(role.tensor_parallel for role in config.slot_roles(pool).values()))


def _open(name: str, pool: PoolConfig, ledgers: list[Ledger]) -> list[Ledger]:
    allowed = eligible(name, pool, [ledger.node for ledger in ledgers])
    return [ledger for ledger, ok in zip(ledgers, allowed, strict=True) if ok]


def _wanted(config: Config, pool: str) -> float:
    """Most slots that the pool's roles can use, spares included; infinite while one takes all there are."""
    if config.backend == "local":
        return 1
    most = max(math.inf if role.workers == "auto" else role.workers for role in config.slot_roles(pool).values())
    return most if most == math.inf else most + spare_count(int(most), config.pools[pool].capacity_factor)


def slots_of(name: str, pool: PoolConfig) -> Want:
    """Slots of a pool, as something to be placed."""

    def remedies(ledger: Ledger, count: int) -> dict[str, str]:
        fewer = f"give pools.{name}.nodes fewer slots a node (at most {ledger.fits(slot_demand(pool, ledger))} here)."
        each = math.floor(100 * ledger.cpus / count + 1e-6) / 100
        if pool.cpus is None:
            cpu = f"{fewer.capitalize()} A process needs at least {number(slot_demand(pool, ledger).cpus)} of a CPU."
        else:
            to = f"to {number(each)} or less" if each > 0 else "and free CPUs on the node"
            cpu = f"Lower pools.{name}.cpus (now {number(pool.cpus)}) {to}, or {fewer}"
        others = {key: f"Lower {key} in pools.{name}.resources (now {number(value)}), or {fewer}" for key, value in pool.resources.items()}
        return {**others, CPU: cpu, GPU: f"Lower pools.{name}.gpus (now {number(pool.gpus)}; 0 runs on CPUs), or {fewer}"}

    return Want(subject=f"pool {name}", thing="slot", demand=lambda ledger: slot_demand(pool, ledger), remedies=remedies)


def _processes_of(role: str, config: Config) -> Want:
    cpus, pool = process_cpus(config, role), config.roles[role].pool

    def remedies(ledger: Ledger, count: int) -> dict[str, str]:
        room = ledger.fits(process_demand(cpus, ledger))
        return {
            CPU: f"Lower roles.{role}.workers or roles.{role}.cpus, or give pools.{pool}.nodes fewer places ({room} processes fit here)."
        }

    return Want(subject=f"roles.{role}", thing="process", demand=lambda ledger: process_demand(cpus, ledger), remedies=remedies)


def _place_process_pool(role: str, config: Config, ledgers: list[Ledger], result: Placement) -> None:
    """A pool without slots: its explicit nodes count the processes of its role."""
    name = config.roles[role].pool
    pool, workers = config.pools[name], config.roles[role].workers
    assert pool.nodes != "auto"
    counts, total = _fit(_processes_of(role, config), name, pool, ledgers, result), sum(pool.nodes)
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


def _fit(want: Want, name: str, pool: PoolConfig, ledgers: list[Ledger], result: Placement) -> Counts | None:
    """A node of its own for each entry, and take the places there; None (and a problem) when that is impossible.

    All entries ask for multiples of one demand, so a node has one capacity. The order of the config is kept when first fit in that
    order works; otherwise the largest entry chooses first, which finds an assignment whenever there is one: a node that holds the
    larger entry can swap it for any smaller one.
    """
    entries = pool.nodes
    assert entries != "auto"
    if sum(entries) == 0:
        remedy = "Write for example [2] for one node with two"
        result.problems.append(Problem(subject=want.subject, need=f"needs at least {many(1, want.thing)}", free="0", remedy=remedy))
        return None
    allowed = _open(name, pool, ledgers)
    needed = sum(entry > 0 for entry in entries)
    if len(entries) <= len(ledgers) and len(allowed) < needed:
        result.problems.append(unmet(name, pool, [ledger.node for ledger in ledgers], needed))
        return None
    caps = [0] * len(ledgers)
    for ledger in allowed:
        caps[ledger.index] = ledger.fits(want.demand(ledger))
    largest_first = sorted(range(len(entries)), key=lambda entry: -entries[entry])
    chosen = _first_fit(entries, range(len(entries)), caps) or _first_fit(entries, largest_first, caps)
    if chosen is None:
        result.problems.append(_no_fit(want, entries, caps, ledgers, allowed))
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


def _no_fit(want: Want, entries: Sequence[int], caps: list[int], ledgers: list[Ledger], allowed: list[Ledger]) -> Problem:
    """The first entry, by size, that the nodes left by larger entries cannot hold."""
    sizes = sorted(entries, reverse=True)
    if len(sizes) > len(ledgers):
        return Problem(
            subject=want.subject,
            need=f"nodes: needs {len(sizes)}, one for each entry of the pool's nodes",
            free=many(len(ledgers), "node"),
            remedy=f"Give the pool's nodes at most {len(ledgers)} entries, or add nodes",
        )
    ranked = sorted(allowed, key=lambda ledger: (-caps[ledger.index], -ledger.gpus, -ledger.cpus, ledger.index))
    rank = next(rank for rank, size in enumerate(sizes) if caps[ranked[rank].index] < size)
    return misfit(want, sizes[rank], ranked[rank], "largest node" if rank == 0 else "largest node left")


def _place_auto(pools: dict[str, PoolConfig], config: Config, ledgers: list[Ledger], result: Placement) -> None:
    """Derive the slots of pools with `nodes: auto`, then set their spares aside."""
    allowed = {name: _open(name, pool, ledgers) for name, pool in pools.items()}
    for name, pool in pools.items():
        if not allowed[name]:
            result.problems.append(unmet(name, pool, [ledger.node for ledger in ledgers], 1))
    placed = {name: pool for name, pool in pools.items() if allowed[name]}
    _place_auto_devices({name: pool for name, pool in placed.items() if has_device(pool)}, allowed, config, ledgers, result)
    homes: dict[int, dict[str, PoolConfig]] = {}
    for name, pool in placed.items():
        if not has_device(pool):
            homes.setdefault(max(allowed[name], key=lambda ledger: ledger.cpus).index, {})[name] = pool
    for node, members in homes.items():
        _place_auto_cpus(members, config, ledgers[node], result)
    for name, pool in placed.items():
        if name not in result.slots:
            result.problems.append(_none_fits(name, pool, config, allowed[name]))
        elif pool.capacity_factor > 1:
            split_off_spares(name, pool, parallel_unit(config, name), ledgers, result)


def _place_auto_devices(
    pools: dict[str, PoolConfig], allowed: dict[str, list[Ledger]], config: Config, ledgers: list[Ledger], result: Placement
) -> None:
    totals, wanted = dict.fromkeys(pools, 0), {name: _wanted(config, name) for name in pools}
    units = {name: parallel_unit(config, name) for name in pools}
    homes = {name: {ledger.index for ledger in allowed[name]} for name in pools}
    weights = {name: sum(amount for _, amount in slot_demand(pool, ledgers[0]).amounts()) for name, pool in pools.items()}
    for ledger in ledgers:
        here = [name for name in pools if ledger.index in homes[name]]
        counts = dict.fromkeys(here, 0)
        demands = {name: slot_demand(pools[name], ledger) for name in here}
        while open_pools := [name for name in here if totals[name] < wanted[name] and ledger.fits(demands[name]) >= units[name]]:
            # Fewest devices first; among equals the order of the config, because `min` keeps the first.
            name = min(open_pools, key=lambda name: totals[name] * weights[name])
            ledger.take(f"pool {name}", demands[name], units[name])
            counts[name] += units[name]
            totals[name] += units[name]
        for name, count in counts.items():
            if count:
                result.slots.setdefault(name, {})[ledger.index] = count


def _place_auto_cpus(pools: dict[str, PoolConfig], config: Config, ledger: Ledger, result: Placement) -> None:
    budget = _auto_budget(config, ledger)
    counts, wanted = dict.fromkeys(pools, 0), {name: _wanted(config, name) for name in pools}
    progress = True
    while progress:
        progress = False
        for name, pool in pools.items():
            unit, demand = parallel_unit(config, name), slot_demand(pool, ledger)
            cost = unit * (pool.cpus or 1.0)
            room = cost <= budget and sum(counts.values()) + unit <= max(AUTO_CPU_SLOTS, unit)
            # The first slot is given even from a fraction of a CPU: every pool must be able to work.
            if counts[name] < wanted[name] and (room or counts[name] == 0) and ledger.fits(demand) >= unit:
                ledger.take(f"pool {name}", demand, unit)
                counts[name] += unit
                budget -= cost
                progress = True
    result.slots.update({name: {ledger.index: count} for name, count in counts.items() if count})


def _auto_budget(config: Config, ledger: Ledger) -> float:
    """CPUs of the node that derived slots may use: all of a small node, else the usable share less what is taken and reserved."""
    if ledger.small:
        return ledger.cpus
    taken = sum(held.get(CPU, 0.0) for held in ledger.holders.values())
    reserve = 0.0
    for role in config.process_roles:
        if role in config.roles and config.roles[role].pool in config.pools:
            workers = config.roles[role].workers
            count = auto_processes(config, ledger) if workers == "auto" else workers
            reserve += count * (process_cpus(config, role) or 1.0)
    return min(ledger.cpus, USABLE_SHARE * ledger.node.cpus - taken) - reserve


def _none_fits(name: str, pool: PoolConfig, config: Config, allowed: list[Ledger]) -> Problem:
    best = max(allowed, key=lambda ledger: (ledger.fits(slot_demand(pool, ledger)), ledger.gpus, ledger.cpus))
    unit, room = parallel_unit(config, name), best.fits(slot_demand(pool, best))
    if not 0 < room < unit:
        return misfit(slots_of(name, pool), 1, best)
    roles = [role for role, entry in config.roles.items() if entry.pool == name and entry.tensor_parallel > 1]
    return Problem(
        subject=f"roles.{roles[0]}.tensor_parallel",
        need=f"{unit} slots of pool {name} on one node: ranks that share a model never lie on different nodes",
        free=f"largest node {best.node.name}: {room} slots fit",
        remedy=f"Lower roles.{roles[0]}.tensor_parallel to {room} or less, or use larger nodes",
    )


def _place_processes(role: str, config: Config, ledgers: list[Ledger], result: Placement) -> None:
    """Processes beside the slots of their pool, on its nodes (on every node that the pool allows when it has no slots)."""
    workers, want = config.roles[role].workers, _processes_of(role, config)
    name = config.roles[role].pool
    slots = result.slots.get(name)
    homes = [ledgers[node] for node in slots] if slots else _open(name, config.pools[name], ledgers)
    result.processes[role] = {}
    if not homes:
        problem = unmet(name, config.pools[name], [ledger.node for ledger in ledgers], 1)
        if problem not in result.problems:
            result.problems.append(problem)
        return
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
