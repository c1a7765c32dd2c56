"""`rolemesh`: one command a file function, errors turned into messages and exit codes at this one place.

Exit codes: 0 done; 2 config error; 3 resources cannot satisfy the plan; 4 failure; 130 interrupted, all complete steps saved.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rolemesh import __version__
from rolemesh.cli import cleaning, inspecting, running
from rolemesh.cli.options import Arguments, RunArgument, RunsDir
from rolemesh.errors import ConfigError, ResourceError, RolemeshError

INTERRUPTED = 130

app = typer.Typer(
    name="rolemesh",
    help="Train language models with reinforcement learning: roles on pools, one legible controller, hard to kill.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rolemesh {__version__}")
        raise typer.Exit


@app.callback()
def _top(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False) -> None:
    pass


@app.command()
def train(
    arguments: Arguments = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with this run (path, name or its beginning) from its newest checkpoint.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Train by a recipe (default: the demo). RECIPE is a name or a YAML file, further words are overrides such as trainer.steps=5."""
    running.train(arguments or [], resume, runs_dir)


@app.command(name="set")
def change(
    run: Annotated[str, typer.Argument(help="Run: path, name or its beginning.")],
    overrides: Annotated[list[str], typer.Argument(metavar="key=value ...", help="Options, such as trainer.steps=300.")],
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the answer of the run.")] = 60.0,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Change options of a run while it trains, from its next step on: steps, intervals, temperature, KL coefficient."""
    running.change(run, overrides, deadline, runs_dir)


@app.command()
def sft(arguments: Arguments = None) -> None:
    """Supervised fine-tuning by the `sft` section of a recipe; leaves a Hugging Face folder in the run directory."""
    running.sft(arguments or [])


@app.command(name="eval")
def evaluate(
    arguments: Arguments = None,
    run: Annotated[str | None, typer.Option(help="Evaluate the newest checkpoint of this run instead of a recipe's model.")] = None,
    runs_dir: RunsDir = Path("runs"),
    samples: Annotated[int | None, typer.Option(help="Sample so many answers a prompt, and estimate pass@k from them.")] = None,
    k: Annotated[str, typer.Option("--k", help="Values of k for pass@k, with commas between them.")] = "1",
    temperature: Annotated[float | None, typer.Option(help="Temperature of these samples (default: rollout.temperature).")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results to this file, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Accuracy on the held-out prompts: greedy, or pass@k from several samples. By source where there are several."""
    sampling = running.Sampling(samples=samples, k=k, temperature=temperature)
    running.evaluate(arguments or [], run, runs_dir, sampling, output=output, as_json=as_json)


@app.command()
def serve(
    arguments: Arguments = None,
    run: Annotated[str | None, typer.Option(help="Serve the newest checkpoint of this run instead of a recipe's model.")] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Serve a model over HTTP, as OpenAI does, until interrupted. (A run in training does so with rollout.serve={}.)"""
    running.serve(arguments or [], run, runs_dir)


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; standard input, a prompt a line, when none are given.")] = None,
    run: Annotated[str | None, typer.Option(help="Answer with the newest checkpoint of this run (default: the newest run).")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Answer prompts with a trained model, in this process."""
    running.generate(prompts or _lines(), run, temperature, runs_dir)


def _lines() -> list[str]:
    """Standard input, a prompt a line."""
    try:
        return sys.stdin.read().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError.one("prompts", "standard input must be UTF-8 text", str(error)) from error


@app.command()
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
    running.export(which, to, step, dtype, runs_dir, adapter=adapter, force=force)


@app.command()
def plan(
    arguments: Arguments = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(help="Plan for nodes that need not exist: 2x8 is two nodes with eight GPUs each. Give it again for others."),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Plan for what is free now on the cluster of `cluster.address`.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What would run where: roles, pools, nodes, CPUs, memory, sizes, and every problem, without starting anything."""
    raise typer.Exit(inspecting.plan(arguments or [], nodes, live=live, as_json=as_json))


@app.command()
def status(
    run: RunArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """What a run does now: roles, ranks, nodes, pids, state, current call and since when."""
    inspecting.status(run, runs_dir, as_json=as_json)


@app.command()
def clean(
    run: Annotated[str | None, typer.Argument(help="Free this run alone: path, name or its beginning.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Look into this Ray cluster too (default: that of the run, if it joined one).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Free nothing, only list.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also end RUN when it has a driver, and the driver, without saving.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """List what runs have left on this machine (processes, folders) and free what has no driver any more."""
    cleaning.clean(run, runs_dir, address, dry_run=dry_run, force=force, as_json=as_json)


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="Folder to write into.")] = Path()) -> None:
    """Write a recipe and a reward function of your own to start from."""
    inspecting.init(folder)


def main() -> None:
    """Run the command line; every error of ours ends as a message and an exit code, without a traceback."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app()
    except (ConfigError, ResourceError) as error:
        for problem in error.problems:
            errors.print(f"[red]✗[/red] [bold]{_plain(problem.subject)}[/bold]: {_plain(str(problem)[len(problem.subject) + 2 :])}")
        sys.exit(error.exit_code)
    except RolemeshError as error:
        errors.print(f"[red]✗[/red] {_plain(str(error))}")
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # typer turns KeyboardInterrupt into this
            errors.print("interrupted")
        raise
    except Exception:  # noqa: BLE001 - the end of the process: an error that is not ours keeps its trace, and the contract its exit code
        traceback.print_exc()
        sys.exit(RolemeshError.exit_code)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
