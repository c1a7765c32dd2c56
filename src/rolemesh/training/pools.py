"""The pools of a run: as its plan has them, and as an earlier driver has left them. Needs nothing of models, so it is there at once."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rolemesh.config.schema import Config
from rolemesh.errors import ResourceError
from rolemesh.observe import EventLog, Journal, RunDirectory, Stage
from rolemesh.plan.schema import NodeInfo, Plan, WorkerPlan
from rolemesh.runtime import Backend, Bundle, Pool

SPARE = "spare"
"""What identifies a place that no worker has."""
Place = tuple[str, int]
Announce = Callable[[str, str, str], None]
"""Called with (stage, subject, kind) as things happen."""


def place_of(worker: WorkerPlan) -> Place:
    """Workers with equal places share a process: a slot, or for a process of its own the role and rank."""
    return ("slot", worker.slot) if worker.slot is not None else (worker.role, worker.rank)


def places(plan: Plan, pool: str, roles: Sequence[str]) -> dict[Place, Bundle]:
    """The places of a pool that the roles need, in the order of its bundles: slots, processes beside them, and spare slots, which are
    held for workers that have to be replaced."""
    workers = [worker for worker in plan.workers if worker.pool == pool and worker.role in roles]
    workers.sort(key=lambda worker: (worker.slot is None, worker.slot or 0))
    found: dict[Place, Bundle] = {}
    for worker in workers:
        bundle = Bundle(node=worker.node, cpus=worker.cpus, gpus=worker.gpus, resources=worker.resources)
        found.setdefault(place_of(worker), bundle)
    for spare in plan.pools[pool].spares if workers else ():
        found[SPARE, spare.index] = Bundle(node=spare.node, cpus=spare.cpus, gpus=spare.gpus, resources=spare.resources)
    return found


def bundle_of(plan: Plan, worker: WorkerPlan, roles: Sequence[str]) -> int:
    """The number of a worker's place in its pool."""
    return list(places(plan, worker.pool, roles)).index(place_of(worker))


async def planned_nodes(plan: Plan, backend: Backend) -> Sequence[NodeInfo]:
    """The plan's nodes as the backend knows them: where the plan is not of its making, those that stand for them in their order.
    Raises ResourceError when there are fewer, or smaller ones."""
    inventory = await backend.inventory()
    found = inventory.nodes
    if inventory.origin == plan.origin:
        return plan.nodes  # of which those in use are there, or a pool says that they are gone
    for index, planned in enumerate(plan.nodes):
        need, free = f"{planned.cpus:g} CPUs and {planned.gpus} GPUs", "no such node"
        if index < len(found):
            free = f"{found[index].cpus:g} CPUs and {found[index].gpus} GPUs on {found[index].name}"
        if index >= len(found) or found[index].cpus < planned.cpus or found[index].gpus < planned.gpus:
            raise ResourceError.one(f"node {planned.name}", f"planned with {need}", free, "Plan again with what is there now")
    return found


def planned_pools(
    config: Config, plan: Plan, backend: Backend, nodes: Sequence[NodeInfo], *, roles: Sequence[str], run_dir: Path | None
) -> dict[str, Pool]:
    """The pools that the roles need, by name. Nothing is reserved yet."""
    log_dir = run_dir / "logs" if run_dir else None
    made = {}
    for name in plan.pools:
        if planned := places(plan, name, roles):
            spares = [index for index, (kind, _) in enumerate(planned) if kind == SPARE]
            made[name] = Pool(
                backend, name, list(planned.values()), nodes, spares=spares, log_dir=log_dir, interface=config.cluster.interface
            )
    return made


async def take_over(pools: Mapping[str, Pool], epoch: int, deadline: float, announce: Announce) -> set[str]:
    """Names of those that a driver before has left as they are planned now: taken over, with their processes."""
    taken = {name for name, pool in pools.items() if await pool.attach(deadline, epoch=epoch)}
    for name in taken:
        living, planned = len(pools[name].processes), len(pools[name].bundles)
        announce("schedule", f"pool {name}", f"attached, {living} of {planned} processes live")
    return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOver:
    """What a controller has taken over ahead of its session."""

    journal: Journal
    """Opened by this controller; its epoch is the one that the processes know."""
    pools: Mapping[str, Pool]
    workers: list[dict[str, Any]]
    """Who is in their processes, as `status.json` tells it."""


@asynccontextmanager
async def taken_over(
    config: Config, plan: Plan, backend: Backend, directory: RunDirectory, show: Callable[[str, str], None]
) -> AsyncIterator[TakenOver]:
    """Take over what the driver before has left of a run, ahead of all that takes long: from here on nothing of it runs out of time, and
    no call of that driver goes on. If this ends by an exception, because the run is refused, all is left as it was. A plan with problems
    takes nothing."""
    before, roles = directory.read_status(), list(config.roles) if not plan.problems else []
    nodes = await planned_nodes(plan, backend)
    pools = planned_pools(config, plan, backend, nodes, roles=roles, run_dir=directory.path.resolve())
    journal = Journal(directory.journal)
    try:
        with EventLog(directory.events) as events:

            def tell(stage: str, subject: str, kind: str) -> None:
                events.write(cast(Stage, stage), subject, kind)
                show(stage, f"{subject}: {kind}")

            taken = await take_over(pools, journal.epoch, config.deadlines.create, tell)
        held = {name: pool for name, pool in pools.items() if name in taken}
        workers = list(_workers(plan, held, roles))
        told = {"state": "starting", "pid": os.getpid(), "time": time.time(), "phase": "attached", "workers": workers}
        directory.write_status(before | told)
        yield TakenOver(journal=journal, pools=held, workers=workers)
    except BaseException:
        for pool in pools.values():
            pool.detach()
        journal.close()
        directory.write_status(before)
        raise


def _workers(plan: Plan, pools: Mapping[str, Pool], roles: Sequence[str]) -> Iterator[dict[str, Any]]:
    for role in roles:
        for worker in plan.of_role(role):
            process = pools[worker.pool].latest(bundle_of(plan, worker, roles)) if worker.pool in pools else None
            if process is not None:
                told = {"group": role, "roles": [role], "rank": worker.rank, "node": process.node, "pid": process.pid}
                yield told | {"state": "idle", "call": "", "since": None, "leaving": False}
