"""Positions that a model computes anew in the middle of a sequence. Called before a run starts, and by the rollout engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolemesh.errors import ConfigError


def check_positions(config: Any, longest: int) -> None:
    """Raises ConfigError if sequences of a model with this `config` of transformers, of up to `longest` tokens, grow past the length from
    which on it rotates all their positions otherwise (rotary embeddings of type longrope). An engine goes on with keys that it rotated
    before, a trainer computes all of them by the new ones, also for a short sequence beside a long one: their log-probabilities differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):  # of all layers, or by kind of layer
        limit = one.get("original_max_position_embeddings")
        if one.get("rope_type") == "longrope" and limit is not None and longest > limit:
            raise ConfigError.one(
                "data.max_response_tokens",
                f"with data.max_prompt_tokens at most {limit} tokens: over that this model rotates all positions of a sequence otherwise "
                "(longrope), so that log-probabilities of rollout and trainer would not be the same",
                f"{longest} together",
                "Make prompts or answers shorter, or use a model without longrope",
            )
