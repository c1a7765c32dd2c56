"""Inference engines behind one protocol (`protocols/engine.py`): `builtin` runs here and needs nothing more, `fake` is for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rolemesh.protocols.engine import RolloutEngine
from rolemesh.registry import check_call, resolve

ENGINES: Final[Mapping[str, str]] = {
    "builtin": "rolemesh.engines.rollout.builtin:BuiltinEngine",
    "fake": "rolemesh.engines.rollout.fake:FakeEngine",
}
"""Built-in engines, as import paths: each is loaded by those who run it."""
SETTINGS: Final = ("slots", "max_prompt_tokens", "max_response_tokens", "deterministic", "device")
"""Keywords that every engine is made with."""


def create_engine(name: str, model: Any, **settings: Any) -> RolloutEngine:
    """An engine by name or import path. `model` is the engine's own copy of the policy, whose parameters it overwrites; `settings` are
    those of `SETTINGS`. Raises ConfigError for an unknown name."""
    engine: RolloutEngine = resolve(name, ENGINES, subject="rollout.engine")(model, **settings)
    return engine


def check_engine(name: str) -> None:
    """Raise ConfigError unless there is an engine of this name that can be made as `create_engine` makes it. Makes none."""
    found = resolve(name, ENGINES, subject="rollout.engine")
    called = f"{name}(model, {', '.join(f'{setting}=...' for setting in SETTINGS)})"
    check_call(found, [None], dict.fromkeys(SETTINGS), subject="rollout.engine", name=name, called=called)


__all__ = ["ENGINES", "check_engine", "create_engine"]
