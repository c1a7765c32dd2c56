"""Load a tokenizer and refuse one that would fail later. Called by data, rollout, rewards (decoding) and checkpoints."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rolemesh.config.model_files import BUILTIN_MODELS, GENERATION, ModelFiles, gguf_header, model_files, read_config_json
from rolemesh.config.packaged import local_path
from rolemesh.config.schema import ModelConfig
from rolemesh.errors import ConfigError, Problem
from rolemesh.models.load import LOAD_ERRORS, load_config

PLAIN_TEXT: Final = "What is 3 - 8? The answer is -5."


def load_tokenizer(model: ModelConfig, *, writes: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer`, or else of `model.path` (also one in a GGUF file), with an end and a padding token; that of a
    model that `writes` nothing, such as a reward model, needs neither.

    No token is ever guessed: where the tokenizer declares no padding token, `model.pad_token` names one. Raises ConfigError when the
    folder cannot be loaded or has no vocabulary, when there is no end or padding token, or when ids would lie outside the model's
    embedding.
    """
    subject = "model.path" if model.tokenizer is None else "model.tokenizer"
    files = model_files(model.path) if model.tokenizer is None else _tokenizer_folder(model.tokenizer)
    try:
        tokenizer = _read(files, model.trust_remote_code)
    except LOAD_ERRORS as error:
        raise _no_tokenizer(files, subject, f"{type(error).__name__}: {error}") from error
    if _is_blank(tokenizer):
        raise _no_tokenizer(files, subject, f"{type(tokenizer).__name__} without a vocabulary, to which {PLAIN_TEXT!r} has no tokens")
    if problems := [*_problems(tokenizer, model, files.main, subject, writes=writes)]:
        raise ConfigError(problems=problems)
    return tokenizer


def _no_tokenizer(files: ModelFiles, subject: str, found: str) -> ConfigError:
    remedy = "Copy tokenizer.json and tokenizer_config.json into it"
    if files.gguf:
        remedy = "Set model.tokenizer to a folder with tokenizer.json and tokenizer_config.json"
    return ConfigError.one(subject, f"{files.main} must hold a tokenizer that transformers can load", found, remedy)


def _is_blank(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True for what transformers makes for many architectures where a folder has no files of a tokenizer: added tokens alone, so that a
    text has no ids, or that of the unknown token alone. A small vocabulary need not have a token for any text; it is not asked."""
    if len(tokenizer.get_vocab()) > len(tokenizer.get_added_vocab()):
        return False
    return set(tokenizer(PLAIN_TEXT, add_special_tokens=False)["input_ids"]) <= {tokenizer.unk_token_id}


def _read(files: ModelFiles, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    if files.gguf:
        return copy.deepcopy(_gguf_tokenizer(files, files.main.stat().st_mtime_ns))
    return AutoTokenizer.from_pretrained(files.folder, local_files_only=True, trust_remote_code=trust_remote_code)


@lru_cache(maxsize=4)
def _gguf_tokenizer(files: ModelFiles, changed: int) -> PreTrainedTokenizerBase:
    """Reading one takes seconds, and every checkpoint wants it. `changed` is the time of the file's last change, in ns."""
    tokenizer = AutoTokenizer.from_pretrained(**files.for_transformers, local_files_only=True)
    return _without_made_up_tokens(tokenizer, gguf_header(files.main).values.get("tokenizer.ggml.tokens"))


def _without_made_up_tokens(tokenizer: PreTrainedTokenizerBase, count: int | None) -> PreTrainedTokenizerBase:
    """The tokenizer with the `count` tokens that its file has, and no other.

    Behind a byte-level vocabulary without `<|endoftext|>`, transformers adds it, with an id for which the model has no embedding.
    """
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = [token for token in written["added_tokens"] if count is None or token["id"] < count]
    if len(kept) == len(written["added_tokens"]):
        return tokenizer
    special = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    backend = Tokenizer.from_str(json.dumps(written | {"added_tokens": kept}))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=tokenizer.chat_template, name_or_path=tokenizer.name_or_path, **special
    )


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> tuple[int, ...]:
    """Ids that end an answer, in rising order: the tokenizer's end token and those that the model's files declare.

    Chat models often end a turn with another token than a text, and name it in one of these places only. Raises ConfigError for a file
    that cannot be read.
    """
    files = model_files(model.path)
    declared = _declared_in_gguf(files) if files.gguf else _declared_in_json(files)
    stops = {tokenizer.eos_token_id, *declared}
    return tuple(sorted(stop for stop in stops if stop is not None))


def _declared_in_json(files: ModelFiles) -> list[Any]:
    found: list[Any] = []
    for name in ("config.json", *([GENERATION] if files.generation else [])):
        declared = read_config_json(files, name).get("eos_token_id")
        found += declared if isinstance(declared, list) else [declared]
    return found


def _declared_in_gguf(files: ModelFiles) -> list[Any]:
    """The ends of a text, of a turn and of a message."""
    values = gguf_header(files.main).values
    return [values.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]


def _tokenizer_folder(path: str) -> ModelFiles:
    """The user's folder; it need not hold a model."""
    folder = BUILTIN_MODELS.get(path) or local_path(path, subject="model.tokenizer")
    if not folder.is_dir():
        found = f"{path!r}, which " + ("is a file" if folder.is_file() else "does not exist")
        raise ConfigError.one("model.tokenizer", "must be a folder on this machine", found, "Tokenizers are never downloaded")
    return ModelFiles(folder=folder)


def _problems(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, folder: Path, subject: str, *, writes: bool) -> Iterator[Problem]:
    """What it lacks, once it has `model.pad_token`."""
    vocabulary = tokenizer.get_vocab()
    if writes and model.pad_token is not None:
        if model.pad_token in vocabulary:
            tokenizer.pad_token = model.pad_token
        else:
            yield Problem(subject="model.pad_token", need=f"must be in the vocabulary of {folder}", free=repr(model.pad_token))
    elif writes and tokenizer.pad_token_id is None:
        example = f", for example model.pad_token='{tokenizer.eos_token}'" if tokenizer.eos_token else ""
        need = f"the tokenizer in {folder} declares no padding token, so this option must name one of its tokens"
        yield Problem(subject="model.pad_token", need=need, remedy=f"Set it{example}")
    if writes and tokenizer.eos_token_id is None:
        need = f"the tokenizer in {folder} must declare an end token, or no answer would ever be finished"
        yield Problem(subject=subject, need=need, remedy="Add eos_token to its tokenizer_config.json")
    highest, rows = max(vocabulary.values()), int(load_config(model).get_text_config().vocab_size)
    if highest >= rows:
        yield Problem(
            subject=subject,
            need=f"every token id must be below the {rows} rows of the model's embedding",
            free=f"id {highest} in the tokenizer of {folder}",
            remedy="Use the model's own tokenizer, or a model whose embedding was resized for this one",
        )
