"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rolemesh.errors import ConfigError

Arguments = Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [key=value ...]", help="Recipe, then overrides.")]
RunArgument = Annotated[str | None, typer.Argument(help="Run: path, name or its beginning; the newest when not given.")]
RunsDir = Annotated[Path, typer.Option(help="Folder that holds run directories, to find one in.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def recipe_and_overrides(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """The first word is the recipe unless it is an override."""
    arguments = arguments or []
    if arguments and "=" not in arguments[0]:
        return arguments[0], arguments[1:]
    return None, arguments


def overrides_only(arguments: list[str] | None, option: str) -> list[str]:
    """The words beside `--resume` or `--run`, which bring the recipe of their run. Raises ConfigError when they name another one."""
    recipe, overrides = recipe_and_overrides(arguments)
    if recipe is not None:
        remedy = f"Leave it out; overrides (key=value) may follow, and without {option} it starts anew"
        raise ConfigError.one("recipe", f"none can be given with {option}, which goes by the options of its run", repr(recipe), remedy)
    return overrides
