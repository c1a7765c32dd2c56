"""Environments of other libraries: several attempts at a reasoning-gym problem, and textarena's games (where it is installed)."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import re
from typing import Any

import pytest

from rolemesh.config.schema import EnvironmentConfig
from rolemesh.data import open_source
from rolemesh.data.sources import DataConfig
from rolemesh.environments import check_environment_section, environment_maker
from rolemesh.errors import ConfigError
from rolemesh.protocols.environment import Environment, Start, Step, Turn

has_textarena = importlib.util.find_spec("textarena") is not None
needs_textarena = pytest.mark.skipif(not has_textarena, reason="textarena is not installed")


def make(name: str, **options: Any) -> Environment:
    return environment_maker(EnvironmentConfig(name=name, options=options))()


def turn(number: int, text: str) -> Turn:
    return Turn(number=number, token_ids=[], text=text)


def start(seed: int = 0, **task: Any) -> Start:
    return Start(draw=0, sample=0, seed=seed, source="s", prompt="p", answer=None, task=task)


def attempts(environment: Environment, first: Start, *texts: str) -> list[Step]:
    async def main() -> list[Step]:
        assert await environment.reset(first) == ()
        return [await environment.step(turn(number, text)) for number, text in enumerate(texts, start=1)]

    return asyncio.run(main())


def test_reasoning_gym_gives_another_attempt_after_a_wrong_one():
    config = DataConfig(options={"min_terms": 2, "max_terms": 2})
    source = open_source("reasoning_gym:chain_sum", config, subject="data.train", size=2, seed=1)
    problem = source.problem(0)
    first = start(**problem.task)
    wrong, right = attempts(make("reasoning_gym", attempts=3, feedback="No."), first, "no idea", str(problem.answer))
    assert (wrong.done, wrong.reward, [(one.content, one.role) for one in wrong.messages]) == (False, None, [("No.", "user")])
    assert (right.done, right.reward) == (True, 0.9)
    assert attempts(make("reasoning_gym"), first, str(problem.answer))[0].reward == 1.0
    last = attempts(make("reasoning_gym", attempts=2), first, "a", "b")[1]
    assert (last.done, last.reward, last.counts) == (True, 0.0, {"attempts": 2})


def test_options_that_cannot_be_used_are_refused_before_the_run():
    with pytest.raises(ConfigError, match="attempts must be at least 1, got 0"):
        check_environment_section(EnvironmentConfig(name="reasoning_gym", options={"attempts": 0}), None, chat=False)


@pytest.mark.skipif(has_textarena, reason="textarena is installed")
def test_textarena_is_named_where_it_is_missing():
    with pytest.raises(ConfigError, match=r"textarena must be installed.*pip install 'rolemesh\[textarena\]'"):
        make("textarena", game="GuessTheNumber-v0")


def play(seed: int, between: Any = None) -> list[tuple[str, float | None]]:
    """Bisect until the number is found: what the game said after each guess, and what it gave."""
    environment = make("textarena", game="GuessTheNumber-v0")

    async def main() -> list[tuple[str, float | None]]:
        (opening,) = await environment.reset(start(seed))
        assert "between 1 and 20" in opening.content
        low, high, told = 1, 20, []
        for number in range(1, 7):
            if between is not None:
                await between()
            guess = (low + high) // 2
            step = await environment.step(turn(number, f"I say [{guess}]"))
            said = step.messages[0].content if step.messages else "right"
            assert "I say" not in said  # the model wrote that itself
            told.append((said, step.reward))
            if step.done:
                return told
            low, high = (guess + 1, high) if re.search("higher", said) else (low, guess - 1)
        raise AssertionError(told)

    return asyncio.run(main())


@needs_textarena
def test_a_game_of_textarena_is_the_same_for_the_same_seed_whatever_happens_beside_it():
    state = random.getstate()
    games = [play(seed) for seed in range(6)]
    assert random.getstate() == state
    assert all(game[-1] == ("right", 1.0) and all(reward is None for _, reward in game[:-1]) for game in games)
    assert len({len(game) for game in games}) > 1

    async def beside() -> None:
        random.seed(5)
        other = make("textarena", game="GuessTheNumber-v0")
        await other.reset(start(99))
        await other.step(turn(1, "[3]"))

    assert [play(seed, beside) for seed in range(6)] == games


@needs_textarena
def test_an_unknown_game_is_named():
    with pytest.raises(ConfigError, match="Did you mean 'GuessTheNumber-v0'"):
        make("textarena", game="GuessTheNumbr-v0")
