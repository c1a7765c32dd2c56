"""`rolemesh`: its commands, and errors turned into messages and exit codes at this one place.

Exit codes: 0 done; 2 config error; 3 resources cannot satisfy the plan; 4 failure; 130 interrupted, all complete steps saved.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from rolemesh import __version__
from rolemesh.cli import cleaning, inspecting, running
from rolemesh.errors import ConfigError, ResourceError, RolemeshError

INTERRUPTED = 130


def _end(code: int | None, **_: object) -> None:
    """A command may return its exit code."""
    raise typer.Exit(code or 0)


app = typer.Typer(
    name="rolemesh",
    help="Train language models with reinforcement learning: roles on pools, one legible controller, hard to kill.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    result_callback=_end,
)
for _name, _command in (
    ("train", running.train),
    ("set", running.change),
    ("sft", running.sft),
    ("eval", running.evaluate),
    ("serve", running.serve),
    ("generate", running.generate),
    ("export", running.export),
    ("plan", inspecting.plan),
    ("status", inspecting.status),
    ("clean", cleaning.clean),
    ("init", inspecting.init),
):
    app.command(name=_name)(_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rolemesh {__version__}")
        raise typer.Exit


@app.callback()
def _top(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False) -> None:
    pass


def main() -> None:
    """Run the command line; every error of ours ends as a message and an exit code, without a traceback."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app()
    except (ConfigError, ResourceError) as error:
        for problem in error.problems:
            errors.print(Text.assemble(("✗", "red"), " ", (problem.subject, "bold"), str(problem).removeprefix(problem.subject)))
        sys.exit(error.exit_code)
    except RolemeshError as error:
        errors.print(Text.assemble(("✗", "red"), f" {error}"))
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # typer turns KeyboardInterrupt into this
            errors.print("interrupted")
        raise
    except Exception:  # noqa: BLE001 - the end of the process: an error that is not ours keeps its trace, and the contract its exit code
        traceback.print_exc()
        sys.exit(RolemeshError.exit_code)
