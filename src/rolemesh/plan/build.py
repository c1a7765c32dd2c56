"""`build_plan`: config + inventory -> Plan. Pure data in and out (it reads the model's `config.json` unless its facts are given)."""

from __future__ import annotations

from collections.abc import Iterator

from rolemesh.config.model_files import ModelFacts, read_model_facts
from rolemesh.config.schema import Config
from rolemesh.errors import ConfigError, Problem
from rolemesh.names import ACTOR, CRITIC
from rolemesh.plan.ledger import number, open_ledgers
from rolemesh.plan.memory import check_memory, pool_memory, reward_memory
from rolemesh.plan.placement import PROCESS_ROLES, Counts, Placement, place, too_many_workers
from rolemesh.plan.schema import Inventory, NodeInfo, Plan, PoolMemory, PoolPlan, Slot, WorkerPlan
from rolemesh.plan.shares import Shares, divide_cpus
from rolemesh.registry import nearest


def build_plan(config: Config, inventory: Inventory, facts: ModelFacts | None = None) -> Plan:
    """Place every worker of the run on the nodes, or say why that is impossible: `problems` holds all that keeps it from starting.

    Expects a config that `check_config` accepts; what depends on the machine is checked here. Never raises for a bad plan.
    """
    problems = _unknown_pools(config)
    if not inventory.nodes:
        free = Problem(
            subject="inventory", need="nodes: needs at least 1", free="0", remedy="Start the cluster, or name nodes with --nodes"
        )
        return Plan(nodes=(), origin=inventory.origin, pools={}, workers=(), memory=(), derived={}, problems=(*problems, free))
    ledgers = open_ledgers(inventory.nodes)
    placement = place(config, ledgers)
    shares = divide_cpus(config, placement, ledgers)
    pools = {name: _pool_plan(config, name, placement, shares) for name in config.pools}
    workers: list[WorkerPlan] = []
    problems += placement.problems
    for role in config.roles:
        if role in PROCESS_ROLES:
            workers += _process_workers(config, role, placement, shares)
        elif config.roles[role].pool in placement.slots:
            workers += _slot_workers(config, role, pools[config.roles[role].pool], problems)
    facts, memory = _memory(config, facts, inventory.nodes, placement, workers, problems)
    return Plan(
        nodes=inventory.nodes,
        origin=inventory.origin,
        pools=pools,
        workers=tuple(workers),
        memory=memory,
        derived=_derived(config, facts, pools, workers),
        warnings=(*shares.warnings, *_warnings(config, inventory.nodes, pools, workers, not placement.problems)),
        problems=tuple(problems),
    )


def _unknown_pools(config: Config) -> list[Problem]:
    return [
        Problem(
            subject=f"roles.{name}.pool",
            need=f"must name a pool: {', '.join(config.pools)}",
            free=repr(role.pool),
            remedy=f"Did you mean {hint!r}?" if (hint := nearest(role.pool, config.pools)) else f"Add pools.{role.pool}.nodes=auto",
        )
        for name, role in config.roles.items()
        if role.pool not in config.pools
    ]


def _pool_plan(config: Config, name: str, placement: Placement, shares: Shares) -> PoolPlan:
    slots: list[Slot] = []
    for node, count in placement.slots.get(name, {}).items():
        cpus, gpus = shares.slots[name, node], config.pools[name].gpus
        slots += [Slot(index=len(slots) + local, node=node, local_index=local, cpus=cpus, gpus=gpus) for local in range(count)]
    return PoolPlan(name=name, slots=tuple(slots))


def _slot_workers(config: Config, role: str, pool: PoolPlan, problems: list[Problem]) -> Iterator[WorkerPlan]:
    """Rank i of the role in slot i."""
    asked = config.roles[role].workers
    count = len(pool.slots) if asked == "auto" else asked
    if asked == "auto" and config.backend == "local" and role in (ACTOR, CRITIC):
        count = 1  # one process cannot form a communicator
    if count > len(pool.slots):
        problems.append(too_many_workers(role, pool.name, count, len(pool.slots)))
    for slot in pool.slots[:count]:
        yield WorkerPlan(role=role, rank=slot.index, pool=pool.name, node=slot.node, slot=slot.index, cpus=slot.cpus, gpus=slot.gpus)


def _process_workers(config: Config, role: str, placement: Placement, shares: Shares) -> Iterator[WorkerPlan]:
    rank = 0
    for node, count in placement.processes.get(role, {}).items():
        for _ in range(count):
            yield WorkerPlan(
                role=role, rank=rank, pool=config.roles[role].pool, node=node, slot=None, cpus=shares.processes[role, node], gpus=0
            )
            rank += 1


def _memory(
    config: Config,
    facts: ModelFacts | None,
    nodes: tuple[NodeInfo, ...],
    placement: Placement,
    workers: list[WorkerPlan],
    problems: list[Problem],
) -> tuple[ModelFacts | None, tuple[PoolMemory, ...]]:
    if facts is None:
        try:
            facts = read_model_facts(config.model.path)
        except ConfigError as error:
            problems += error.problems
            return None, ()
    actors = sum(worker.role == ACTOR for worker in workers)
    memory = [pool_memory(config, name, facts, actors) for name in placement.slots]
    places: list[Counts] = list(placement.slots.values())
    for role, counts in placement.processes.items():
        memory.append(reward_memory(config, role))
        places.append(counts)
    problems += check_memory(nodes, memory, places, {name: pool.gpus for name, pool in config.pools.items()})
    return facts, tuple(memory)


def _derived(
    config: Config, facts: ModelFacts | None, pools: dict[str, PoolPlan], workers: list[WorkerPlan]
) -> dict[str, float | int | str]:
    """Sizes that follow from the options, so that nobody has to work them out."""
    trainer = config.trainer
    samples = trainer.prompts_per_step * config.algorithm.group_size
    derived: dict[str, float | int | str] = {
        "samples_per_step": samples,
        "rows_per_minibatch": samples // trainer.minibatches,
        "optimizer_steps_per_step": trainer.minibatches * trainer.epochs,
        "optimizer_steps": trainer.steps * trainer.minibatches * trainer.epochs,
        "samples": samples * trainer.steps,
    }
    if len(config.data.train) == 1 and config.data.train[0].path.startswith("reasoning_gym:"):
        # The size of a file is known only to who reads it, and several sources have an epoch each.
        derived["steps_per_epoch"] = round((config.data.train[0].size or config.data.size) / trainer.prompts_per_step, 2)
    if facts is not None:
        derived["parameters"] = facts.parameters
    slots = {(worker.pool, worker.slot) for worker in workers if worker.slot is not None}
    beside = [worker for worker in workers if worker.slot is None]
    cpus = sum(slot.cpus for pool in pools.values() for slot in pool.slots) + sum(worker.cpus for worker in beside)
    derived |= {
        "workers": len(workers),
        "processes": len(slots) + len(beside),
        "cpus": round(cpus, 2),
        "gpus": sum(slot.gpus for pool in pools.values() for slot in pool.slots),
    }
    return derived


def _warnings(
    config: Config, nodes: tuple[NodeInfo, ...], pools: dict[str, PoolPlan], workers: list[WorkerPlan], complete: bool
) -> Iterator[str]:
    for name, pool in pools.items():
        used = len({worker.slot for worker in workers if worker.pool == name and worker.slot is not None})
        if used < len(pool.slots):
            yield f"pool {name}: {len(pool.slots) - used} of {len(pool.slots)} slots hold no worker"
    actors = sum(worker.role == ACTOR for worker in workers)
    rows = config.trainer.prompts_per_step * config.algorithm.group_size // config.trainer.minibatches
    if actors > rows:
        yield f"actor: {actors} workers share mini-batches of {rows} rows, so {actors - rows} of them idle; raise trainer.prompts_per_step"
    taken = sum(slot.gpus for pool in pools.values() for slot in pool.slots)
    gpus = sum(node.gpus if node.free_gpus is None else node.free_gpus for node in nodes)
    if complete and taken < gpus:
        hint = "" if taken else "; pools.<pool>.gpus=1 uses them"
        yield f"{number(gpus - taken)} of {number(gpus)} free GPUs are in no pool{hint}"
