"""A checkpoint's policy as a Hugging Face folder elsewhere, loaded again and compared. Called by `rolemesh export`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rolemesh.config.schema import ModelConfig
from rolemesh.errors import ConfigError, RolemeshError
from rolemesh.models import load_model, load_tokenizer, save_model
from rolemesh.models.verify import differences
from rolemesh.observe import RunDirectory, find_run
from rolemesh.plan.memory import size
from rolemesh.training import checkpoint

WIDTH: Final = {"float32": 4, "bfloat16": 2}
"""Bytes of a number in the formats that a model can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What is exported, checked: nothing is written yet."""

    source: Path
    """Folder of the checkpoint."""
    target: Path
    model: ModelConfig


def plan_export(which: str, target: Path, *, runs_dir: Path, step: int | None, dtype: str, force: bool) -> Export:
    """Find the checkpoint (`which` is a run as `find_run` takes it, or the folder of a checkpoint) and check the target. Raises
    ConfigError."""
    if dtype not in WIDTH:
        raise ConfigError.one("--dtype", f"must be one of {', '.join(WIDTH)}", repr(dtype))
    source = _source(which, runs_dir, step)
    options: dict[str, Any] = checkpoint.read_state(source)["config"]["model"]
    _check_target(target, source, force=force)
    model = ModelConfig.model_validate(options | {"path": str(source / checkpoint.MODEL), "tokenizer": None, "dtype": dtype})
    need = sum(file.stat().st_size for file in (source / checkpoint.MODEL).iterdir()) * WIDTH[dtype] // WIDTH["float32"]
    home = next(parent for parent in (target.resolve(), *target.resolve().parents) if parent.is_dir())
    if (free := shutil.disk_usage(home).free) < need:
        raise ConfigError.one("--to", f"{home} must have room for {size(need)}", f"{size(free)} free", "Name a folder on another disk")
    return Export(source=source, target=target, model=model)


def _source(which: str, runs_dir: Path, step: int | None) -> Path:
    path = Path(which).expanduser()
    if (path / checkpoint.STATE).is_file():
        if step is not None:
            found = f"the checkpoint {path}"
            raise ConfigError.one("--step", "chooses among the checkpoints of a run", found, "Leave it out, or name the run")
        directory, wanted = RunDirectory(path.resolve().parents[1]), path.resolve().name
    else:
        directory = find_run(runs_dir, which)
        if step is None:
            return checkpoint.newest(directory, "run")[0]
        wanted = directory.checkpoint(step).name
    there = checkpoint.complete(directory)
    for folder in there:
        if folder.name == wanted:
            return folder
    names = ", ".join(folder.name for folder in there) or "none"
    raise ConfigError.one("--step", f"{wanted} must be a complete checkpoint of {directory.name}", f"complete are: {names}")


def _check_target(target: Path, source: Path, *, force: bool) -> None:
    """A folder with other things in it is never replaced, nor a part of a run."""
    if source.parent in (target.resolve(), *target.resolve().parents):
        raise ConfigError.one("--to", "must not lie among the checkpoints of the run", str(target), "Name a folder elsewhere")
    if target.is_file():
        raise ConfigError.one("--to", "must be a folder", f"the file {target}")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not (target / "config.json").is_file():
        raise ConfigError.one("--to", "must be a new folder, or one with a model", f"other files in {target}", "Name another folder")
    if not force:
        raise ConfigError.one("--to", "must be a new or empty folder", f"a model in {target}", "Replace it with --force, or name another")


def run_export(export: Export, tell: Callable[[str], None]) -> None:
    """Write the folder, and load it with plain transformers before it gets its name. Raises RolemeshError when it cannot be written or is
    not the same to the last bit; what was there before stays then."""
    tell(f"reading {export.source / checkpoint.MODEL}")
    model, tokenizer = load_model(export.model, seed=0), load_tokenizer(export.model)

    def compare(written: Path) -> None:
        tell("loading it again with transformers, and comparing")
        if wrong := differences(written, model, tokenizer, trust_remote_code=export.model.trust_remote_code):
            raise RolemeshError(text=f"what would be {export.target} is not the model of {export.source}: {'; '.join(wrong[:5])}")

    count = sum(weight.numel() for weight in model.parameters())
    tell(f"writing {count:,} parameters in {export.model.dtype} to {export.target}")
    try:
        save_model(export.target, model, tokenizer, check=compare)
    except OSError as error:
        raise RolemeshError(text=f"{export.target} could not be written: {error}. What was there before is still there") from error
