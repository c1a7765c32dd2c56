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
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from rolemesh.algorithms import create_algorithm
from rolemesh.config import dump_config, load_config
from rolemesh.config.schema import Config
from rolemesh.errors import ResourceError, RolemeshError, RunStopped, WorkerError
from rolemesh.observe import Journal, RunDirectory, read_json_lines, write_json, write_text
from rolemesh.plan import Inventory, Plan, held_as_free, local_inventory, plan_json
from rolemesh.runtime import Backend, create_backend
from rolemesh.runtime.janitor import is_watched
from rolemesh.training import phases, saving, serving, settings, watch
from rolemesh.training.admission import Wait, admitted, joins_cluster, meeting_points, python_path
from rolemesh.training.loop import train
from rolemesh.training.pools import TakenOver, taken_over
from rolemesh.training.preflight import Checked, Prepared, Site, check
from rolemesh.training.recorder import Display, Recorder
from rolemesh.training.resume import Checkpoint, find_checkpoint, restore
from rolemesh.training.run import Progress, TrainingRun
from rolemesh.training.session import Session

T = TypeVar("T")
Loop = Callable[[TrainingRun], Awaitable[None]]
"""Takes a run that stands ready to its end; `loop.train` is the usual one."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What ends a run."""


def run_training(config: Config, display: Display, *, resume: RunDirectory | None = None, loop: Loop = train) -> dict[str, Any]:
    """Train to the end, by a loop of your own if you give one, and return the summary. Raises what the run raises, and KeyboardInterrupt
    after an interrupt (the state of all complete steps is saved then); whatever was started is freed before. A run that is to be resumed
    is not touched before everything about it was checked; only processes that an earlier driver has left are taken over before, if its
    options are what they were."""
    inventory = own_inventory(config)
    standing = resume is not None and _stands(resume, config)
    checked = None if standing else check(config, inventory, warm_start=resume is None)
    with run_directory(config, resume) as directory:
        tell = partial(tell_wait, directory, display)
        if checked is None:
            summary = _take_over_and_train(config, directory, display, loop, tell)
        else:
            checkpoint = find_checkpoint(directory, checked) if resume is not None else None

            async def main(prepared: Prepared, backend: Backend) -> dict[str, Any]:
                return await _train(prepared, directory, backend, display, checkpoint, loop)

            summary = launch(checked, directory.name, tell, main)
    if summary["state"] == "interrupted":
        raise KeyboardInterrupt
    return summary


def _stands(run: RunDirectory, config: Config) -> bool:
    """Whether processes of a run, with the options that it is to go on with, may wait on this machine for their next driver."""
    return config.cluster.detached and is_watched(run.name) and load_config(str(run.config)) == config


def _take_over_and_train(
    config: Config, directory: RunDirectory, display: Display, loop: Loop, tell: Callable[[Wait], None]
) -> dict[str, Any]:
    """Go on in the processes that an earlier driver has left. They are taken over before anything that takes long."""
    inventory = own_inventory(config)
    backend = backend_for(config, inventory, directory.name)

    async def main() -> dict[str, Any]:
        plan = await planned(Site.of(config, inventory), backend, directory.name, tell)
        async with taken_over(config, plan, backend, directory, display.phase) as taken:
            with _handling(signal.default_int_handler):  # nobody else is waited for meanwhile
                checked = check(config, inventory, warm_start=False)
                checkpoint = find_checkpoint(directory, checked)
        return await _train(checked.with_plan(plan), directory, backend, display, checkpoint, loop, taken)

    return run_on(backend, main())


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


# -- a run under way -----------------------------------------------------------------------------------------------------------


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
    """A `TrainingRun` ready for its loop, standing at the checkpoint if there is one; with `roles` for a task that needs these alone.

    Frees everything on exit, what was `taken` over too, and leaves word in the directory of how the run ended."""
    config = prepared.config
    dropped = directory.truncate_metrics(checkpoint.progress.step) if checkpoint is not None else 0
    with ExitStack() as stack:
        stack.callback(display.stop)
        recorder = Recorder(directory, config, display)
        stack.callback(recorder.close)
        journal = taken.journal if taken is not None else Journal(directory.journal)
        stack.callback(journal.close)
        session = Session(
            config, prepared.plan, backend, run_id=directory.name, run_dir=directory.path, tokenizer=prepared.tokenizer,
            observer=recorder.observe, announce=recorder.announce, warn=recorder.note, roles=roles,
            journal=journal, taken=taken,
        )  # fmt: skip
        run = TrainingRun(
            config=config, directory=directory, session=session, recorder=recorder, algorithm=create_algorithm(config),
            prompts=prepared.prompts, sft_prompts=prepared.sft_prompts, eval_set=prepared.eval_set,
            progress=checkpoint.progress if checkpoint is not None else Progress(), cursor=prepared.prompts.state(),
            trains=roles is None,
        )  # fmt: skip
        stack.enter_context(_ending(run))
        if checkpoint is None:
            _write_plan(prepared, directory)
        write_json(directory.cluster, {"backend": backend.name, "address": backend.address})
        directory.write_status(watch.status_of(run, "starting", taken.workers if taken else []))
        _warn(run, prepared, journal)
        async with session:
            if checkpoint is not None:
                await restore(run, checkpoint, dropped)
                if run.progress.step < config.trainer.steps:  # the config of this start counts from its first step on
                    _write_plan(prepared, directory)
            async with watch.watched(run), settings.followed(run), saving.saves_finished(run), serving.served(run):
                yield run


def _warn(run: TrainingRun, prepared: Prepared, journal: Journal) -> None:
    for warning in (*prepared.plan.warnings, *([f"dropped from the journal, cut short: {journal.torn}"] if journal.torn else [])):
        run.recorder.note(warning)
    if joins_cluster(run.config):
        run.recorder.display.note(meeting_points(prepared.plan, run.config.cluster.interface))


def _write_plan(prepared: Prepared, directory: RunDirectory) -> None:
    write_text(directory.config, dump_config(prepared.config))
    write_json(directory.plan, plan_json(prepared.plan))


@contextmanager
def _ending(run: TrainingRun) -> Iterator[None]:
    """Write down how the run ended, whatever ended it. Raises RolemeshError where its directory takes no more words."""
    outcome, cause = "failed", None
    try:
        yield
        outcome = "interrupted" if run.interrupted else "finished"
    except asyncio.CancelledError:
        outcome = "interrupted"
        raise
    except Exception as error:
        cause = error
        with _writing(run.directory, cause):
            _keep_error(run.directory, run.recorder, error)
        raise
    finally:
        with _writing(run.directory, cause):
            run.recorder.events.write("end", "run", outcome)
            run.directory.write_status(watch.status_of(run, outcome, []))


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


# -- a place for it ------------------------------------------------------------------------------------------------------------


def launch(checked: Checked, run: str, tell: Callable[[Wait], None], work: Callable[[Prepared, Backend], Awaitable[T]]) -> T:
    """Start or join the cluster of a run, wait for room there (`tell` hears of that), and have `work` done on it. Raises as `run_on`."""
    backend = backend_for(checked.config, checked.site.inventory, run)

    async def main() -> T:
        return await work(checked.with_plan(await planned(checked.site, backend, run, tell)), backend)

    return run_on(backend, main())


async def planned(site: Site, backend: Backend, run: str, tell: Callable[[Wait], None]) -> Plan:
    """The plan for the machine that the run has to itself, or for the cluster that the backend has joined, where the run may use what it
    has from an earlier driver. Raises ResourceError."""
    if site.inventory is not None:
        return site.plan_for(site.inventory)
    return await admitted(site.config, backend, lambda found: site.plan_for(held_as_free(found, run)), tell)


def own_inventory(config: Config) -> Inventory | None:
    """The machine that the run has to itself; None when it joins a cluster, whose inventory is taken there."""
    return None if joins_cluster(config) else local_inventory()


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


# -- its directory -------------------------------------------------------------------------------------------------------------


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


def tell_wait(directory: RunDirectory, display: Display, wait: Wait) -> None:
    """To the screen and, for `rolemesh status`, to the directory of a run that waits for room."""
    display.phase("waiting", str(wait))
    directory.write_status(watch.status(directory, "waiting", f"waiting {wait}"))
