"""The section `reward` where it names models: what is refused before anything is loaded. Needs no torch, as the checks do not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rolemesh.config import check_config, dump_config, load_config
from rolemesh.config.schema import Config, RewardConfig
from rolemesh.errors import ConfigError

SIZES = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 20,
}


def write_model(folder: Path, architecture: str, weights: dict[str, tuple[int, ...]], **more: object) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES | {"architectures": [architecture]} | more))
    save_file({name: np.zeros(shape, dtype=np.float32) for name, shape in weights.items()}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture
def config_of(tmp_path: Path):
    good = write_model(tmp_path / "good", "LlamaForSequenceClassification", {"score.weight": (1, 8)}, id2label={"0": "score"})
    recipe = tmp_path / "recipe.yaml"

    def make(reward: str, *overrides: str) -> Config:
        recipe.write_text(f"reward: {reward.replace('GOOD', good)}\n")
        return load_config(str(recipe), overrides)

    return make


def problems(config: Config, **builtins: list[str]) -> dict[str, str]:
    return {problem.subject: str(problem) for problem in check_config(config, builtins={"reward.name": ["exact"]})}


def test_an_entry_with_a_model_beside_functions(config_of, tmp_path: Path) -> None:
    config = config_of(
        "[{name: exact}, {weight: 0.5, sources: [a], model: {path: GOOD}}, {name: harm, weight: -1, model: {path: GOOD, dtype: bfloat16}}]"
    )
    assert [reward.name for reward in config.reward] == ["exact", "model", "harm"]
    assert list(config.reward_models) == [1, 2]
    assert config.process_roles == ()
    assert problems(config) == {}
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "again.yaml"), []) == config
    alone = config_of("[{name: exact}]", "reward.0.model.path=somewhere")
    assert alone.reward_models[0].path == "somewhere"
    assert Config().process_roles == ("reward",)


def test_what_does_not_go_with_a_model(config_of) -> None:
    found = problems(config_of("[{name: exact, deadline: 5, options: {a: 1}, memory_mb: 100, model: {path: GOOD}}]"))
    assert set(found) == {"reward.0.name", "reward.0.deadline", "reward.0.options", "reward.0.memory_mb"}
    assert "this is the name of a built-in verifier; found 'exact'" in found["reward.0.name"]
    found = problems(config_of("[{name: 'mine:score', model: {path: GOOD}}]"))
    assert list(found) == ["reward.0.name"]
    assert "has letters, digits, _, . and - alone" in found["reward.0.name"]
    found = problems(config_of("[{model: {path: GOOD}}]", "roles.reward.cpus=2", "roles.reward.processes=3"))
    assert "lives in the slots of its pool" in found["roles.reward.cpus"]
    assert list(found) == ["roles.reward.cpus"]
    with pytest.raises(ConfigError, match=r"reward.0.model.path"):
        config_of("[{model: {dtype: float32}}]")


@pytest.mark.parametrize(
    ("architecture", "weights", "more", "found"),
    [
        ("LlamaForSequenceClassification", {"score.weight": (2, 8)}, {}, "with 2 labels"),
        ("LlamaForSequenceClassification", {"score.weight": (3, 8)}, {"id2label": {"0": "a", "1": "b", "2": "c"}}, "with 3 labels"),
        ("LlamaForSequenceClassification", {"norm.weight": (8,)}, {"num_labels": 1}, "no weight with one output"),
        ("LlamaForCausalLM", {"lm_head.weight": (20, 8)}, {}, "without a weight [1, hidden]"),
        ("Qwen2MoeForCausalLM", {"model.layers.0.mlp.shared_expert_gate.weight": (1, 8)}, {}, "without a weight [1, hidden]"),
        ("LlamaForCausalLM", {"model.layers.0.a.weight": (8, 8), "model.b.weight": (1, 8)}, {}, "without a weight [1, hidden]"),
        ("LlamaForCausalLM", {"a.weight": (1, 8), "b.weight": (1, 8)}, {}, "without a weight [1, hidden]"),
        ("LlamaModel", {"norm.weight": (8,)}, {}, "LlamaModel in config.json"),
    ],
)
def test_a_model_that_gives_no_score_is_refused(config_of, tmp_path: Path, architecture, weights, more, found) -> None:
    path = write_model(tmp_path / "bad", architecture, weights, **more)
    (problem,) = problems(config_of(f"[{{name: exact}}, {{model: {{path: {path}}}}}]")).items()
    assert problem[0] == "reward.1.model.path"
    assert found in problem[1]
    assert "Use a" in problem[1]


def test_a_head_beside_a_causal_model_will_do(config_of, tmp_path: Path) -> None:
    weights = {
        "model.layers.0.a.weight": (8, 8),
        "lm_head.weight": (20, 8),
        "v_head.summary.weight": (1, 8),
        "v_head.summary.bias": (1,),
    }
    path = write_model(tmp_path / "causal", "LlamaForCausalLM", weights)
    assert problems(config_of(f"[{{model: {{path: {path}}}}}]")) == {}


def test_files_that_are_missing(config_of, tmp_path: Path) -> None:
    path = Path(write_model(tmp_path / "bad", "LlamaForSequenceClassification", {"score.weight": (1, 8)}, num_labels=1))
    config = config_of(f"[{{model: {{path: {path}}}}}]")
    assert problems(config) == {}
    (path / "model.safetensors").unlink()
    assert "must hold model.safetensors" in problems(config)["reward.0.model.path"]
    (path / "config.json").unlink()
    assert "must hold config.json" in problems(config)["reward.0.model.path"]
    assert "no folder" in problems(config_of("[{model: {path: nowhere}}]"))["reward.0.model.path"]


def test_a_reward_that_names_neither_is_the_default() -> None:
    assert RewardConfig.model_validate({"weight": 2.0}).name == "reasoning_gym"
