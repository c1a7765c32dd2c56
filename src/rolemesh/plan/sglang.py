"""What the plan knows of rollout workers on SGLang: their memory, and what they cannot run. The engine uses the same numbers.

None of it is measured: docs/gpu.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rolemesh.config.model_files import ModelFacts
from rolemesh.config.schema import Config
from rolemesh.errors import Problem
from rolemesh.names import ROLLOUT
from rolemesh.plan.ledger import has_device

PASS_TOKENS: Final = 4096
"""Most tokens of one pass over prompts."""
SPARE_TOKENS: Final = 8
"""It takes no sequence of the whole context: a prompt must be 6 tokens shorter, and an answer ends 2 before."""
LIBRARIES_BYTES: Final = 6 * 1024**3
"""What its two processes, of scheduler and detokenizer, take of the host; assumed."""


def used_by(config: Config, role: str) -> bool:
    return role == ROLLOUT and config.rollout.engine == "sglang"


def cache_tokens(*, slots: int, longest: int) -> int:
    """Tokens of its cache, with which none of so many sequences of the longest length is ever put off."""
    return slots * (longest + SPARE_TOKENS)


def memory(config: Config, facts: ModelFacts, *, longest: int, width: int) -> dict[str, int]:
    """Bytes by what takes them, beside weights and libraries. Sampling works in float64, with noise for each number."""
    slots = config.rollout.slots
    token = 4 * facts.hidden + (facts.heads + 2 * facts.kv_heads) * facts.head_dim + 3 * facts.mlp_width
    cached = 2 * facts.layers * facts.kv_heads * facts.head_dim * width
    return {
        "KV cache": cache_tokens(slots=slots, longest=longest) * cached,
        "sampling": slots * facts.vocab * 40,
        "passes": PASS_TOKENS * token * width,
    }


def unfit(config: Config) -> Iterator[Problem]:
    """What it cannot run, as far as a config tells."""
    role = config.roles.get(ROLLOUT)
    if role is None or not used_by(config, ROLLOUT):
        return
    if role.pool in config.pools and not has_device(config.pools[role.pool]):
        remedy = f"Set rollout.engine=builtin, or on a machine with GPUs pools.{role.pool}.gpus=1"
        yield Problem(subject="rollout.engine", need="sglang computes on GPUs only", free=f"pool {role.pool} without", remedy=remedy)
    if config.model.dtype != "bfloat16":
        need = "must be bfloat16 for sglang: the seeds of answers count in half precision only"
        remedy = "Set model.dtype=bfloat16, or rollout.engine=builtin"
        yield Problem(subject="model.dtype", need=need, free=config.model.dtype, remedy=remedy)


def notes(config: Config) -> Iterator[str]:
    if used_by(config, ROLLOUT):
        yield "rollout.engine=sglang has not run yet: it was written against the source of SGLang 0.5.23; see docs/engines.md"
