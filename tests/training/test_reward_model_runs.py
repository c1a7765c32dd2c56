"""Runs whose rewards come from models: the same in one process, in shared slots and in a pool of their own, and refused if unfit."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_helpers import ONE_PROCESS, PPO, Quiet, contract_problems, only_run, rows, small
from transformers import LlamaConfig, LlamaForSequenceClassification

from rolemesh.config.schema import Config, ModelConfig
from rolemesh.errors import ConfigError, WorkerDied, WorkerError
from rolemesh.models import load_tokenizer
from rolemesh.observe import RunDirectory
from rolemesh.plan import local_inventory
from rolemesh.training import loop, phases
from rolemesh.training.launch import backend_for, open_run, run_on, run_training
from rolemesh.training.preflight import prepare

JUDGED = "reward=[{{name: exact, weight: 0.5}}, {{name: judge, weight: 2.0, model: {{path: {folder}}}}}]"


def save_reward_model(folder: Path, labels: int = 1) -> LlamaForSequenceClassification:
    """A classifier for the tokens of the tiny policy, whose scores differ enough to learn from."""
    tokenizer = load_tokenizer(ModelConfig())
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(9)
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer), num_labels=labels, pad_token_id=tokenizer.eos_token_id, initializer_range=0.3)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_a_run_learns_from_a_model_beside_a_function_and_is_resumed_and_evaluated(tmp_path: Path) -> None:
    save_reward_model(tmp_path / "judge")
    settings = (*ONE_PROCESS, JUDGED.format(folder=tmp_path / "judge"), "trainer.prompts_per_step=2", "trainer.save_every=1")
    run_training(small(tmp_path, *settings, "trainer.steps=1"), Quiet())
    run = only_run(tmp_path)
    run_training(small(tmp_path, *settings), Quiet(), resume=run)
    assert contract_problems(run, 2) == "contract holds"
    steps = [row for row in rows(run) if "reward/mean" in row]
    assert len(steps) == 2
    for row in steps:
        whole = 0.5 * row["reward/extra/exact"] + 2.0 * row["reward/extra/judge"]
        assert row["reward/mean"] == pytest.approx(whole, abs=1e-5)
        assert row["reward/std"] > 0
        assert row["memory/reward/weights"] > 0
        assert row["reward/model/cut"] == row["reward/failed"] == 0
    before, after = (load_file(run.checkpoint(step) / "model" / "model.safetensors") for step in (1, 2))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    plan = json.loads(run.plan.read_text())
    assert [worker["slot"] for worker in plan["workers"] if worker["role"] == "reward"] == [0]
    assert any(row.get("eval/failed") == 0 for row in rows(run))


def test_unfit_models_are_refused_before_anything_starts(tmp_path: Path) -> None:
    save_reward_model(tmp_path / "three", labels=3)
    save_reward_model(tmp_path / "speechless")
    for file in (tmp_path / "speechless").glob("tokenizer*"):
        file.unlink()
    shutil.copytree(tmp_path / "speechless", tmp_path / "blank")  # transformers makes an empty tokenizer for this architecture
    speechless = json.loads((tmp_path / "speechless" / "config.json").read_text())
    (tmp_path / "blank" / "config.json").write_text(json.dumps(speechless | {"model_type": "qwen2"}))
    save_reward_model(tmp_path / "strange")
    strange = json.loads((tmp_path / "strange" / "config.json").read_text())
    (tmp_path / "strange" / "config.json").write_text(json.dumps(strange | {"model_type": "nothing_known"}))
    entries = [f"{{model: {{path: {tmp_path / name}}}}}" for name in ("three", "speechless", "strange", "nowhere", "blank")]
    with pytest.raises(ConfigError) as caught:
        run_training(small(tmp_path, *ONE_PROCESS, f"reward=[{', '.join(entries)}]"), Quiet())
    assert not (tmp_path / "runs").exists()
    found = {problem.subject: str(problem) for problem in caught.value.problems}
    assert list(found) == [f"reward.{number}.model.path" for number in (0, 3, 1, 2, 4)]
    assert "with 3 labels" in found["reward.0.model.path"]
    assert "must hold a tokenizer" in found["reward.1.model.path"]
    assert "nothing_known" in found["reward.2.model.path"]
    assert "must be a Hugging Face folder; found no folder" in found["reward.3.model.path"]
    assert "must hold a tokenizer" in found["reward.4.model.path"]
    assert "Copy tokenizer.json" in found["reward.4.model.path"]


def test_weights_that_are_missing_end_the_start_with_the_option(tmp_path: Path) -> None:
    model = save_reward_model(tmp_path / "judge")
    model.save_pretrained(tmp_path / "judge", state_dict={k: v for k, v in model.state_dict().items() if "layers.1" not in k})
    with pytest.raises(WorkerError, match=r"reward rank 0") as caught:
        run_training(small(tmp_path, *ONE_PROCESS, JUDGED.format(folder=tmp_path / "judge"), "sft=null"), Quiet())
    assert "reward.1.model.path: " in str(caught.value)
    assert "weights are missing in its files: model.layers.1" in str(caught.value)


TOGETHER = ("pools.main={nodes: [2], cpus: 0.4}",)
APART = (
    "pools={main: {nodes: [1], cpus: 0.3}, judge: {nodes: [3], cpus: 0.3}, other: {nodes: [1], cpus: 0.3}}",
    "roles={actor: {pool: main}, rollout: {pool: main}, reward: {pool: judge}, ref: {pool: other}, critic: {pool: other}}",
)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", [TOGETHER, APART], ids=["together", "apart"])
def test_rewards_are_those_of_transformers_on_any_number_of_workers(tmp_path: Path, layout: tuple[str, ...]) -> None:
    """Two workers have five rows, and one, in the slots of others; or three in slots of their own, of which one is killed then."""
    model = save_reward_model(tmp_path / "judge")
    judged = (*PPO, JUDGED.format(folder=tmp_path / "judge"), "sft=null", "trainer.prompts_per_step=1", "algorithm.group_size=5")
    config = small(tmp_path, *judged, *layout)
    backend = backend_for(config, local_inventory(), f"judges-{secrets.token_hex(6)}")

    async def main(config: Config = config) -> Any:
        directory = RunDirectory.create(config.runs_dir, config.name)
        async with open_run(prepare(config, local_inventory()), directory, backend, Quiet()) as run:
            await phases.publish(run)
            samples = await phases.generate(run, phases.draw(run))
            scored = await phases.score(run, samples)
            found = await run.session.read(scored, ["prompt_ids", "response_ids", "response", "answer", "reward", "reward_status"])
            alone = await run.session.read(await run.session.groups["reward"].score(samples.take([3])), ["reward"])
            assert abs(alone.scalars("reward")[0] - found.scalars("reward")[3]) < 1e-6
            await loop.step(run)
            if layout is APART:
                os.kill(run.session.groups["reward"].processes[1].pid, signal.SIGKILL)
                with pytest.raises(WorkerDied, match="reward rank 1"):
                    await phases.score(run, samples)
            return found

    found = run_on(backend, main())
    tokens = [prompt + answer for prompt, answer in zip(found.rows("prompt_ids"), found.rows("response_ids"), strict=True)]
    with torch.no_grad():
        own = np.array([float(model(input_ids=torch.tensor([row])).logits) for row in tokens])
    right = np.array([given.strip() == wanted for given, wanted in zip(found.scalars("response"), found.scalars("answer"), strict=True)])
    assert np.ptp(own) > 0.01
    assert np.abs(found.scalars("reward") - (2.0 * own + 0.5 * right)).max() < 1e-5
