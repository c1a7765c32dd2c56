"""Inference engines behind one protocol (`protocols/engine.py`): `builtin` needs nothing more, `vllm` and `sglang` need
vLLM and SGLang, `fake` is for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rolemesh.errors import ConfigError, Problem
from rolemesh.protocols.engine import RolloutEngine
from rolemesh.registry import check_call, resolve

ENGINES: Final[Mapping[str, str]] = {
    "builtin": "rolemesh.engines.rollout.builtin:BuiltinEngine",
    "fake": "rolemesh.engines.rollout.fake:FakeEngine",
    "sglang": "rolemesh.engines.rollout.sglang:SglangEngine",
    "vllm": "rolemesh.engines.rollout.vllm:VllmEngine",
}
"""Built-in engines, as import paths: each is loaded by those who run it."""
SETTINGS: Final = ("slots", "max_prompt_tokens", "max_response_tokens", "deterministic", "device")
"""Keywords that every engine is made with."""


def create_engine(name: str, model: Any, **settings: Any) -> RolloutEngine:
    """An engine by name or import path. `model` is the engine's own copy of the policy, whose parameters it overwrites; `settings` are
    those of `SETTINGS`. Raises ConfigError for an unknown name, and for an engine whose log-probabilities are not the trainer's."""
    engine: RolloutEngine = resolve(name, ENGINES, subject="rollout.engine")(model, **settings)
    _check_logprobs(name, engine)
    return engine


def _check_logprobs(name: str, engine: Any) -> None:
    kind = getattr(engine, "logprobs_kind", "unstated")
    if kind != "after_temperature":
        raise ConfigError.one(
            "rollout.engine",
            "log-probabilities must be those after temperature over all tokens, which training compares with its own",
            f"{name} gives {kind!r} ones",
            "Set up the engine to give these",
        )


def needs_contents(name: str) -> bool:
    """Whether the model that this engine is made with must hold numbers; see the protocol."""
    return bool(getattr(resolve(name, ENGINES, subject="rollout.engine"), "needs_contents", True))


def check_engine(name: str, *, deterministic: bool = False, filtered: bool = False) -> None:
    """Raise ConfigError unless there is an engine of this name that can be made as `create_engine` makes it, and that can give bit-equal
    samples (`deterministic`) and serve top-k and top-p (`filtered`), where these are asked for. Makes none."""
    found = resolve(name, ENGINES, subject="rollout.engine")
    called = f"{name}(model, {', '.join(f'{setting}=...' for setting in SETTINGS)})"
    if hasattr(found, "logprobs_kind"):  # a function that makes engines has none
        _check_logprobs(name, found)
    check_call(found, [None], dict.fromkeys(SETTINGS), subject="rollout.engine", name=name, called=called)
    unable: list[Problem] = []
    if deterministic and getattr(found, "sampling_kind", "counter") != "counter":
        need = "needs an engine whose answers are the same in any company (sampling by counter)"
        remedy = "Set rollout.engine=builtin, or deterministic=false"
        unable.append(
            Problem(subject="deterministic", need=need, free=f"rollout.engine={name} samples {found.sampling_kind}", remedy=remedy)
        )
    if filtered and not getattr(found, "filters", True):
        need = f"must be 1, and rollout.top_k 0: {name} gives log-probabilities of what they leave alone"
        unable.append(Problem(subject="rollout.top_p", need=need, free="other values", remedy="Set both so, or rollout.engine=builtin"))
    if unable:
        raise ConfigError(problems=unable)


__all__ = ["ENGINES", "check_engine", "create_engine", "needs_contents"]
