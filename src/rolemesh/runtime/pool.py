"""A resource pool: bundles on nodes, each the place of one process. Works alone, without any role or reinforcement learning."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Self

from rolemesh.errors import ConfigError, DeadlineExceeded, ResourceError, StaleCall, WorkerDied
from rolemesh.plan.schema import NodeInfo
from rolemesh.protocols.backend import Backend, Bundle, Process, ProcessSpec, Report, Resident
from rolemesh.runtime.calls import together

Restore = Callable[[float], Awaitable[None]]
TAKE_SECONDS = 10.0
"""How long a process that is taken over gets to answer, and a call of the controller before to end; then it is replaced."""
PAUSE_SECONDS = 0.05


class Pool:
    """Bundles reserved under one name, and the processes started in them. A process is started once and shared by all groups.

    Groups use places, numbered as the bundles are. `spares` are bundles that nobody uses until the node of another one is lost.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        bundles: Sequence[Bundle],
        nodes: Sequence[NodeInfo],
        *,
        spares: Collection[int] = (),
        log_dir: Path | None = None,
        interface: str | None = None,
    ) -> None:
        self.backend, self.name, self.nodes = backend, name, tuple(nodes)
        self._reserved, self._spares = tuple(bundles), list(spares)
        self._moved: dict[int, int] = {}
        """Places that have moved to a spare bundle."""
        self._log_dir, self._interface = log_dir, interface
        self._starting: dict[int, asyncio.Future[Process]] = {}
        self._latest: dict[int, Process] = {}
        self._started: dict[int, int] = {}
        """How many processes each bundle has had."""
        self._residents: dict[int, dict[str, Resident]] = {}
        """Workers that were found in processes that were taken over, until their groups ask for them."""
        self._tenants: dict[int, dict[str, Restore]] = {}
        self._env: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if interface is not None:
            self._env |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}

    @classmethod
    async def of_slots(cls, backend: Backend, name: str, slots: Sequence[int], *, cpus: float = 1.0, gpus: int = 0) -> Self:
        """A pool of `slots[i]` places on the i-th node of the backend's inventory, created at once.

        Raises ResourceError when there are fewer nodes than entries, for no places, and for places of nothing.
        """
        if min(slots, default=0) < 0 or sum(slots) < 1:
            raise ResourceError.one(f"pool {name}", "at least one place", f"slots {list(slots)}", "Give for example [2]")
        if not (0 <= cpus < inf and gpus >= 0 and cpus + gpus > 0):
            raise ResourceError.one(f"pool {name}", "places of some CPUs or GPUs each", f"cpus={cpus:g}, gpus={gpus}", "Give cpus=1")
        nodes = (await backend.inventory()).nodes
        if len(slots) > len(nodes):
            raise ResourceError.one(f"pool {name}", f"{len(slots)} nodes", str(len(nodes)), "Give fewer entries or add nodes")
        bundles = [Bundle(node=node, cpus=cpus, gpus=gpus) for node, count in enumerate(slots) for _ in range(count)]
        return cls(backend, name, bundles, nodes)

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """Of each place, where it is now."""
        return tuple(self._reserved[self._moved.get(place, place)] for place in range(len(self._reserved)))

    @property
    def places(self) -> tuple[tuple[Self, int], ...]:
        """This pool and the number of each place, as a `PoolView` has them of several."""
        return tuple((self, place) for place in range(len(self._reserved)))

    async def create(self, deadline: float) -> None:
        """Reserve the bundles. Raises ResourceError on expiry."""
        await self.backend.create_pool(self._full_name, self._reserved, self.nodes, deadline)

    async def attach(self, deadline: float, *, epoch: int) -> bool:
        """Take over the pool of a controller that is gone, with the processes that live; `epoch` is the new controller's, and has to be
        higher than that of any before. Whatever an older one still has under way is stopped and what it has queued is refused. Processes
        that are missing start on first use, as ever.

        False when there is no such pool, or one of other bundles or nodes, which is given back then: `create` it.
        """
        found = await self.backend.attach_pool(self._full_name, self._reserved, self.nodes, deadline)
        if found is None:
            return False
        try:
            await together(self._take(process, epoch) for process in found)
        except StaleCall:  # a newer controller has it
            self.detach()
            raise
        return True

    async def _take(self, process: Process, epoch: int) -> None:
        bundle = process.spec.bundle
        self._started[bundle] = int(process.spec.name.rpartition(".")[2])
        try:
            residents = await self._freed(process, epoch)
        except (WorkerDied, DeadlineExceeded):
            await self.backend.kill(process)
            return
        self._starting[bundle] = taken = asyncio.get_running_loop().create_future()
        taken.set_result(process)
        self._latest[bundle], self._residents[bundle] = process, residents

    async def _freed(self, process: Process, epoch: int) -> dict[str, Resident]:
        """The workers of a process that is ours from now on, once the call of an older controller has ended in it."""
        ends = self.backend.time() + TAKE_SECONDS
        report: Report = await self.backend.control(process, "take", TAKE_SECONDS, epoch=epoch)
        while report.state == "computing":
            if self.backend.time() >= ends:
                raise DeadlineExceeded(waiter="the controller", subject=f"{report.call} of an older controller", seconds=TAKE_SECONDS)
            await self.backend.sleep(PAUSE_SECONDS)
            report = await self.backend.control(process, "report", TAKE_SECONDS)
        return dict(report.workers)

    def resident(self, bundle: int, group: str) -> Resident | None:
        """The worker of a group that was found in a bundle's process when it was taken over. Given to its group once."""
        return self._residents.get(bundle, {}).pop(group, None)

    def detach(self) -> None:
        """Let go of the pool and leave everything as it is, for a later `attach`. Raises ConfigError where processes end with us."""
        if "detach" in self.backend.lacks:
            remedy = "Use create_backend('ray', run=..., detached=True)"
            raise ConfigError.one(f"pool {self.name}", "needs a backend whose processes outlive it", self.backend.name, remedy)
        self._starting.clear()
        self._tenants.clear()
        self.backend.detach(self._full_name)

    @property
    def _full_name(self) -> str:
        return f"{self.backend.prefix}{self.name}"

    async def process(self, bundle: int, deadline: float) -> Process:
        """The process of a bundle, started on first use. A start that failed is forgotten, so that the next use tries again."""
        if bundle not in self._starting:
            home = self._moved.get(bundle, bundle)
            self._started[home] = nth = self._started.get(home, 0) + 1  # the name of the one before may not be free yet
            name = f"{self._full_name}-{home}.{nth}"
            log_path = str(self._log_dir / f"{self.name}-{home}.log") if self._log_dir else ""
            spec = ProcessSpec(name=name, pool=self._full_name, bundle=home, env=self._env, log_path=log_path, interface=self._interface)
            starting = self._starting[bundle] = asyncio.ensure_future(self.backend.spawn(spec, deadline))
            starting.add_done_callback(lambda task: self._forget_failed(bundle, task))
        process = await asyncio.shield(self._starting[bundle])  # one waiter that gives up does not end the start for the others
        self._latest[bundle] = process
        return process

    def _forget_failed(self, bundle: int, task: asyncio.Future[Process]) -> None:
        if not _succeeded(task) and self._starting.get(bundle) is task:
            del self._starting[bundle]

    def latest(self, bundle: int) -> Process | None:
        """The process that was last used in a bundle; after `kill` calls of it raise WorkerDied, until another is started."""
        return self._latest.get(bundle)

    @property
    def processes(self) -> list[Process]:
        """Processes that run now, by bundle."""
        return [task.result() for _, task in sorted(self._starting.items()) if _succeeded(task)]

    def move_in(self, bundle: int, group: str, restore: Restore) -> None:
        """A group has a worker in this bundle's process; `restore(deadline)` makes it again in a new process."""
        self._tenants.setdefault(bundle, {})[group] = restore

    def tenants(self, bundle: int) -> frozenset[str]:
        """Groups that have a worker in this bundle's process."""
        return frozenset(self._tenants.get(bundle, ()))

    async def replace(self, bundle: int, deadline: float) -> None:
        """Kill the process of a bundle, start a new one and restore the workers of all groups in it; on a spare bundle, if its node is
        gone. Raises ResourceError when there is none that would do."""
        await self.kill(bundle)
        await self._leave_lost_node(bundle)
        for restore in list(self._tenants.get(bundle, {}).values()):
            await restore(deadline)

    async def _leave_lost_node(self, place: int) -> None:
        alive = {node.identity for node in (await self.backend.inventory()).nodes}
        bundle = self.bundles[place]
        if self.nodes[bundle.node].identity in alive:
            return
        for spare in self._spares:
            other = self._reserved[spare]
            if replace(other, node=bundle.node) == bundle and self.nodes[other.node].identity in alive:
                self._spares.remove(spare)
                self._moved[place] = spare
                return
        need = f"place {place} needs another: its node {self.nodes[bundle.node].name} is gone"
        found = f"{len(self._spares)} spare, none of its kind on a node that lives"
        raise ResourceError.one(f"pool {self.name}", need, found, f"Hold spares with pools.{self.name}.capacity_factor")

    async def kill(self, bundle: int) -> None:
        """End the process of a bundle, also one that is still starting; the next use starts a new one."""
        task = self._starting.pop(bundle, None)
        self._residents.pop(bundle, None)
        if task is not None:
            await self._end(task)

    async def _end(self, task: asyncio.Future[Process]) -> None:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if _succeeded(task):
            await self.backend.kill(task.result())

    async def close(self) -> None:
        """End all processes, also those still starting, and give the bundles back. Then raises the first error of a kill, if any."""
        tasks = [self._starting.pop(bundle) for bundle in sorted(self._starting)]
        ended = await asyncio.gather(*map(self._end, tasks), return_exceptions=True)
        self._tenants.clear()
        await self.backend.release_pool(self._full_name)
        for error in ended:
            if error is not None:
                raise error


def _succeeded(task: asyncio.Future[Process]) -> bool:
    """Looks at the exception, so that asyncio does not report one that nobody waited for."""
    return task.done() and not task.cancelled() and task.exception() is None
