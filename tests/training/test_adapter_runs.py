"""Runs that train an adapter: the reference below it, what is published and saved, and that rewards rise."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from training_helpers import ONE_PROCESS, PPO, Quiet, contract_problems, only_run, rows, small

from rolemesh.config.schema import ModelConfig
from rolemesh.errors import ConfigError, ResourceError, WorkerError
from rolemesh.models import load_model, load_tokenizer, save_model
from rolemesh.names import REF
from rolemesh.observe import RunDirectory
from rolemesh.plan import local_inventory
from rolemesh.training.launch import run_training
from rolemesh.training.preflight import prepare
from rolemesh.training.tasks import run_sft

LORA = ("model.lora.rank=8", "trainer.learning_rate=0.01", "trainer.warmup_steps=0", "reward=[{name: 'test_adapter_runs:varied'}]")
WITH_REF = ("roles={actor: {}, rollout: {}, reward: {}, ref: {}}", "algorithm.kl_coefficient=0.2")
REF_APART = (
    "pools={main: {nodes: [1]}, other: {nodes: [1]}}",
    "roles={actor: {}, rollout: {}, reward: {}, ref: {pool: other}}",
    "algorithm.kl_coefficient=0.2",
)


def varied(sample: Any, **options: object) -> float:
    """Differs within a group even before the model can answer anything."""
    return float(sum(map(ord, sample.response)) % 7)


def train(tmp_path: Path, *overrides: str, resume: RunDirectory | None = None) -> RunDirectory:
    run_training(small(tmp_path, *ONE_PROCESS, *LORA, *overrides), Quiet(), resume=resume)
    return resume or only_run(tmp_path)


def served(run: RunDirectory, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoint(step) / "model" / "model.safetensors")


def steps(run: RunDirectory) -> list[dict[str, Any]]:
    return [row for row in rows(run) if "reward/mean" in row]


def test_S07_the_reference_of_an_adapter_is_a_copy_of_its_own_to_the_last_bit(tmp_path: Path) -> None:
    shared, apart = (train(tmp_path / str(len(place)), "sft=null", *place) for place in (WITH_REF, REF_APART))
    assert contract_problems(shared, steps=2) == "contract holds"
    keys = ("policy/kl_ref", "policy/loss", "actor/grad_norm", "reward/mean")
    assert [[row[key] for key in keys] for row in steps(shared)] == [[row[key] for key in keys] for row in steps(apart)]
    first, second = steps(shared)
    assert abs(first["policy/kl_ref"]) < 1e-7
    assert second["policy/kl_ref"] > 1e-6
    assert "time/ref/logprobs" in first
    assert (first["memory/ref/weights"], steps(apart)[0]["memory/ref/weights"]) == (0, 4 * 1_115_264)
    assert max(row["policy/ratio_first_minibatch_max_deviation"] for row in steps(shared)) < 1e-4
    start = dict(load_model(ModelConfig(), seed=0).named_parameters())
    found, expected = served(shared, 2), served(apart, 2)
    assert found.keys() == start.keys()
    assert all(torch.equal(found[name], expected[name]) for name in start)
    changed = {name for name in start if not torch.equal(found[name], start[name])}
    assert changed == {name for name in start if "_proj." in name}
    loaded = PeftModel.from_pretrained(load_model(ModelConfig(), seed=0), str(shared.checkpoint(2) / "adapter")).merge_and_unload()
    assert max(float((weight - found[name]).abs().max()) for name, weight in loaded.named_parameters()) < 1e-6
    adapter = sum(8 * sum(start[name].shape) for name in changed)
    assert first["memory/actor/gradients"] == 4 * adapter
    assert first["memory/actor/weights"] == 4 * (1_115_264 + adapter)


def test_a_warm_start_ends_at_its_reference_and_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", *WITH_REF, "trainer.steps=3")
    parts = train(tmp_path / "parts", *WITH_REF, "trainer.steps=1")
    train(tmp_path / "parts", *WITH_REF, "trainer.steps=3", resume=parts)
    with pytest.raises(ConfigError, match=r"model\.lora.*must stay as it was"):
        train(tmp_path / "parts", *WITH_REF, "model.lora.rank=4", "trainer.steps=4", resume=parts)
    with pytest.raises(ConfigError, match=r"roles\.ref\.pool.*the checkpoint holds its adapter"):
        train(tmp_path / "parts", *REF_APART, "trainer.steps=4", resume=parts)
    with pytest.raises(ConfigError, match=r"model\.lora.*must stay as it was"):
        train(tmp_path / "parts", *WITH_REF, "model.lora=null", "trainer.steps=4", resume=parts)
    first, *later = steps(parts)
    assert abs(first["policy/kl_ref"]) < 1e-7, "the reference is what the warm start left"
    assert min(row["policy/kl_ref"] for row in later) > 1e-6
    assert [row["policy/kl_ref"] for row in steps(parts)] == [row["policy/kl_ref"] for row in steps(whole)]
    found, expected = served(parts, 3), served(whole, 3)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_an_adapter_is_not_resumed_on_another_model_than_it_was_trained_on(tmp_path: Path) -> None:
    """The model below it lies outside the run, and files of the same names and shapes may have come there."""
    base = tmp_path / "base"
    save_model(base, load_model(ModelConfig(), seed=1), load_tokenizer(ModelConfig()))
    few = (f"model.path={base}", "sft=null", "trainer.steps=1")
    run = train(tmp_path, *few)
    named = json.loads((run.checkpoint(1) / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(base)
    save_model(base, load_model(ModelConfig(), seed=2), load_tokenizer(ModelConfig()))
    with pytest.raises(
        WorkerError, match=r"the model below the adapter is not the one that it was trained on: \d+ of its weights, such as"
    ):
        train(tmp_path, *few[:-1], "trainer.steps=2", resume=run)
    moved = tmp_path / "moved"
    save_model(moved, load_model(ModelConfig(), seed=1), load_tokenizer(ModelConfig()))
    train(tmp_path, f"model.path={moved}", "sft=null", "trainer.steps=2", resume=run)


def test_a_critic_beside_an_adapter_is_trained_whole(tmp_path: Path) -> None:
    run = train(tmp_path, *PPO, "trainer.steps=1")
    (row,) = steps(run)
    assert abs(row["policy/kl_ref"]) < 1e-7
    assert row["memory/critic/gradients"] == row["memory/critic/weights"] > 10 * row["memory/actor/gradients"]


def test_layers_that_the_model_has_not_and_workers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'q_proj'") as caught:
        run_training(small(tmp_path, *ONE_PROCESS, "model.lora.target_modules=[q_prj]"), Quiet())
    assert [problem.subject for problem in caught.value.problems] == ["model.lora.target_modules"]
    more = ("roles={actor: {workers: 1}, rollout: {}, reward: {workers: 1, cpus: 0.2}, ref: {workers: 2}}", "model.lora.rank=8")
    with pytest.raises(ResourceError, match=r"roles\.ref\.workers.*must be the 1 of the actor"):
        prepare(small(tmp_path, "pools.main={nodes: [2], cpus: 0.4}", *more), local_inventory())
    more = ("roles={actor: {workers: 1}, rollout: {}, reward: {workers: 1, cpus: 0.2}, ref: {}}", "model.lora.rank=8")
    plan = prepare(small(tmp_path, "pools.main={nodes: [2], cpus: 0.4}", *more), local_inventory()).plan
    assert len(plan.of_role(REF)) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_adapter_on_a_model_that_sometimes_answers_right_raises_the_reward(tmp_path: Path) -> None:
    easy = ("data.options={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}", "data.max_prompt_tokens=24", *ONE_PROCESS)
    start = ("sft={steps: 100, batch_size: 64, learning_rate: 0.002, warmup_steps: 10, schedule: constant}", "rollout.slots=128")
    folder = run_sft(small(tmp_path / "start", *easy, *start), Quiet())
    train_ = (f"model.path={folder}", "model.lora.rank=16", "trainer.steps=40", "trainer.prompts_per_step=32", "algorithm.group_size=8")
    more = (
        "trainer.learning_rate=0.001",
        "trainer.warmup_steps=5",
        "sft=null",
        "rollout.slots=128",
        "data.eval_size=256",
        "trainer.minibatches=2",
    )
    run_training(small(tmp_path / "adapter", *easy, *train_, *more), Quiet())
    summary = json.loads(only_run(tmp_path / "adapter").summary.read_text())
    rewards = [row["reward/mean"] for row in steps(only_run(tmp_path / "adapter"))]
    assert summary["eval/accuracy/last"] > summary["eval/accuracy/first"] + 0.1
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1
    assert max(row["policy/ratio_first_minibatch_max_deviation"] for row in steps(only_run(tmp_path / "adapter"))) < 1e-4
