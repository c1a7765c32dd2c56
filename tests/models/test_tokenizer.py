"""Tokenizers: the built-in one, what is refused, and where stop tokens come from."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolemesh.config.model_files import model_files
from rolemesh.config.schema import ModelConfig
from rolemesh.errors import ConfigError
from rolemesh.models import load_tokenizer, stop_token_ids

TINY = model_files("tiny").folder
TOOL = Path(__file__).parents[2] / "tools" / "make_tiny_tokenizer.py"
tiny = load_tokenizer(ModelConfig())


def tokenizer_folder(path, **changes):
    """A copy of the built-in folder with changes to tokenizer_config.json; None removes a key."""
    shutil.copytree(TINY, path)
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return str(path)


def test_tiny_is_what_the_tool_makes():
    made = runpy.run_path(str(TOOL))["train"]()
    assert json.loads(made.to_str()) == json.loads((TINY / "tokenizer.json").read_text())


@given(st.text())
def test_tiny_gives_any_text_back(text):
    ids = tiny(text, add_special_tokens=False)["input_ids"]
    assert tiny.decode(ids) == text
    assert max(ids, default=0) < 512


def test_tiny_keeps_digits_apart():
    assert tiny.convert_ids_to_tokens(tiny("1907", add_special_tokens=False)["input_ids"]) == ["1", "9", "0", "7"]


def test_tiny_has_three_different_special_tokens():
    assert (tiny.pad_token_id, tiny.bos_token_id, tiny.eos_token_id) == (0, 1, 2)
    assert tiny.decode([1, 20, 2], skip_special_tokens=True) == tiny.decode([20])


def test_C17_missing_pad_token_is_refused_with_the_option(tmp_path):
    folder = tokenizer_folder(tmp_path / "no-pad", pad_token=None)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(ModelConfig(tokenizer=folder))
    message = str(caught.value)
    assert folder in message
    assert "model.pad_token='<eos>'" in message


def test_C17_the_option_names_the_pad_token(tmp_path):
    folder = tokenizer_folder(tmp_path / "no-pad", pad_token=None)
    assert load_tokenizer(ModelConfig(tokenizer=folder, pad_token="<eos>")).pad_token_id == 2


def test_pad_token_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model.pad_token: must be in the vocabulary .*; found '<other>'"):
        load_tokenizer(ModelConfig(pad_token="<other>"))


def test_missing_end_token_is_refused_beside_missing_pad_token(tmp_path):
    folder = tokenizer_folder(tmp_path / "bare", eos_token=None, pad_token=None)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(ModelConfig(tokenizer=folder))
    assert [problem.subject for problem in caught.value.problems] == ["model.pad_token", "model.tokenizer"]


def test_ids_beyond_the_embedding_are_refused(tmp_path):
    folder = Path(tokenizer_folder(tmp_path / "small"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(ConfigError, match="below the 300 rows of the model's embedding; found id 511"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_missing_folder_names_the_key_and_never_asks_the_network(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.tokenizer: .*'org/name', which does not exist.*never downloaded"):
        load_tokenizer(ModelConfig(tokenizer="org/name"))


def test_folder_without_tokenizer_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.tokenizer: .* must hold a tokenizer that transformers can load"):
        load_tokenizer(ModelConfig(tokenizer=str(tmp_path)))


def test_stop_tokens_are_the_union_of_all_sources(tmp_path):
    folder = Path(tokenizer_folder(tmp_path / "chat"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    model = ModelConfig(path=str(folder))
    assert stop_token_ids(load_tokenizer(model), model) == (2, 5, 7, 9)


def test_stop_tokens_of_tiny():
    assert stop_token_ids(tiny, ModelConfig()) == (2,)


@pytest.mark.parametrize(("family", "made"), [("qwen2", "Qwen2Tokenizer"), ("gemma2", "GemmaTokenizer")])
def test_a_folder_without_a_tokenizer_for_which_transformers_makes_an_empty_one_is_refused(tmp_path, family, made):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ConfigError, match=rf"must hold a tokenizer .*found {made} without a vocabulary.*Copy tokenizer.json"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
