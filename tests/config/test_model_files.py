"""Model folders and the sizes in config.json, against hand counts and against the models that transformers builds of them."""

from __future__ import annotations

import json

import pytest

from rolemesh.config import BUILTIN_MODELS, model_files, read_model_facts
from rolemesh.errors import ConfigError

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path):
    def write(config: dict) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return str(tmp_path)

    return write


def test_sizes_and_parameters_of_a_llama_by_hand(folder):
    facts = read_model_facts(folder(LLAMA))
    assert (facts.layers, facts.hidden, facts.heads, facts.kv_heads, facts.head_dim) == (2, 8, 4, 2, 2)
    assert (facts.intermediate, facts.vocab, facts.tied, facts.family) == (16, 10, False, "llama")
    # A layer: q 8x8, k and v 8x4 each, o 8x8, mlp 3 of 8x16, two norms of 8. Then final norm, embedding and head.
    layer = 64 + 2 * 32 + 64 + 3 * 128 + 16
    assert facts.parameters == 2 * layer + 8 + 2 * 80
    assert read_model_facts(folder({**LLAMA, "tie_word_embeddings": True})).parameters == 2 * layer + 8 + 80


FAMILIES = {
    "llama": {},
    "llama tied with biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 6},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "head_dim": 2},
    "gemma": {"tie_word_embeddings": True, "head_dim": 2},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_equal_those_that_transformers_builds(folder, name):
    assert_parameters_equal(folder({**LLAMA, "model_type": name.split()[0], **FAMILIES[name]}))


def test_parameters_of_gpt2_equal_those_that_transformers_builds(folder):
    tokens = {"vocab_size": 10, "bos_token_id": 0, "eos_token_id": 0}
    assert_parameters_equal(folder({"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 4, "n_positions": 12, **tokens}))


def assert_parameters_equal(path: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    assert read_model_facts(path).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_sizes_of_a_nested_language_model(folder):
    assert read_model_facts(folder({"model_type": "some_vlm", "text_config": LLAMA})).hidden == 8


def test_built_in_models_have_a_folder_each():
    assert set(BUILTIN_MODELS) == {"tiny"}
    assert BUILTIN_MODELS["tiny"].parts[-3:] == ("rolemesh", "models", "tiny")
    assert model_files("tiny").folder == BUILTIN_MODELS["tiny"]
    assert 100_000 < read_model_facts("tiny").parameters < 5_000_000


def test_what_is_missing_is_named(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"no folder 'tinny'.*Did you mean 'tiny'"):
        model_files("tinny")
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_files(str(tmp_path))
    (tmp_path / "weights").mkdir()
    with pytest.raises(ConfigError, match=r"Did you mean '.*/weights'"):
        model_files(str(tmp_path / "weigths"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="must be a GGUF file"):
        read_model_facts(str(file))
    with pytest.raises(ConfigError, match="must give num_hidden_layers"):
        read_model_facts(folder({**LLAMA, "num_hidden_layers": None}))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="readable JSON"):
        read_model_facts(str(tmp_path))
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="JSON object"):
        read_model_facts(str(tmp_path))


def test_a_missing_built_in_names_the_file(monkeypatch, tmp_path):
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", tmp_path)
    with pytest.raises(ConfigError, match=r"no file '.*config\.json'"):
        read_model_facts("tiny")
