"""Tools: Python functions that a model may call, with the JSON schema that it is shown. Called by `ToolEnvironment` and by checks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from rolemesh.environments.parsers import ToolCall
from rolemesh.environments.threads import in_thread
from rolemesh.errors import ConfigError, Problem
from rolemesh.models.tools import tool_schema
from rolemesh.registry import nearest, resolve

BUILTIN_TOOLS: Final[Mapping[str, str]] = {
    "calculator": "rolemesh.environments.calculator:calculator",
    "python": "rolemesh.environments.python_tool:python",
}
_CHECKS: Final[Mapping[str, str]] = {"python": "rolemesh.environments.sandbox:check_sandbox"}
"""What has to be tried before a built-in tool is used."""

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
}
"""Of JSON schema, as Python values."""


class CallRefused(Exception):
    """A call that its tool does not take; the text is for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool may return instead of its result alone."""

    text: str
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to add up over all episodes, as metrics `environment/NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function, synchronous or not, and what the model is told of it."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], *, subject: str = "environment.tools") -> Tool:
        """Raises ConfigError, naming `subject`, for something that is no function, or a function that does not say what it takes."""
        if not callable(function):
            raise ConfigError.one(subject, "a tool must be a function", repr(function))
        schema = tool_schema(function, subject=subject)
        return cls(name=schema["function"]["name"], function=function, schema=schema)

    async def __call__(self, call: ToolCall) -> ToolResult:
        """The result with its text; other values as JSON. Raises CallRefused for arguments that do not fit, and what the function
        raises."""
        bound = self._bind(call)
        run = partial(self.function, *bound.args, **bound.kwargs)
        result = run() if inspect.iscoroutinefunction(self.function) else await in_thread(run)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, ToolResult):
            return result
        return ToolResult(text=result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str))

    def _bind(self, call: ToolCall) -> inspect.BoundArguments:
        try:
            bound = inspect.signature(self.function).bind(*call.positional, **call.arguments)
        except TypeError as error:
            raise CallRefused(f"{self.name}: {error}") from error
        properties = self.schema["function"]["parameters"]["properties"]
        for name, value in bound.arguments.items():
            expected = properties.get(name, {}).get("type")
            if value is None and properties.get(name, {}).get("nullable"):
                continue
            allowed = _TYPES.get(expected) if isinstance(expected, str) else None
            if allowed is not None and (not isinstance(value, allowed) or (isinstance(value, bool) and expected != "boolean")):
                raise CallRefused(f"{self.name}: {name} must be of the type {expected}, got {json.dumps(value, default=str)[:80]}")
        return bound


def load_tools(names: Sequence[str]) -> dict[str, Tool]:
    """Tools of `environment.tools` by the name that the model uses. Raises ConfigError with all that cannot be used."""
    found: dict[str, Tool] = {}
    problems: list[Problem] = []
    for number, name in enumerate(names):
        subject = f"environment.tools.{number}"
        try:
            tool = Tool.of(resolve(name, BUILTIN_TOOLS, subject=subject), subject=subject)
            if tool.name in found:
                raise ConfigError.one(subject, "tools must have different names", f"two called {tool.name!r}")
            found[tool.name] = tool
            if name in _CHECKS:
                resolve(name, _CHECKS, subject=subject)()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems=problems)
    return found


def unknown_tool(name: str, tools: Mapping[str, Tool]) -> CallRefused:
    """What to tell a model that calls a tool which there is not."""
    hint = nearest(name, tools)
    return CallRefused(f"no tool {name[:80]!r}; " + (f"did you mean {hint}?" if hint else f"there are {', '.join(tools)}"))
