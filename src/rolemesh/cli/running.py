"""Commands that start something: train, sft, eval, generate. Torch and Ray are loaded inside, after the config was read."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import typer

from rolemesh.cli.options import overrides_only, recipe_and_overrides
from rolemesh.config import load_config
from rolemesh.errors import ConfigError
from rolemesh.observe import RunDirectory, find_run
from rolemesh.observe.console import TrainingDisplay
from rolemesh.training.checkpoint import newest


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


def sft(arguments: list[str]) -> None:
    """See `rolemesh sft --help`."""
    config = load_config(*recipe_and_overrides(arguments))
    if config.sft is None:
        raise ConfigError.one("sft", "the recipe must have a section `sft`", "none", "Add `sft: {steps: 200}`")
    _prepare_process()
    from rolemesh.training.tasks import run_sft

    folder = run_sft(config, TrainingDisplay(config.name))
    typer.echo(f"The model is in {folder}. Train on from it with model.path={folder}")


def evaluate(arguments: list[str], run: str | None, runs_dir: Path, *, as_json: bool) -> None:
    """See `rolemesh eval --help`."""
    if run is None:
        config = load_config(*recipe_and_overrides(arguments))
    else:
        directory = find_run(runs_dir, run)
        config = load_config(directory.config, [_model_of(directory), *overrides_only(arguments, "--run")])
    _prepare_process()
    from rolemesh.training.tasks import run_evaluation

    found = run_evaluation(config)
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, value in found.items():
        typer.echo(f"{name}: {value:.4g}")


def generate(prompts: list[str], run: str | None, temperature: float, runs_dir: Path) -> None:
    """See `rolemesh generate --help`."""
    directory = find_run(runs_dir, run)
    config = load_config(directory.config, [_model_of(directory), "backend=local"])
    _prepare_process()
    from rolemesh.training.tasks import run_generation

    for answer in run_generation(config, prompts, temperature):
        typer.echo(answer)


def _model_of(directory: RunDirectory) -> str:
    """The override that takes the model of the newest checkpoint, by itself complete. Raises ConfigError when there is none."""
    folder, _ = newest(directory, "run")
    return f"model.path={json.dumps(str((folder / 'model').resolve()))}"
