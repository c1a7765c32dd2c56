"""Whether a model folder can score: its head with one output, from `config.json` and the heads of the weight files. Needs no torch.

Called by checks, and by whoever loads critics and reward models.
"""

from __future__ import annotations

from typing import Final

from safetensors import SafetensorError, safe_open

from rolemesh.config.model_files import BUILTIN_MODELS, ModelFiles, architecture, model_files, read_config_json, weight_files
from rolemesh.errors import ConfigError

CLASSIFIER: Final = "ForSequenceClassification"
CAUSAL: Final = ("ForCausalLM", "LMHeadModel")
DEFAULT_LABELS: Final = 2
"""Of transformers, for a `config.json` that says nothing."""


def check_scalar_head(path: str) -> None:
    """Raise ConfigError (`model.path`) unless the model gives one number for a text: a sequence classifier with one label, or a causal
    model with a stored head. Whether the files hold all other weights too is known when it is loaded."""
    files = _folder(path)
    data = read_config_json(files)
    name = architecture(data)
    if name.endswith(CLASSIFIER):
        labels = data["id2label"] if isinstance(data.get("id2label"), dict) else range(data.get("num_labels") or DEFAULT_LABELS)
        if len(labels) != 1:
            raise ConfigError.one(
                "model.path",
                f"{files.folder} must be a classifier with one label, whose output is the score",
                f"{name} with {len(labels)} labels",
                "Use a reward model that was trained with num_labels=1",
            )
        if not any(len(shape) > 1 and shape[0] == 1 for shape in stored_shapes(files).values()):
            raise _headless(files, f"no weight with one output in the files of {name}")
    elif not name.endswith(CAUSAL):
        raise _headless(files, f"{name or 'no architecture'} in config.json")
    elif stored_head(path) is None:
        raise _headless(files, f"{name} without a weight [1, hidden] beside the language model")


def check_language_model(path: str) -> None:
    """Raise ConfigError (`model.path`) for the folder of a classifier, whose files hold no output layer over the vocabulary."""
    files = model_files(path)
    if not files.gguf and (name := architecture(read_config_json(files))).endswith(CLASSIFIER):
        need, found = f"{files.folder} must hold a language model", f"{name}, a classifier"
        raise ConfigError.one("model.path", need, found, "Give a causal language model; one that scores answers goes into reward.<n>.model")


def stored_head(path: str) -> str | None:
    """Name of the weight [1, hidden] that a causal model's files hold beside the language model, such as `v_head.summary.weight`: the head
    of a critic or reward model. None where there is none, or several. Raises ConfigError for files that cannot be read."""
    if path in BUILTIN_MODELS or (files := model_files(path)).gguf:
        return None
    shapes = stored_shapes(files)
    body = {name.split(".")[0] for name in shapes if any(part.isdigit() for part in name.split("."))}  # which has numbered layers
    beside = {name: shape for name, shape in shapes.items() if name.endswith(".weight") and name.split(".")[0] not in body}
    heads = [name for name, shape in beside.items() if len(shape) == 2 and shape[0] == 1]
    return heads[0] if len(heads) == 1 else None


def stored_shapes(files: ModelFiles) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights of a folder by name. Raises ConfigError for files that are missing or cannot be read."""
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(files.folder):
        try:
            with safe_open(file, framework="numpy") as weights:
                found |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            need = f"{file} must be a whole safetensors file"
            raise ConfigError.one("model.path", need, str(error), "Copy or download it again") from error
    return found


def _folder(path: str) -> ModelFiles:
    files = model_files(path, folders_only=True)
    if path in BUILTIN_MODELS or files.gguf:
        raise _headless(files, "a built-in language model" if path in BUILTIN_MODELS else "a GGUF file, which holds a language model alone")
    return files


def _headless(files: ModelFiles, found: str) -> ConfigError:
    return ConfigError.one(
        "model.path",
        f"{files.main} must have a head with one output: ...{CLASSIFIER} with num_labels 1, or a causal model with a weight [1, hidden] "
        "beside it, such as v_head.summary.weight",
        found,
        "Use a trained reward model in Hugging Face format",
    )
