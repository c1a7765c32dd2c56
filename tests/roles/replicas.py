"""Rollout replicas in real processes, for tests that compare what one and several of them generate."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rolemesh
from rolemesh.batch import Batch, BatchRef, assemble, block_meta
from rolemesh.config.schema import Config
from rolemesh.protocols.backend import Backend
from rolemesh.roles.rollout import RolloutWorker
from rolemesh.roles.rollout_manager import RolloutManager
from rolemesh.runtime import Pool, create_backend

PROMPTS = 16


def die_as_first_of_rank_1(worker: RolloutWorker) -> bool:
    """Whether this process is the one that is to be killed: its successor is not."""
    return worker.context.rank == 1 and worker.context.process.endswith(".1")


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Replicas:
    """Managers of replicas, each with places of its own in one pool or with those of another that is done."""

    def __init__(self, config: Config, backend: Backend, pool: Pool) -> None:
        self._config, self._backend, self._pool = config, backend, pool
        self.told: list[str] = []
        """What managers said of their replicas."""

    async def manager(self, name: str, worker: type[RolloutWorker], places: Sequence[int]) -> RolloutManager:
        """One that serves the weights of the model's folder as version 0."""
        made = RolloutManager(name, worker, self._pool, places, worker_kwargs={"config": self._config}, tell=self.told.append)
        await made.create(deadline=180)
        await made.init()
        assert await made.serve_folder(0) == [0] * len(places)
        return made

    def prompts(self, answers: int, **columns: Sequence[Any]) -> BatchRef:
        """Prompts of different lengths, each as often as it is to be answered; `columns` have what else there is of them."""
        draws = np.arange(PROMPTS)
        ids = {"draw": draws, "sample": draws * 0, "prompt_ids": [[5 + draw % 9] * (1 + draw % 8) for draw in draws]}
        batch = Batch.from_columns({**ids, **columns}).compact()
        return BatchRef.from_blocks([(self._backend.put(batch), block_meta(batch))]).repeat(answers)

    async def rows(self, manager: RolloutManager, sent: BatchRef, columns: Sequence[str]) -> dict[tuple[int, int], tuple[Any, ...]]:
        """What is generated, by id; in the order of what was sent."""
        written = await manager.generate(sent, version=0, temperature=1.0, seed=3)
        assert np.array_equal(written.ids, sent.ids)
        refs, assembly = written.assembly(columns)
        found = assemble(assembly, await self._backend.fetch(refs, 60)).table.select(["draw", "sample", *columns])
        return {(row["draw"], row["sample"]): tuple(row[name] for name in columns) for row in found.to_pylist()}


def with_replicas(config: Config, slots: int, compare: Callable[[Replicas], Awaitable[None]]) -> None:
    """Run a test in a cluster of its own with so many slots."""
    path = [str(Path(__file__).parent), str(Path(rolemesh.__file__).parents[1])]
    backend = create_backend("ray", num_cpus=8, object_store_bytes=400_000_000, pythonpath=path)

    async def main() -> None:
        pool = await Pool.of_slots(backend, "pool", [slots])
        await pool.create(deadline=120)
        await compare(Replicas(config, backend, pool))
        await pool.close()
        await backend.close()

    try:
        backend.run(main())
    finally:
        backend.stop()
