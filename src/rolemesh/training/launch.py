"""Starts and ends runs for the command line and for scripts: prepare, open a session, train, write the summary."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rolemesh.algorithms import create_algorithm
from rolemesh.config import dump_config, load_config
from rolemesh.config.schema import Config
from rolemesh.errors import ConfigError, ResourceError, RolemeshError, RunStopped, WorkerError
from rolemesh.observe import Journal, RunDirectory, read_journal, read_json_lines, write_json, write_text
from rolemesh.plan import Inventory, Plan, held_as_free, local_inventory, plan_json
from rolemesh.runtime import Backend, create_backend
from rolemesh.runtime.janitor import is_watched
from rolemesh.training import checkpoint as checkpoints
from rolemesh.training import phases, saving, serving, settings, watch
from rolemesh.training.admission import Wait, admitted, joins_cluster, meeting_points, python_path
from rolemesh.training.loop import train
from rolemesh.training.pools import TakenOver, taken_over
from rolemesh.training.preflight import Checked, Prepared, Site, check, check_saved_model
from rolemesh.training.recorder import Display, Recorder
from rolemesh.training.run import Progress, TrainingRun
from rolemesh.training.session import Session

T = TypeVar("T")
Loop = Callable[[TrainingRun], Awaitable[None]]
"""Takes a run that stands ready to its end; `loop.train` is the usual one."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What ends a run."""


def backend_for(config: Config, inventory: Inventory | None, run: str) -> Backend:
    """The backend of a config for a run: with exactly the resources of the inventory, or on the config's cluster. Workers import user code
    from where the controller does."""
    if config.backend == "local":
        return create_backend("local")
    cluster = config.cluster
    kept = {"detached": cluster.detached, "time_to_live": cluster.time_to_live, "run": run, "pythonpath": python_path()}
    if inventory is None:
        return create_backend("ray", address=cluster.address, **kept)
    cpus, gpus = sum(node.cpus for node in inventory.nodes), sum(node.gpus for node in inventory.nodes)
    return create_backend("ray", num_cpus=math.ceil(cpus), num_gpus=gpus, **kept)


def own_inventory(config: Config) -> Inventory | None:
    """The machine that the run has to itself; None when it joins a cluster, whose inventory is taken there."""
    return None if joins_cluster(config) else local_inventory()


async def ready(checked: Checked, backend: Backend, inventory: Inventory | None, run: str, tell: Callable[[Wait], None]) -> Prepared:
    """What was checked, with a plan; see `planned`."""
    return checked.with_plan(await planned(checked.site, backend, inventory, run, tell))


async def planned(site: Site, backend: Backend, inventory: Inventory | None, run: str, tell: Callable[[Wait], None]) -> Plan:
    """The plan for that inventory, or for the cluster that the backend has joined, where the run may use what it has from an earlier
    driver. Raises ResourceError."""
    if inventory is not None:
        return site.plan_for(inventory)

    def plan(found: Inventory) -> Plan:
        return site.plan_for(held_as_free(found, run))

    return await admitted(site.config, backend, plan, tell)


def run_on(backend: Backend, main: Coroutine[Any, Any, T]) -> T:
    """Run a controller on a backend and end the cluster that belongs to it. SIGINT and SIGTERM cancel `main`, which frees what it owns;
    then KeyboardInterrupt is raised. (A training run replaces the handlers by its own, see `_stop_at_step_end_on_signals`.) Both signals
    do so while the cluster starts, too, and neither can cut short its end."""

    async def cancelled_by_signals() -> T:
        task = asyncio.current_task()
        assert task is not None
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await main

    controller = cancelled_by_signals()
    with _handling(signal.default_int_handler):
        try:
            return backend.run(controller)
        except asyncio.CancelledError as error:
            raise KeyboardInterrupt from error
        finally:
            with _handling(signal.SIG_IGN):
                controller.close()  # neither was started if the backend could not be
                main.close()
                backend.stop()


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """Treat SIGINT and SIGTERM so; afterwards as before."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where a resumed run goes on."""

    folder: Path
    state: dict[str, Any]
    skipped: tuple[str, ...]
    """Incomplete checkpoints that were passed over, each with what is wrong with it."""
    changed: dict[str, Any]
    """Options that differ from those the run was started with."""


def run_training(config: Config, display: Display, *, resume: RunDirectory | None = None, loop: Loop = train) -> dict[str, Any]:
    """Train to the end, by a loop of your own if you give one, and return the summary. Raises what the run raises, and KeyboardInterrupt
    after an interrupt (the state of all complete steps is saved then); whatever was started is freed before. A run that is to be resumed
    is not touched before everything about it was checked; only processes that an earlier driver has left are taken over before, if its
    options are what they were."""
    inventory = own_inventory(config)
    standing = resume is not None and _stands(resume, config)
    checked = None if standing else check(config, inventory, warm_start=resume is None)
    with run_directory(config, resume) as directory:
        checkpoint = _find_checkpoint(directory, checked) if resume is not None and checked is not None else None
        backend = backend_for(config, inventory, directory.name)

        def tell(wait: Wait) -> None:
            tell_wait(directory, config, display, wait)

        async def main() -> dict[str, Any]:
            if checked is not None:
                prepared = await ready(checked, backend, inventory, directory.name, tell)
                return await _train(prepared, directory, backend, display, checkpoint, loop)
            plan = await planned(Site.of(config), backend, inventory, directory.name, tell)
            async with taken_over(config, plan, backend, directory, display.phase) as taken:
                with _handling(signal.default_int_handler):  # nobody else is waited for meanwhile
                    late = check(config, inventory, warm_start=False)
                    found = _find_checkpoint(directory, late)
            return await _train(late.with_plan(plan), directory, backend, display, found, loop, taken)

        summary = run_on(backend, main())
    if summary["state"] == "interrupted":
        raise KeyboardInterrupt
    return summary


@contextmanager
def run_directory(config: Config, resume: RunDirectory | None = None) -> Iterator[RunDirectory]:
    """Hold the directory of a run, a new one unless one is resumed. A run that a cluster refuses at once leaves none behind; one that ends
    otherwise before its session began says so in its status. Raises ConfigError as `held` does."""
    directory, mine = resume, resume is None
    try:
        directory = directory or RunDirectory.create(config.runs_dir, config.name)
        with directory.held():
            mine = True
            yield directory
    except BaseException as error:
        state = directory.read_status().get("state") if directory is not None and mine else None
        if directory is not None and resume is None and isinstance(error, ResourceError) and state == "created":
            shutil.rmtree(directory.path)
        elif directory is not None and state in ("created", "waiting"):
            directory.write_status({"state": "interrupted" if isinstance(error, KeyboardInterrupt) else "failed", "pid": os.getpid()})
        raise


def tell_wait(directory: RunDirectory, config: Config, display: Display, wait: Wait) -> None:
    """To the screen and, for `rolemesh status`, to the directory of a run that waits for room."""
    display.phase("waiting", str(wait))
    directory.write_status(watch.status(directory, config, Progress(), "waiting", f"waiting {wait}", []))


def _stands(run: RunDirectory, config: Config) -> bool:
    """Whether processes of a run, with the options that it is to go on with, may wait on this machine for their next driver."""
    return config.cluster.detached and is_watched(run.name) and load_config(str(run.config)) == config


def _find_checkpoint(directory: RunDirectory, prepared: Checked) -> Checkpoint:
    """The newest complete checkpoint, checked against the config. Raises ConfigError."""
    folder, skipped = checkpoints.newest(directory)
    state = checkpoints.read_state(folder)
    directory.read_metrics()
    read_journal(directory.journal)
    done, steps = _progress(folder, state).step, prepared.config.trainer.steps
    if steps < done:
        remedy = f"Set trainer.steps above {done} to train on"
        raise ConfigError.one("trainer.steps", f"must be at least the {done} steps that {directory.name} has done", str(steps), remedy)
    prepared.prompts.load_state(state["prompts"])
    earlier = load_config(str(directory.config))
    checkpoints.check_roles(folder, state, earlier, prepared.config)
    check_saved_model(folder / checkpoints.MODEL, prepared)
    before, after = (config.model_dump(mode="json") for config in (earlier, prepared.config))
    changed = {name: after[name] for name in after if after[name] != before[name]}
    if any(before["algorithm"][name] != after["algorithm"][name] for name in ("kl_coefficient", "kl_target")):
        state["progress"]["kl_coefficient"] = None  # what was adapted belongs to the settings before
    return Checkpoint(folder=folder, state=state, skipped=tuple(skipped), changed=changed)


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


async def _train(
    prepared: Prepared,
    directory: RunDirectory,
    backend: Backend,
    display: Display,
    checkpoint: Checkpoint | None,
    loop: Loop,
    taken: TakenOver | None = None,
) -> dict[str, Any]:
    began = time.time()
    async with open_run(prepared, directory, backend, display, checkpoint=checkpoint, taken=taken) as run:
        _stop_at_step_end_on_signals(run)
        display.start(run.config.trainer.steps, run.progress.step, read_json_lines(directory.metrics))
        display.note(f"run {directory.name} in {directory.path}")
        for report in (*run.prompts.reports, *run.eval_set.reports):
            run.recorder.display.note(str(report))
        try:
            await loop(run)
        except RunStopped:
            run.prompts.load_state(run.cursor)  # the step that was given up is drawn again after a resume
            await phases.save(run)
            await saving.finish(run)
            raise
        if run.interrupted:
            await phases.save(run)
        await saving.end(run)
        summary = _summary(run, "interrupted" if run.interrupted else "finished", time.time() - began)
        write_json(directory.summary, summary)
        display.finish(summary)
    return summary


def _stop_at_step_end_on_signals(run: TrainingRun) -> None:
    """The first Ctrl-C or SIGTERM ends the run after the step under way and saves it; the second, or one before the first step, at once."""
    loop, main = asyncio.get_running_loop(), asyncio.current_task()

    def interrupt() -> None:
        if run.interrupted or run.recorder.step == 0:
            assert main is not None
            main.cancel()
            return
        run.interrupted = True
        run.recorder.note("interrupted: finishing this step, then saving. Press Ctrl-C again to stop at once")

    for number in SIGNALS:
        loop.add_signal_handler(number, interrupt)


@asynccontextmanager
async def open_run(
    prepared: Prepared,
    directory: RunDirectory,
    backend: Backend,
    display: Display,
    *,
    checkpoint: Checkpoint | None = None,
    roles: Sequence[str] | None = None,
    taken: TakenOver | None = None,
) -> AsyncIterator[TrainingRun]:
    """A `TrainingRun` ready for its loop, standing at the checkpoint if there is one. Frees everything on exit, what was `taken` over
    too."""
    config = prepared.config
    dropped = directory.truncate_metrics(checkpoint.state["progress"]["step"]) if checkpoint is not None else 0
    recorder = Recorder(directory, config, display)
    journal = taken.journal if taken is not None else Journal(directory.journal)
    outcome = "failed"
    cause: Exception | None = None
    progress = Progress(**checkpoint.state["progress"]) if checkpoint is not None else Progress()
    run: TrainingRun | None = None
    try:
        if checkpoint is None:
            _write_plan(prepared, directory)
        write_json(directory.cluster, {"backend": backend.name, "address": backend.address})
        workers = taken.workers if taken is not None else []
        directory.write_status(watch.status(directory, config, progress, "starting", "starting", workers))
        for warning in (*prepared.plan.warnings, *([f"dropped from the journal, cut short: {journal.torn}"] if journal.torn else [])):
            recorder.note(warning)
        if joins_cluster(config):
            display.note(meeting_points(prepared.plan, config.cluster.interface))
        session = Session(
            config, prepared.plan, backend, run_id=directory.name, run_dir=directory.path, tokenizer=prepared.tokenizer,
            observer=recorder.observe, announce=recorder.announce, warn=recorder.note, roles=roles,
            journal=journal, taken=taken,
        )  # fmt: skip
        async with session:
            run = TrainingRun(
                config=config, directory=directory, session=session, recorder=recorder, algorithm=create_algorithm(config),
                prompts=prepared.prompts, sft_prompts=prepared.sft_prompts, eval_set=prepared.eval_set, progress=progress,
                cursor=prepared.prompts.state(),
            )  # fmt: skip
            if checkpoint is not None:
                await _restore(run, prepared, checkpoint, dropped)
            async with watch.watched(run), settings.followed(run), saving.saves_finished(run), serving.served(run):
                yield run
            outcome = "interrupted" if run.interrupted else "finished"
    except asyncio.CancelledError:
        outcome = "interrupted"
        raise
    except Exception as error:
        cause = error
        with _writing(directory, cause):
            _keep_error(directory, recorder, error)
        raise
    finally:
        try:
            with _writing(directory, cause):
                recorder.events.write("end", "run", outcome)
                last = run.config if run is not None else config  # options change while a run trains
                directory.write_status(watch.status(directory, last, progress, outcome, recorder.phase, []))
        finally:
            journal.close()
            recorder.close()
            display.stop()


@contextmanager
def _writing(directory: RunDirectory, cause: Exception | None) -> Iterator[None]:
    """The last words of a run. Raises RolemeshError where its directory takes none: it was removed, or the disk is full."""
    try:
        yield
    except OSError as error:
        text = f"the run directory {directory.path} cannot be written any more: {type(error).__name__}: {error}"
        raise RolemeshError(text=text + (f". What ended the run: {type(cause).__name__}: {cause}" if cause else "")) from error


def _keep_error(directory: RunDirectory, recorder: Recorder, error: Exception) -> None:
    """The full trace goes to a file; the screen gets the message alone."""
    original = error.original_traceback if isinstance(error, WorkerError) else ""
    trace = directory.logs / "error.txt"
    text = "".join(traceback.format_exception(error))
    write_text(trace, text + ("\nIn the worker:\n" + original if original else ""))
    fields = error.fields if isinstance(error, WorkerError) else {}
    where = {name: fields[name] for name in ("group", "rank", "node", "pid", "method") if name in fields}
    recorder.events.write("run", "run", "error", level="error", message=str(error), error=type(error).__name__, trace=str(trace), **where)
    write_json(directory.summary, {"run": directory.name, "state": "failed", "error": str(error), "trace": str(trace)})


def _write_plan(prepared: Prepared, directory: RunDirectory) -> None:
    write_text(directory.config, dump_config(prepared.config))
    write_json(directory.plan, plan_json(prepared.plan))


async def _restore(run: TrainingRun, prepared: Prepared, checkpoint: Checkpoint, dropped: int) -> None:
    """Give the roles their state back; only then does the run directory take the config of this start, if a step will be done by it."""
    await saving.restore(run, checkpoint.folder)
    if run.progress.step < run.config.trainer.steps:
        _write_plan(prepared, run.directory)
    run.recorder.step = run.progress.step
    skipped = f"; skipped incomplete {', '.join(checkpoint.skipped)}" if checkpoint.skipped else ""
    text = (
        f"resumed at step {run.progress.step} from {checkpoint.folder}{skipped}; {dropped} later rows of metrics dropped; "
        f"next prompt is number {checkpoint.state['prompts']['draws']}"
    )
    details = {"step": run.progress.step, "dropped_rows": dropped, "changed_options": checkpoint.changed}
    run.recorder.events.write("prepare", str(checkpoint.folder), "resumed", message=text, **details)
    run.recorder.display.note(text + (f"; changed sections: {', '.join(checkpoint.changed)}" if checkpoint.changed else ""))


def _summary(run: TrainingRun, state: str, seconds: float) -> dict[str, Any]:
    return {
        "run": run.directory.name,
        "directory": str(run.directory.path),
        "state": state,
        "steps": run.progress.step,
        "weight_version": run.progress.weight_version,
        "eval/accuracy/first": run.progress.first_accuracy,
        "eval/accuracy/last": run.progress.last_accuracy,
        "seconds": seconds,
        "checkpoint": str(run.directory.checkpoint(run.progress.step)),
        "data": str(run.prompts.report),
    }
