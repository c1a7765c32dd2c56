"""A resource pool: bundles on nodes, each the place of one process. Works alone, without any role or reinforcement learning."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from rolemesh.errors import ResourceError
from rolemesh.plan.schema import NodeInfo
from rolemesh.protocols.backend import Backend, Bundle, Process, ProcessSpec


class Pool:
    """Bundles reserved under one name, and the processes started in them. A process is started once and shared by all groups."""

    def __init__(
        self,
        backend: Backend,
        name: str,
        bundles: Sequence[Bundle],
        nodes: Sequence[NodeInfo],
        *,
        prefix: str = "",
        log_dir: Path | None = None,
    ) -> None:
        self.backend, self.name, self.bundles, self.nodes = backend, name, tuple(bundles), tuple(nodes)
        self._prefix, self._log_dir = prefix, log_dir
        self._starting: dict[int, asyncio.Task[Process]] = {}
        self._env: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

    @classmethod
    async def of_slots(cls, backend: Backend, name: str, slots: Sequence[int], *, cpus: float = 1.0, gpus: int = 0) -> Self:
        """A pool of `slots[i]` places on the i-th node of the backend's inventory, created at once.

        Raises ResourceError when there are fewer nodes than entries.
        """
        nodes = (await backend.inventory()).nodes
        if len(slots) > len(nodes):
            raise ResourceError.one(f"pool {name}", f"{len(slots)} nodes", str(len(nodes)), "Give fewer entries or add nodes")
        bundles = [Bundle(node=node, cpus=cpus, gpus=gpus) for node, count in enumerate(slots) for _ in range(count)]
        return cls(backend, name, bundles, nodes)

    async def create(self, deadline: float) -> None:
        """Reserve the bundles. Raises ResourceError on expiry."""
        await self.backend.create_pool(self._full_name, self.bundles, self.nodes, deadline)

    @property
    def _full_name(self) -> str:
        return f"{self._prefix}{self.name}"

    async def process(self, bundle: int, deadline: float) -> Process:
        """The process of a bundle, started on first use."""
        if bundle not in self._starting:
            name = f"{self._full_name}-{bundle}"
            log_path = str(self._log_dir / f"{self.name}-{bundle}.log") if self._log_dir else ""
            spec = ProcessSpec(name=name, pool=self._full_name, bundle=bundle, env=self._env, log_path=log_path)
            self._starting[bundle] = asyncio.ensure_future(self.backend.spawn(spec, deadline))
        return await self._starting[bundle]

    @property
    def processes(self) -> list[Process]:
        """Processes that run now, by bundle."""
        return [
            task.result() for _, task in sorted(self._starting.items()) if task.done() and not task.cancelled() and task.exception() is None
        ]

    async def kill(self, bundle: int) -> None:
        """End the process of a bundle; the next use starts a new one."""
        task = self._starting.pop(bundle, None)
        if task is not None:
            await self.backend.kill(await task)

    async def close(self) -> None:
        """End all processes and give the bundles back."""
        for process in self.processes:
            await self.backend.kill(process)
        self._starting.clear()
        await self.backend.release_pool(self._full_name)
