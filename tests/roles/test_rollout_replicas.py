"""Replicas of the built-in engine in real processes: what they generate does not depend on how many there are, nor on whether one is
killed. That holds for answers of one turn and for episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from replicas import PROMPTS, Replicas, die_as_first_of_rank_1, kill_this_process, with_replicas

from rolemesh.batch import Batch
from rolemesh.config import load_config
from rolemesh.roles import episodes, rollout
from rolemesh.roles.episodes import EpisodeWorker
from rolemesh.roles.rollout import RolloutWorker

SIZES = ["deterministic=true", "data.max_prompt_tokens=8"]
SECTION = "{tools: [], name: 'episode_environments:Echo', max_turns: 4, max_observation_tokens: 12, options: {latency: 0.02}}"
WHO_DID_IT = ("weight_spans", "engine")


class Dying(RolloutWorker):
    """The first process of rank 1 is killed in the middle of its second piece."""

    pieces = 0

    def hand_in(self, **settings: Any) -> Batch:
        self.pieces += 1
        if die_as_first_of_rank_1(self) and self.pieces == 2:
            for _ in range(3):
                self.engine.step()
            kill_this_process()
        return super().hand_in(**settings)


class Ending(EpisodeWorker):
    """A model from scratch, which hardly ever ends a turn by itself, ends one now and then."""

    def load(self) -> None:
        super().load()
        self.stop = tuple(range(2, 512, 5))


class DyingEpisodes(Ending):
    """The first process of rank 1 is killed when two of its episodes have ended, with the others at any turn."""

    def hand_in(self, **settings: Any) -> Batch:
        if die_as_first_of_rank_1(self):
            self._play(2)
            kill_this_process()
        return super().hand_in(**settings)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
def test_samples_are_bit_equal_for_1_2_and_4_replicas_one_of_them_killed_in_mid_generation() -> None:
    columns = [name for name in rollout.WRITES if name not in WHO_DID_IT]

    async def compare(replicas: Replicas) -> None:
        sent = replicas.prompts(answers=3)
        shuffled = sent.take(np.random.default_rng(0).permutation(len(sent)))
        expected = await replicas.rows(await replicas.manager("one", RolloutWorker, [0]), sent, columns)
        assert len({tuple(tokens) for tokens, *_ in expected.values()}) > 40
        two = await replicas.manager("two", Dying, [1, 2])
        pids = [process.pid for process in two.processes]
        assert await replicas.rows(two, sent, columns) == expected
        assert len(replicas.told) == 1
        assert replicas.told[0].startswith("two rank 1 serves no more, 1 of 2 do: two rank 1 ")
        assert await replicas.rows(two, shuffled, columns) == expected
        assert replicas.told[1:] == ["two rank 1 serves again"]
        assert [process.pid == pid for process, pid in zip(two.processes, pids, strict=True)] == [True, False]
        assert await replicas.rows(await replicas.manager("four", RolloutWorker, range(4)), shuffled, columns) == expected

    with_replicas(load_config("demo", [*SIZES, "rollout.slots=8", "data.max_response_tokens=24"]), 4, compare)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(580)
def test_episodes_are_bit_equal_for_1_2_and_4_replicas_and_those_of_one_that_is_killed_are_played_again() -> None:
    columns = [name for name in episodes.WRITES if name not in WHO_DID_IT]
    nothing = [None] * PROMPTS
    rest = {"source": ["s"] * PROMPTS, "prompt": ["p"] * PROMPTS, "answer": nothing, "task": nothing}

    async def compare(replicas: Replicas) -> None:
        sent = replicas.prompts(answers=2, **rest)
        shuffled = sent.take(np.random.default_rng(0).permutation(len(sent)))
        expected = await replicas.rows(await replicas.manager("one", Ending, [0]), sent, columns)
        two = await replicas.manager("two", DyingEpisodes, [1, 2])
        assert await replicas.rows(two, sent, columns) == expected
        assert replicas.told[0].startswith("two rank 1 serves no more")
        assert await replicas.rows(two, shuffled, columns) == expected  # with a new process in the place of the killed one
        assert await replicas.rows(await replicas.manager("four", Ending, range(4)), shuffled, columns) == expected

    section = [f"environment={SECTION}", "rollout.slots=4", "data.max_response_tokens=40"]
    with_replicas(load_config("tools", [*SIZES, *section]), 4, compare)
