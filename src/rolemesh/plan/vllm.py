"""What the plan knows of rollout workers on vLLM: their memory, and models that they cannot run. The engine uses the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rolemesh.config.model_files import ModelFacts
from rolemesh.config.schema import Config
from rolemesh.errors import Problem
from rolemesh.names import ROLLOUT
from rolemesh.plan.ledger import has_device

BLOCK_TOKENS: Final = 32
"""Tokens of a block of its cache; a prompt's whole blocks are computed once for all its answers."""
PASS_TOKENS: Final = 4096
"""Most tokens of one pass; more when a sequence can be longer."""
LIBRARIES_BYTES: Final = 350 * 1024**2
"""What its libraries take of a process; 250 MiB were measured on CPUs."""
CPU_HEADS: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of a head that its attention on CPUs can compute with."""

TEMPERATURES: Final = (0.01, 2.0)
"""Lowest above 0, and highest: it takes lower ones for the lowest, and refuses higher ones."""


def used_by(config: Config, role: str) -> bool:
    return role == ROLLOUT and config.rollout.engine == "vllm"


def cache_bytes(facts: ModelFacts, *, slots: int, longest: int, width: int) -> int:
    """Keys and values of so many sequences of the longest length, in numbers of `width` bytes, and an empty block of vLLM's own."""
    blocks = slots * -(-longest // BLOCK_TOKENS) + 1
    return blocks * BLOCK_TOKENS * 2 * facts.layers * facts.key_value * width


def memory(config: Config, facts: ModelFacts, *, longest: int, width: int) -> dict[str, int]:
    """Bytes by what takes them, beside weights and libraries. On CPUs linear layers are packed in place, but the head keeps its weights
    beside the packed ones, as they may be the embedding too."""
    slots, tokens = config.rollout.slots, max(PASS_TOKENS, longest, config.rollout.slots)
    found = {
        "KV cache": cache_bytes(facts, slots=slots, longest=longest, width=width),
        "sampling": slots * facts.vocab * (20 + width),
        "passes": tokens * facts.pass_width * width,
    }
    return found if has_device(config.pools[config.roles[ROLLOUT].pool]) else found | {"packed head": facts.vocab * facts.hidden * width}


def unfit(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    """What vLLM would find out at the first request only: temperatures that it does not have, and models that it cannot run on CPUs."""
    role = config.roles.get(ROLLOUT)
    if role is None or not used_by(config, ROLLOUT):
        return
    lowest, highest = TEMPERATURES
    if not lowest <= config.rollout.temperature <= highest and config.rollout.temperature != 0:
        yield Problem(
            subject="rollout.temperature",
            need=f"vllm has temperatures of {lowest} to {highest}",
            free=str(config.rollout.temperature),
            remedy="Set rollout.engine=builtin, or another temperature",
        )
    pool = config.pools.get(role.pool)
    if pool is None or facts is None or has_device(pool):
        return
    if facts.head_dim not in CPU_HEADS:
        yield Problem(
            subject="rollout.engine",
            need=f"vllm on CPUs needs heads of size {', '.join(map(str, CPU_HEADS))}",
            free=f"{facts.head_dim} in {config.model.path}",
            remedy="Set rollout.engine=builtin",
        )
