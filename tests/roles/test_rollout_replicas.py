"""Replicas of the built-in engine in real processes: the samples do not depend on how many there are, nor on whether one is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolemesh
from rolemesh.batch import Batch, BatchRef, assemble, block_meta
from rolemesh.config import load_config
from rolemesh.config.schema import Config
from rolemesh.roles.rollout import WRITES, RolloutWorker
from rolemesh.roles.rollout_manager import RolloutManager
from rolemesh.runtime import Pool, create_backend

OVERRIDES = ["deterministic=true", "rollout.slots=8", "data.max_prompt_tokens=8", "data.max_response_tokens=24"]


class Dying(RolloutWorker):
    """The first process of rank 1 is killed in the middle of its second piece."""

    pieces = 0

    def hand_in(self, **settings: Any) -> Batch:
        self.pieces += 1
        if self.context.rank == 1 and self.context.process.endswith(".1") and self.pieces == 2:
            for _ in range(3):
                self.engine.step()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().hand_in(**settings)


@pytest.mark.slow
@pytest.mark.ray
def test_samples_are_bit_equal_for_1_2_and_4_replicas_one_of_them_killed_in_mid_generation() -> None:
    config: Config = load_config("demo", OVERRIDES)
    path = [str(Path(__file__).parent), str(Path(rolemesh.__file__).parents[1])]
    backend = create_backend("ray", num_cpus=8, object_store_bytes=400_000_000, pythonpath=path)
    told: list[str] = []

    async def rows(manager: RolloutManager, sent: BatchRef, temperature: float = 1.0) -> dict[tuple[int, int], Any]:
        written = await manager.generate(sent, version=0, temperature=temperature, seed=3)
        assert np.array_equal(written.ids, sent.ids)
        refs, assembly = written.assembly(WRITES)
        found = assemble(assembly, await backend.fetch(refs, 60))
        tokens, logprobs = found.rows("response_ids"), found.rows("rollout_logprobs")
        return {
            (draw, sample): (list(ids), list(numbers))
            for (draw, sample), ids, numbers in zip(found.ids.tolist(), tokens, logprobs, strict=True)
        }

    async def main() -> None:
        pool = await Pool.of_slots(backend, "pool", [4])
        await pool.create(deadline=60)

        async def replicas(name: str, worker: type[RolloutWorker], places: Sequence[int]) -> RolloutManager:
            manager = RolloutManager(name, worker, pool, places, worker_kwargs={"config": config}, tell=told.append)
            await manager.create(deadline=120)
            await manager.init()
            assert await manager.serve_folder(0) == [0] * len(places)
            return manager

        count = 16
        draws = np.arange(count)
        batch = Batch.from_columns(
            {"draw": draws, "sample": np.zeros(count, dtype=np.int64), "prompt_ids": [[5 + draw % 9] * (1 + draw % 8) for draw in draws]}
        ).compact()
        sent = BatchRef.from_blocks([(backend.put(batch.table), block_meta(batch))]).repeat(3)
        shuffled = sent.take(np.random.default_rng(0).permutation(len(sent)))

        expected = await rows(await replicas("one", RolloutWorker, [0]), sent)
        assert len({tuple(tokens) for tokens, _ in expected.values()}) > 40
        two = await replicas("two", Dying, [1, 2])
        pids = [process.pid for process in two.processes]
        assert await rows(two, sent) == expected
        assert len(told) == 1
        assert told[0].startswith("two rank 1 serves no more, 1 of 2 do: two rank 1 ")
        assert await rows(two, shuffled) == expected
        assert told[1:] == ["two rank 1 serves again"]
        assert [process.pid == pid for process, pid in zip(two.processes, pids, strict=True)] == [True, False]
        four = await replicas("four", RolloutWorker, range(4))
        assert await rows(four, shuffled) == expected
        await pool.close()
        await backend.close()

    try:
        backend.run(main())
    finally:
        backend.stop()
