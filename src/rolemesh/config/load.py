"""Recipe + overrides -> Config, and back. Called by the command line and by whoever starts a run from Python.

Everything that is wrong is collected and raised as one ConfigError in plain words; `checks.py` then looks at the fields together.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Final, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from rolemesh.config.options import Branch, Place, branch, default_text, locate, suggestions, words_of
from rolemesh.config.overrides import Tree, apply_override, merge
from rolemesh.config.schema import Config
from rolemesh.config.yaml_text import YamlProblem, dump_yaml, parse_yaml, show
from rolemesh.errors import ConfigError, Problem
from rolemesh.registry import did_you_mean, nearest

RECIPES_DIR: Final = Path(__file__).parent.parent / "recipes"
DEFAULT_RECIPE: Final = "demo"

RENAMED: dict[str, str] = {}
"""Options that changed name or meaning: old dotted name (with `<role>`, `<pool>`, `<n>`) -> new one. The old name raises and says so."""


def recipe_names(recipes_dir: Path = RECIPES_DIR) -> list[str]:
    """Names of the recipes that come with rolemesh."""
    return sorted(path.stem for path in recipes_dir.glob("*.yaml"))


def load_config(recipe: str | os.PathLike[str] | None = None, overrides: Sequence[str] = (), recipes_dir: Path = RECIPES_DIR) -> Config:
    """The config of a recipe (a name in `recipes_dir`, a YAML file, or `demo` when None) with `key=value` overrides laid over it.

    Raises ConfigError with every problem found in recipe, overrides, names and types. Does not check fields against each other: that
    is `check_config`.
    """
    problems: list[Problem] = []
    tree: Tree = Config().model_dump(mode="json")
    try:
        layer = _read_layer(_recipe_file(DEFAULT_RECIPE if recipe is None else os.fspath(recipe), recipes_dir))
        tree = copy.deepcopy(merge(Config, tree, layer))
    except ConfigError as error:
        problems += error.problems
    problems += [found for text in overrides if (found := apply_override(tree, text)) is not None]
    config, wrong = _validate(tree)
    problems += wrong
    if config is None or problems:
        raise ConfigError(problems=problems)
    return config


def dump_config(config: Config) -> str:
    """YAML of every option; `load_config` of it gives an equal config."""
    return dump_yaml(config.model_dump(mode="json"))


def _recipe_file(recipe: str, recipes_dir: Path) -> Path:
    path, names = Path(recipe).expanduser(), recipe_names(recipes_dir)
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        hint = nearest(path.name, (other.name for other in path.parent.glob("*.y*ml")))
        remedy = f"Did you mean {str(path.parent / hint)!r}?" if hint else f"Check the path; recipes by name: {', '.join(names)}"
        raise ConfigError.one("recipe", "the file must exist", f"no file {str(path)!r}", remedy)
    if recipe in names:
        return recipes_dir / f"{recipe}.yaml"
    need = f"must be one of {', '.join(names) or '(none installed)'} or the path of a YAML file"
    remedy = f"{did_you_mean(recipe, names)}Give one of these names, or a path that ends in .yaml"
    raise ConfigError.one("recipe", need, repr(recipe), remedy)


def _read_layer(path: Path) -> Tree:
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except YamlProblem as error:
        subject = f"{path} line {error.line}, column {error.column}"
        raise ConfigError.one(subject, "must be valid YAML", error.reason, "Correct this line, or the one above it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.one(str(path), "must be a readable UTF-8 text file", str(error), "Check the file") from error
    if data is not None and not isinstance(data, dict):
        raise ConfigError.one(str(path), "must be a mapping of sections", show(data), "Write for example `trainer: {steps: 5}`")
    return data or {}


def _validate(tree: Tree) -> tuple[Config | None, list[Problem]]:
    try:
        # Through JSON, because pydantic's strict rules for it are those of YAML: no text for a number, no number for a boolean,
        # but a list for a tuple and a text for a path.
        return Config.model_validate_json(json.dumps(tree), strict=True), []
    except ValidationError as error:
        problems: dict[str, Problem] = {}
        for item in error.errors(include_url=False, include_context=False, include_input=False):
            place = locate(item["loc"])
            # Several errors of one option (the branches of a union, the items of a list) are one problem for the user.
            missing = item["type"] == "missing" and item["loc"] == place.keys  # else a part of its value is
            problems.setdefault(place.dotted, _missing(place) if missing else _problem(place, reduce(getitem, place.keys, cast(Any, tree))))
        return None, list(problems.values())


def _missing(place: Place) -> Problem:
    assert place.info is not None, "only declared options can be required"
    return Problem(subject=place.dotted, need=f"must be {words_of(place.info)}", free="not set", remedy="It has no default; write it")


def _problem(place: Place, value: Any) -> Problem:
    if place.info is None and not place.entry:
        return _unknown(place, value)
    words = "a mapping of options" if place.info is None else words_of(place.info)
    remedy = _branch_remedy(place, value) or _value_remedy(place, value)
    return Problem(subject=place.dotted, need=f"must be {words}", free=show(value), remedy=remedy)


def _branch_remedy(place: Place, value: Any) -> str:
    """An example of the mapping or list that should stand at `place`; empty when a plain value should."""
    found = Branch(kind="section", model=place.section) if place.info is None else branch(place.info.annotation)
    if found is None:
        return ""
    if found.kind == "list" and isinstance(value, Mapping):
        return f"Put it into a list: {place.dotted}=[{show(value)}]"
    fields = found.model.model_fields
    bare = value is True and not any(info.is_required() for info in fields.values())
    inner = "{}" if bare else f"{{{next(iter(fields))}: ...}}"
    example = {"section": inner, "mapping": f"{{name: {inner}}}", "list": f"[{inner}]"}[found.kind]
    return f"Write for example {place.dotted}={example}"


def _value_remedy(place: Place, value: Any) -> str:
    assert place.info is not None, "only an entry has no info, and that is a branch"
    words = words_of(place.info)
    if isinstance(value, str) and words.startswith("one of ") and (hint := did_you_mean(value, words[7:].split(", "))):
        return hint.rstrip()
    if place.info.annotation is str and isinstance(value, int | float):
        return f'Put it in quotes: "{show(value)}"'
    if not isinstance(value, list) and _fits(place.info, [value]):
        return f"Put it into a list: {place.dotted}=[{value}]"
    return f"The default is {default_text(place.info)}"


def _fits(info: FieldInfo, value: Any) -> bool:
    """Whether an option of plain values would take `value`."""
    annotation: Any = info.annotation
    try:
        TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return False
    return True


def _unknown(place: Place, value: Any) -> Problem:
    if place.generic in RENAMED:
        new = RENAMED[place.generic]
        return Problem(
            subject=place.dotted, need=f"was renamed to {new}", free=show(value), remedy=f"Write {new} instead, and read what it means now"
        )
    found = suggestions(place, value)
    if found:
        remedy = f"Did you mean {' or '.join(found)}?"
    else:
        where = place.dotted.rpartition(".")[0] or "the top level"
        remedy = f"Options of {where}: {', '.join(place.section.model_fields)}"
    return Problem(subject=place.dotted, need="there is no option of this name", remedy=remedy)
