"""Load a model with the weights, number format and determinism that the config asks for. Called by train and rollout engines."""

from __future__ import annotations

import copy
import logging
from functools import lru_cache
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rolemesh.config.model_files import BUILTIN_MODELS, ModelFiles, gguf_header, model_files, weight_files
from rolemesh.config.schema import ModelConfig
from rolemesh.errors import ConfigError

logger = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()  # bars over a few files, in the log of every worker

# What transformers raises for folders that it cannot read. Mapped to ConfigError here and nowhere else.
LOAD_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError, SafetensorError)


def load_config(model: ModelConfig) -> PreTrainedConfig:
    """The model's own config with every kind of dropout set to 0, so that training and rollout compute the same function."""
    files = model_files(model.path)
    config = _gguf_config(files, files.main.stat().st_mtime_ns) if files.gguf else _read_config(files, model.trust_remote_code)
    config = copy.deepcopy(config)
    for key, value in config.to_dict().items():
        # attention_dropout, resid_pdrop, layerdrop ...: a rate under any of the names in use
        if "drop" in key and isinstance(value, float) and value != 0.0:
            setattr(config, key, 0.0)
    return config


def _read_config(files: ModelFiles, trust_remote_code: bool = False) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(**files.for_transformers, local_files_only=True, trust_remote_code=trust_remote_code)
    except LOAD_ERRORS as error:
        raise _unusable(files, error) from error


@lru_cache(maxsize=4)
def _gguf_config(files: ModelFiles, changed: int) -> PreTrainedConfig:
    """Reading one takes seconds, as the whole vocabulary is read with it. `changed` is the time of the file's last change, in ns."""
    gguf_header(files.main)  # refuses what transformers would misread
    return _read_config(files)


def attention(config: PreTrainedConfig) -> str:
    """The attention that a model computes rightly with: `sdpa`, which knows no caps of its scores and would leave them out, or `eager`."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else "sdpa"


def load_model(model: ModelConfig, *, seed: int, device: str | torch.device = "cpu") -> PreTrainedModel:
    """A causal language model in eval mode, without dropout in any mode, in `model.dtype` on `device`.

    A built-in model gets its weights from `seed` alone: they are the same in every process, and the caller's random state is left as
    it was. A folder gives its own weights, from safetensors files only; a GGUF file gives its weights unpacked, and the model is then
    like any other, to be trained and saved. On device `meta` no weights are read, and the model has config, names and shapes alone.
    Raises ConfigError when files are missing, unreadable, of another kind, or do not hold every weight of the model.
    """
    config = load_config(model)
    dtype = getattr(torch, model.dtype)
    if torch.device(device).type == "meta":
        return _without_contents(config, dtype, model.trust_remote_code)
    loaded = _initialise(config, seed) if model.path in BUILTIN_MODELS else _read(model, config, dtype)
    for module in loaded.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return loaded.to(device=device, dtype=dtype).eval()


def _initialise(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    # Drawn in float32 whatever the final format, so that formats differ by rounding only.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention(config))


def _without_contents(config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    options = {"attn_implementation": attention(config), "trust_remote_code": trust_remote_code}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)


def _read(model: ModelConfig, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    files = model_files(model.path)
    if not files.gguf:
        weight_files(files.folder)
    try:
        loaded, info = read_model(AutoModelForCausalLM, files, config, dtype, model.trust_remote_code)
    except LOAD_ERRORS as error:
        raise _unusable(files, error) from error
    _check_complete(files, info)
    return _unpacked(loaded, config, files) if files.gguf else loaded


def read_model(
    kind: Any, files: ModelFiles, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model of that kind with the weights of these files, and what transformers tells of the names in there. Raises `LOAD_ERRORS`."""
    loaded, info = kind.from_pretrained(
        **files.for_transformers,
        config=config,
        dtype=dtype,
        attn_implementation=attention(config),
        use_safetensors=None if files.gguf else True,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    return loaded, info


def _unpacked(loaded: PreTrainedModel, config: PreTrainedConfig, files: ModelFiles) -> PreTrainedModel:
    """A plain model with the weights of one that was read from a GGUF file, which refuses to be saved."""
    packed = [name for name, weight in loaded.named_parameters() if not weight.is_floating_point()]
    if packed:
        found = f"{len(packed)} weights in blocks: {_some(packed)}"
        raise ConfigError.one("model.path", f"{files.main} must be unpacked to be trained", found, "Use the model in Hugging Face format")
    plain = _without_contents(config, loaded.dtype)
    for name, module in plain.named_modules():  # what no weight file holds, such as the frequencies of rotary positions
        for key, value in module._buffers.items():
            if value is not None:
                module._buffers[key] = loaded.get_submodule(name)._buffers[key]
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    return plain


def open_weights(model: ModelConfig, kind: type = AutoModelForCausalLM) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """A model of that kind in `model.dtype` without contents, and its weights by name as they lie in the files, of which parts can be read:
    safetensors' slices. None where loading does more than reading: for built-in models, GGUF files, code of the folder's own, and files
    whose names are not the model's. Raises ConfigError as `load_model`."""
    if model.path in BUILTIN_MODELS or model.trust_remote_code or (files := model_files(model.path)).gguf:
        return None
    config = load_config(model)
    with init_empty_weights(include_buffers=False):
        empty = cast(Any, kind).from_config(config, dtype=getattr(torch, model.dtype), attn_implementation=attention(config)).eval()
    empty.tie_weights()  # registering a parameter made another one of it
    try:
        if files.generation and empty.can_generate():
            empty.generation_config = GenerationConfig.from_pretrained(files.folder, local_files_only=True)
        opened: list[Any] = [safe_open(file, framework="pt") for file in weight_files(files.folder)]
        found = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118 - no mapping
    except LOAD_ERRORS as error:
        raise _unusable(files, error) from error
    tied = set(empty.all_tied_weights_keys)
    wanted = {name: list(tensor.shape) for name, tensor in empty.state_dict().items() if name not in tied}
    if any(name not in found or found[name].get_shape() != shape for name, shape in wanted.items()):
        return None
    return empty, {name: found[name] for name in wanted}


def check_weights(model: ModelConfig) -> None:
    """Raise ConfigError unless the weight files are there, whole, and in their format. Reads their headers, so it takes no time.

    Whether they hold every weight of the model is known when it is loaded.
    """
    if model.path in BUILTIN_MODELS:
        return
    files = model_files(model.path)
    if files.gguf:
        return  # its header is read with the model's config
    for file in weight_files(files.folder):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            found = f"{file.stat().st_size:,} bytes: {error}"
            raise ConfigError.one("model.path", f"{file} must be a whole safetensors file", found, "Copy or download it again") from error


def _check_complete(files: ModelFiles, info: dict[str, Any]) -> None:
    """Weights that the files lack would be random, silently; weights that the model does not use are only reported."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError.one(
            "model.path",
            f"the weight files of {files.main} must hold every weight of the model",
            f"{len(missing)} missing: {_some(missing)}",
            "Sizes and weights do not belong together, or the files are incomplete",
        )
    unused = sorted(info["unexpected_keys"])
    if unused:
        logger.warning("%s: %d weights have no place in the model and are left out: %s", files.main, len(unused), _some(unused))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def _unusable(files: ModelFiles, error: BaseException) -> ConfigError:
    remedy = "If you trust its author, set model.trust_remote_code=true" if "trust_remote_code" in str(error) else ""
    return ConfigError.one(
        "model.path",
        f"{files.main} must be a causal language model that transformers can load",
        f"{type(error).__name__}: {error}",
        remedy,
    )
