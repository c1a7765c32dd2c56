"""`build_plan`: config + inventory -> Plan. Pure data in and out (it reads the model's `config.json` unless its facts are given)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rolemesh.config.model_files import ModelFacts, read_model_facts
from rolemesh.config.schema import Config
from rolemesh.errors import ConfigError, Problem
from rolemesh.names import ACTOR, CRITIC, REF, REWARD, ROLLOUT
from rolemesh.plan import sglang, vllm
from rolemesh.plan.balance import balance_hints
from rolemesh.plan.costs import predict_stages, step_seconds
from rolemesh.plan.ledger import DEVICES, GPU, Ledger, number, open_ledgers, slot_gpus, slot_resources
from rolemesh.plan.memory import WITH_MODEL, cheaper, node_memory, pool_memory, reward_memory
from rolemesh.plan.placement import Counts, Placement, place, too_many_workers
from rolemesh.plan.room import check_memory
from rolemesh.plan.routes import Place, Route, handed_on, weight_format, weight_route
from rolemesh.plan.schema import HelperPlan, Inventory, Layout, NodeInfo, Plan, PoolMemory, PoolPlan, Slot, WorkerPlan
from rolemesh.plan.shares import Shares, divide_cpus
from rolemesh.plan.spares import spare_advice, starved
from rolemesh.registry import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """An actor beside the workers that the run needs: one in all, or one on each node that it uses. It counts no CPU."""

    name: str
    each_node: bool = False


LATER: Final = "End them, or let them go first (cluster.wait)"
KV_STORE: Final = "kv_store"
RUN_HELPERS: Final = (Helper(name=KV_STORE),)
"""Those of every run."""


def build_plan(config: Config, inventory: Inventory, facts: ModelFacts | None = None, *, helpers: Sequence[Helper] = ()) -> Plan:
    """Place every worker of the run on the nodes, or say why that is impossible: `problems` holds all that keeps it from starting.

    Helpers get the nodes that workers use and no others, so what binds a pool binds them. Expects a config that `check_config` accepts;
    what depends on the machine is checked here. Never raises for a bad plan.
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
    workers: dict[str, list[WorkerPlan]] = {}
    problems += placement.problems
    for role in config.roles:
        if role in config.process_roles:
            workers[role] = list(_process_workers(config, role, placement, shares))
        elif config.roles[role].pool in placement.slots:
            workers[role] = list(_slot_workers(config, role, pools[config.roles[role].pool], problems))
    if ROLLOUT in workers:
        ways = zip(workers[ROLLOUT], _routes(config, workers, ROLLOUT), strict=True)
        workers[ROLLOUT] = [replace(one, weights=way, weight_format=weight_format(config, way) if way else None) for one, way in ways]
    models, judges = _models(config, facts, problems), _judges(config, problems)
    problems += [*_indivisible(config, models), *vllm.unfit(config, models.get(ROLLOUT)), *sglang.unfit(config)]
    memory = _memory(config, models, judges, inventory.nodes, placement, workers, problems)
    addresses = list(_addresses(config, inventory, workers, problems))
    if problems and inventory.pending:
        problems.append(Problem(subject="cluster", need="others wait for room too", free="; ".join(inventory.pending), remedy=LATER))
    stages = tuple(predict_stages(config, models, judges, inventory.nodes, workers))
    step = step_seconds(stages, {role: pool for pool in config.pools for role in config.slot_roles(pool)})
    complete = not placement.problems
    return Plan(
        nodes=inventory.nodes,
        origin=inventory.origin,
        pools=pools,
        workers=tuple(worker for group in workers.values() for worker in group),
        memory=memory,
        derived=_derived(config, models.get(ACTOR), pools, workers),
        layouts={role: _layout(config, role, len(group)) for role, group in workers.items() if group},
        helpers=tuple(_helpers(helpers, workers)),
        stages=stages,
        seconds_per_step=step,
        warnings=(
            *sglang.notes(config),
            *shares.warnings,
            *addresses,
            *_spare_warnings(config, inventory.nodes, placement),
            *_warnings(config, ledgers, pools, workers, complete),
            *(balance_hints(config, stages, step) if complete else ()),
        ),
        problems=tuple(problems),
    )


def _unknown_pools(config: Config) -> list[Problem]:
    return [
        Problem(
            subject=f"roles.{name}.pool",
            need=f"must name a pool: {', '.join(config.pools)}",
            free=repr(role.pool),
            remedy=did_you_mean(role.pool, config.pools).rstrip() or f"Add pools.{role.pool}.nodes=auto",
        )
        for name, role in config.roles.items()
        if role.pool not in config.pools
    ]


def _pool_plan(config: Config, name: str, placement: Placement, shares: Shares) -> PoolPlan:
    pool, slots, local = config.pools[name], list[Slot](), dict.fromkeys(placement.slots.get(name, {}), 0)
    gpus, resources = slot_gpus(pool), slot_resources(pool)
    places = [(node, count) for counts in (placement.slots, placement.spares) for node, count in counts.get(name, {}).items()]
    for node, count in places:
        cpus, first = shares.slots[name, node], local.get(node, 0)
        slots += [
            Slot(index=len(slots) + offset, node=node, local_index=first + offset, cpus=cpus, gpus=gpus, resources=resources)
            for offset in range(count)
        ]
        local[node] = first + count
    used = sum(placement.slots.get(name, {}).values())
    return PoolPlan(name=name, slots=tuple(slots[:used]), spares=tuple(slots[used:]))


def _slot_workers(config: Config, role: str, pool: PoolPlan, problems: list[Problem]) -> Iterator[WorkerPlan]:
    count = _slot_count(config, role, pool)
    if count > len(pool.slots):
        problems.append(too_many_workers(role, pool.name, count, len(pool.slots)))
    if role == REF and config.ref_is_actor and count != (actors := _slot_count(config, ACTOR, pool)):
        problems.append(
            Problem(
                subject="roles.ref.workers",
                need=f"must be the {actors} of the actor: with model.lora the reference is the actor without its adapter",
                free=str(count),
                remedy="Set roles.ref.workers=auto, or give the reference a pool and so a model of its own",
            )
        )
    for slot in pool.slots[:count]:
        yield WorkerPlan(
            role=role,
            rank=slot.index,
            pool=pool.name,
            node=slot.node,
            slot=slot.index,
            cpus=slot.cpus,
            gpus=slot.gpus,
            resources=slot.resources,
        )


def _routes(config: Config, workers: Mapping[str, list[WorkerPlan]], role: str) -> list[Route | None]:
    """The way on which weights come to each worker of a role; None without an actor."""
    actors, shared = [_place_of(worker) for worker in workers.get(ACTOR, ())], config.backend == "ray"
    processes, takers = {actor.process for actor in actors}, workers.get(role, ())
    disk = config.trainer.publish_folder is not None
    return [weight_route(_place_of(taker), actors[0], processes, shared_memory=shared, disk=disk) if actors else None for taker in takers]


def _place_of(worker: WorkerPlan) -> Place:
    return Place((worker.pool, worker.slot), worker.node)


def _slot_count(config: Config, role: str, pool: PoolPlan) -> int:
    asked = config.roles[role].workers
    if asked != "auto":
        return asked
    if role == REF and config.ref_is_actor:
        return _slot_count(config, ACTOR, pool)
    alone = config.backend == "local" and role in (ACTOR, CRITIC, REF)  # one process cannot form a communicator
    return 1 if alone else len(pool.slots)


def _process_workers(config: Config, role: str, placement: Placement, shares: Shares) -> Iterator[WorkerPlan]:
    nodes = [node for node, count in placement.processes.get(role, {}).items() for _ in range(count)]
    for rank, node in enumerate(nodes):
        cpus = shares.processes[role, node]
        yield WorkerPlan(role=role, rank=rank, pool=config.roles[role].pool, node=node, slot=None, cpus=cpus, gpus=0)


def _layout(config: Config, role: str, workers: int) -> Layout:
    parts = config.roles[role].tensor_parallel
    return Layout(pool=config.roles[role].pool, workers=workers, tensor_parallel=parts, data_parallel=workers // parts)


def _helpers(helpers: Sequence[Helper], workers: Mapping[str, list[WorkerPlan]]) -> Iterator[HelperPlan]:
    nodes = sorted({worker.node for group in workers.values() for worker in group})
    for helper in helpers:
        for node in nodes if helper.each_node else nodes[:1]:
            yield HelperPlan(name=helper.name, node=node)


def _addresses(config: Config, inventory: Inventory, workers: Mapping[str, list[WorkerPlan]], problems: list[Problem]) -> Iterator[str]:
    """Nodes on which ranks use another address than the one by which the cluster knows the node; a problem for each without it."""
    interface = config.cluster.interface
    for node in (inventory.nodes[index] for index in sorted({worker.node for group in workers.values() for worker in group})):
        if interface is None or node.interfaces is None:
            continue
        if interface not in node.interfaces:
            found = ", ".join(f"{name} {address}" for name, address in node.interfaces.items()) or "none with an address"
            need = f"node {node.name} must have the network interface {interface}"
            remedy = "Name one that every node has, or leave it out"
            problems.append(Problem(subject="cluster.interface", need=need, free=found, remedy=remedy))
        elif node.address_of(interface) != node.address:
            yield f"node {node.name}: ranks use {node.address_of(interface)} ({interface}), the cluster knows it as {node.address}"


def _indivisible(config: Config, models: Mapping[str, ModelFacts]) -> Iterator[Problem]:
    """Rows of ranks that cannot share the heads of their model."""
    for role, facts in models.items():
        size, heads = config.roles[role].tensor_parallel, math.gcd(facts.heads, facts.kv_heads)
        if heads % size and config.roles[role].worker is None:
            yield Problem(
                subject=f"roles.{role}.tensor_parallel",
                need=f"must divide the {facts.heads} attention heads and the {facts.kv_heads} key-value heads of the model",
                free=str(size),
                remedy=f"Valid are {', '.join(str(number) for number in range(1, heads + 1) if heads % number == 0)}",
            )


def _models(config: Config, facts: ModelFacts | None, problems: list[Problem]) -> dict[str, ModelFacts]:
    """The model of each role that has one; a problem for each that cannot be read."""
    policy = facts or _facts(config.model.path, "model.path", problems)
    if policy is None:
        return {}
    found = {role: policy for role in config.roles if role in WITH_MODEL}
    path = config.algorithm.critic_path if CRITIC in found else None
    if path is not None and (critic := _facts(path, "algorithm.critic_path", problems)) is not None:
        found[CRITIC] = critic
    return found


def _judges(config: Config, problems: list[Problem]) -> dict[int, ModelFacts]:
    """The models that score answers, by their entry of `reward`; a problem for each that cannot be read."""
    judges = config.reward_models if REWARD in config.roles else {}
    found = {entry: _facts(model.path, f"reward.{entry}.model.path", problems) for entry, model in judges.items()}
    return {entry: facts for entry, facts in found.items() if facts is not None}


def _facts(path: str, subject: str, problems: list[Problem]) -> ModelFacts | None:
    try:
        return read_model_facts(path)
    except ConfigError as error:
        problems += [replace(problem, subject=subject) for problem in error.problems]
        return None


def _memory(
    config: Config,
    models: Mapping[str, ModelFacts],
    judges: Mapping[int, ModelFacts],
    nodes: tuple[NodeInfo, ...],
    placement: Placement,
    workers: Mapping[str, list[WorkerPlan]],
    problems: list[Problem],
) -> tuple[PoolMemory, ...]:
    if not models:
        return ()
    ranks = {role: len(group) for role, group in workers.items()}
    memory, places = [], list[Counts]()
    for name, counts in placement.slots.items():
        memory.append(pool_memory(config, name, models, ranks, judges))
        spares = placement.spares.get(name, {})
        places.append({node: counts.get(node, 0) + spares.get(node, 0) for node in {**counts, **spares}})
    for role, counts in placement.processes.items():
        memory.append(reward_memory(config, role))
        places.append(counts)
    sent = {(worker.weights, worker.weight_format) for worker in workers.get(ROLLOUT, ()) if worker.weight_format}
    sent |= {(way, "float32") for role in handed_on(config) for way in _routes(config, workers, role) if way != "process"}
    if ACTOR in models and sent:
        readers = Counter(worker.node for worker in workers.get(ROLLOUT, ()) if worker.weights == "disk")
        memory.append(node_memory(config, models[ACTOR], sent, readers=max(readers.values(), default=1)))
        places.append({node: 1 for counts in placement.slots.values() for node in counts})
    devices = {name: _devices(config, name) for name in config.pools}
    problems += check_memory(nodes, memory, places, devices, lambda pool: cheaper(config, pool, models, ranks, judges))
    return tuple(memory)


def _devices(config: Config, pool: str) -> float:
    """Devices of one slot: GPUs, or those that its other resources stand for."""
    return slot_gpus(config.pools[pool]) or sum(amount for name, amount in slot_resources(config.pools[pool]).items() if name in DEVICES)


def _derived(
    config: Config, facts: ModelFacts | None, pools: dict[str, PoolPlan], workers: Mapping[str, list[WorkerPlan]]
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
        if config.model.lora is not None:
            derived["trained_parameters"] = facts.adapter_parameters(config.model.lora.rank)
    beside = [worker for role in config.process_roles for worker in workers.get(role, ())]
    slots = [slot for pool in pools.values() for slot in (*pool.slots, *pool.spares)]
    derived |= {
        "workers": sum(len(group) for group in workers.values()),
        "processes": sum(_used(workers, name) for name in pools) + len(beside),
        "cpus": round(sum(slot.cpus for slot in slots) + sum(worker.cpus for worker in beside), 2),
        "gpus": _whole(sum(slot.gpus for slot in slots)),
    }
    if spares := sum(len(pool.spares) for pool in pools.values()):
        derived["spare_slots"] = spares
    for name in dict.fromkeys(key for slot in slots for key in slot.resources):
        derived[name] = _whole(sum(slot.resources.get(name, 0) for slot in slots))
    return derived


def _used(workers: Mapping[str, list[WorkerPlan]], pool: str) -> int:
    """Slots of the pool that hold a worker: those of its largest role, since each takes the first ones."""
    return max((len(group) for group in workers.values() if group and group[0].pool == pool and group[0].slot is not None), default=0)


def _whole(amount: float) -> float | int:
    """Shares add up to whole devices but for rounding."""
    return round(amount) if abs(amount - round(amount)) < 1e-6 else round(amount, 2)


def _spare_warnings(config: Config, nodes: tuple[NodeInfo, ...], placement: Placement) -> Iterator[str]:
    """What spares cost others, found by placing everything once more without them; and what they are good for."""
    if any(pool.capacity_factor > 1 for pool in config.pools.values()):
        pools = {name: pool.model_copy(update={"capacity_factor": 1.0}) for name, pool in config.pools.items()}
        yield from starved(placement, place(config.model_copy(update={"pools": pools}), open_ledgers(nodes)))
        yield from spare_advice(placement, config.pools)


def _warnings(
    config: Config, ledgers: Sequence[Ledger], pools: dict[str, PoolPlan], workers: Mapping[str, list[WorkerPlan]], complete: bool
) -> Iterator[str]:
    if config.backend == "local" and REWARD in config.roles:
        yield "backend local runs reward functions in the controller's process, where their deadlines and memory limits do not hold"
    for name, pool in pools.items():
        used = _used(workers, name)
        if used < len(pool.slots):
            yield f"pool {name}: {len(pool.slots) - used} of {len(pool.slots)} slots hold no worker"
    actors = len(workers.get(ACTOR, ()))
    rows = config.trainer.prompts_per_step * config.algorithm.group_size // config.trainer.minibatches
    if actors > rows:
        yield f"actor: {actors} workers share mini-batches of {rows} rows, so {actors - rows} of them idle; raise trainer.prompts_per_step"
    yield from _without_effect(config, workers)
    gpus, left = sum(ledger.node.usable(GPU) for ledger in ledgers), sum(ledger.gpus for ledger in ledgers)
    if complete and left > 0:
        hint = "" if left < gpus else "; pools.<pool>.gpus=1 uses them"
        yield f"{number(left)} of {number(gpus)} free GPUs are in no pool{hint}"


def _without_effect(config: Config, workers: Mapping[str, list[WorkerPlan]]) -> Iterator[str]:
    """Options that change nothing where the workers are."""
    trainer, rollouts = config.trainer, workers.get(ROLLOUT, ())
    if rollouts and all(worker.weights == "process" for worker in rollouts):
        nothing = "has no effect: every rollout worker is in an actor's process, where nothing is sent"
        if trainer.publish == "adapter":
            yield f"trainer.publish=adapter {nothing}"
        if trainer.publish_folder is not None and not handed_on(config):
            yield f"trainer.publish_folder {nothing}"
    if trainer.sharding == "fsdp" and max(len(workers.get(role, ())) for role in (ACTOR, CRITIC, REF)) == 1:
        yield "trainer.sharding=fsdp has no effect: one worker keeps all of its model"
    if trainer.offload and workers.get(ACTOR) and not _devices(config, config.roles[ACTOR].pool):
        yield "trainer.offload has no effect: the actor has no devices to leave"
