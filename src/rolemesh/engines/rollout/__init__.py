"""Inference engines behind one protocol (`protocols/engine.py`): `builtin` runs here and needs nothing more, `fake` is for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from rolemesh.engines.rollout.builtin import BuiltinEngine
from rolemesh.engines.rollout.fake import FakeEngine
from rolemesh.protocols.engine import RolloutEngine
from rolemesh.registry import resolve

ENGINES: Final[Mapping[str, Callable[..., RolloutEngine]]] = {"builtin": BuiltinEngine, "fake": FakeEngine}


def create_engine(name: str, model: Any, **settings: Any) -> RolloutEngine:
    """An engine by name or import path. `model` is the engine's own copy of the policy, whose parameters it overwrites; `settings` are
    slots, max_prompt_tokens, max_response_tokens, deterministic and device. Raises ConfigError for an unknown name."""
    engine: RolloutEngine = resolve(name, ENGINES, subject="rollout.engine")(model, **settings)
    return engine


__all__ = ["ENGINES", "BuiltinEngine", "FakeEngine", "create_engine"]
