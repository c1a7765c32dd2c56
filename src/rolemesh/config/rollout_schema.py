"""Options of generation: the engine, requests from outside, and what happens between turns. A part of the schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rolemesh.config.section import NotNegative, NotNegativeFloat, Positive, PositiveFloat, Section

COOLEST, HOTTEST = 1e-6, 1e6
"""Temperatures above 0: logits divided by less than the first may be beyond float32, and then there is nothing to sample from."""


class ServeConfig(Section):
    """The policy in training as an OpenAI-compatible endpoint: see docs/serving.md."""

    host: str = "127.0.0.1"
    """Address to listen on. The endpoint speaks plain HTTP: anything but loopback shows prompts and the token to the network."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port; 0 takes a free one, which `status.json` names."""
    in_flight: Literal["resume", "wait", "abort"] = "resume"
    """What becomes of requests that run when weights are published: they go on with the new ones, training waits for them (`patience`),
    or they end with the tokens that they have."""
    patience: PositiveFloat = 10.0
    """Seconds that a publication waits for them at most, with `in_flight: wait`; what still runs then ends."""
    deadline: PositiveFloat = 600.0
    """Seconds in which a request has to be answered."""
    requests: Positive = 256
    """Answers under way at a time; what is asked for beyond is refused (status 429)."""


class RolloutConfig(Section):
    """Generation."""

    engine: str = "builtin"
    """Inference engine by name (`builtin`, or `vllm` or `sglang` where these are installed), or an own one by import path."""
    temperature: NotNegativeFloat = 1.0
    """Sampling temperature: 0 (greedy) or from 1e-6 to 1e6, and not 0 for training."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; must be 1 for training, where sampled and trained probabilities have to agree."""
    top_k: NotNegative = 0
    """Sample only among the k likeliest tokens; 0 means all, and must be 0 for training."""
    slots: Positive = 64
    """Sequences that one engine decodes side by side."""
    deadline: PositiveFloat = 1800.0
    """Seconds in which one of several rollout workers has to hand in some answers; then others get its prompts."""
    serve: ServeConfig | None = None
    """Answer requests from outside meanwhile, `{}` for the defaults; off when not set."""


class EnvironmentConfig(Section):
    """What happens between the turns of the model, for answers of several turns. Without this section an answer is one turn."""

    name: str = "tools"
    """Environment by name (`tools`, `reasoning_gym`, `textarena`), or an own class by import path."""
    tools: tuple[str, ...] = ()
    """Tools that the model may call: built-in ones by name (`calculator`, `python`), own Python functions by import path."""
    parser: str = "hermes"
    """How the model writes calls: `hermes` (Qwen), `llama3_json`, `pythonic`, or an own function by import path."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    max_turns: Positive = 8
    """Turns of the model in one answer; all of them together have at most `data.max_response_tokens`, what lies between included."""
    max_observation_tokens: Positive = 512
    """Longest message of the environment, in tokens; a longer one is cut at its end and counted."""
    deadline: PositiveFloat = 60.0
    """Seconds for one step of an environment, tools included, waiting for a free thread or sandbox not; then the answer has no reward."""
