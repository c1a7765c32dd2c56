"""Commands that start something: train, sft, eval, generate, export. Torch and Ray are loaded inside, after the config was read."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from rolemesh.cli.options import overrides_only, recipe_and_overrides
from rolemesh.config import Config, load_config
from rolemesh.errors import ConfigError, Problem
from rolemesh.observe import RunDirectory, find_run, write_json
from rolemesh.observe.console import TrainingDisplay


def _prepare_process() -> None:
    """The working directory holds the user's own code; one thread a process; no warnings of other libraries on the screen."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def train(arguments: list[str], resume: str | None, runs_dir: Path) -> None:
    """See `rolemesh train --help`."""
    directory = None
    if resume is None:
        config = load_config(*recipe_and_overrides(arguments))
    else:
        directory = find_run(runs_dir, resume)
        config = load_config(directory.config, overrides_only(arguments, "--resume"))
    _prepare_process()
    from rolemesh.training.launch import run_training

    run_training(config, TrainingDisplay(config.name), resume=directory)


def change(run: str, overrides: list[str], deadline: float, runs_dir: Path) -> None:
    """See `rolemesh set --help`."""
    directory = find_run(runs_dir, run)
    _prepare_process()
    from rolemesh.training import settings

    step = settings.change(directory, overrides, deadline)
    typer.echo(f"{directory.name}: {', '.join(overrides)} from step {step} on")


def sft(arguments: list[str]) -> None:
    """See `rolemesh sft --help`."""
    config = load_config(*recipe_and_overrides(arguments))
    if config.sft is None:
        raise ConfigError.one("sft", "the recipe must have a section `sft`", "none", "Add `sft: {steps: 200}`")
    _prepare_process()
    from rolemesh.training.tasks import run_sft

    folder = run_sft(config, TrainingDisplay(config.name))
    typer.echo(f"The model is in {folder}. Train on from it with model.path={folder}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What `rolemesh eval` was told about samples."""

    samples: int | None
    k: str
    temperature: float | None

    def checked(self, config: Config) -> tuple[int, tuple[int, ...], float] | None:
        """(answers a prompt, values of k, temperature); None for greedy answers. Raises ConfigError with everything that is wrong."""
        if self.samples is None:
            if self.temperature is not None or self.k != "1":
                raise ConfigError.one("--samples", "is needed for --k and --temperature", "none", "Write for example --samples 16 --k 1,8")
            return None
        temperature = config.rollout.temperature if self.temperature is None else self.temperature
        words = [word.strip() for word in self.k.split(",")]
        ks = [int(word) for word in words if word.isascii() and word.isdigit()]
        problems = []
        if self.samples < 1:
            problems.append(Problem(subject="--samples", need="must be at least 1", free=str(self.samples)))
        elif len(ks) < len(words) or not all(1 <= k <= self.samples for k in ks):
            need = f"must be whole numbers from 1 to --samples={self.samples}, with commas between them"
            problems.append(Problem(subject="--k", need=need, free=repr(self.k), remedy="Write for example --samples 16 --k 1,8"))
        if not temperature > 0:
            remedy = "Leave --samples out for greedy answers"
            problems.append(
                Problem(subject="--temperature", need="must be above 0 for several samples", free=f"{temperature:g}", remedy=remedy)
            )
        if problems:
            raise ConfigError(problems=problems)
        return self.samples, tuple(dict.fromkeys(ks)), temperature


def evaluate(arguments: list[str], run: str | None, runs_dir: Path, sampling: Sampling, *, output: Path | None, as_json: bool) -> None:
    """See `rolemesh eval --help`."""
    if run is None:
        config = load_config(*recipe_and_overrides(arguments))
    else:
        directory = find_run(runs_dir, run)
        config = load_config(directory.config, [_model_of(directory), *overrides_only(arguments, "--run")])
    asked = sampling.checked(config)
    if output is not None:
        _check_output(output)
    _prepare_process()
    from rolemesh.training import evaluation
    from rolemesh.training.tasks import run_evaluation

    how = evaluation.Sampling(samples=asked[0], ks=asked[1], temperature=asked[2]) if asked is not None else None
    found = run_evaluation(config, how, tell=lambda wait: typer.echo(f"waiting {wait}", err=True))
    if as_json:
        typer.echo(json.dumps(found))
    else:
        typer.echo(f"model: {config.model.path}")
        for name, value in found.items():
            typer.echo(f"{name}: {value:.4g}")
    if output is not None:
        told = {
            "model": config.model.path,
            "samples": asked[0] if asked else 1,
            "temperature": asked[2] if asked else 0.0,
            "seed": config.seed,
        }
        write_json(output, told | found)


def _check_output(file: Path) -> None:
    """Raise ConfigError, before minutes of work, for a file that could not be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        problem = "a folder" if file.is_dir() else "a place that may not be written to" if not os.access(file.parent, os.W_OK) else ""
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise ConfigError.one("--output", "must name a file that can be written", f"{problem} ({file})", "Name another file")


def serve(arguments: list[str], run: str | None, runs_dir: Path) -> None:
    """See `rolemesh serve --help`."""
    if run is None:
        config = load_config(*recipe_and_overrides(arguments))
    else:
        directory = find_run(runs_dir, run)
        config = load_config(directory.config, [_model_of(directory), *overrides_only(arguments, "--run")])
    _prepare_process()
    from rolemesh.training.tasks import run_serving

    run_serving(config, TrainingDisplay(config.name))


def generate(prompts: list[str], run: str | None, temperature: float, runs_dir: Path) -> None:
    """See `rolemesh generate --help`."""
    directory = find_run(runs_dir, run)
    config = load_config(directory.config, [_model_of(directory), "backend=local"])
    _prepare_process()
    from rolemesh.training.tasks import run_generation

    for answer in run_generation(config, prompts, temperature):
        typer.echo(answer)


def export(which: str, to: Path, step: int | None, dtype: str, runs_dir: Path, *, adapter: bool, force: bool) -> None:
    """See `rolemesh export --help`."""
    _prepare_process()
    from rolemesh.training.export import plan_export, run_export

    planned = plan_export(which, to, runs_dir=runs_dir, step=step, dtype=dtype, adapter=adapter, force=force)
    run_export(planned, lambda text: typer.echo(text, err=True))
    typer.echo(str(to))


def _model_of(directory: RunDirectory) -> str:
    """The override that takes the model of the newest checkpoint, by itself complete. Raises ConfigError when there is none."""
    from rolemesh.training.checkpoint import newest

    folder, skipped = newest(directory, "run")
    if skipped:
        typer.echo(f"skipped incomplete {', '.join(skipped)}", err=True)
    return f"model.path={json.dumps(str((folder / 'model').resolve()))}"
