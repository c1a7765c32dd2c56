"""Models: seeded start, complete weights or a refusal, no dropout, whole folders."""

import json
import logging
import os
import socket

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM

from rolemesh.batch import Batch
from rolemesh.config.model_files import model_files
from rolemesh.config.schema import ModelConfig
from rolemesh.engines.rollout import create_engine
from rolemesh.engines.train import OptimizerSettings, Scorer, TrainEngine
from rolemesh.errors import ConfigError
from rolemesh.models import check_weights, load_model, load_tokenizer, open_weights, save_model
from rolemesh.protocols.engine import Request, Sampling

TINY = ModelConfig()
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 512


@pytest.fixture
def tokenizer():
    return load_tokenizer(TINY)


@pytest.fixture
def folder(tmp_path, tokenizer):
    save_model(tmp_path / "model", load_model(TINY, seed=3), tokenizer)
    return tmp_path / "model"


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def equal(one, other):
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_tiny_has_about_a_million_parameters_and_sdpa():
    model = load_model(TINY, seed=0)
    assert 0.9e6 < sum(p.numel() for p in model.parameters()) < 1.3e6
    assert model.config._attn_implementation == "sdpa"
    assert not model.training


def capped(tmp_path, tokenizer) -> tuple[ModelConfig, Gemma2ForCausalLM]:
    """A folder with a model that caps the scores of its attention low, and transformers' own eager one."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        initializer_range=0.5, attn_logit_softcapping=0.5, sliding_window=4, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        attn_implementation="eager",
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    save_model(tmp_path / "capped", model, tokenizer)
    return ModelConfig(path=str(tmp_path / "capped")), model


def test_caps_of_attention_scores_are_kept_in_training_scoring_and_generation(tmp_path, tokenizer):
    config, own = capped(tmp_path, tokenizer)
    prompt, answer = TOKENS[0, :7].tolist(), TOKENS[0, 7:].tolist()
    with torch.no_grad():
        expected = own(input_ids=TOKENS[:1]).logits[0, 6:-1].log_softmax(-1)[torch.arange(5), TOKENS[0, 7:]].numpy()
    rows = Batch.from_columns({"draw": [0], "sample": [0], "prompt_ids": [prompt], "response_ids": [answer]})
    settings = {"optimizer": OptimizerSettings(learning_rate=1e-3), "micro_batch_tokens": 64}
    (trained,) = TrainEngine(load_model(config, seed=0), **settings).logprobs(rows, 1.0)
    (scored,) = Scorer(load_model(config, seed=0), micro_batch_tokens=64).logprobs(rows, 1.0)
    assert np.abs(trained - expected).max() < 1e-5
    assert np.array_equal(scored, trained)
    opened = open_weights(config)
    assert opened is not None
    assert opened[0].config._attn_implementation == "eager"
    engine = create_engine("builtin", load_model(config, seed=0), slots=2, max_prompt_tokens=8, max_response_tokens=8)
    engine.load_weights(own.named_parameters(), 1)
    engine.add([Request(id=(0, 0), prompt_ids=prompt)], Sampling(temperature=1.0, max_new_tokens=5, stop_token_ids=(), seed=3))
    done = []
    while engine.unfinished:
        done += engine.step()
    ids = torch.tensor([prompt + done[0].token_ids])
    with torch.no_grad():
        expected = own(input_ids=ids).logits[0, 6:-1].log_softmax(-1)[torch.arange(5), ids[0, 7:]].numpy()
    assert np.abs(np.array(done[0].logprobs) - expected).max() < 1e-5
    own.set_attn_implementation("sdpa")
    with torch.no_grad():
        without = own(input_ids=ids).logits[0, 6:-1].log_softmax(-1)[torch.arange(5), ids[0, 7:]].numpy()
    assert np.abs(without - expected).max() > 0.01, "the caps of this model change nothing"


def test_seed_alone_decides_the_first_weights():
    torch.manual_seed(1)
    first = load_model(TINY, seed=0)
    torch.manual_seed(2)
    assert equal(first, load_model(TINY, seed=0))
    assert not equal(first, load_model(TINY, seed=1))


def test_random_state_of_the_caller_is_left_alone():
    before = torch.random.get_rng_state()
    load_model(TINY, seed=0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_formats_start_from_the_same_weights():
    full, half = load_model(TINY, seed=0), load_model(ModelConfig(dtype="bfloat16"), seed=0)
    assert {value.dtype for value in half.parameters()} == {torch.bfloat16}
    assert all(torch.equal(value.bfloat16(), half.state_dict()[name]) for name, value in full.state_dict().items())


def test_saved_folder_gives_the_same_logits(folder):
    with torch.no_grad():
        expected = load_model(TINY, seed=3)(TOKENS).logits
        assert torch.equal(load_model(ModelConfig(path=str(folder)), seed=0)(TOKENS).logits, expected)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert load_tokenizer(ModelConfig(path=str(folder))).get_vocab() == load_tokenizer(TINY).get_vocab()


def test_a_generation_config_is_read_with_parts_too_and_saved_as_it_is(folder, tokenizer, tmp_path):
    """Also one that transformers reads and refuses to write; where there is none it is made of the config, whatever that says."""
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 5]}))
    config = ModelConfig(path=str(folder))
    opened = open_weights(config)
    assert opened is not None
    for model in (opened[0], load_model(config, seed=0)):
        assert (model.generation_config.eos_token_id, model.generation_config.top_p) == ([2, 5], 0.9)
    save_model(tmp_path / "copy", model, tokenizer, generation=model_files(config.path).generation)
    assert (tmp_path / "copy" / file.name).read_bytes() == file.read_bytes()
    file.write_text("{")
    with pytest.raises(ConfigError, match="generation_config"):
        open_weights(config)
    file.unlink()
    edit_config(folder, temperature=0.6)
    save_model(tmp_path / "copy", load_model(config, seed=0), tokenizer, generation=model_files(config.path).generation)
    assert json.loads((tmp_path / "copy" / file.name).read_text())["eos_token_id"] == 2


def test_save_replaces_and_leaves_nothing_beside(folder, tokenizer):
    (folder / "stale.txt").write_text("old")
    save_model(folder, load_model(TINY, seed=4), tokenizer)
    assert equal(load_model(ModelConfig(path=str(folder)), seed=0), load_model(TINY, seed=4))
    assert not (folder / "stale.txt").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_failed_save_keeps_the_old_model_whole(folder, tokenizer, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(type(tokenizer), "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        save_model(folder, load_model(TINY, seed=4), tokenizer)
    assert equal(load_model(ModelConfig(path=str(folder)), seed=0), load_model(TINY, seed=3))
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_G13_separated_head_survives_a_config_that_says_tied(tmp_path, tokenizer):
    model = load_model(TINY, seed=0)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
    save_model(tmp_path / "untied", model, tokenizer)
    with torch.no_grad():
        assert torch.equal(load_model(ModelConfig(path=str(tmp_path / "untied")), seed=0)(TOKENS).logits, model(TOKENS).logits)
    assert json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"] is False


def test_dropout_is_off_even_in_train_mode(folder):
    edit_config(folder, attention_dropout=0.5)
    model = load_model(ModelConfig(path=str(folder)), seed=0).train()
    assert model.config.attention_dropout == 0.0
    assert torch.equal(model(TOKENS).logits, model(TOKENS).logits)


def test_missing_weight_is_refused_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"must hold every weight of the model; found 1 missing: model\.norm\.weight"):
        load_model(ModelConfig(path=str(folder)), seed=0)


def test_unused_weight_is_reported(folder, caplog):
    weights = load_file(folder / "model.safetensors") | {"value_head.weight": torch.zeros(1, 2)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="rolemesh.models.load"):
        load_model(ModelConfig(path=str(folder)), seed=0)
    assert "1 weights have no place in the model and are left out: value_head.weight" in caplog.text


def test_weights_of_another_shape_are_refused(folder):
    edit_config(folder, hidden_size=64, head_dim=16)
    with pytest.raises(ConfigError, match=r"model.path: .* must be a causal language model"):
        load_model(ModelConfig(path=str(folder)), seed=0)


def test_other_weight_formats_are_refused_by_name(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"must hold model.safetensors .*; found pytorch_model.bin. Other formats are not read"):
        load_model(ModelConfig(path=str(folder)), seed=0)


def test_weight_files_are_checked_without_loading_them(folder):
    model = ModelConfig(path=str(folder))
    check_weights(model)
    check_weights(TINY)
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)
    with pytest.raises(ConfigError, match=r"model.safetensors must be a whole safetensors file; found [\d,]+ bytes"):
        check_weights(model)


def test_missing_shard_is_named(folder):
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    with pytest.raises(ConfigError, match=r"all 2 weight files .*; found no model-2.safetensors"):
        load_model(ModelConfig(path=str(folder)), seed=0)


@pytest.mark.parametrize("path", ["no/such-model", "tini"])
def test_missing_folder_is_refused(path):
    with pytest.raises(ConfigError, match=rf"model\.path: must be a Hugging Face folder, .*found no folder '{path}'"):
        load_model(ModelConfig(path=path), seed=0)


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path: the model folder must hold config\.json"):
        load_model(ModelConfig(path=str(tmp_path)), seed=0)


def test_unknown_model_type_is_refused(folder):
    edit_config(folder, model_type="no_such_type")
    with pytest.raises(ConfigError, match="no_such_type"):
        load_model(ModelConfig(path=str(folder)), seed=0)


def test_code_of_a_folder_needs_the_flag(folder):
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"})
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code=true"):
        load_model(ModelConfig(path=str(folder)), seed=0)


def test_nothing_reaches_for_the_network(folder, monkeypatch):
    def refuse(*args):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model = ModelConfig(path=str(folder))
    load_tokenizer(model)
    load_model(model, seed=0)


def test_weights_of_a_folder_can_be_read_in_parts(folder):
    model = ModelConfig(path=str(folder), dtype="float32")
    empty, weights = open_weights(model)
    whole = load_model(model, seed=0)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert [name for name, _ in empty.named_parameters()] == list(weights) == [name for name, _ in whole.named_parameters()]
    for (name, mine), buffer in zip(empty.named_buffers(), whole.buffers(), strict=True):  # not in the files: they have to be right already
        assert torch.equal(mine, buffer), name
    for name, parameter in whole.named_parameters():
        assert torch.equal(weights[name][1:3], parameter[1:3]), name


def test_weights_that_are_more_than_read_are_not_read_in_parts(folder):
    assert open_weights(TINY) is None
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if "norm" not in name}, folder / "model.safetensors")
    assert open_weights(ModelConfig(path=str(folder))) is None


def test_on_meta_a_model_has_names_and_shapes_alone():
    config = ModelConfig(dtype="bfloat16")
    empty, whole = load_model(config, seed=0, device="meta"), load_model(config, seed=0)
    forms = [{name: (weight.shape, weight.dtype) for name, weight in model.named_parameters()} for model in (empty, whole)]
    assert forms[0] == forms[1]
    assert {weight.device.type for weight in empty.parameters()} == {"meta"}
