"""Scores of frozen models against transformers' own forward of each row alone: packed, padded, in any micro-batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from train_support import VOCABULARY, tiny_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from rolemesh.config.reward_heads import check_scalar_head, stored_head
from rolemesh.config.schema import ModelConfig
from rolemesh.engines.train import RewardEngine, ValueModel, load_reward_model, load_value_model
from rolemesh.errors import ConfigError

SMALL = {"vocab_size": VOCABULARY, "num_labels": 1, "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 2}


def qwen2(**more: object) -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(3)
    return Qwen2ForSequenceClassification(Qwen2Config(**SMALL | sizes | {"pad_token_id": 2} | more))


def llama(**more: object) -> PreTrainedModel:
    config = tiny_model().config
    for name, value in ({"num_labels": 1, "pad_token_id": 2} | more).items():
        setattr(config, name, value)
    torch.manual_seed(4)
    return LlamaForSequenceClassification(config)


def gpt2(**more: object) -> PreTrainedModel:
    torch.manual_seed(5)
    return GPT2ForSequenceClassification(GPT2Config(**SMALL | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64} | more))


def bert(**more: object) -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(6)
    return BertForSequenceClassification(BertConfig(**SMALL | sizes | {"pad_token_id": 0} | more))


MODELS = {
    "qwen2": qwen2,
    "llama": llama,
    "llama without padding": lambda: llama(pad_token_id=None),
    "gpt2": gpt2,
    "bert": bert,
    "bert without padding": lambda: bert(pad_token_id=None),
}


def rows(count: int = 9) -> list[list[int]]:
    """Of uneven lengths; some end with 2, which is padding for some models, one has nothing else."""
    random = np.random.default_rng(1)
    found = [random.integers(1, VOCABULARY, length).tolist() for length in (7, 1, 12, 5, 7, 3, 11, 4, 6)[:count]]
    for row in found[::3]:
        row[-1] = 2
    return [*found, [2, 2], [5, 2, 2]]


@torch.no_grad()
def own_scores(model: torch.nn.Module, given: list[list[int]]) -> np.ndarray:
    """As transformers computes them: each row alone, without padding."""
    model = model.eval()
    return np.array([model(input_ids=torch.tensor([row])).logits.item() for row in given], dtype=np.float32)


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_transformers_for_each_row_alone(tmp_path: Path, name: str) -> None:
    MODELS[name]().save_pretrained(tmp_path)
    check_scalar_head(str(tmp_path))
    given, model = rows(), ModelConfig(path=str(tmp_path))
    expected = own_scores(type(MODELS[name]()).from_pretrained(tmp_path), given)
    assert np.ptp(expected) > 0.05, "rows must differ for this to say anything"
    for packing in (True, False):
        for budget in (1, 20, 1000):
            engine = RewardEngine(load_reward_model(model, option="it"), micro_batch_tokens=budget, packing=packing)
            assert engine.packed == (packing and not name.startswith("bert"))
            assert np.abs(engine.scores(given) - expected).max() < 1e-6, (packing, budget)
    order = np.random.default_rng(2).permutation(len(given))
    assert np.abs(engine.scores([given[place] for place in order]) - expected[order]).max() < 1e-6
    assert engine.scores([]).tolist() == []
    assert engine.scores(given[:1])[0] == pytest.approx(expected[0], abs=1e-6)
    assert not any(parameter.requires_grad for parameter in engine._model.parameters())
    assert engine.memory() >= sum(parameter.nbytes for parameter in engine._model.parameters())


def test_bfloat16_weights_give_scores_as_transformers_does_in_that_format(tmp_path: Path) -> None:
    qwen2().save_pretrained(tmp_path)
    expected = own_scores(Qwen2ForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16), rows())
    model = load_reward_model(ModelConfig(path=str(tmp_path), dtype="bfloat16"), option="it")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    engine = RewardEngine(model, micro_batch_tokens=50)
    assert engine.packed, "rounding must not be taken for another function"
    assert np.abs(engine.scores(rows()) - expected).max() <= 4 * 2**-8 * np.abs(expected).max()


@pytest.mark.parametrize("bias", [True, False])
def test_head_that_is_stored_beside_a_language_model(tmp_path: Path, bias: bool) -> None:
    policy = tiny_model(seed=7).eval()
    head = {"v_head.summary.weight": torch.randn(1, 16), **({"v_head.summary.bias": torch.tensor([0.25])} if bias else {})}
    policy.save_pretrained(tmp_path)
    save_file(load_file(tmp_path / "model.safetensors") | head, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_scalar_head(str(tmp_path))
    assert stored_head(str(tmp_path)) == "v_head.summary.weight"
    model, given = ModelConfig(path=str(tmp_path)), rows(6)[:6]
    with torch.no_grad():
        hidden = [policy.model(torch.tensor([row])).last_hidden_state[0, -1] for row in given]
    expected = [float(state @ head["v_head.summary.weight"][0] + 0.25 * bias) for state in hidden]
    assert RewardEngine(load_reward_model(model, option="it"), micro_batch_tokens=20).scores(given) == pytest.approx(expected, abs=1e-5)
    critic = load_value_model(model, path=None, seed=0)
    assert isinstance(critic, ValueModel)
    assert torch.equal(critic.head.weight, head["v_head.summary.weight"])


def refusal(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_scalar_head(str(path))
    (problem,) = caught.value.problems
    assert problem.subject == "model.path"
    return str(problem)


def test_what_gives_no_score_is_refused_with_what_was_found(tmp_path: Path) -> None:
    llama(num_labels=3).save_pretrained(tmp_path / "three")
    assert "LlamaForSequenceClassification with 3 labels" in refusal(tmp_path / "three")
    llama(num_labels=2).save_pretrained(tmp_path / "two")
    assert "with 2 labels" in refusal(tmp_path / "two")
    tiny_model().save_pretrained(tmp_path / "plain")
    assert "LlamaForCausalLM without a weight [1, hidden]" in refusal(tmp_path / "plain")
    model = llama()
    model.save_pretrained(tmp_path / "headless", state_dict={k: v for k, v in model.state_dict().items() if k != "score.weight"})
    assert "no weight with one output in the files of LlamaForSequenceClassification" in refusal(tmp_path / "headless")
    model.model.save_pretrained(tmp_path / "body")
    assert "LlamaModel in config.json" in refusal(tmp_path / "body")
    (tmp_path / "empty").mkdir()
    assert "must hold config.json" in refusal(tmp_path / "empty")
    assert "no folder" in refusal(tmp_path / "nowhere")
    assert "a built-in language model" in refusal("tiny")
    weights = tmp_path / "cut" / "model.safetensors"
    model.save_pretrained(tmp_path / "cut")
    weights.write_bytes(weights.read_bytes()[:100])
    assert "must be a whole safetensors file" in refusal(tmp_path / "cut")
    model.save_pretrained(tmp_path / "part", state_dict={k: v for k, v in model.state_dict().items() if "layers.1" not in k})
    with pytest.raises(ConfigError, match=r"it: .*weights are missing in its files: model.layers.1"):
        load_reward_model(ModelConfig(path=str(tmp_path / "part")), option="it")
