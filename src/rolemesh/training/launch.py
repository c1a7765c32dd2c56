"""Starts and ends runs for the command line and for scripts: prepare, open a session, train, write the summary."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rolemesh.algorithms import create_algorithm
from rolemesh.config import dump_config
from rolemesh.config.schema import Config
from rolemesh.errors import WorkerError
from rolemesh.observe import RunDirectory, read_json_lines, write_json, write_text
from rolemesh.plan import local_inventory, plan_json
from rolemesh.runtime import Backend, create_backend
from rolemesh.training import checkpoint, phases
from rolemesh.training.loop import train
from rolemesh.training.preflight import Prepared, prepare
from rolemesh.training.recorder import Display, Recorder
from rolemesh.training.run import Progress, TrainingRun
from rolemesh.training.session import Session, python_path

STATUS_SECONDS = 1.0


def backend_for(config: Config) -> Backend:
    """The backend of a config. Workers import user code from where the controller does."""
    if config.backend == "local":
        return create_backend("local")
    return create_backend("ray", pythonpath=python_path())


def stop_backend(backend: Backend) -> None:
    """End a cluster that belongs to the run alone."""
    stop: Callable[[], None] | None = getattr(backend, "stop", None)
    if stop is not None:
        stop()


def run_training(config: Config, display: Display, *, resume: RunDirectory | None = None) -> dict[str, Any]:
    """Train to the end and return the summary. Raises what the run raises, and KeyboardInterrupt after an interrupt at whose end the
    state was saved; whatever was started is freed before."""
    prepared = prepare(config, local_inventory())
    directory = resume or RunDirectory.create(config.runs_dir, config.name)
    backend = backend_for(config)
    try:
        summary = backend.run(_train(prepared, directory, backend, display, resume=resume is not None))
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error
    finally:
        stop_backend(backend)
    if summary["state"] == "interrupted":
        raise KeyboardInterrupt
    return summary


async def _train(prepared: Prepared, directory: RunDirectory, backend: Backend, display: Display, *, resume: bool) -> dict[str, Any]:
    began = time.time()
    async with open_run(prepared, directory, backend, display, resume=resume) as run:
        _stop_at_step_end_on_signals(run)
        display.start(run.config.trainer.steps, run.progress.step, read_json_lines(directory.metrics))
        for report in (run.prompts.report, run.eval_set.report):
            run.recorder.display.note(str(report))
        await train(run)
        if run.interrupted:
            await phases.save(run)
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

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)


@asynccontextmanager
async def open_run(
    prepared: Prepared,
    directory: RunDirectory,
    backend: Backend,
    display: Display,
    *,
    resume: bool = False,
    roles: Sequence[str] | None = None,
) -> AsyncIterator[TrainingRun]:
    """A `TrainingRun` ready for its loop, standing at the newest checkpoint when resumed. Frees everything on exit."""
    config = prepared.config
    recorder = Recorder(directory, config, display)
    state = "failed"
    try:
        _write_plan(prepared, directory)
        for warning in prepared.plan.warnings:
            recorder.note(warning)
        session = Session(
            config, prepared.plan, backend, run_id=directory.name, run_dir=directory.path, tokenizer=prepared.tokenizer,
            observer=recorder.observe, announce=recorder.announce, roles=roles,
        )  # fmt: skip
        async with session:
            run = TrainingRun(
                config=config, directory=directory, session=session, recorder=recorder, algorithm=create_algorithm(config),
                prompts=prepared.prompts, sft_prompts=prepared.sft_prompts, eval_set=prepared.eval_set,
            )  # fmt: skip
            if resume:
                await _resume(run)
            async with _watched(run):
                yield run
            state = "interrupted" if run.interrupted else "finished"
    except asyncio.CancelledError:
        state = "interrupted"
        raise
    except Exception as error:
        _keep_traceback(directory, error)
        raise
    finally:
        recorder.events.write("end", "run", state)
        directory.write_status({**directory.read_status(), "run": directory.name, "state": state, "workers": []})
        recorder.close()
        display.stop()


def _keep_traceback(directory: RunDirectory, error: Exception) -> None:
    """The full trace goes to a file; the screen gets the message alone."""
    original = error.original_traceback if isinstance(error, WorkerError) else ""
    text = "".join(traceback.format_exception(error)) + ("\nIn the worker:\n" + original if original else "")
    write_text(directory.logs / "error.txt", text)
    write_json(
        directory.summary, {"run": directory.name, "state": "failed", "error": str(error), "trace": str(directory.logs / "error.txt")}
    )


def _write_plan(prepared: Prepared, directory: RunDirectory) -> None:
    write_text(directory.config, dump_config(prepared.config))
    write_json(directory.plan, plan_json(prepared.plan))


async def _resume(run: TrainingRun) -> None:
    folder, skipped = checkpoint.newest(run.directory)
    state = checkpoint.read_state(folder)
    run.progress = Progress(**state["progress"])
    run.prompts.load_state(state["prompts"])
    await run.session.groups["actor"].restore(str(folder.resolve()))
    dropped = run.directory.truncate_metrics(run.progress.step)
    run.recorder.step = run.progress.step
    names = f"; skipped incomplete {', '.join(path.name for path in skipped)}" if skipped else ""
    draws = state["prompts"]["draws"]
    text = (
        f"resumed at step {run.progress.step} from {folder}{names}; {dropped} later rows of metrics dropped; next prompt is number {draws}"
    )
    run.recorder.events.write("prepare", str(folder), "resumed", step=run.progress.step, message=text)
    run.recorder.display.note(text)


@asynccontextmanager
async def _watched(run: TrainingRun) -> AsyncIterator[None]:
    """Keep `status.json` fresh for `rolemesh status` meanwhile."""
    watch = asyncio.ensure_future(_watch(run))
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def _watch(run: TrainingRun) -> None:
    while True:
        run.directory.write_status(_status(run, await run.session.status()))
        await run.session.backend.sleep(STATUS_SECONDS)


def _status(run: TrainingRun, workers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "run": run.directory.name,
        "state": "running",
        "pid": os.getpid(),
        "time": time.time(),
        "step": run.progress.step,
        "steps": run.config.trainer.steps,
        "phase": run.recorder.phase,
        "workers": workers,
    }


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
