"""Episodes on replicas in real processes: those of one that is killed are played again by others, and are what they would have been."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolemesh
from rolemesh.batch import Batch, BatchRef, assemble, block_meta
from rolemesh.config import load_config
from rolemesh.roles.episodes import WRITES, EpisodeWorker
from rolemesh.roles.rollout_manager import RolloutManager
from rolemesh.runtime import Pool, create_backend

SECTION = "{tools: [], name: 'episode_environments:Echo', max_turns: 4, max_observation_tokens: 12, options: {latency: 0.02}}"
OVERRIDES = [f"environment={SECTION}", "deterministic=true", "rollout.slots=4", "data.max_prompt_tokens=8", "data.max_response_tokens=40"]
SAME = [name for name in WRITES if name not in ("weight_spans", "engine")]


class Ending(EpisodeWorker):
    """A model from scratch, which hardly ever ends a turn by itself, ends one now and then."""

    def load(self) -> None:
        super().load()
        self.stop = tuple(range(2, 512, 5))


class Dying(Ending):
    """The first process of rank 1 is killed when two of its episodes have ended, with the others at any turn."""

    def hand_in(self, **settings: Any) -> Batch:
        if self.context.rank == 1 and self.context.process.endswith(".1"):
            self._play(2)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().hand_in(**settings)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
def test_episodes_of_a_replica_that_is_killed_are_played_again_and_equal() -> None:
    config = load_config("tools", OVERRIDES)
    path = [str(Path(__file__).parent), str(Path(rolemesh.__file__).parents[1])]
    backend = create_backend("ray", num_cpus=8, object_store_bytes=400_000_000, pythonpath=path)
    told: list[str] = []

    async def rows(manager: RolloutManager, sent: BatchRef) -> list[tuple[Any, ...]]:
        written = await manager.generate(sent, version=0, temperature=1.0, seed=3)
        assert np.array_equal(written.ids, sent.ids)
        refs, assembly = written.assembly(SAME)
        found = assemble(assembly, await backend.fetch(refs, 60))
        return [tuple(row.values()) for row in found.table.select(["draw", "sample", *SAME]).to_pylist()]

    async def main() -> None:
        pool = await Pool.of_slots(backend, "pool", [3])
        await pool.create(deadline=120)

        async def replicas(name: str, worker: type[EpisodeWorker], places: list[int]) -> RolloutManager:
            manager = RolloutManager(name, worker, pool, places, worker_kwargs={"config": config}, tell=told.append)
            await manager.create(deadline=180)
            await manager.init()
            await manager.serve_folder(0)
            return manager

        draws = np.arange(16)
        columns: dict[str, Any] = {"draw": draws, "sample": draws * 0, "prompt_ids": [[5 + draw % 9] * (1 + draw % 8) for draw in draws]}
        columns |= {"source": ["s"] * 16, "prompt": ["p"] * 16, "answer": [None] * 16, "task": [None] * 16}
        batch = Batch.from_columns(columns).compact()
        sent = BatchRef.from_blocks([(backend.put(batch.table), block_meta(batch))]).repeat(2)
        expected = await rows(await replicas("one", Ending, [0]), sent)
        two = await replicas("two", Dying, [1, 2])
        assert await rows(two, sent) == expected
        assert told[0].startswith("two rank 1 serves no more")
        await pool.close()
        await backend.close()

    try:
        backend.run(main())
    finally:
        backend.stop()
