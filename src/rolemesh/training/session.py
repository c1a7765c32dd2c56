"""A session executes a plan: it turns it into pools and worker groups, and frees them on every exit path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rolemesh.batch import Batch, BatchRef, assemble, block_meta
from rolemesh.config.schema import Config
from rolemesh.names import ACTOR, CRITIC, REF
from rolemesh.observe import Journal
from rolemesh.plan.build import KV_STORE
from rolemesh.plan.schema import NodeInfo, Plan
from rolemesh.protocols.backend import Report
from rolemesh.roles import ROLE_GROUPS, worker_class
from rolemesh.runtime import Backend, CallRecord, Deadlines, KvStore, Pool, ResourceGuard, WorkerGroup, kept_alive, together
from rolemesh.training.pools import Announce, TakenOver, bundle_of, planned_nodes, planned_pools, take_over
from rolemesh.training.publication import Publisher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
LOAD_RETRIES = 1
SLOW_SECONDS = 10.0
"""A stage of the start that takes longer says so often what its workers do."""


def nobody(*told: object) -> None:
    """Who hears of what a task without a display has to tell."""


class Session:
    """Pools, groups, KV store and resource guard of one run. `async with session:` creates and initialises them, in two steps with
    their own deadlines."""

    kv: KvStore
    """Who is where, and what the run shares with others; see docs/library.md for its keys."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        backend: Backend,
        *,
        run_id: str,
        run_dir: Path | None,
        tokenizer: PreTrainedTokenizerBase,
        observer: Callable[[CallRecord], None] = nobody,
        announce: Announce = nobody,
        warn: Callable[[str], None] = nobody,
        roles: Sequence[str] | None = None,
        journal: Journal | None = None,
        taken: TakenOver | None = None,
    ) -> None:
        """`taken`: pools that were taken over already, under the journal's epoch."""
        self.config, self.plan, self.backend, self.tokenizer = config, plan, backend, tokenizer
        self.publisher = Publisher(self)
        self._announce, self._warn, self._observer, self._journal = announce, warn, observer, journal
        self._run_dir = run_dir.resolve() if run_dir else None  # workers may be in another folder
        self._roles = [role for role in config.roles if roles is None or role in roles]
        self.run_id = run_id
        self._taken = taken.pools if taken is not None else {}
        self.pools: dict[str, Pool] = {}
        self.groups: dict[str, WorkerGroup] = {}
        self.guard = ResourceGuard(backend, warn=lambda text: announce("run", "guard", text))
        for name, pool in plan.pools.items():
            if pool.slots:
                self.guard.add_slots(name, len(pool.slots))
        self._life = AsyncExitStack()
        self._asleep: set[str] = set()

    def _group(self, role: str) -> WorkerGroup:
        workers = self.plan.of_role(role)
        deadlines = self.config.deadlines
        return ROLE_GROUPS.get(role, WorkerGroup)(
            role,
            worker_class(role, self.config),
            self.pools[workers[0].pool],
            [bundle_of(self.plan, worker, self._roles) for worker in workers],
            worker_kwargs={"config": self.config},
            deadlines=Deadlines(load=deadlines.load, join=deadlines.join, call=deadlines.call, control=deadlines.control),
            journal=self._journal,
            tensor_parallel=self.config.roles[role].tensor_parallel,
            run_dir=str(self._run_dir or ""),
            store=self.kv.link,
            observer=self._observer,
            tell=self._warn,
            moved=partial(self.register, role),
        )

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
        nodes = await planned_nodes(self.plan, self.backend)
        await self._open_store(nodes, deadline)
        self.pools = planned_pools(self.config, self.plan, self.backend, nodes, roles=self._roles, run_dir=self._run_dir)
        taken = await self._take_over(deadline)
        self.groups = {role: self._group(role) for role in self._roles}
        for name, pool in self.pools.items():
            if name in taken:
                continue
            self._announce("schedule", f"pool {name}", "placing")
            await pool.create(deadline)
            self._announce("schedule", f"pool {name}", "placed")
        for role in self.groups:
            self._announce("create", role, "starting")
        await self._told("create", deadline, (group.create(deadline) for group in self.groups.values()))
        for role, group in self.groups.items():
            self._announce("create", role, f"started {group.world_size}")
        await self.publisher.open()

    async def _take_over(self, deadline: float) -> set[str]:
        """Names of the pools that a driver before has left as they are planned now: taken over, with their processes. What else it left is
        given back."""
        if self._journal is None or "detach" in self.backend.lacks:
            return set()
        await self.backend.give_back(keep=[f"{self.backend.prefix}{name}" for name in self.pools])
        self.pools |= self._taken
        others = {name: pool for name, pool in self.pools.items() if name not in self._taken}
        return set(self._taken) | await take_over(others, self._journal.epoch, deadline, self._announce)

    async def _open_store(self, nodes: Sequence[NodeInfo], deadline: float) -> None:
        node = next((nodes[helper.node] for helper in self.plan.helpers if helper.name == KV_STORE), None)
        self.kv = await KvStore.start(self.backend, self.run_id, deadline=deadline, node=node)
        await self._life.enter_async_context(self.kv)
        await self._life.enter_async_context(kept_alive(self.kv, lambda text: self._announce("run", "kv store", text)))

    async def _told(self, stage: str, deadline: float, work: Iterable[Awaitable[T]]) -> list[T]:
        """Do work side by side; while it takes long, say again and again who is not ready, and what they do."""
        began = self.backend.time()
        task = asyncio.ensure_future(together(work))
        try:
            while not (await asyncio.wait({task}, timeout=SLOW_SECONDS))[0]:
                for role, group in self.groups.items():
                    if doing := await group.unready():
                        seconds = self.backend.time() - began
                        self._announce(stage, role, f"{doing} after {seconds:.0f} s of at most {deadline:.0f} s")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _init(self) -> None:
        for role in self.groups:
            self._announce("load", role, "loading")
        await self._told("load", self.config.deadlines.load, (group.init(retries=LOAD_RETRIES) for group in self.groups.values()))
        for role in self.groups:
            self._announce("join", role, "ready")
            await self.register(role)

    async def register(self, role: str) -> None:
        """Tell the KV store where the workers of a role are, after it was created or has changed. Late writers of the role that it had
        before are refused from here on."""
        group = self.groups[role]
        await self.kv.fence(role, group.generation)
        await self.kv.put(f"groups/{role}", {"workers": group.world_size, "generation": group.generation, "epoch": group.epoch})
        for rank, process in enumerate(group.processes):
            told = {"node": process.node, "address": process.address, "pid": process.pid, "process": process.spec.name}
            await self.kv.put(f"groups/{role}/{rank}", told)

    async def close(self) -> None:
        """End all processes and give the pools back. Idempotent."""
        self.guard.close()
        for pool in self.pools.values():
            await pool.close()
        await self._life.aclose()
        await self.backend.close()

    def detach(self) -> None:
        """Leave everything as it is, for the next driver of this run. Raises ConfigError where processes end with this one."""
        for pool in self.pools.values():
            pool.detach()
        self.pools.clear()
        self.backend.detach(self.run_id)

    # -- devices --------------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def holding(self, phase: str, *roles: str) -> AsyncIterator[None]:
        """Hold the slots of these roles (those that the run has) for a phase; other phases that need one of them wait meanwhile, in
        turn. With `trainer.offload` models under training are woken for their phases and sent to sleep for others on their slots. Raises
        DeadlineExceeded naming the holders, or Deadlock."""
        wanted: dict[str, set[int]] = {}
        for role in roles:
            for worker in self.plan.of_role(role) if role in self.groups else ():
                if worker.slot is not None:
                    wanted.setdefault(worker.pool, set()).add(worker.slot)
        with ExitStack() as held:
            for pool in sorted(wanted):
                deadline = self.config.deadlines.call
                held.enter_context(await self.guard.acquire(pool, who=phase, slots=sorted(wanted[pool]), deadline=deadline))
            if self.config.trainer.offload:
                await self._hand_over({*roles, *((ACTOR,) if REF in roles and self.config.ref_is_actor else ())}, wanted)
            yield

    async def _hand_over(self, using: Collection[str], slots: Mapping[str, Collection[int]]) -> None:
        """Give devices from models that a phase on these slots does not use to those that it does."""
        trained = [role for role in (ACTOR, CRITIC) if role in self.groups]
        here = [role for role in trained if any(one.slot in slots.get(one.pool, ()) for one in self.plan.of_role(role))]
        leaving, coming = set(here) - {*using, *self._asleep}, self._asleep & set(using)
        await together(self.groups[role].sleep() for role in sorted(leaving))
        await together(self.groups[role].wake() for role in sorted(coming))
        self._asleep = (self._asleep | leaving) - coming

    def devices(self) -> list[dict[str, Any]]:
        """Of each pool its slots, who holds them and who waits, with seconds so far."""
        return [
            {
                "pool": pool.name,
                "slots": int(pool.budget),
                "free": pool.free,
                "holders": [{"who": held.who, "slots": list(held.slots), "seconds": pool.time - held.since} for held in pool.holders],
                "waiting": [{"who": one.who, "slots": one.amount, "seconds": pool.time - one.since} for one in pool.waiting],
            }
            for pool in self.guard.snapshot()
        ]

    # -- data ----------------------------------------------------------------------------------------------------------------

    def store(self, batch: Batch) -> BatchRef:
        """Put a batch that the controller made (prompts, advantages) where workers can read it."""
        compact = batch.compact()
        return BatchRef.from_blocks([(self.backend.put(compact), block_meta(compact))])

    async def read(self, batch: BatchRef, names: Sequence[str]) -> Batch:
        """Fetch columns of numbers, which lie in blocks of their own. Token columns stay where they are."""
        refs, assembly = batch.assembly(names)
        return assemble(assembly, await self.backend.fetch(refs, self.config.deadlines.call))

    # -- state ----------------------------------------------------------------------------------------------------------------

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
        return {"state": "unreachable", "call": "", "since": None, "leaving": False}
    mine = report.call.startswith(f"{role}.")
    state = report.state if mine else ("waiting" if report.call else "idle")
    return {"roles": list(report.workers), "state": state, "call": report.call, "since": report.since, "leaving": report.leaving}
