"""Checkpoints on disk: `checkpoints/step-N/` with a Hugging Face folder of the policy (`model/`), files of the other state, and
`state.json`, which lists them all. `saving.py` makes and restores them.

A checkpoint is written into a hidden folder, synced and renamed, so that one with its name is complete; `state.json` is its marker. The
newest complete one is used, and those that were skipped are named. Whatever is decided is read from the disk, never remembered.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from rolemesh import __version__
from rolemesh.config.schema import Config
from rolemesh.errors import ConfigError, Problem
from rolemesh.names import ACTOR, CRITIC, REF
from rolemesh.observe import RunDirectory, write_json
from rolemesh.observe.files import sync_directory

STATE: Final = "state.json"
FORMAT: Final = 3
MODEL: Final = "model"
"""The folder of the policy, which transformers loads."""
ADAPTER: Final = "adapter"
"""The folder of an adapter, which peft loads."""
_NAME: Final = re.compile(r"step-\d+")
_PARTIAL: Final = ".partial"


def new_folder(directory: RunDirectory, step: int) -> Path:
    """An empty folder to write the checkpoint of a step into, with a name that no save had before: a worker that still writes for a
    controller before this one does not meet it. Raises OSError."""
    folder = directory.checkpoints / f".step-{step}.{secrets.token_hex(4)}{_PARTIAL}"
    folder.mkdir()
    return folder


def publish(folder: Path, final: Path, state: dict[str, Any]) -> int:
    """Make a checkpoint out of a folder in which every file is written and synced; `state` is what `state.json` says beside their sizes.
    Returns the bytes. Raises OSError."""
    sizes = _sizes(folder)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "ray")}
    write_json(folder / STATE, {"format": FORMAT, "versions": {"rolemesh": __version__, **versions}, **state, "files": sizes})
    for inner in sorted({path.parent for path in folder.rglob("*")}):
        sync_directory(inner)
    remove(final)
    os.rename(folder, final)
    sync_directory(final.parent)
    return sum(sizes.values())


def remove(folder: Path) -> None:
    """Remove a checkpoint, if it is there: first its name, so that nobody takes for one what a crash leaves of it. Raises OSError."""
    if folder.is_dir():
        gone = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{_PARTIAL}")
        os.rename(folder, gone)
        if gone.is_symlink():
            gone.unlink()
        else:
            shutil.rmtree(gone)


def retain(directory: RunDirectory, keep: int) -> None:
    """Remove all but the newest complete checkpoints. Raises OSError."""
    for old in complete(directory)[:-keep]:
        remove(old)


def clean(directory: RunDirectory) -> list[str]:
    """Remove what saves and removals that were cut short have left, and return the names. Only while nothing is saved."""
    left = sorted(path for path in directory.checkpoints.glob(f".*{_PARTIAL}") if path.is_dir())
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in left]


def check_roles(folder: Path, state: dict[str, Any], before: Config, after: Config) -> None:
    """Raise ConfigError when the checkpoint cannot give every role of the resumed run its state: roles or an algorithm were added, or
    the reference, which is read from the model's own folder, would be another."""
    warm, problems = bool(state["progress"].get("warm_started")), []
    for role in roles_with_state(after.roles, warm_started=warm):
        if role not in state["roles"]:
            remedy = f"Train on in a new run, with model.path={folder / MODEL} and sft=null"
            found = f"only {', '.join(state['roles'])} in {folder}"
            problems.append(Problem(subject=f"roles.{role}", need="the checkpoint must hold its state", free=found, remedy=remedy))
    if REF in after.roles and not (warm or after.ref_is_actor) and before.model.path != after.model.path:
        need = "must stay as it was: the reference is read from there"
        problems.append(Problem(subject="model.path", need=need, free=after.model.path, remedy=f"Set model.path={before.model.path}"))
    if before.model.lora != after.model.lora:
        was = before.model.model_dump(include={"lora"})
        need = "must stay as it was: the checkpoint holds such an adapter, or none"
        remedy = f"Train on in a new run, with model.path={folder / MODEL}"
        problems.append(Problem(subject="model.lora", need=need, free=f"{was} before", remedy=remedy))
    if REF in after.roles and warm and before.ref_is_actor != after.ref_is_actor:
        need = "must stay in the actor's pool or apart from it: the checkpoint holds its adapter or its whole weights"
        found, remedy = after.roles[REF].pool, "Leave roles and pools as they were"
        problems.append(Problem(subject="roles.ref.pool", need=need, free=found, remedy=remedy))
    if problems:
        raise ConfigError(problems=problems)


def roles_with_state(roles: Collection[str], *, warm_started: bool) -> list[str]:
    """Those that `state.json` alone does not bring back. A reference is what its model folder says, unless it came out of a warm start."""
    return [role for role in (ACTOR, CRITIC, *((REF,) if warm_started else ())) if role in roles]


def complete(directory: RunDirectory) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    named = (path for path in directory.checkpoints.glob("step-*") if _NAME.fullmatch(path.name))
    return sorted((path for path in named if not _flaw(path)), key=_step_of)


def _flaw(folder: Path) -> str:
    """What makes a checkpoint incomplete; empty when the state is there and every file that it lists has the size it was written with."""
    if folder.name.endswith(_PARTIAL):
        return "its save or removal did not end"
    if not (folder / STATE).is_file():
        return f"no {STATE}"
    try:
        listed, there = json.loads((folder / STATE).read_text(encoding="utf-8")).get("files", {}), _sizes(folder)
        wrong = [name for name, length in listed.items() if there.get(name) != length]
    except (OSError, ValueError, AttributeError) as error:  # no JSON, or not an object of objects
        return f"{STATE} cannot be read: {type(error).__name__}"
    if not wrong:
        return ""
    return f"{wrong[0]} has {there[wrong[0]]:,} of {listed[wrong[0]]:,} bytes" if wrong[0] in there else f"no {wrong[0]}"


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by path relative to it."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def newest(directory: RunDirectory, subject: str = "--resume") -> tuple[Path, list[str]]:
    """(newest complete checkpoint, incomplete ones that were skipped, each with what is wrong with it). Raises ConfigError, about
    `subject`, when there is none."""
    found = complete(directory)
    there = sorted(directory.checkpoints.iterdir()) if directory.checkpoints.is_dir() else ()
    others = (path for path in there if path not in found and (_NAME.fullmatch(path.name) or path.name.endswith(_PARTIAL)))
    skipped = [f"{path.name} ({_flaw(path)})" for path in others]
    if not found:
        raise ConfigError.one(
            subject,
            "the run must have a complete checkpoint",
            f"none in {directory.checkpoints}" + (f"; incomplete are {', '.join(skipped)}" if skipped else ""),
            "Start it anew; trainer.save_every writes checkpoints on the way",
        )
    return found[-1], skipped


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` of a complete checkpoint. Raises ConfigError for one of another format, and for one that lacks something."""
    state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        writer = state.get("rolemesh") or state.get("versions", {}).get("rolemesh")
        found = f"format {state.get('format')} in {folder}, written by rolemesh {writer}"
        remedy = f"Resume with that version, or train on in a new run from {folder / MODEL}"
        raise ConfigError.one("--resume", f"checkpoints must be of format {FORMAT}", found, remedy)
    lacking = [name for name in ("progress", "prompts", "roles", "config") if not isinstance(state.get(name), dict)]
    if lacking:
        remedy = "Remove this folder to go on from the checkpoint before it"
        raise ConfigError.one("--resume", f"{folder / STATE} must hold all of its sections", f"no {', '.join(lacking)}", remedy)
    return state


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
