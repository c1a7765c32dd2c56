"""Runs with an environment: two tools and several turns through the whole loop, with what they leave in samples and metrics."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from training_helpers import ONE_PROCESS, PPO, Quiet, only_run, rows

from rolemesh import recipes
from rolemesh.config import load_config
from rolemesh.observe import RunDirectory
from rolemesh.training.launch import run_training
from rolemesh.training.tasks import run_evaluation, run_generation

SMALL = (
    "trainer.steps=2",
    "trainer.prompts_per_step=4",
    "trainer.eval_every=0",
    "trainer.save_samples_every=1",
    "algorithm.group_size=4",
    "algorithm.no_signal=train",
    "data.eval_size=8",
    "rollout.slots=16",
)


def train(tmp_path: Path, *overrides: str) -> tuple[RunDirectory, Quiet]:
    display = Quiet()
    run_training(load_config("tools", [*SMALL, f"runs_dir={tmp_path / 'runs'}", *overrides]), display)
    return only_run(tmp_path), display


def samples(directory: RunDirectory, step: int = 2) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(directory.samples / f"step-{step:06d}.parquet").to_pylist()
    return found


def last_step(directory: RunDirectory) -> dict[str, Any]:
    return next(row for row in reversed(rows(directory)) if "samples/trained" in row)


def check(directory: RunDirectory) -> list[dict[str, Any]]:
    """What holds of every run; returns the samples of its last step."""
    found = samples(directory)
    for row in found:
        turns = json.loads(row["turns"])
        expected = [one for turn in turns for one in [int(turn["role"] == "assistant")] * turn["tokens"]]
        assert row["response_mask"] == expected
        assert row["response_length"] == sum(expected)
    last = last_step(directory)
    trained = sum(row["response_length"] for row in found if row["reward_status"] == "ok")
    assert last["actor/tokens_trained"] == trained < sum(len(row["response_mask"]) for row in found)
    assert last["policy/ratio_first_minibatch_max_deviation"] < 1e-4
    assert last["samples/trained"] + last["samples/masked"] == 16
    assert last["samples/lost"] == 0
    return found


class Echo:
    """Tells the model twice that it wrote something; earns by what it wrote, and fails for two of the answers: for one before its first
    token."""

    async def reset(self, start: Any) -> tuple[()]:
        self.start = start
        if start.sample == 2:
            raise ConnectionError("no judge came")
        return ()

    async def step(self, turn: Any) -> Any:
        from rolemesh.protocols.environment import Message, Step

        if self.start.sample == 1 and turn.number == 2:
            raise ConnectionError("the judge left")
        told = [Message(content="go on", role="user")] if turn.number < 3 else []
        return Step(messages=told, reward=float(len(turn.text) % 5), done=not told)

    async def close(self) -> None:
        pass


@pytest.mark.slow
def test_an_own_environment_with_ppo_in_one_process(tmp_path):
    own = "environment={tools: [], name: 'test_environment_runs:Echo', max_turns: 4}"
    learn = ["sft.steps=12", "sft.warmup_steps=2", "sft.batch_size=32", "reward=[{name: environment}]"]
    directory, _ = train(tmp_path, own, *learn, *PPO, *ONE_PROCESS)
    found = check(directory)
    failed = [row for row in found if row["reward_status"] == "environment"]
    errors = {1: "ConnectionError: the judge left", 2: "ConnectionError: no judge came"}
    assert {row["sample"]: row["environment_error"] for row in failed} == errors
    assert {row["response_length"] for row in failed if row["sample"] == 2} == {0}
    for row in found:
        if row["reward_status"] == "ok":
            assert row["reward"] == row["environment_reward"]
    last = last_step(directory)
    assert last["environment/failed"] == last["reward/status/environment"] == len(failed) == 8
    assert last["samples/masked"] == sum(row["reward"] is None for row in found)
    assert last["environment/turns/max"] == 3
    assert last["critic/tokens_trained"] == last["actor/tokens_trained"]


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_a_model_writes_python_and_its_programs_are_run(tmp_path):
    """The recipe with the tool `python` in the place of the calculator."""
    lessons = tmp_path / "lessons.jsonl"
    lessons.write_text((Path(recipes.__file__).parent / "tools/lessons.jsonl").read_text().replace("calculator(", "python("))
    tools = "environment.tools=['rolemesh.recipes.prices:price', python]"
    directory, _ = train(tmp_path, tools, f"sft.train={lessons}", "sft.steps=80", "trainer.learning_rate=1e-5", "seed=1", *ONE_PROCESS)
    answers = 0
    for row in check(directory):
        turns = json.loads(row["turns"])
        for call, told in pairwise(turns):
            if expression := re.fullmatch(r"python\('(\d+)\+(\d+)'\)", call["text"]):
                assert told == {"role": "tool", "text": str(int(expression[1]) + int(expression[2])), "tokens": told["tokens"]}
                answers += 1
    assert answers > 3
    last = last_step(directory)
    assert last["environment/tool_calls"] > last["environment/python_errors"] >= 0
    assert last["environment/python_timeouts"] == last["environment/python_outputs_cut"] == last["environment/failed"] == 0


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_the_recipe_learns_what_to_ask_its_tools(tmp_path):
    display = Quiet()
    run_training(load_config("tools", [f"runs_dir={tmp_path / 'runs'}", "trainer.steps=12", "trainer.eval_every=0"]), display)
    first, last = (values["eval/accuracy"] for _, values in display.evaluations)
    assert first < 0.5
    assert last > 0.8


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(580)
def test_two_tools_are_learned_end_to_end_with_grpo_and_ppo(tmp_path):
    directory, _ = train(tmp_path / "grpo", "sft.steps=80", "trainer.learning_rate=1e-5", "trainer.minibatches=1", "seed=1")
    called = [turn["text"] for row in check(directory) for turn in json.loads(row["turns"]) if turn["role"] == "assistant"]
    assert any(text.startswith("price(") for text in called)
    assert any(text.startswith("calculator(") for text in called)
    last = last_step(directory)
    assert last["environment/tool_calls"] >= 16
    assert last["environment/observation_tokens"] > 0
    model = directory.checkpoint(2) / "model"
    own = [f"model.path={model}", "sft=null", f"runs_dir={tmp_path / 'other'}"]
    assert run_evaluation(load_config("tools", [*SMALL, *own]))["eval/samples"] == 8
    (answer,) = run_generation(load_config("tools", [*SMALL, *own]), ["Price of item 47 plus 41: "], 0.0)
    assert answer.startswith("price(")
    assert "\n" in answer  # what the tool said
    directory, _ = train(tmp_path / "ppo", f"model.path={model}", "sft=null", "trainer.minibatches=1", *PPO)
    check(directory)
    assert last_step(directory)["critic/tokens_trained"] == last_step(directory)["actor/tokens_trained"]
