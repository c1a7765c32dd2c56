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

from rolemesh.config.options import Branch, branch, locate
from rolemesh.config.schema import Config, Section, spelled_out
from rolemesh.config.yaml_text import YamlProblem, parse_yaml, show
from rolemesh.errors import Problem

Tree = dict[str, Any]


def merge(model: type[Section], base: Mapping[str, Any], layer: Mapping[str, Any]) -> Tree:
    """`base` with `layer` laid over it. Neither is changed."""
    merged = dict(base)
    for key, value in layer.items():
        info = model.model_fields.get(key)
        found = branch(info.annotation) if info is not None else None
        merged[key] = value if found is None else _merged_branch(found, merged.get(key), value)
    return merged


def _merged_branch(found: Branch, old: Any, value: Any) -> Any:
    if found.kind == "section":
        if value is None and not found.optional:
            return old  # `trainer:` with nothing below it keeps the section as it is
        return merge(found.model, old if isinstance(old, Mapping) else {}, value) if isinstance(value, Mapping) else value
    if found.kind == "mapping" and isinstance(value, Mapping):
        return {name: _entry(found.model, part) for name, part in value.items()}
    if found.kind == "list" and isinstance(listed := spelled_out(found.model, value), list):
        return [_entry(found.model, part) for part in listed]
    return value


def _entry(model: type[Section], value: Any) -> Any:
    """An entry of a mapping or list of sections; `critic:` with nothing below it means all defaults."""
    if value is None:
        return {}
    return merge(model, {}, value) if isinstance(value, Mapping) else value


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
    return problem or _set(tree, Config, path, value, key)


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


def _set(tree: Any, model: type[Section], path: list[str], value: Any, key: str) -> Problem | None:
    name, rest = path[0], path[1:]
    if not isinstance(tree, dict):
        return None  # the recipe's value here has the wrong type, which the validation reports
    info = model.model_fields.get(name)
    found = branch(info.annotation) if info is not None else None
    if not rest:
        tree[name] = value if found is None else _merged_branch(found, tree.get(name), value)
        return None
    if found is None:
        if info is None or isinstance(tree.get(name), dict):
            return _set_plain(tree, path, value, key)
        return _set_item(tree, name, rest, value, key)
    if found.kind == "section":
        if tree.get(name) is None:
            tree[name] = {}
        return _set(tree[name], found.model, rest, value, key)
    holder: Any = tree.get(name)
    entry, rest = rest[0], rest[1:]
    if found.kind == "list":
        return _set_list(holder, entry, rest, value, key, found.model)
    if not isinstance(holder, dict):
        return None
    if not rest and value is None:
        holder.pop(entry, None)
        return None
    if not rest:
        holder[entry] = _merged_branch(Branch(kind="section", model=found.model), holder.get(entry) or {}, value)
        return None
    return _set(holder.setdefault(entry, {}), found.model, rest, value, key)


def _set_list(holder: Any, entry: str, rest: list[str], value: Any, key: str, model: type[Section]) -> Problem | None:
    if not isinstance(holder, list):
        return None
    # One past the end appends, so that `reward.1.name=exact` adds a second reward.
    index = _index(entry, len(holder) + 1)
    if index is None:
        return _index_problem(key, entry, len(holder))
    if index == len(holder):
        holder.append({})
    if not rest:
        holder[index] = _merged_branch(Branch(kind="section", model=model), holder[index], value)
        return None
    return _set(holder[index], model, rest, value, key)


def _set_item(tree: Tree, name: str, rest: list[str], value: Any, key: str) -> Problem | None:
    """Change one item of a plain list (`trainer.betas.1=0.95`)."""
    items = tree.get(name)
    if not isinstance(items, list) or len(rest) > 1:
        place = key.removesuffix("." + ".".join(rest))
        return Problem(subject=key, need=f"{place} holds a single value and has no parts", free=show(items), remedy=f"Write {place}=VALUE")
    index = _index(rest[0], len(items))
    if index is None:
        return _index_problem(key, rest[0], len(items))
    items[index] = value
    return None


def _set_plain(tree: Tree, path: list[str], value: Any, key: str) -> Problem | None:
    """Set a key in free-form data (`data.options.max_terms=2`) or below an unknown option, which the validation reports."""
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[path[-1]] = value
    return None


def _index(text: str, length: int) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and int(text) < length else None


def _index_problem(key: str, entry: str, length: int) -> Problem:
    allowed = f"0 to {length - 1}" if length else "none"
    return Problem(
        subject=key,
        need=f"the list has {length} items, indexes {allowed}",
        free=repr(entry),
        remedy="Give the whole list or an index in it",
    )
