"""What can be learned of a model from its files without torch: where they are, and the sizes in `config.json` or the GGUF file.

Used by the plan (memory), by checks and by whoever loads the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rolemesh.config.gguf_header import GgufHeader, read_gguf_header
from rolemesh.config.model_sizes import ModelFacts as ModelFacts
from rolemesh.config.model_sizes import counted, head_dim, is_tied
from rolemesh.config.packaged import PACKAGE, local_path
from rolemesh.errors import ConfigError
from rolemesh.registry import nearest

BUILTIN_MODELS: Final[dict[str, Path]] = {"tiny": Path(__file__).parent.parent / "models" / "tiny"}
"""Models that rolemesh makes from scratch: name -> folder with `config.json` and tokenizer."""

GGUF: Final = ".gguf"
GENERATION: Final = "generation_config.json"
"""What a folder may say of how its model is used: the tokens that end an answer, and sampling that it recommends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model lies: a folder in Hugging Face format, or one GGUF file in a folder."""

    folder: Path
    gguf: str | None = None
    """Name of the GGUF file in `folder`."""

    @property
    def main(self) -> Path:
        """The path to name in messages."""
        return self.folder / self.gguf if self.gguf else self.folder

    @property
    def generation(self) -> Path | None:
        """The folder's `generation_config.json`; None where there is none, and for a GGUF file, which says that itself."""
        file = self.folder / GENERATION
        return file if self.gguf is None and file.is_file() else None

    @property
    def for_transformers(self) -> dict[str, str]:
        """The arguments of `from_pretrained` that say where."""
        found = {"pretrained_model_name_or_path": str(self.folder)}
        return found | {"gguf_file": self.gguf} if self.gguf else found


def model_files(path: str, *, folders_only: bool = False) -> ModelFiles:
    """The files of `model.path`: a built-in's or the user's. Raises ConfigError when they are missing or a folder has no `config.json`;
    with `folders_only` it asks for a folder then, where no other kind would be of use."""
    folder = BUILTIN_MODELS.get(path) or local_path(path, subject="model.path")
    if folder.suffix == GGUF and folder.is_file():
        return ModelFiles(folder=folder.parent, gguf=folder.name)
    if not folder.is_dir():
        raise _no_model(path, folder, folders_only)
    if not (folder / "config.json").is_file():
        inside = sorted(file.name for file in folder.glob(f"*{GGUF}"))
        raise ConfigError.one(
            "model.path",
            "the model folder must hold config.json",
            f"no file {str(folder / 'config.json')!r}",
            f"Name the file: model.path={path.rstrip('/')}/{inside[0]}" if inside else "Give a folder in Hugging Face format",
        )
    return ModelFiles(folder=folder)


def _no_model(path: str, folder: Path, folders_only: bool) -> ConfigError:
    others = f", a {GGUF} file (also {PACKAGE}NAME/FILE{GGUF}) or a built-in model ({', '.join(BUILTIN_MODELS)})"
    siblings = _siblings(folder)
    known = [name for name in siblings if not name.endswith(GGUF)] if folders_only else [*BUILTIN_MODELS, *siblings]
    hint = nearest(path, known) or nearest(folder.name, known)
    found = f"a file {path!r}" if folder.is_file() else f"no {'file' if folder.suffix == GGUF else 'folder'} {path!r}"
    suggestion = f"Did you mean {hint!r}? " if hint else ""
    return ConfigError.one(
        "model.path",
        "must be a Hugging Face folder" + ("" if folders_only else others),
        found,
        f"{suggestion}Give the folder that holds config.json",
    )


def _siblings(folder: Path) -> list[str]:
    parent = folder.parent
    others = parent.iterdir() if parent.is_dir() else ()
    return [str(parent / other.name) for other in others if other.is_dir() or other.suffix == GGUF]


def gguf_header(file: Path) -> GgufHeader:
    """Metadata of a GGUF file. Raises ConfigError for one that is broken or cut, one of several parts, and one with scaled
    positions."""
    try:
        header = read_gguf_header(file)
    except (ValueError, OSError) as error:
        raise ConfigError.one("model.path", f"{file} must be a GGUF file", str(error), "Download or copy the file again") from error
    if int(header.values.get("split.count") or 1) > 1:
        parts = f"part {header.values.get('split.no', 0) + 1} of {header.values['split.count']}"
        raise ConfigError.one("model.path", f"{file} must hold the whole model", parts, "Merge the parts with `llama-gguf-split --merge`")
    # transformers does not read these for most architectures, and would compute another function without a word
    if header.size("rope.scaling.type") not in (None, "none") or "rope_freqs.weight" in header.tensors:
        raise ConfigError.one(
            "model.path",
            f"{file} must have plain rotary positions: scaled ones are not read from GGUF files",
            str(header.size("rope.scaling.type") or "rope_freqs.weight"),
            "Use the model's folder in Hugging Face format",
        )
    size = file.stat().st_size
    if size <= header.least_bytes:
        found = f"{size:,} bytes, and its tensors begin as far as byte {header.least_bytes:,}"
        raise ConfigError.one("model.path", f"{file} must hold all of its tensors", found, "Download or copy the file again")
    return header


def check_model_files(path: str) -> None:
    """Raise ConfigError when there is no model at `path`, or one in a GGUF file that cannot be used. Reads no weights."""
    files = model_files(path)
    if files.gguf:
        gguf_header(files.main)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises ConfigError when one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            wanted = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise ConfigError.one("model.path", f"{index} must list the weight files", found, "Copy or download it again") from error
        missing = [name for name in wanted if not (folder / name).is_file()]
        if missing:
            raise ConfigError.one(
                "model.path", f"all {len(wanted)} weight files of {index.name} must be in {folder}", f"no {', '.join(missing)}"
            )
        return [folder / name for name in wanted]
    if not (folder / "model.safetensors").is_file():
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors") for path in folder.glob(pattern))
        raise ConfigError.one(
            "model.path",
            f"{folder} must hold model.safetensors or model.safetensors.index.json with its shards",
            ", ".join(others) or "no weight files",
            "Other formats are not read; convert them with save_pretrained of transformers" if others else "",
        )
    return [folder / "model.safetensors"]


def read_model_facts(path: str | Path) -> ModelFacts:
    """Sizes of a built-in model, a folder (from `config.json`) or a GGUF file. Raises ConfigError naming the file and what it lacks."""
    files = model_files(str(path))
    if files.gguf:
        return _gguf_facts(gguf_header(files.main), files.main)
    data = read_config_json(files)
    # Models with several modalities keep the sizes of the language model in a section of their own.
    text = data.get("text_config")
    return _facts(text if isinstance(text, dict) else data, files.folder / "config.json")


def read_config_json(files: ModelFiles, name: str = "config.json") -> dict[str, Any]:
    """What `config.json`, or another file of a folder, holds. Raises ConfigError."""
    file = files.folder / name
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError.one("model.path", f"{file} must be readable JSON", str(error), "Download or copy the file again") from error
    if not isinstance(data, dict):
        raise ConfigError.one("model.path", f"{file} must hold a JSON object", type(data).__name__, "Download or copy the file again")
    return data


def architecture(data: Mapping[str, Any]) -> str:
    """The class that `config.json` names; empty when it names none."""
    names = data.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _gguf_facts(header: GgufHeader, file: Path) -> ModelFacts:
    """Sizes under the names of llama.cpp. The parameters are counted from the table of tensors, so exactly."""
    keys = ("block_count", "embedding_length", "attention.head_count")
    layers, hidden, heads = (_size({key: header.size(key)}, file, key) for key in keys)
    vocab = header.size("vocab_size") or header.values.get("tokenizer.ggml.tokens")
    return ModelFacts(
        family=header.family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(header.size("attention.head_count_kv") or heads),
        head_dim=int(header.size("attention.key_length") or hidden // heads),
        intermediate=int(header.size("feed_forward_length") or 4 * hidden),
        vocab=_size({"vocab_size": vocab}, file, "vocab_size"),
        tied="output.weight" not in header.tensors,
        parameters=sum(header.tensors.values()),
        context=int(header.size("context_length") or 0),
    )


def _facts(data: Mapping[str, Any], file: Path) -> ModelFacts:
    hidden = _size(data, file, "hidden_size", "n_embd", "d_model")
    heads = _size(data, file, "num_attention_heads", "n_head", "num_heads")
    family = str(data.get("model_type", ""))
    sizes = ModelFacts(
        family=family,
        layers=_size(data, file, "num_hidden_layers", "n_layer", "num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=int(data.get("num_key_value_heads") or heads),
        head_dim=head_dim(family, data, hidden, heads),
        intermediate=int(data.get("intermediate_size") or data.get("n_inner") or data.get("ffn_dim") or 4 * hidden),
        vocab=_size(data, file, "vocab_size"),
        tied=is_tied(family, data),
        parameters=0,
        plain_head=not any(data.get(key) not in (None, 1, 1.0) for key in ("final_logit_softcapping", "logit_scale", "logits_scaling")),
        context=int(data.get("max_position_embeddings") or data.get("n_positions") or 0),
    )
    return counted(sizes, data)


def _size(data: Mapping[str, Any], file: Path, *keys: str) -> int:
    for key in keys:
        value = data.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise ConfigError.one(
        "model.path",
        f"{file} must give {keys[0]} as a whole number above 0",
        repr(data.get(keys[0])),
        "Only decoder-only language models can be used",
    )
