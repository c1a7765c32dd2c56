"""Write a model, or an adapter, as a folder that is either whole or absent. Called by checkpoints and `export`."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from rolemesh.config.model_files import GENERATION


def save_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    generation: Path | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write weights (safetensors), config, generation config and tokenizer; see `save_folder` and, of `generation`, `save_description`."""

    def write(fresh: Path) -> None:
        _save_weights(fresh, model)
        _save_generation(fresh, model, generation)
        tokenizer.save_pretrained(fresh)

    save_folder(folder, write, check=check)


def save_folder(folder: Path, write: Callable[[Path], None], *, check: Callable[[Path], None] | None = None) -> None:
    """Have `write` fill `folder`, replacing what is there.

    Everything is written and synced beside `folder` first and then renamed, so that a reader never meets half of it. `check` looks at
    what was written, and raises to leave everything as it was. A symlink stays one, to what it leads to now.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        write(fresh)
        _sync(fresh)
        if check is not None:
            check(fresh)
        _swap(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    _sync_path(folder.parent)


def save_description(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: Collection[str],
    *,
    generation: Path | None = None,
) -> None:
    """Write and sync everything of a Hugging Face folder but the weights, which others write: config, generation config, code of the
    model's own, tokenizer. `weights` are their names: those that the model ties and that are all there have separated, and the config says
    so, or readers that believe it would lose one of them. `generation` is the generation config that the model came with, copied as it
    is: transformers reads some that it refuses to write. Raises OSError."""
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], str(model.dtype).removeprefix("torch.")
    if any(one in weights and other in weights for one, other in model.all_tied_weights_keys.items()):
        config.tie_word_embeddings = False
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    _save_generation(folder, model, generation)
    tokenizer.save_pretrained(folder)
    _sync(folder)


def _save_generation(folder: Path, model: PreTrainedModel, generation: Path | None) -> None:
    if generation is not None:
        shutil.copyfile(generation, folder / GENERATION)
    elif model.can_generate():
        model.generation_config.to_json_file(folder / GENERATION, keys_to_pop=["compile_config"])  # made of the config, and not judged


def _save_weights(folder: Path, model: PreTrainedModel) -> None:
    described = copy.copy(model)  # of the same weights
    described.config, described.generation_config = copy.deepcopy(model.config), GenerationConfig()
    # A config that says "tied" over tensors that differ would lose one of them for readers that believe it.
    if getattr(model.config, "tie_word_embeddings", False) and not _tied(model):
        described.config.tie_word_embeddings = False
    described.save_pretrained(folder)


def _tied(model: PreTrainedModel) -> bool:
    state, pairs = model.state_dict(), dict[str, str](model.all_tied_weights_keys)
    return all(torch.equal(state[one], state[other]) for one, other in pairs.items() if one in state and other in state)


def _swap(fresh: Path, folder: Path) -> None:
    if not folder.exists():
        fresh.rename(folder)
        return
    old = fresh.with_suffix(".old")
    folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        _sync_path(path)
    _sync_path(folder)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
