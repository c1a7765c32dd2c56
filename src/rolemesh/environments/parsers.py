"""Tool calls in what a model wrote: one parser for each way in which models are trained to write them. Pure.

A parser returns the calls of a turn in their order; none means that the turn is an answer. What was meant as a call and cannot be read
is a `BadCall`, which says why, so that the model can be told.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as the model wrote it. Whether there is such a tool, and whether it takes these arguments, is not known here."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class BadCall:
    """Meant as a call, and not to be read as one."""

    why: str


Calls: TypeAlias = list[ToolCall | BadCall]
Parser: TypeAlias = Callable[[str], Calls]

CALL_MARK: Final = "<tool_call>"
_HERMES = re.compile(rf"{CALL_MARK}(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PYTHON_TAG: Final = "<|python_tag|>"
_CALL = re.compile(r"[A-Za-z_]\w*\(.*\)\Z", re.DOTALL)
_NOT_PYTHON: Final = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What Python's own parser raises for text that is none."""


def _said(text: str) -> str:
    """What stands behind the model's thinking, where it thinks aloud: a call that is only considered there is none."""
    _, end, behind = text.partition("</think>")
    return behind if end else text


def hermes(text: str) -> Calls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them (Hermes, Qwen)."""
    return [_json_call(inside.strip()) for inside in _HERMES.findall(_said(text))]


def llama3_json(text: str) -> Calls:
    """A turn that is `{"name": ..., "parameters": {...}}` and nothing else, several parted by semicolons (Llama 3)."""
    rest = _said(text).strip().removeprefix(_PYTHON_TAG).strip()
    if not rest.startswith("{") or '"name"' not in rest:
        return []
    calls: Calls = []
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError) as error:
            return [*calls, BadCall(f"not JSON: {error}")]
        calls.append(_call_of(value))
        rest = rest[end:].strip().removeprefix(";").strip()
        if rest and not rest.startswith("{"):
            return [*calls, BadCall("text behind a call; a turn with calls holds nothing else")]
    return calls


def pythonic(text: str) -> Calls:
    """A turn that is `name(argument=value)` or a list of such calls, with literals for values (Llama 4 and others)."""
    stripped = _said(text).strip()
    listed = stripped.startswith("[") and "(" in stripped
    if not listed and not _CALL.match(stripped):
        return []
    try:
        expression = ast.parse(stripped, mode="eval").body
    except _NOT_PYTHON as error:
        return [BadCall(f"not Python: {error}")]
    nodes = expression.elts if isinstance(expression, ast.List) else [expression]
    return [_python_call(node) for node in nodes]


TOOL_PARSERS: Final[dict[str, Parser]] = {"hermes": hermes, "llama3_json": llama3_json, "pythonic": pythonic}


def _json_call(text: str) -> ToolCall | BadCall:
    try:
        return _call_of(json.loads(text))
    except (ValueError, RecursionError) as error:
        return BadCall(f"not JSON: {error}")


def _call_of(value: Any) -> ToolCall | BadCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('a call is a JSON object with the text "name" and the object "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON, as some models write it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return BadCall(f"arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return BadCall(f"arguments must be a JSON object, got {type(arguments).__name__}")
    return ToolCall(name=value["name"], arguments=arguments)


def _python_call(node: ast.expr) -> ToolCall | BadCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return BadCall("a call is written name(argument=value)")
    if any(keyword.arg is None for keyword in node.keywords) or any(isinstance(value, ast.Starred) for value in node.args):
        return BadCall("arguments with stars are not understood")
    if len({keyword.arg for keyword in node.keywords}) < len(node.keywords):
        return BadCall("an argument is given twice")
    try:
        return ToolCall(
            name=node.func.id,
            arguments={str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords},
            positional=tuple(ast.literal_eval(value) for value in node.args),
        )
    except (*_NOT_PYTHON, TypeError) as error:
        return BadCall(f"arguments must be literals: {error}")
