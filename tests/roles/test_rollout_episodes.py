"""The rollout with an environment, on the built-in engine: equal episodes whoever plays them, tokens as trained, and no loss on what the
model did not write."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rolemesh.algorithms import Grpo
from rolemesh.batch import Batch
from rolemesh.config import load_config
from rolemesh.config.schema import AlgorithmConfig
from rolemesh.engines.train import OptimizerSettings, TrainEngine
from rolemesh.errors import RolemeshError, StaleWeights
from rolemesh.models import load_model, load_tokenizer
from rolemesh.observe import Metrics
from rolemesh.roles import worker_class
from rolemesh.roles.episodes import WRITES, EpisodeWorker
from rolemesh.runtime import WorkerContext

ROWS, SAMPLES, ROOM = 6, 2, 40
SETTINGS = {"version": 0, "temperature": 1.0, "seed": 3}


def worker(*overrides: str, environment: str = "Echo", latency: float = 0.0) -> EpisodeWorker:
    section = f"tools: [], name: 'episode_environments:{environment}', max_turns: 4, max_observation_tokens: 12"
    own = [
        f"environment={{{section}, options: {{latency: {latency}}}}}",
        f"data.max_response_tokens={ROOM}",
        "deterministic=true",
        "rollout.slots=16",
        *overrides,
    ]
    config = load_config("tools", own)
    made = worker_class("rollout", config)(
        WorkerContext(group="rollout", rank=0, world_size=1, local_rank=0, local_world_size=1, node="here", address="127.0.0.1"),
        config=config,
    )
    assert isinstance(made, EpisodeWorker)
    made.load()
    made.stop = tuple(range(2, 512, 5))  # a model from scratch hardly ever ends a turn
    made.serve_folder(0)
    return made


def prompts() -> Batch:
    rows = [(draw, sample) for draw in range(ROWS) for sample in range(SAMPLES)]
    columns = {name: ["x"] * len(rows) for name in ("source", "prompt")} | {name: [None] * len(rows) for name in ("answer", "task")}
    ids = {"draw": [draw for draw, _ in rows], "sample": [sample for _, sample in rows]}
    return Batch.from_columns(ids | columns | {"prompt_ids": [[1, *range(40, 44 + draw)] for draw, _ in rows]})


@pytest.fixture(scope="module")
def played() -> Batch:
    made = worker()
    try:
        return made.generate(prompts(), **SETTINGS)
    finally:
        made.close()


def content(batch: Batch) -> dict[tuple[int, int], tuple[object, ...]]:
    columns = [list(batch.rows(name)) for name in ("response_ids", "response_mask", "rollout_logprobs")]
    columns += [list(batch.scalars(name)) for name in ("response", "turns", "environment_reward", "finish_reason", "response_length")]
    rows = zip(batch.ids.tolist(), *columns, strict=True)
    return {(draw, sample): tuple(list(one) if isinstance(one, np.ndarray) else one for one in row) for (draw, sample), *row in rows}


def test_episodes_have_turns_and_their_columns_agree(played):
    assert set(WRITES) <= set(played.names)
    reasons = set()
    rows = zip(
        *(played.rows(name) for name in ("response_ids", "response_mask", "rollout_logprobs")),
        *(played.scalars(name) for name in ("turns", "response_length", "finish_reason", "environment_reward")),
        strict=True,
    )
    for ids, mask, logprobs, told, length, reason, reward in rows:
        turns = json.loads(told)
        written = [turn["tokens"] for turn in turns if turn["role"] == "assistant"]
        assert sum(turn["tokens"] for turn in turns) == len(ids) == len(mask) == len(logprobs)
        expected = [one for turn in turns for one in [int(turn["role"] == "assistant")] * turn["tokens"]]
        assert list(mask) == expected
        assert length == sum(mask) == sum(written)
        assert turns[0]["role"] == "tool"  # what reset says
        assert all((logprob == 0) == (not sampled) for logprob, sampled in zip(logprobs, mask, strict=True))
        reasons.add(reason)
        if reason == "stop":
            assert len(written) == 3
            assert reward == sum(written)
    assert reasons == {"stop", "length"}  # by the environment and by the room


def test_episodes_are_bit_equal_whoever_plays_them_and_however_slow_the_environment_is(played):
    other = worker("rollout.slots=3", latency=0.05)
    try:
        batch = prompts()
        shuffled = np.random.default_rng(0).permutation(len(batch))
        other.take_on(batch.take(shuffled[:5]), round="a", **SETTINGS)
        pieces = [other.hand_in(round="a", at_least=2)]
        other.take_on(batch.take(shuffled[5:]), round="a", **SETTINGS)
        pieces += [other.hand_in(round="a", at_least=3), other.hand_in(round="a", at_least=len(batch))]
        assert content(Batch.concat(pieces)) == content(played)
        with pytest.raises(RuntimeError, match="round a has no request here"):
            other.hand_in(round="a", at_least=1)
        other.take_on(batch, round="b", **SETTINGS)
        other.take_on(batch, round="c", **SETTINGS)  # b was given up
        assert content(other.hand_in(round="c", at_least=len(batch))) == content(played)
        assert other.metrics.reduce()["environment/turns/max"] == 3
        with pytest.raises(StaleWeights):
            other.generate(batch, version=1, temperature=1.0, seed=3)
    finally:
        other.close()


def trainer() -> TrainEngine:
    return TrainEngine(
        load_model(load_config("tools").model, seed=0), optimizer=OptimizerSettings(learning_rate=1e-3), micro_batch_tokens=512
    )


def test_the_trainer_finds_the_log_probabilities_of_the_engine_for_every_sampled_token(played):
    batch = prompts().join(played)
    for own, engines, mask in zip(
        trainer().logprobs(batch, 1.0), played.rows("rollout_logprobs"), played.rows("response_mask"), strict=True
    ):
        sampled = np.asarray(mask) == 1
        assert np.abs(own[sampled] - np.asarray(engines)[sampled]).max() < 1e-4


def test_what_the_model_did_not_write_is_in_no_loss(played):
    batch = prompts().join(played).with_columns({"reward": np.arange(len(played), dtype=np.float64)})
    algorithm = Grpo(AlgorithmConfig(group_size=SAMPLES), minibatches=1)
    data = algorithm.prepare(batch, Metrics())

    def gradients(rows: Batch) -> dict[str, torch.Tensor]:
        return trainer().compute_gradients(rows, algorithm.loss, temperature=1.0, metrics=Metrics())

    junk = [
        [logprob if sampled else -50.0 for logprob, sampled in zip(logprobs, mask, strict=True)]
        for logprobs, mask in zip(data.rows("rollout_logprobs"), data.rows("response_mask"), strict=True)
    ]
    expected, other = gradients(data), gradients(data.with_columns({"rollout_logprobs": junk}))
    assert all(torch.equal(expected[name], other[name]) for name in expected)
    unmasked = gradients(data.drop(["response_mask"]))
    assert not all(torch.allclose(expected[name], unmasked[name], rtol=0.01) for name in expected)


def test_in_a_chat_the_template_stands_between_turns(tmp_path):
    tokenizer = load_tokenizer(load_config("tools").model)
    head = "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>\n{% endfor %}" + head
    tokenizer.save_pretrained(tmp_path)
    made = worker("data.chat=true", f"model.tokenizer={tmp_path}")
    try:
        found = made.generate(prompts(), **SETTINGS)
    finally:
        made.close()
    several = 0
    for ids, told in zip(found.rows("response_ids"), found.scalars("turns"), strict=True):
        at, last = 0, -1
        for turn in json.loads(told):
            part = list(ids[at : at + turn["tokens"]])
            if turn["role"] == "tool":
                expected = f"\ntool: {turn['text']}<eos>\nassistant: "
                assert tokenizer.decode(part) == (expected if last == tokenizer.eos_token_id else f"<eos>{expected}")
                several += at > 0
            at, last = at + len(part), part[-1]
        assert at == len(ids)
    assert several > 5


def test_B16_an_environment_that_only_fails_stops_the_run_with_its_name():
    made = worker(environment="Broken")
    try:
        one = made.generate(prompts().take([0]), **SETTINGS)  # a single prompt may be at fault itself
        assert one.scalars("environment_error")[0] == "ConnectionError: nobody at port 80"
        assert one.table.column("environment_reward").to_pylist() == [None]
        assert made.metrics.reduce()["environment/failed"] == 1
        with pytest.raises(RolemeshError, match=r"environment episode_environments:Broken failed in all of 12 .*\n*.*port 80"):
            made.generate(prompts(), **SETTINGS)
    finally:
        made.close()
