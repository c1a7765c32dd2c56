"""Models in GGUF files: the same function as the model they were made of, and a model like any other from then on."""

from __future__ import annotations

import sys

import pytest
import torch
from gguf_files import CHAT, HIDDEN, INTERMEDIATE, LAYERS, VOCAB, small_llama, write_gguf

from rolemesh.config import check_config, load_config, read_model_facts
from rolemesh.config.schema import ModelConfig
from rolemesh.errors import ConfigError
from rolemesh.models import encode_prompt, load_model, load_tokenizer, save_model, stop_token_ids
from rolemesh.plan import build_plan, parse_nodes

TOKENS = torch.arange(30).reshape(2, 15) * 17 % VOCAB


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def original(request):
    return small_llama(tied=request.param)


@pytest.fixture
def tied_file(tmp_path):
    return write_gguf(tmp_path / "small.gguf", small_llama(tied=True))


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def test_a_gguf_file_computes_what_the_model_it_was_made_of_computes(tmp_path, original):
    loaded = load_model(ModelConfig(path=str(write_gguf(tmp_path / "small.gguf", original))), seed=0)
    torch.testing.assert_close(logits(loaded), logits(original), rtol=1e-5, atol=1e-5)
    assert all(weight.requires_grad for weight in loaded.parameters())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == original.config.tie_word_embeddings


def test_G14_checkpoint_of_a_gguf_model_is_a_folder_with_the_same_logits(tmp_path, original):
    config = ModelConfig(path=str(write_gguf(tmp_path / "small.gguf", original)))
    model, tokenizer = load_model(config, seed=0), load_tokenizer(config)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.1)  # trained a little
    save_model(tmp_path / "saved", model, tokenizer)
    saved = ModelConfig(path=str(tmp_path / "saved"))
    assert torch.equal(logits(load_model(saved, seed=0)), logits(model))
    messages = [{"role": "user", "content": "3 - 8 + 5  = "}]
    assert encode_prompt(load_tokenizer(saved), messages, chat=True) == encode_prompt(tokenizer, messages, chat=True)
    assert stop_token_ids(load_tokenizer(saved), saved) == stop_token_ids(tokenizer, config) == (2,)
    assert read_model_facts(saved.path) == read_model_facts(config.path)


def test_tokenizer_of_a_gguf_file(tied_file):
    tokenizer, tiny = load_tokenizer(ModelConfig(path=str(tied_file))), load_tokenizer(ModelConfig())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)

    def pieces(*words):  # a GGUF file names a usual way to cut text into words, the built-in tokenizer has its own
        return [token for word in words for token in tiny(word, add_special_tokens=False)["input_ids"]]

    assert encode_prompt(tokenizer, "answer", chat=False) == [1, *pieces("answer")]
    assert tokenizer.chat_template == CHAT
    assert encode_prompt(tokenizer, "hi", chat=True) == [1, 0, *pieces("user", ":", "hi"), 2, 0, *pieces("assistant", ":")]


def test_a_tokenizer_that_was_changed_leaves_the_next_one_alone(tied_file):
    config = ModelConfig(path=str(tied_file))
    load_tokenizer(config).chat_template = "other"
    assert load_tokenizer(config).chat_template == CHAT


def test_another_tokenizer_may_be_named(tied_file):
    assert load_tokenizer(ModelConfig(path=str(tied_file), tokenizer="tiny")).pad_token_id == 0


def test_stop_tokens_of_a_gguf_file_hold_the_end_of_a_turn(tmp_path):
    file = write_gguf(tmp_path / "small.gguf", small_llama(tied=True), tokenizer__ggml__eot_token_id=7)
    config = ModelConfig(path=str(file))
    assert stop_token_ids(load_tokenizer(config), config) == (2, 7)


@pytest.mark.parametrize(("tied", "embeddings"), [(True, 1), (False, 2)])
def test_sizes_of_a_gguf_file_by_hand(tmp_path, tied, embeddings):
    facts = read_model_facts(write_gguf(tmp_path / "small.gguf", small_llama(tied=tied)))
    assert (facts.family, facts.layers, facts.hidden, facts.heads, facts.kv_heads, facts.head_dim) == ("llama", LAYERS, HIDDEN, 4, 2, 4)
    assert (facts.intermediate, facts.vocab, facts.tied) == (INTERMEDIATE, VOCAB, tied)
    # A layer: q and o 16x16, k and v 16x8, mlp 3 of 16x32, two norms of 16. Then the final norm and the embeddings.
    layer = 2 * 256 + 2 * 128 + 3 * 512 + 32
    assert facts.parameters == 2 * layer + 16 + embeddings * 512 * 16


def test_a_plan_is_made_from_a_gguf_file(tied_file):
    config = load_config(None, [f"model.path={tied_file}"])
    assert check_config(config) == []
    plan = build_plan(config, parse_nodes("1x2"))
    assert plan.derived["parameters"] == 2 * (2 * 256 + 2 * 128 + 3 * 512 + 32) + 16 + 512 * 16


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ({"llama__rope__scaling__type": "yarn"}, "must have plain rotary positions.*found yarn"),
        ({"split__count": 3, "split__no": 1}, "must hold the whole model; found part 2 of 3"),
    ],
)
def test_gguf_files_that_would_be_misread_are_refused(tmp_path, extra, found):
    file = write_gguf(tmp_path / "small.gguf", small_llama(tied=True), **extra)
    (problem,) = check_config(load_config(None, [f"model.path={file}"]))
    assert problem.subject == "model.path"
    with pytest.raises(ConfigError, match=found):
        load_model(ModelConfig(path=str(file)), seed=0)


def test_a_gguf_file_that_was_cut_is_refused_before_anything_starts(tied_file):
    whole = tied_file.read_bytes()
    tied_file.write_bytes(whole[: len(whole) - 8192])
    (problem,) = check_config(load_config(None, [f"model.path={tied_file}"]))
    assert problem.subject == "model.path"
    assert f"found {len(whole) - 8192:,} bytes" in str(problem)


def test_a_model_inside_a_package_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "packaged_llama"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('what it needs is not there')")
    write_gguf(package / "small.gguf", small_llama(tied=True))
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load_model(ModelConfig(path="package:packaged_llama/small.gguf"), seed=0)
    torch.testing.assert_close(logits(loaded), logits(small_llama(tied=True)), rtol=1e-5, atol=1e-5)
    assert "packaged_llama" not in sys.modules
