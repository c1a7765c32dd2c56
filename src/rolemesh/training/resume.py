"""Where a resumed run goes on: the newest complete checkpoint, checked against the config of this start. Called by `launch.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolemesh.config import load_config
from rolemesh.errors import ConfigError
from rolemesh.observe import RunDirectory, read_journal
from rolemesh.training import checkpoint as checkpoints
from rolemesh.training import saving
from rolemesh.training.preflight import Checked, check_saved_model
from rolemesh.training.run import Progress, TrainingRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One to go on from."""

    folder: Path
    progress: Progress
    draws: int
    """Number of the next prompt."""
    skipped: tuple[str, ...]
    """Incomplete checkpoints that were passed over, each with what is wrong with it."""
    changed: dict[str, Any]
    """Options that differ from those the run was started with."""


def find_checkpoint(directory: RunDirectory, checked: Checked) -> Checkpoint:
    """The newest complete checkpoint; the prompts stand there from then on. Raises ConfigError when the config cannot go on from it."""
    folder, skipped = checkpoints.newest(directory)
    state = checkpoints.read_state(folder)
    directory.read_metrics()
    read_journal(directory.journal)
    progress, steps = _progress(folder, state), checked.config.trainer.steps
    if steps < progress.step:
        need = f"must be at least the {progress.step} steps that {directory.name} has done"
        raise ConfigError.one("trainer.steps", need, str(steps), f"Set trainer.steps above {progress.step} to train on")
    checked.prompts.load_state(state["prompts"])
    earlier = load_config(str(directory.config))
    checkpoints.check_roles(folder, state, earlier, checked.config)
    check_saved_model(folder / checkpoints.MODEL, checked)
    before, after = (config.model_dump(mode="json") for config in (earlier, checked.config))
    changed = {name: after[name] for name in after if after[name] != before[name]}
    if any(before["algorithm"][name] != after["algorithm"][name] for name in ("kl_coefficient", "kl_target")):
        progress.kl_coefficient = None  # what was adapted belongs to the settings before
    return Checkpoint(folder=folder, progress=progress, draws=state["prompts"]["draws"], skipped=tuple(skipped), changed=changed)


def _progress(folder: Path, state: dict[str, Any]) -> Progress:
    """Where the checkpoint stands. Raises ConfigError for a manifest that does not say."""
    try:
        found = Progress(**state["progress"])
        if not isinstance(found.step, int):
            raise TypeError(f"step is {found.step!r}")
    except TypeError as error:
        need, remedy = f"{folder / checkpoints.STATE} must say where the run stands", "Remove this folder to go on from the one before it"
        raise ConfigError.one("--resume", need, str(error), remedy) from error
    return found


async def restore(run: TrainingRun, checkpoint: Checkpoint, dropped: int) -> None:
    """Give the roles their state back, and say so. `dropped` rows of metrics were of later steps."""
    await saving.restore(run, checkpoint.folder)
    run.recorder.step = run.progress.step
    skipped = f"; skipped incomplete {', '.join(checkpoint.skipped)}" if checkpoint.skipped else ""
    text = (
        f"resumed at step {run.progress.step} from {checkpoint.folder}{skipped}; {dropped} later rows of metrics dropped; "
        f"next prompt is number {checkpoint.draws}"
    )
    details = {"step": run.progress.step, "dropped_rows": dropped, "changed_options": checkpoint.changed}
    run.recorder.events.write("prepare", str(checkpoint.folder), "resumed", message=text, **details)
    run.recorder.display.note(text + (f"; changed sections: {', '.join(checkpoint.changed)}" if checkpoint.changed else ""))
