"""`key=value` overrides and recipes, laid over a tree of plain data; called by `load.py`.

One rule serves both: what is given for a section is merged into it, what is given for a mapping of names (`roles`, `pools`), a list
(`reward`) or a plain value replaces it. A dotted key reaches inside (`roles.critic.pool=main` adds a role, `roles.critic=null` takes it
away, `reward.0.threshold=1` changes the first reward, `pools.main.nodes.0=4` the first node). Wrong keys and types are kept in the tree
for the validation to report.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

from rolemesh.config.options import Branch, field_branch, locate
from rolemesh.config.schema import Config, Section, spelled_out
from rolemesh.config.yaml_text import YamlProblem, parse_yaml, show
from rolemesh.errors import Problem

Tree = dict[str, Any]


def merge(model: type[Section], base: Mapping[str, Any], layer: Mapping[str, Any]) -> Tree:
    """`base` with `layer` laid over it. Neither is changed."""
    return {**base, **{key: _merged(field_branch(model, key), base.get(key), value) for key, value in layer.items()}}


def _merged(found: Branch | None, old: Any, value: Any) -> Any:
    """What becomes of `old` when `value` is given in its place; `found` is what the schema knows of the place."""
    if found is None:
        return value
    if found.kind == "section":
        if value is None and not found.optional:
            return old  # `trainer:` with nothing below it keeps the section as it is
        return merge(found.model, old if isinstance(old, Mapping) else {}, value) if isinstance(value, Mapping) else value
    entry = Branch(kind="section", model=found.model)  # `critic:` with nothing below it means all defaults
    if found.kind == "mapping" and isinstance(value, Mapping):
        return {name: _merged(entry, {}, part) for name, part in value.items()}
    if found.kind == "list" and isinstance(listed := spelled_out(found.model, value), list):
        return [_merged(entry, {}, part) for part in listed]
    return value


def apply_override(tree: Tree, text: str) -> Problem | None:
    """Lay one `key=value` over `tree`, in place. Returns what is wrong with it."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key or any(not part for part in key.split(".")):
        return Problem(
            subject=f"override {text!r}",
            need="must look like key=value",
            remedy="Write for example trainer.steps=5 or pools.main.nodes=[2]",
        )
    bare = key.lstrip("+~-")
    if bare != key:
        return Problem(subject=f"override {text!r}", need="options take no prefix", free=repr(key), remedy=f"Write {bare}={raw}")
    path = key.split(".")
    value, problem = _parse_value(path, key, raw)
    return problem or _set(tree, Branch(kind="section", model=Config), path, value, key)


def _parse_value(path: list[str], key: str, raw: str) -> tuple[Any, Problem | None]:
    """The value as YAML; for options that are text the text as it stands, unless it is quoted (or null where that is allowed)."""
    place = locate(path)
    annotation = place.info.annotation if place.info is not None and len(place.keys) == len(path) else None
    choices = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    stripped = raw.strip()
    quoted = stripped[:1] in ("'", '"')
    if str in choices and not quoted and not (type(None) in choices and stripped in ("", "~", "null")):
        return raw, None
    try:
        return parse_yaml(raw), None
    except YamlProblem as error:
        return None, Problem(
            subject=key,
            need=f"the value must be YAML: {error.reason}",
            free=repr(raw),
            remedy=f"Put quotes around texts and around the whole argument: '{key}=\"...\"'",
        )


def _set(holder: Any, found: Branch | None, path: list[str], value: Any, key: str) -> Problem | None:
    """Lay `value` on the part of `holder` that `path` leads to; `found` is what the schema knows of the holder, None for free data.

    A recipe's value of the wrong type is left as it is, and so are unknown options: the validation reports them.
    """
    name, rest = path[0], path[1:]
    at: Any = name
    if (found is None and isinstance(holder, list)) or (found is not None and found.kind == "list"):
        if not isinstance(holder, list):
            return None
        # One past the end of a list of sections appends, so that `reward.1.name=exact` adds a second reward.
        if not (name.isascii() and name.isdigit() and int(name) < len(holder) + (found is not None)):
            return _index_problem(key, name, len(holder))
        at = int(name)
        holder += [{}] if at == len(holder) else []
    elif not isinstance(holder, dict):
        return None
    old, inner = holder[at] if isinstance(holder, list) else holder.get(at), None
    if found is not None:
        inner = field_branch(found.model, name) if found.kind == "section" else Branch(kind="section", model=found.model)
    if not rest:
        if value is None and found is not None and found.kind == "mapping":
            holder.pop(name, None)
        else:
            holder[at] = _merged(inner, old, value)
        return None
    free = inner is None and (found is None or name not in found.model.model_fields)
    if (free and not isinstance(old, dict)) or (old is None and inner is not None and inner.kind == "section"):
        holder[at] = old = {}
    if inner is None and not isinstance(old, dict) and (not isinstance(old, list) or len(rest) > 1):
        place = key.removesuffix("." + ".".join(rest))
        return Problem(subject=key, need=f"{place} holds a single value and has no parts", free=show(old), remedy=f"Write {place}=VALUE")
    return _set(old, inner, rest, value, key)


def _index_problem(key: str, entry: str, length: int) -> Problem:
    allowed = f"0 to {length - 1}" if length else "none"
    return Problem(
        subject=key,
        need=f"the list has {length} items, indexes {allowed}",
        free=repr(entry),
        remedy="Give the whole list or an index in it",
    )
