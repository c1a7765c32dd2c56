"""Commands that start something: train, set, sft, eval, serve, generate, export. They load torch and Ray after the config was read."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.cli.options import Arguments, AsJson, RunsDir, overrides_only, recipe_and_overrides
from rolemesh.config import Config, load_config
from rolemesh.errors import ConfigError, Problem
from rolemesh.observe import RunDirectory, find_run, list_runs, write_json
from rolemesh.observe.console import TrainingDisplay


def _prepare_process() -> None:
    """The working directory holds the user's own code; one thread a process; no warnings of other libraries on the screen."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def train(
    arguments: Arguments = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with this run (path, name or its beginning) from its newest checkpoint.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Train by a recipe (default: the demo). RECIPE is a name or a YAML file, further words are overrides such as trainer.steps=5."""
    directory = None
    if resume is None:
        config = load_config(*recipe_and_overrides(arguments))
    else:
        directory = find_run(runs_dir, resume)
        config = load_config(directory.config, overrides_only(arguments, "--resume"))
    _prepare_process()
    from rolemesh.training.launch import run_training

    run_training(config, TrainingDisplay(config.name), resume=directory)


def change(
    run: Annotated[str, typer.Argument(help="Run: path, name or its beginning.")],
    overrides: Annotated[list[str], typer.Argument(metavar="key=value ...", help="Options, such as trainer.steps=300.")],
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the answer of the run.")] = 60.0,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Change options of a run while it trains, from its next step on: steps, intervals, temperature, KL coefficient."""
    directory = find_run(runs_dir, run)
    _prepare_process()
    from rolemesh.training import settings

    step = settings.change(directory, overrides, deadline)
    typer.echo(f"{directory.name}: {', '.join(overrides)} from step {step} on")


def sft(arguments: Arguments = None) -> None:
    """Supervised fine-tuning by the `sft` section of a recipe; leaves a Hugging Face folder in the run directory."""
    config = load_config(*recipe_and_overrides(arguments))
    if config.sft is None:
        raise ConfigError.one("sft", "the recipe must have a section `sft`", "none", "Add `sft: {steps: 200}`")
    _prepare_process()
    from rolemesh.training.tasks import run_sft

    folder = run_sft(config, TrainingDisplay(config.name))
    typer.echo(f"The model is in {folder}. Train on from it with model.path={folder}")


def sampling(config: Config, samples: int | None, k: str, temperature: float | None) -> tuple[int, tuple[int, ...], float] | None:
    """(answers a prompt, values of k, temperature) by what `rolemesh eval` was told; None for greedy answers. Raises ConfigError with
    everything that is wrong."""
    if samples is None:
        if temperature is not None or k != "1":
            raise ConfigError.one("--samples", "is needed for --k and --temperature", "none", "Write for example --samples 16 --k 1,8")
        return None
    temperature = config.rollout.temperature if temperature is None else temperature
    words = [word.strip() for word in k.split(",")]
    ks = [int(word) for word in words if word.isascii() and word.isdigit()]
    problems = []
    if samples < 1:
        problems.append(Problem(subject="--samples", need="must be at least 1", free=str(samples)))
    elif len(ks) < len(words) or not all(1 <= number <= samples for number in ks):
        need = f"must be whole numbers from 1 to --samples={samples}, with commas between them"
        problems.append(Problem(subject="--k", need=need, free=repr(k), remedy="Write for example --samples 16 --k 1,8"))
    if not temperature > 0:
        need, remedy = "must be above 0 for several samples", "Leave --samples out for greedy answers"
        problems.append(Problem(subject="--temperature", need=need, free=f"{temperature:g}", remedy=remedy))
    if problems:
        raise ConfigError(problems=problems)
    return samples, tuple(dict.fromkeys(ks)), temperature


def _of_run_or_recipe(arguments: list[str] | None, run: str | None, runs_dir: Path) -> Config:
    """The config of a recipe, or that of a run with its newest model."""
    if run is None:
        return load_config(*recipe_and_overrides(arguments))
    directory = find_run(runs_dir, run)
    return load_config(directory.config, [_model_of(directory), *overrides_only(arguments, "--run")])


def evaluate(
    arguments: Arguments = None,
    run: Annotated[str | None, typer.Option(help="Evaluate the newest checkpoint of this run instead of a recipe's model.")] = None,
    runs_dir: RunsDir = Path("runs"),
    samples: Annotated[int | None, typer.Option(help="Sample so many answers a prompt, and estimate pass@k from them.")] = None,
    k: Annotated[str, typer.Option("--k", help="Values of k for pass@k, with commas between them.")] = "1",
    temperature: Annotated[float | None, typer.Option(help="Temperature of these samples (default: rollout.temperature).")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results to this file, as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Accuracy on the held-out prompts: greedy, or pass@k from several samples. By source where there are several."""
    config = _of_run_or_recipe(arguments, run, runs_dir)
    asked = sampling(config, samples, k, temperature)
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
        samples, _, temperature = asked or (1, (), 0.0)
        write_json(output, {"model": config.model.path, "samples": samples, "temperature": temperature, "seed": config.seed} | found)


def _check_output(file: Path) -> None:
    """Raise ConfigError, before minutes of work, for a file that could not be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        problem = "a folder" if file.is_dir() else "a place that may not be written to" if not os.access(file.parent, os.W_OK) else ""
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise ConfigError.one("--output", "must name a file that can be written", f"{problem} ({file})", "Name another file")


def serve(
    arguments: Arguments = None,
    run: Annotated[str | None, typer.Option(help="Serve the newest checkpoint of this run instead of a recipe's model.")] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Serve a model over HTTP, as OpenAI does, until interrupted. (A run in training does so with rollout.serve={}.)"""
    config = _of_run_or_recipe(arguments, run, runs_dir)
    _prepare_process()
    from rolemesh.training.tasks import run_serving

    run_serving(config, TrainingDisplay(config.name))


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; standard input, a prompt a line, when none are given.")] = None,
    run: Annotated[
        str | None, typer.Option(help="Answer with the newest checkpoint of this run (default: the newest run that has one).")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Answer prompts with a trained model, in this process."""
    prompts = prompts or _lines()
    directory = find_run(runs_dir, run) if run is not None else _newest_trained(runs_dir)
    config = load_config(directory.config, [_model_of(directory), "backend=local"])
    _prepare_process()
    from rolemesh.training.tasks import run_generation

    for answer in run_generation(config, prompts, temperature):
        typer.echo(answer)


def _newest_trained(runs_dir: Path) -> RunDirectory:
    """The newest run that has checkpoints, which what only serves a model has not; else as `find_run`."""
    trained = [found for found in list_runs(runs_dir) if any(found.checkpoints.glob("step-*"))]
    return trained[-1] if trained else find_run(runs_dir, None)


def _lines() -> list[str]:
    try:
        return sys.stdin.read().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError.one("prompts", "standard input must be UTF-8 text", str(error)) from error


def export(
    which: Annotated[str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run (path, name or its beginning), or a checkpoint's folder.")],
    to: Annotated[Path, typer.Option(help="Folder to write: new or empty.")],
    step: Annotated[int | None, typer.Option(min=0, help="Checkpoint of this step (default: the newest complete one).")] = None,
    dtype: Annotated[str, typer.Option(help="Number format of the weights: float32 or bfloat16.")] = "float32",
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter alone, for peft, instead of a merged model.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a model or adapter that is there.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Write a trained model as a Hugging Face folder, or its adapter as one of peft, and check that they load the same from it."""
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
