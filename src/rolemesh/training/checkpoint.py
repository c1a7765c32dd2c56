"""Checkpoints: `checkpoints/step-N/` with the state of actor, critic and ref, a Hugging Face folder (`model/`) and `state.json`.

A checkpoint is written into a hidden folder, synced and renamed, so that one with its name is complete; `state.json` is its marker. The
newest complete one is used, and those that were skipped are named.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rolemesh import __version__
from rolemesh.config.schema import Config
from rolemesh.errors import ConfigError, Problem
from rolemesh.names import ACTOR, CRITIC, REF
from rolemesh.observe import RunDirectory, write_json
from rolemesh.observe.files import sync_directory
from rolemesh.roles import worker_class
from rolemesh.runtime import together

if TYPE_CHECKING:
    from rolemesh.training.run import TrainingRun

STATE: Final = "state.json"
FORMAT: Final = 2
_NAME: Final = re.compile(r"step-\d+")


async def save(run: TrainingRun) -> Path:
    """Write a checkpoint of the current step and drop all but the newest `trainer.keep_checkpoints`. Returns its folder."""
    final = run.directory.checkpoint(run.progress.step)
    if final in complete(run.directory):
        return final  # the state of a step is saved once; nothing has changed since
    fresh = final.parent / f".{final.name}.partial"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    await together(run.session.groups[role].save(str(fresh.resolve())) for role in _roles_of(run))
    progress, prompts = run.progress.to_json(), run.prompts.state()
    state = {"format": FORMAT, "rolemesh": __version__, "progress": progress, "prompts": prompts, "files": _sizes(fresh)}
    write_json(fresh / STATE, state)
    _sync(fresh)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(fresh, final)
    sync_directory(final.parent)
    for old in complete(run.directory)[: -run.config.trainer.keep_checkpoints]:
        shutil.rmtree(old)
    return final


def check_roles(folder: Path, state: dict[str, Any], before: Config, after: Config) -> None:
    """Raise ConfigError when the checkpoint cannot give every role of the resumed run its state: roles or an algorithm were added, or
    the reference, which is read from the model's own folder, would be another."""
    warm, problems = bool(state["progress"].get("warm_started")), []
    for role in _roles_with_state(after.roles, warm_started=warm):
        file = getattr(worker_class(role, after), "state_file", None)  # a worker of another make keeps its state as it likes
        if file is not None and not (folder / file).is_file():
            remedy = f"Train on in a new run, with model.path={folder / 'model'} and sft=null"
            need = f"the checkpoint must hold {file}"
            problems.append(Problem(subject=f"roles.{role}", need=need, free=f"none in {folder}", remedy=remedy))
    if REF in after.roles and not warm and before.model.path != after.model.path:
        need = "must stay as it was: the reference is read from there"
        problems.append(Problem(subject="model.path", need=need, free=after.model.path, remedy=f"Set model.path={before.model.path}"))
    if problems:
        raise ConfigError(problems=problems)


async def restore(run: TrainingRun, folder: Path) -> None:
    """Give the roles the state back that `save` wrote; the run's own progress must be restored already."""
    await together(run.session.groups[role].restore(str(folder.resolve())) for role in _roles_of(run))


def _roles_of(run: TrainingRun) -> list[str]:
    return _roles_with_state(run.session.groups, warm_started=run.progress.warm_started)


def _roles_with_state(roles: Collection[str], *, warm_started: bool) -> list[str]:
    """Those that `state.json` alone does not bring back. A reference is what its model folder says, unless it came out of a warm start."""
    return [role for role in (ACTOR, CRITIC, *((REF,) if warm_started else ())) if role in roles]


def complete(directory: RunDirectory) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted((path for path in directory.checkpoints.glob("step-*") if _is_complete(path)), key=_step_of)


def _is_complete(folder: Path) -> bool:
    """True when the state is there and every file that it lists has the size it was written with."""
    if not _NAME.fullmatch(folder.name) or not (folder / STATE).is_file():
        return False
    try:
        listed = json.loads((folder / STATE).read_text(encoding="utf-8")).get("files", {})
        return bool(_sizes(folder).items() >= listed.items())
    except (OSError, ValueError, AttributeError):  # no JSON, or not an object of objects
        return False


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by path relative to it."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def newest(directory: RunDirectory, subject: str = "--resume") -> tuple[Path, list[Path]]:
    """(newest complete checkpoint, incomplete ones that were skipped). Raises ConfigError, about `subject`, when there is none."""
    found = complete(directory)
    skipped = [path for path in directory.checkpoints.iterdir() if path not in found] if directory.checkpoints.is_dir() else []
    if not found:
        raise ConfigError.one(
            subject,
            "the run must have a complete checkpoint",
            f"none in {directory.checkpoints}" + (f" ({len(skipped)} incomplete)" if skipped else ""),
            "Start it anew; trainer.save_every writes checkpoints on the way",
        )
    return found[-1], skipped


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` of a complete checkpoint. Raises ConfigError for one of another format, and for one that lacks something."""
    state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        raise ConfigError.one(
            "--resume", f"checkpoint format {FORMAT}", f"{state.get('format')} (written by rolemesh {state.get('rolemesh')}) in {folder}"
        )
    lacking = [name for name in ("progress", "prompts") if not isinstance(state.get(name), dict)]
    if lacking:
        remedy = "Remove this folder to go on from the checkpoint before it"
        raise ConfigError.one("--resume", f"{folder / STATE} must hold progress and prompts", f"no {', '.join(lacking)}", remedy)
    return state


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
