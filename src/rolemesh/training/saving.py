"""Saving and restoring a run: `begin` returns when every worker has begun to copy its state, and the rest goes on beside the next steps.

    begin      waits for the save before; asks how much it will be and whether there is room; tells every worker to save
    beside     workers copy their blocks to host memory (an update waits for that) and write them; the controller waits for their marks,
               writes `state.json`, gives the folder its name and removes checkpoints that are not kept any more
    finish     waits for that, at the next save and at the end of the run

A save that fails does not end the run: it is told of, and the checkpoint before it stays. Only the last save of a run must not fail.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rolemesh.errors import DeadlineExceeded, RolemeshError
from rolemesh.plan.memory import size
from rolemesh.roles.marks import make_mark, mark_path, read_mark
from rolemesh.runtime import together
from rolemesh.training import checkpoint
from rolemesh.training.run import TrainingRun

LOOK_SECONDS: Final = 0.05
GRACE_SECONDS: Final = 60.0
"""How long a run that ends by an error waits for a save under way."""
SMALL_FILES_BYTES: Final = 2**20
"""Room for config, marks and the like, beside tensors and tokenizer."""
TOKEN_BYTES: Final = 160
"""Room for one token of the vocabulary in the files of its tokenizer, rather too much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A save under way."""

    step: int
    folder: Path
    marks: dict[str, Path]
    """By worker."""
    state: dict[str, Any]
    need: int
    """Bytes of everything, as estimated."""
    began: float


async def begin(run: TrainingRun) -> None:
    """Save the present step, unless that is done already. Training can go on when this returns; see `finish`."""
    began = time.monotonic()
    await finish(run)
    run.save_failure = None
    if run.directory.checkpoint(run.progress.step) in checkpoint.complete(run.directory):
        return  # the state of a step is saved once; nothing has changed since
    try:
        save = await _begun(run, began)
    except OSError as error:
        _failed(run, run.progress.step, error)
        return
    stalled = time.monotonic() - began
    run.saving = asyncio.ensure_future(_complete(run, save, stalled))
    if not run.config.trainer.async_save:
        await finish(run)


async def finish(run: TrainingRun) -> None:
    """Wait for the save under way, if there is one; how it ended is told by then."""
    if run.saving is not None:
        await asyncio.shield(run.saving)
        run.saving = None


async def end(run: TrainingRun) -> None:
    """Wait for the save under way. Raises RolemeshError when the last save of the run has failed."""
    await finish(run)
    if run.save_failure is not None:
        kept = checkpoint.complete(run.directory)
        newest = f"the newest complete one is {kept[-1]}" if kept else "there is no complete one"
        raise RolemeshError(text=f"the last checkpoint was not written, and {newest}. {run.save_failure}")


@asynccontextmanager
async def saves_finished(run: TrainingRun) -> AsyncIterator[None]:
    """Meanwhile saves may go on beside the run. An error that ends the block leaves them a while; an interrupt ends them at once."""
    try:
        yield
    except Exception:
        if run.saving is not None:
            await asyncio.wait({run.saving}, timeout=GRACE_SECONDS)
        raise
    finally:
        if run.saving is not None:
            run.saving.cancel()
            await asyncio.gather(run.saving, return_exceptions=True)


async def _begun(run: TrainingRun, began: float) -> Save:
    """Workers save their state into a new folder. Raises OSError."""
    roles = checkpoint.roles_with_state(run.session.groups, warm_started=run.progress.warm_started)
    groups = {role: run.session.groups[role] for role in roles}
    checkpoint.clean(run.directory)
    tensors = sum(await together(group.save_bytes() for group in groups.values()))
    need = tensors + SMALL_FILES_BYTES + TOKEN_BYTES * len(run.session.tokenizer)
    _check_room(run.directory.checkpoints, need)
    folder = checkpoint.new_folder(run.directory, run.progress.step)
    ranks = [(role, rank) for role, group in groups.items() for rank in range(group.world_size)]
    marks = {f"{role} rank {rank}": mark_path(folder, role, rank) for role, rank in ranks}
    for mark in marks.values():
        make_mark(mark)
    told = await together(group.save(str(folder.resolve()), beside=run.config.trainer.async_save) for group in groups.values())
    state = {
        "progress": asdict(run.progress),
        "prompts": run.prompts.state(),
        "seed": run.config.seed,
        "roles": dict(zip(groups, told, strict=True)),
        "config": run.config.model_dump(mode="json"),
    }
    return Save(step=run.progress.step, folder=folder, marks=marks, state=state, need=need, began=began)


def _check_room(folder: Path, need: int) -> None:
    """Raise OSError naming the bytes where the file system has no room for a checkpoint."""
    if (free := shutil.disk_usage(folder).free) < need:
        raise OSError(f"no room in {folder}: the checkpoint needs {_bytes(need)}, {_bytes(free)} are free")


def _bytes(count: int) -> str:
    return f"{count:,} bytes ({size(count)})"


async def _complete(run: TrainingRun, save: Save, stalled: float) -> None:
    try:
        await _written(run, save)
        final = run.directory.checkpoint(save.step)
        written = await asyncio.to_thread(checkpoint.publish, save.folder, final, save.state)
        values = {"checkpoint/stall_seconds": stalled, "checkpoint/seconds": time.monotonic() - save.began, "checkpoint/bytes": written}
    except (OSError, DeadlineExceeded) as error:
        with suppress(OSError):
            checkpoint.clean(run.directory)
        _failed(run, save.step, error)
        return
    run.recorder.saved(save.step, final, values)
    try:
        await asyncio.to_thread(checkpoint.retain, run.directory, run.config.trainer.keep_checkpoints)
    except OSError as error:
        run.recorder.note(f"older checkpoints could not be removed: {error}")


async def _written(run: TrainingRun, save: Save) -> None:
    """Wait until every worker is done. Raises OSError with what failed, and DeadlineExceeded naming those that are late."""
    backend, deadline = run.session.backend, run.config.deadlines.call
    ends, waiting = backend.time() + deadline, dict(save.marks)
    while waiting:
        for who, mark in list(waiting.items()):
            if (told := read_mark(mark)) is None:
                continue
            if "error" in told:
                free = shutil.disk_usage(save.folder).free
                room = f"The checkpoint needs {_bytes(save.need)}, {_bytes(free)} are free now"
                raise OSError(f"{who} could not write its part of {save.folder}: {told['error']}. {room}")
            mark.unlink()
            del waiting[who]
        if waiting and backend.time() >= ends:
            subject = f"{', '.join(waiting)} to write step {save.step} into {save.folder}"
            raise DeadlineExceeded(waiter="the checkpoint", subject=subject, seconds=deadline)
        if waiting:
            await backend.sleep(LOOK_SECONDS)


def _failed(run: TrainingRun, step: int, error: Exception) -> None:
    run.save_failure = f"{type(error).__name__}: {error}"
    run.recorder.save_failed(step, run.save_failure)


async def restore(run: TrainingRun, folder: Path) -> None:
    """Give the roles the state back that was saved; the run's own progress must be restored already."""
    saved = checkpoint.read_state(folder)["roles"]
    roles = checkpoint.roles_with_state(run.session.groups, warm_started=run.progress.warm_started)
    await together(run.session.groups[role].restore(str(folder.resolve()), saved[role]) for role in roles)
