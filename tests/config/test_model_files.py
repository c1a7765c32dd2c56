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


HEAD_10 = {"head_dim": 10}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
OPT = {"num_key_value_heads": 4, "tie_word_embeddings": True}
GPT = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 12}
FAMILIES = {
    "llama": [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, HEAD_10],
    "mistral": [HEAD_10, {"tie_word_embeddings": True}],
    "mixtral": [{"num_local_experts": 3}],
    "qwen2": [{"tie_word_embeddings": True}, {"num_key_value_heads": 4}],
    "qwen2_moe": [
        {**MIXTURE, "shared_expert_intermediate_size": 20},
        {**MIXTURE, "mlp_only_layers": [0]},
        {**MIXTURE, "decoder_sparse_step": 2},
    ],
    "qwen3": [HEAD_10, {"attention_bias": True, **HEAD_10}],
    "qwen3_moe": [{**MIXTURE, **HEAD_10}],
    "gemma": [{"tie_word_embeddings": True, **HEAD_10}],
    "gemma2": [{"tie_word_embeddings": True, **HEAD_10}, HEAD_10],
    "gemma3_text": [{"tie_word_embeddings": True, **HEAD_10}],
    "phi3": [{}, {"num_key_value_heads": 4}],
    "olmo2": [{}, {"attention_bias": True}],
    "granite": [{}],
    "smollm3": [{"tie_word_embeddings": True}],
    "cohere": [{"tie_word_embeddings": True}],
    "glm4": [{"attention_bias": True, **HEAD_10}],
    "stablelm": [{"use_qkv_bias": True}, {}],
    "gpt_neox": [{"num_key_value_heads": 4}, {"num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": False}],
    "phi": [{}],
    "starcoder2": [{"tie_word_embeddings": True}, {"use_bias": False}],
    "opt": [{"ffn_dim": 40, "word_embed_proj_dim": 24, "max_position_embeddings": 16, **OPT}],
    "gpt2": [GPT, {**GPT, "n_inner": 50, "tie_word_embeddings": False}],
}
"""model_type -> sizes in which it differs from the common ones, for each of its cases."""
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 50,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_equal_those_that_transformers_builds(tmp_path, family):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    for number, case in enumerate(FAMILIES[family]):
        common = {key: SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")} if family == "gpt2" else SIZES
        config = transformers.AutoConfig.for_model(family, **{**common, **case})
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        folder = tmp_path / str(number)
        config.save_pretrained(folder)
        facts = read_model_facts(folder)
        assert facts.parameters == sum(parameter.numel() for parameter in model.parameters()), case
        assert facts.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
        # Without its output layer, and with one number out, it is a critic: the head has as many weights as the hidden state, and a bias.
        body = sum(parameter.numel() for parameter in model.base_model.parameters()) + facts.hidden + 1
        assert facts.body_parameters == body or family == "phi", case  # phi's output layer has a bias too


@pytest.mark.parametrize(
    ("data", "tied"),
    [
        ({"model_type": "llama"}, False),
        ({"model_type": "gemma2"}, True),
        ({"model_type": "gpt2"}, True),
        ({"model_type": "gpt_neox"}, False),
        ({"model_type": "qwen2", "tie_word_embeddings": True}, True),
    ],
)
def test_heads_are_tied_as_the_family_has_it_when_config_json_is_silent(folder, data, tied):
    sizes = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    assert read_model_facts(folder({**sizes, **data})).tied == tied


def test_a_mixture_of_experts_by_hand(folder):
    facts = read_model_facts(folder({**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}))
    # A layer as above without its MLP, a router of 8 x 4, and experts of 3 x 8 x 16, of which a token meets two.
    layer, expert = 64 + 2 * 32 + 64 + 16 + 32, 3 * 128
    assert facts.parameters == 2 * (layer + 4 * expert) + 8 + 2 * 80
    assert facts.active_parameters == 2 * (layer + 2 * expert) + 8 + 2 * 80
    assert (facts.experts, facts.mlp_width) == (2, 32)


def test_heads_that_change_their_logits_are_known(folder):
    assert read_model_facts(folder(LLAMA)).plain_head
    assert not read_model_facts(folder({**LLAMA, "model_type": "gemma2", "final_logit_softcapping": 30.0})).plain_head
    assert not read_model_facts(folder({**LLAMA, "model_type": "cohere", "logit_scale": 0.0625})).plain_head


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
    with pytest.raises(ConfigError, match=r"no file '.*model\.gguf'"):
        model_files(str(tmp_path / "model.gguf"))
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a file '.*model\.bin'"):
        model_files(str(file))
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
