"""Models and tokenizers as Hugging Face folders: found, checked, loaded, saved. The home of `transformers`.

Called by data (prompts), rollout and train engines (weights) and checkpoints (saving). Nothing here reaches for the network. Names are
imported when they are used: `transformers` and torch take seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolemesh.lazy import lazy_names

if TYPE_CHECKING:
    from rolemesh.models.load import check_weights, load_config, load_model, open_weights
    from rolemesh.models.lora import check_lora
    from rolemesh.models.positions import check_positions
    from rolemesh.models.prompts import encode_prompt
    from rolemesh.models.reward_reader import RewardReader, UnreadableSample
    from rolemesh.models.save import save_description, save_model
    from rolemesh.models.tokenizer import load_tokenizer, stop_token_ids

__all__ = [
    "RewardReader",
    "UnreadableSample",
    "check_lora",
    "check_positions",
    "check_weights",
    "encode_prompt",
    "load_config",
    "load_model",
    "load_tokenizer",
    "open_weights",
    "save_description",
    "save_model",
    "stop_token_ids",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "load": ("check_weights", "load_config", "load_model", "open_weights"),
            "lora": ("check_lora",),
            "positions": ("check_positions",),
            "prompts": ("encode_prompt",),
            "reward_reader": ("RewardReader", "UnreadableSample"),
            "save": ("save_description", "save_model"),
            "tokenizer": ("load_tokenizer", "stop_token_ids"),
        },
    )
