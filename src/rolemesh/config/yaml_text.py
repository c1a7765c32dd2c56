"""YAML as rolemesh reads and writes it; used by `load.py` and `overrides.py` only.

Scalars follow YAML 1.2, because the older rules of PyYAML bite in configs: there `1e-6` is a text, `no` a boolean, `010` eight and
`1:30` ninety. Numbers may carry underscores (`100_000`). Keys must be text and may not be repeated. What is written here reads back
equal under these rules and under PyYAML's.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, cast

import yaml

_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)$")
MOST_VALUES = 100_000
"""What a text may stand for when its aliases are written out."""


class YamlProblem(Exception):
    """The text is no acceptable YAML. `line` and `column` count from 1."""

    def __init__(self, line: int, column: int, reason: str) -> None:
        super().__init__(line, column, reason)
        self.line, self.column, self.reason = line, column, reason


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == f"{_TAG}merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"keys must be text, found {key!r}", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is already given in line {seen[key]}", key_node.start_mark
                )
            seen[key] = line
        # Always deep: a mapping that contains itself through an alias is then refused instead of built.
        return super().construct_mapping(node, deep=True)


_TAG = "tag:yaml.org,2002:"
_Loader.add_constructor(f"{_TAG}map", lambda loader, node: loader.construct_mapping(cast(yaml.MappingNode, node), deep=True))
_Loader.add_constructor(f"{_TAG}seq", lambda loader, node: loader.construct_sequence(cast(yaml.SequenceNode, node), deep=True))
for _name, _form, _first in (
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("merge", re.compile(r"^<<$"), ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _name, _form, _first)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that either these rules or PyYAML's would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    # PyYAML takes some of these for line breaks and would fold them; escaped in double quotes they survive.
    style = '"' if any(not (char.isprintable() or char == "\n") for char in value) else None
    return dumper.represent_scalar(f"{_TAG}str", value, style=style)


_Dumper.add_representer(str, _text)


def parse_yaml(text: str) -> Any:
    """The value that `text` stands for. Raises YamlProblem with line, column and reason."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _written_out(node, {}) > MOST_VALUES:
            raise YamlProblem(1, 1, f"more than {MOST_VALUES} values when aliases are written out")
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise YamlProblem(line, column, error.problem or str(error)) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlProblem(line, 1, f"character {error.character!r} is not allowed ({error.reason})") from error
    except RecursionError as error:
        raise YamlProblem(1, 1, "brackets or lists within each other, too deep") from error


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """How many nodes it is, each counted wherever an alias stands for it. One that contains itself counts once: building it is refused."""
    if id(node) not in known:
        known[id(node)] = 1
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        if not isinstance(node, yaml.ScalarNode):
            known[id(node)] += sum(_written_out(part, known) for part in inner)
    return known[id(node)]


def dump_yaml(value: Any) -> str:
    """Block-style YAML of plain data, in the order of its keys."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def show(value: Any, limit: int = 80) -> str:
    """One line for messages: how the value would be written in YAML, texts quoted, long ones cut."""
    if isinstance(value, str | float):
        text = repr(value)
    elif value is None:
        text = "null"
    else:
        text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10_000)
        text = text.removesuffix("...\n").strip()
    return text if len(text) <= limit else text[: limit - 3] + "..."
