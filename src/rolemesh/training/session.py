"""A session executes a plan: it turns it into pools and worker groups, and frees them on every exit path."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rolemesh.batch import Batch, BatchRef, assemble, block_meta
from rolemesh.config.schema import Config
from rolemesh.errors import ResourceError, StaleWeights
from rolemesh.plan.schema import NodeInfo, Plan, WorkerPlan
from rolemesh.protocols.backend import Report
from rolemesh.roles import worker_class
from rolemesh.runtime import Backend, Bundle, CallRecord, Deadlines, Pool, WorkerGroup, together

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOAD_RETRIES = 1
Announce = Callable[[str, str, str], None]
"""Called with (stage, subject, kind) as things happen."""


class Session:
    """Pools and groups of one run. `async with session:` creates and initialises them, in two steps with their own deadlines."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        backend: Backend,
        *,
        run_id: str,
        run_dir: Path | None,
        tokenizer: PreTrainedTokenizerBase,
        observer: Callable[[CallRecord], None],
        announce: Announce,
        roles: Sequence[str] | None = None,
        epoch: int = 1,
    ) -> None:
        self.config, self.plan, self.backend, self.tokenizer = config, plan, backend, tokenizer
        self.published_version: int | None = None
        self._announce, self._observer, self._run_dir, self._epoch = announce, observer, run_dir, epoch
        self._roles = [role for role in config.roles if roles is None or role in roles]
        self._run_id = run_id
        self._bundles = {name: _bundles(plan, name, self._roles) for name in plan.pools}
        self.pools: dict[str, Pool] = {}
        self.groups: dict[str, WorkerGroup] = {}

    def _pool(self, name: str, nodes: Sequence[NodeInfo]) -> Pool:
        bundles = [bundle for bundle, _ in self._bundles[name]]
        log_dir = self._run_dir.resolve() / "logs" if self._run_dir else None
        interface = self.config.cluster.interface
        return Pool(self.backend, name, bundles, nodes, prefix=f"{self._run_id}/", log_dir=log_dir, interface=interface)

    def _group(self, role: str) -> WorkerGroup:
        workers = self.plan.of_role(role)
        deadlines = self.config.deadlines
        return WorkerGroup(
            role,
            worker_class(role, self.config),
            self.pools[workers[0].pool],
            [self._bundle_of(worker) for worker in workers],
            worker_kwargs={"config": self.config},
            deadlines=Deadlines(load=deadlines.load, join=deadlines.join, call=deadlines.call, control=deadlines.control),
            epoch=self._epoch,
            run_dir=str(self._run_dir or ""),
            observer=self._observer,
        )

    def _bundle_of(self, worker: WorkerPlan) -> int:
        key = _place(worker)
        return next(index for index, (_, place) in enumerate(self._bundles[worker.pool]) if place == key)

    # -- life -----------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self._create()
            await self._init()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _create(self) -> None:
        deadline = self.config.deadlines.create
        nodes = await self._nodes()
        self.pools = {name: self._pool(name, nodes) for name, places in self._bundles.items() if places}
        self.groups = {role: self._group(role) for role in self._roles}
        for name, pool in self.pools.items():
            self._announce("schedule", f"pool {name}", "placing")
            await pool.create(deadline)
            self._announce("schedule", f"pool {name}", "placed")
        for role in self.groups:
            self._announce("create", role, "starting")
        await together(group.create(deadline) for group in self.groups.values())
        for role, group in self.groups.items():
            self._announce("create", role, f"started {group.world_size}")

    async def _nodes(self) -> Sequence[NodeInfo]:
        """The plan's nodes as the backend knows them: where the plan is not of its making, those that stand for them in their order.
        Raises ResourceError when there are fewer, or smaller ones."""
        inventory = await self.backend.inventory()
        found = inventory.nodes
        if inventory.origin == self.plan.origin:
            return self.plan.nodes  # of which those in use are there, or a pool says that they are gone
        for index, planned in enumerate(self.plan.nodes):
            need, free = f"{planned.cpus:g} CPUs and {planned.gpus} GPUs", "no such node"
            if index < len(found):
                free = f"{found[index].cpus:g} CPUs and {found[index].gpus} GPUs on {found[index].name}"
            if index >= len(found) or found[index].cpus < planned.cpus or found[index].gpus < planned.gpus:
                raise ResourceError.one(f"node {planned.name}", f"planned with {need}", free, "Plan again with what is there now")
        return found

    async def _init(self) -> None:
        for role in self.groups:
            self._announce("load", role, "loading")
        await together(group.init(retries=LOAD_RETRIES) for group in self.groups.values())
        for role in self.groups:
            self._announce("join", role, "ready")

    async def close(self) -> None:
        """End all processes and give the pools back. Idempotent."""
        for pool in self.pools.values():
            await pool.close()
        await self.backend.close()

    # -- data ----------------------------------------------------------------------------------------------------------------

    def store(self, batch: Batch) -> BatchRef:
        """Put a batch that the controller made (prompts, advantages) where workers can read it."""
        compact = batch.compact()
        return BatchRef.from_blocks([(self.backend.put(compact.table), block_meta(compact))])

    async def read(self, batch: BatchRef, names: Sequence[str]) -> Batch:
        """Fetch columns of numbers, which lie in blocks of their own. Token columns stay where they are."""
        refs, assembly = batch.assembly(names)
        return assemble(assembly, await self.backend.fetch(refs, self.config.deadlines.call))

    # -- state ----------------------------------------------------------------------------------------------------------------

    def confirm_published(self, version: int, held: Sequence[int]) -> None:
        """Every rollout worker must hold the version just published. Raises StaleWeights naming the first that does not."""
        for rank, found in enumerate(held):
            if found != version:
                raise StaleWeights(where=f"rollout rank {rank}", holds=found, asked=version)
        self.published_version = version

    async def status(self) -> list[dict[str, Any]]:
        """One entry for each worker: what its process says it does, and since when."""
        found = []
        reports = await asyncio.gather(*(group.reports() for group in self.groups.values()))
        for (role, group), told in zip(self.groups.items(), reports, strict=True):
            for rank, report in enumerate(told):
                process = group.processes[rank]
                entry = {"group": role, "roles": [role], "rank": rank, "node": process.node, "pid": process.pid}
                found.append(entry | _told(report, role))
        return found


def _told(report: Report | BaseException, role: str) -> dict[str, Any]:
    if not isinstance(report, Report):
        return {"state": "unreachable", "call": "", "since": None}
    mine = report.call.startswith(f"{role}.")
    state = report.state if mine else ("waiting" if report.call else "idle")
    return {"roles": list(report.workers), "state": state, "call": report.call, "since": report.since}


def _place(worker: WorkerPlan) -> tuple[str, int]:
    """Workers with equal places share a process: a slot, or for a process of its own the role and rank."""
    return ("slot", worker.slot) if worker.slot is not None else (worker.role, worker.rank)


def _bundles(plan: Plan, pool: str, roles: Sequence[str]) -> list[tuple[Bundle, tuple[str, int]]]:
    """The places of a pool that the roles need, each with what identifies it: slots, processes beside them, and spare slots, which are
    held for workers that have to be replaced."""
    workers = [worker for worker in plan.workers if worker.pool == pool and worker.role in roles]
    workers.sort(key=lambda worker: (worker.slot is None, worker.slot or 0))
    places: dict[tuple[str, int], Bundle] = {}
    for place in workers:
        places.setdefault(_place(place), Bundle(node=place.node, cpus=place.cpus, gpus=place.gpus, resources=place.resources))
    for spare in plan.pools[pool].spares if workers else ():
        places["spare", spare.index] = Bundle(node=spare.node, cpus=spare.cpus, gpus=spare.gpus, resources=spare.resources)
    return [(bundle, place) for place, bundle in places.items()]
