"""Environments by name, made from the `environment` section, and what can be known about them before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, iscoroutinefunction, signature
from typing import Any, Final

from rolemesh.config.schema import EnvironmentConfig
from rolemesh.environments.parsers import CALL_MARK, TOOL_PARSERS
from rolemesh.environments.sandbox_process import SECONDS
from rolemesh.environments.tools import load_tools
from rolemesh.environments.turns import TurnEncoder
from rolemesh.errors import ConfigError
from rolemesh.protocols.environment import Environment, Message
from rolemesh.registry import check_call, did_you_mean, resolve

ENVIRONMENTS: Final[Mapping[str, str]] = {
    "tools": "rolemesh.environments.tool_use:ToolEnvironment",
    "reasoning_gym": "rolemesh.environments.reasoning:ReasoningGymEnvironment",
    "textarena": "rolemesh.environments.arena:TextArenaEnvironment",
}
"""Built-in environments, as import paths."""


def environment_maker(config: EnvironmentConfig) -> Callable[[], Environment]:
    """What makes the environment of one episode: it is called with `environment.options`, and with `tools` and `parser` where the section
    has tools. Raises ConfigError for what cannot be found, or not be called like that."""
    found = resolve(config.name, ENVIRONMENTS, subject="environment.name")
    if config.name in ENVIRONMENTS:
        _check_options(config, found)
    keywords = dict(config.options)
    if config.tools:
        parser = resolve(config.parser, TOOL_PARSERS, subject="environment.parser")
        keywords |= {"tools": load_tools(config.tools), "parser": parser}
    elif config.name == "tools":
        raise ConfigError.one("environment.tools", "must name a tool or more", "none", "Write environment.tools=[calculator]")
    called = f"{config.name}({', '.join(f'{name}=...' for name in keywords)})"
    check_call(found, [], keywords, subject="environment.options", name=config.name, called=called)
    return partial(found, **keywords)


def _check_options(config: EnvironmentConfig, environment: Callable[..., Environment]) -> None:
    """Raise ConfigError for an option that a built-in environment does not have."""
    parameters = signature(environment).parameters.values()
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return
    taken = [parameter.name for parameter in parameters if parameter.name not in ("tools", "parser")]
    for name in config.options:
        if name not in taken:
            need = f"{config.name} takes {'the options ' + ', '.join(taken) if taken else 'no options'}"
            raise ConfigError.one("environment.options", need, repr(name), did_you_mean(name, taken).rstrip() or "Leave it out")


def tool_schemas(config: EnvironmentConfig | None) -> list[dict[str, Any]]:
    """What chat templates are told of the section's tools. Raises ConfigError as `load_tools`."""
    return [dict(tool.schema) for tool in load_tools(config.tools).values()] if config is not None else []


def check_environment_section(config: EnvironmentConfig, tokenizer: Any, *, chat: bool) -> None:
    """Raise ConfigError unless environments can be made, and their messages told to the model. Makes a built-in one, and none of a
    user's own."""
    make = environment_maker(config)
    _check_methods(config)
    if "python" in config.tools and config.deadline <= SECONDS:
        need = f"must be above {SECONDS:g} s, which a program of the tool python may take"
        raise ConfigError.one("environment.deadline", need, f"{config.deadline:g}", f"Write environment.deadline={3 * SECONDS:g}")
    if config.name in ENVIRONMENTS:
        try:
            make()
        except (TypeError, ValueError) as error:
            raise ConfigError.one("environment.options", f"{config.name} must be able to use them", str(error)) from error
    if chat and tokenizer is not None and tokenizer.chat_template:
        message = Message(content="x", role="tool", name="x") if config.tools else Message(content="x", role="user")
        encoder = TurnEncoder(tokenizer, chat=True)
        encoder.encode([message], -1)
        if config.tools and config.parser == "hermes" and not encoder.shows(CALL_MARK):
            need = f"must keep {CALL_MARK!r} in the text of a turn, or no call of the parser hermes is ever seen"
            found = f"a special token of {tokenizer.name_or_path}, which the text is made without"
            remedy = "Use another parser, or mark the token as not special in tokenizer.json"
            raise ConfigError.one("environment.parser", need, found, remedy)


def _check_methods(config: EnvironmentConfig) -> None:
    """Raise ConfigError for a class that is no environment. What another callable makes is not known before it is called."""
    found = resolve(config.name, ENVIRONMENTS, subject="environment.name")
    if not isinstance(found, type):
        return
    wrong = []
    for name in ("reset", "step", "close"):
        method = getattr(found, name, None)
        if not callable(method):
            wrong.append(f"no {name}")
        elif not iscoroutinefunction(method):
            wrong.append(f"{name} that is not asynchronous")
    if wrong:
        need = f"{config.name} must have the methods of an environment, `async def` reset, step and close"
        raise ConfigError.one("environment.name", need, ", ".join(wrong), "See protocols/environment.py; ToolEnvironment is a good base")
