"""What the schema says about itself: the tree of options, types in plain words, and the option a wrong name was meant to be.

Used by `load.py` (messages), `overrides.py` (where a dotted key leads) and `reference.py` (the reference page).
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rolemesh.config.schema import Config, Section
from rolemesh.config.yaml_text import show
from rolemesh.registry import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """An option that holds further options: a section, a mapping of names to sections, or a list of sections."""

    kind: Literal["section", "mapping", "list"]
    model: type[Section]
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option, as the reference shows it."""

    name: str
    """Dotted name with `<role>`, `<pool>` and `<n>` for what the user names."""
    words: str
    default: str
    help: str


def branch(annotation: Any) -> Branch | None:
    """How an annotation continues in the tree of options; None for a plain value."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Branch(kind="section", model=annotation)
    if origin in (Union, types.UnionType):
        found = [inner for inner in map(branch, arguments) if inner]
        return Branch(kind=found[0].kind, model=found[0].model, optional=True) if found else None
    if origin is dict and (inner := branch(arguments[1])):
        return Branch(kind="mapping", model=inner.model)
    if origin is tuple and len(arguments) == 2 and arguments[1] is ... and (inner := branch(arguments[0])):
        return Branch(kind="list", model=inner.model)
    return None


def field_branch(model: type[Section], name: str) -> Branch | None:
    """The same of an option of a section; None for an unknown one too."""
    info = model.model_fields.get(name)
    return branch(info.annotation) if info is not None else None


def placeholder(name: str, found: Branch) -> str:
    """What stands for the user's own part of a dotted name: `<role>` below `roles`, `<n>` for the index of a list."""
    return "<n>" if found.kind == "list" else f"<{name.removesuffix('s')}>"


def options(model: type[Section] = Config, prefix: str = "") -> Iterator[Option]:
    """All options below `model`, in the order of their declaration."""
    for name, info in model.model_fields.items():
        found = branch(info.annotation)
        place = prefix + name
        if found is None or (found.kind != "section" and found.model.short is not None):  # then a text will do, so the list is one itself
            yield Option(name=place, words=words_of(info), default=default_text(info), help=info.description or "")
        if found is not None:
            yield from options(found.model, f"{place}." if found.kind == "section" else f"{place}.{placeholder(name, found)}.")


def option_names() -> list[str]:
    """Every option's dotted name, with `<role>`, `<pool>` and `<n>` for what the user names."""
    return [option.name for option in options()]


def default_text(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=False)
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, tuple):
        value = [getattr(item, item.short) if isinstance(item, Section) and item.short else item for item in value]
        found = branch(info.annotation)
        value = value[0] if found is not None and len(value) == 1 else value
    return "not set" if value is None else show(value)


_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
"""Words for the bounds of `annotated_types`, by the name of their field."""

_NOUNS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    Any: "any value",
    type(None): "null",
}


def _bounds(metadata: Sequence[Any]) -> str:
    return " and ".join(f"{word} {getattr(item, name)}" for name, word in _BOUNDS.items() for item in metadata if hasattr(item, name))


def _flatten(metadata: Sequence[Any]) -> list[Any]:
    return [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]


def type_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in plain words, for "must be ..." messages: `a whole number above 0`, `one of linear, cosine`."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        return type_words(arguments[0], _flatten(arguments[1:]))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else repr(arguments[0])
    if origin in (Union, types.UnionType):
        # A bound given for the whole union belongs to its number, never to null.
        return " or ".join(type_words(argument, metadata) for argument in arguments)
    found = branch(annotation)
    if found is not None:
        listed = f"{'text or ' if found.model.short else ''}a list, each item a mapping of options"
        return {"list": listed, "mapping": "a mapping of names to options", "section": "a mapping of options"}[found.kind]
    if origin is dict:
        return "a mapping of names to values"
    if origin is tuple and arguments[-1] is ...:
        return f"a list, each item {type_words(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)} items, each {type_words(arguments[0])}"
    noun = _NOUNS[annotation]
    bounds = _bounds(metadata) if annotation in (int, float) else ""
    return f"{noun} {bounds}" if bounds else noun


def words_of(info: FieldInfo) -> str:
    return type_words(info.annotation, _flatten(info.metadata))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a path of keys leads: the deepest declared option on it, its keys, and the section that holds it.

    `generic` is the dotted name with placeholders; `info` is None when the last key is not an option of `section`, or names the
    user's own entry of a mapping or list (then `entry` is true).
    """

    keys: tuple[str | int, ...]
    generic: str
    section: type[Section]
    info: FieldInfo | None
    entry: bool = False

    @property
    def dotted(self) -> str:
        return ".".join(map(str, self.keys))


def locate(path: Sequence[str | int], model: type[Section] = Config) -> Place:
    """Follow keys through the tree of options, as far as options are declared."""
    section, generic, index = model, "", 0
    while True:
        key = str(path[index])
        info = section.model_fields.get(key)
        generic += key
        index += 1
        found = field_branch(section, key)
        if found is None or index == len(path):
            return Place(keys=tuple(path[:index]), generic=generic, section=section, info=info)
        if found.kind != "section":
            generic += f".{placeholder(key, found)}"
            index += 1
            if index == len(path):
                return Place(keys=tuple(path[:index]), generic=generic, section=found.model, info=None, entry=True)
        generic += "."
        section = found.model


def suggestions(place: Place, value: Any) -> list[str]:
    """Options that an unknown key may have been meant to be, the likeliest first, at most three.

    The same key in another section comes first, then a similar key in its own section, then a similar key anywhere. For an unknown
    section the keys given below it are looked up, too.
    """
    names = option_names()
    prefix = place.dotted.removesuffix(str(place.keys[-1]))
    key = str(place.keys[-1])
    found = [name for name in names if name.rpartition(".")[2] == key]
    if near := nearest(key, place.section.model_fields):
        found.append(prefix + near)
    if not found and isinstance(value, Mapping):
        found = [name for inner in value for name in names if name.rpartition(".")[2] == inner]
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    if not found and (leaf := nearest(key, leaves) or _spelled_out(key, leaves)):
        found = [name for name in names if name.rpartition(".")[2] == leaf]
    return list(dict.fromkeys(found))[:3]


def _spelled_out(key: str, leaves: Sequence[str]) -> str | None:
    """The option that `key` is the initials of: `lr` for `learning_rate`."""
    return next((leaf for leaf in leaves if len(key) > 1 and "".join(word[0] for word in leaf.split("_")) == key), None)
