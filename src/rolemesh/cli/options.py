"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Arguments = Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [key=value ...]", help="Recipe, then overrides.")]
RunArgument = Annotated[str | None, typer.Argument(help="Run: path, name or its beginning; the newest when not given.")]
RunsDir = Annotated[Path, typer.Option(help="Folder that holds run directories, to find one in.")]


def recipe_and_overrides(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The first word is the recipe unless it is an override."""
    if arguments and "=" not in arguments[0]:
        return arguments[0], arguments[1:]
    return None, arguments
