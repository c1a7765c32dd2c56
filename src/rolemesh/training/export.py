"""A checkpoint's policy as a Hugging Face folder elsewhere, or its adapter as one of peft, loaded again and compared. Called by
`rolemesh export`. Torch is loaded when everything else was checked."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rolemesh.config.model_files import BUILTIN_MODELS, model_files
from rolemesh.config.schema import ModelConfig
from rolemesh.errors import ConfigError, RolemeshError
from rolemesh.observe import RunDirectory, find_run
from rolemesh.observe.run_dir import owner_of
from rolemesh.plan.memory import size
from rolemesh.training import checkpoint

WIDTH: Final = {"float32": 4, "bfloat16": 2}
"""Bytes of a number in the formats that a model can have."""
WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
MODELS: Final = (("a model", "config.json", "model_type"), ("an adapter", CONFIG, "peft_type"))
"""What may be replaced in a folder, with a file that shows it and a key in there: other programs have a `config.json` too."""
MERGED: Final = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What is exported, checked: nothing is written yet."""

    source: Path
    """Folder of the checkpoint."""
    skipped: tuple[str, ...] = ()
    """Incomplete checkpoints that were passed over for it, each with what is wrong with it."""
    target: Path
    model: ModelConfig
    """The merged model of the checkpoint; or the one below its adapter, with `lora`, when that alone is exported."""
    seed: int = 0


def plan_export(
    which: str, target: Path, *, runs_dir: Path, step: int | None = None, dtype: str = "float32", adapter: bool = False, force: bool = False
) -> Export:
    """Find the checkpoint (`which` is a run as `find_run` takes it, or the folder of a checkpoint) and check the target. Raises
    ConfigError."""
    if dtype not in WIDTH:
        raise ConfigError.one("--dtype", f"must be one of {', '.join(WIDTH)}", repr(dtype))
    source, skipped = _source(which, runs_dir, step)
    config: dict[str, Any] = checkpoint.read_state(source)["config"]
    _check_target(target, source, str(config["model"]["path"]), force=force)
    if adapter:
        model, folder, width = _below_adapter(source, config["model"], dtype), source / checkpoint.ADAPTER, 4
    else:
        folder, width = source / checkpoint.MODEL, WIDTH[dtype]
        changed = {"path": str(folder), "tokenizer": None, "dtype": dtype, "lora": None}
        model = ModelConfig.model_validate(config["model"] | changed)
    need = sum(file.stat().st_size for file in folder.iterdir()) * width // WIDTH["float32"]
    home = next(parent for parent in (target.resolve(), *target.resolve().parents) if parent.exists())
    if not home.is_dir() or not os.access(home, os.W_OK):
        found = "may not be written to" if home.is_dir() else "is a file"
        raise ConfigError.one("--to", "must be a folder that can be made", f"{home} {found}", "Name another folder")
    if (free := shutil.disk_usage(home).free) < need:
        raise ConfigError.one("--to", f"{home} must have room for {size(need)}", f"{size(free)} free", "Name a folder on another disk")
    return Export(source=source, skipped=tuple(skipped), target=target, model=model, seed=config.get("seed", 0))


def _below_adapter(source: Path, options: dict[str, Any], dtype: str) -> ModelConfig:
    """The model that the adapter of a checkpoint names as its base."""
    if options.get("lora") is None:
        remedy = "Leave --adapter out; with model.lora a run trains one"
        raise ConfigError.one("--adapter", "the run must have trained an adapter", f"model.lora=null in {source}", remedy)
    if dtype != "float32":
        raise ConfigError.one("--dtype", "must be float32 with --adapter, the format that adapters are trained in", dtype, "Leave it out")
    file = source / checkpoint.ADAPTER / CONFIG
    try:
        base = str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError.one("--adapter", f"{file} must name the model below the adapter", found, "Export another step") from error
    try:
        model_files(base)
    except ConfigError as error:
        found, remedy = error.problems[0].free, "Bring it back, or leave --adapter out: the merged model of the checkpoint needs no other"
        raise ConfigError.one("--adapter", f"the model below the adapter must be there: {base}", found, remedy) from error
    return ModelConfig.model_validate(options | {"path": base, "dtype": dtype})


def _source(which: str, runs_dir: Path, step: int | None) -> tuple[Path, list[str]]:
    """(folder of the checkpoint, incomplete ones that were passed over)."""
    path = Path(which).expanduser()
    if (path / checkpoint.STATE).is_file() or owner_of(path) is not None:
        if step is not None:
            found = f"the checkpoint {path}"
            raise ConfigError.one("--step", "chooses among the checkpoints of a run", found, "Leave it out, or name the run")
        directory, wanted = RunDirectory(path.resolve().parents[1]), path.resolve().name
    else:
        directory = find_run(runs_dir, which)
        if step is None:
            return checkpoint.newest(directory, "run")
        wanted = directory.checkpoint(step).name
    there = checkpoint.complete(directory)
    for folder in there:
        if folder.name == wanted:
            return folder, []
    names = ", ".join(folder.name for folder in there) or "none"
    need, remedy = f"{wanted} must be a complete checkpoint of {directory.name}", "Older ones are removed by trainer.keep_checkpoints"
    raise ConfigError.one("--step" if step is not None else "run", need, f"complete are: {names}", remedy)


def _check_target(target: Path, source: Path, model: str, *, force: bool) -> None:
    """A folder with other things in it is never replaced, nor a part of the run, nor the model that it began with."""
    if source.parent.resolve() in (target.resolve(), *target.resolve().parents):
        raise ConfigError.one("--to", "must not lie among the checkpoints of the run", str(target), "Name a folder elsewhere")
    if target.resolve() == Path(model).expanduser().resolve():
        raise ConfigError.one("--to", "must not be the model that the run began with", str(target), "Name a folder elsewhere")
    if target.is_file():
        raise ConfigError.one("--to", "must be a folder", f"the file {target}")
    if not target.is_dir() or not any(target.iterdir()):
        return
    there = next((what for what, file, key in MODELS if _has_key(target / file, key)), None)
    if there is None:
        raise ConfigError.one("--to", "must be a new folder, or one with a model", f"other files in {target}", "Name another folder")
    if not force:
        raise ConfigError.one("--to", "must be a new or empty folder", f"{there} in {target}", "Replace it with --force, or name another")


def _has_key(file: Path, key: str) -> bool:
    """Whether a JSON file holds an object with that key."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and key in found


def run_export(export: Export, tell: Callable[[str], None]) -> None:
    """Write the folder, and load it with plain transformers, or peft, before it gets its name. Raises RolemeshError when it cannot be
    written or is not the same to the last bit; what was there before stays then."""
    if export.skipped:
        tell(f"skipped incomplete {', '.join(export.skipped)}")
    try:
        (_export_model if export.model.lora is None else _export_adapter)(export, tell)
    except (OSError, ConfigError) as error:
        if not (export.source / checkpoint.STATE).is_file():
            text = (
                f"{export.source} is gone: its run has removed it meanwhile, which keeps its newest trainer.keep_checkpoints. Export again"
            )
            raise RolemeshError(text=text) from error
        if isinstance(error, ConfigError):
            raise
        raise RolemeshError(text=f"{export.target} could not be written: {error}. What was there before is still there") from error


def _export_model(export: Export, tell: Callable[[str], None]) -> None:
    from rolemesh.models import load_model, load_tokenizer, save_model
    from rolemesh.models.verify import differences

    tell(f"reading {export.source / checkpoint.MODEL}")
    model, tokenizer = load_model(export.model, seed=0), load_tokenizer(export.model)

    def compare(written: Path) -> None:
        tell("loading it again with transformers, and comparing")
        _refuse(export, differences(written, model, tokenizer, trust_remote_code=export.model.trust_remote_code))

    count = sum(weight.numel() for weight in model.parameters())
    tell(f"writing {count:,} parameters in {export.model.dtype} to {export.target}")
    save_model(export.target, model, tokenizer, generation=model_files(export.model.path).generation, check=compare)


def _export_adapter(export: Export, tell: Callable[[str], None]) -> None:
    """The two files of the checkpoint, which are peft's."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from rolemesh.models import load_model
    from rolemesh.models.lora import add_adapter, load_adapter, merged_weights, other_weights
    from rolemesh.models.save import save_folder
    from rolemesh.models.verify import adapter_differences

    folder, lora = export.source / checkpoint.ADAPTER, export.model.lora
    assert lora is not None
    tell(f"reading {folder} and, below it, {export.model.path}")
    base = load_model(export.model, seed=export.seed)
    trained = copy.deepcopy(base)
    add_adapter(trained, lora, seed=0)
    try:
        load_adapter(trained, folder / WEIGHTS)
        own, saved = trained.state_dict(), load_file(export.source / checkpoint.MODEL / MERGED)
        merged = merged_weights(trained, saved, weight=own.__getitem__, whole=own.__getitem__)
        other = [f"{name} differs" for name in other_weights(merged, lambda name, inside: saved[name])]
    except SafetensorError as error:
        raise RolemeshError(text=f"the weights in {export.source} cannot be read: {error}. Export another step") from error
    except (ValueError, KeyError) as error:
        other = [str(error)]
    if other:
        text = f"{export.model.path} is not the model any more that the adapter of {export.source} was trained on"
        remedy = "Bring that back, or leave --adapter out: the merged model of the checkpoint needs no other"
        raise RolemeshError(text=f"{text}: {'; '.join(other[:3])}. {remedy}")

    def write(fresh: Path) -> None:
        for name in (WEIGHTS, CONFIG):
            shutil.copyfile(folder / name, fresh / name)

    def compare(written: Path) -> None:
        tell("loading it again with peft, and comparing")
        _refuse(export, adapter_differences(written, base, trained))

    tell(f"writing an adapter of rank {lora.rank} to {export.target}")
    save_folder(export.target, write, check=compare)
    if export.model.path in BUILTIN_MODELS:
        tell(f"its base is {export.model.path!r}, which only rolemesh makes; without --adapter others can load what is exported")


def _refuse(export: Export, wrong: list[str]) -> None:
    if wrong:
        raise RolemeshError(text=f"what would be {export.target} is not the model of {export.source}: {'; '.join(wrong[:5])}")
