"""What any cluster would have to have for a config: told to those who add machines, and the measure of what no cluster can do.

Called by `training/admission.py`, and `with_unplaced` by all that refuse a config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from rolemesh.config.schema import Config, PoolConfig
from rolemesh.errors import Problem
from rolemesh.plan.build import build_plan
from rolemesh.plan.ledger import GPU, Ledger, process_demand, slot_demand
from rolemesh.plan.placement import parallel_unit, process_cpus
from rolemesh.plan.schema import Inventory, NodeInfo

PLENTY: Final = 1024
"""Of everything, and more than that of what is asked for."""


def needed_nodes(config: Config) -> list[NodeInfo]:
    """One node for each entry of each pool, with the least that it must have; for `nodes: auto` one with the least that makes sense."""
    return [node for name, pool in config.pools.items() for node in _pool_nodes(config, name, pool)]


def _pool_nodes(config: Config, name: str, pool: PoolConfig) -> Iterator[NodeInfo]:
    roomy = NodeInfo(name=f"for pool {name}", cpus=PLENTY, memory_bytes=0, gpu_type=pool.accelerator_type or "", labels=pool.labels)
    ledger = Ledger(index=0, node=roomy, cpus=PLENTY, left={})
    own = [role for role in config.process_roles if role in config.roles and config.roles[role].pool == name]
    slots = config.slot_roles(name)
    demand = slot_demand(pool, ledger) if slots else process_demand(process_cpus(config, own[0]) if own else None, ledger)
    beside = process_demand(process_cpus(config, own[0]), ledger).cpus if own and slots else 0.0
    for count in (parallel_unit(config, name),) if pool.nodes == "auto" else pool.nodes:
        amounts = {what: count * amount for what, amount in demand.amounts()}
        yield replace(roomy, cpus=count * demand.cpus + beside, gpus=round(amounts.pop(GPU, 0) + 0.49), resources=amounts)
        beside = 0.0


def with_unplaced(problems: Sequence[Problem], unplaced: Callable[[], Sequence[Problem]]) -> list[Problem]:
    """The problems of a config behind those of its plan, which are made unless roles, pools or models are wrong: what the machines cannot
    hold decides, whatever could be installed or set otherwise. Of a subject that has a problem already the plan's are left out."""
    if any(problem.subject.startswith(("roles", "pools", "model")) for problem in problems):
        return list(problems)
    known = {problem.subject for problem in problems}
    return [*(problem for problem in unplaced() if problem.subject not in known), *problems]


def impossible(config: Config) -> tuple[Problem, ...]:
    """What would keep the run from starting on a cluster with plenty of everything that it asks for."""
    workers = sum(role.workers for role in config.roles.values() if role.workers != "auto")
    plenty = [
        replace(
            node,
            name=f"node-{index}",
            cpus=PLENTY * (node.cpus + workers),
            gpus=node.gpus and PLENTY + node.gpus + workers,
            resources={name: PLENTY + amount + workers for name, amount in node.resources.items()},
            memory_bytes=1 << 62,
        )
        for index, node in enumerate(needed_nodes(config))
    ]
    return build_plan(config, Inventory(nodes=tuple(plenty), origin="any cluster")).problems
