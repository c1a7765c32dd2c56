"""Memory of one slot's process, estimated from the model's sizes. Called by `build.py`.

Rough on purpose, and meant to be above the truth: it answers "can this ever fit?" before anything starts. With P parameters of b bytes:

| what | bytes | who |
|---|---|---|
| weights | P b | every role with a model |
| gradients | P b | actor, critic |
| optimizer | 8 P (two float32 moments of AdamW) | actor, critic |
| activations | T layers (14 hidden + 4 intermediate) b: what one block keeps for its backward pass | actor, critic |
| logits | 12 T vocab (float32 logits, log-softmax and their gradient) | actor |
| KV cache | slots (prompt + response) 2 layers kv_heads head_dim b | rollout |
| sampling | 8 slots vocab (float32 logits and a copy) | rollout |
| process | Python, torch and their libraries | each process |

T is the tokens of a micro-batch: `trainer.micro_batch_tokens`, or fewer when a rank's part of a mini-batch is smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from rolemesh.config.model_files import ModelFacts
from rolemesh.config.schema import Config
from rolemesh.errors import Problem
from rolemesh.names import ACTOR, CRITIC, REF, ROLLOUT
from rolemesh.plan.placement import PROCESS_ROLES
from rolemesh.plan.schema import MemoryLine, NodeInfo, PoolMemory

MIB: Final = 1024**2
PROCESS_BYTES: Final = 500 * MIB
"""A process that has imported torch and transformers."""
GPU_PROCESS_BYTES: Final = 3 * 1024 * MIB
"""The same with CUDA's libraries and pinned buffers."""
REWARD_PROCESS_BYTES: Final = 350 * MIB
"""A reward process: Python, Arrow and the verifiers, no torch."""
TRAINED: Final = (ACTOR, CRITIC)
WITH_MODEL: Final = (ACTOR, CRITIC, REF, ROLLOUT)


def pool_memory(config: Config, pool: str, facts: ModelFacts, actors: int) -> PoolMemory:
    """One slot's process of the pool with all its roles. `actors` is the number of data-parallel ranks that share a mini-batch."""
    roles = [name for name, role in config.roles.items() if role.pool == pool and name not in PROCESS_ROLES]
    on_gpu = config.pools[pool].gpus > 0
    lines = [MemoryLine(role="", what="process", bytes=GPU_PROCESS_BYTES if on_gpu else PROCESS_BYTES)]
    for role in roles:
        if role in WITH_MODEL:
            lines += [replace(line, on_gpu=on_gpu) for line in _role_lines(config, role, facts, actors)]
    return PoolMemory(pool=pool, lines=tuple(lines))


def reward_memory(config: Config, role: str) -> PoolMemory:
    """One process of a role that has its own."""
    line = MemoryLine(role=role, what="process", bytes=REWARD_PROCESS_BYTES)
    return PoolMemory(pool=config.roles[role].pool, process=role, lines=(line,))


def _role_lines(config: Config, role: str, facts: ModelFacts, actors: int) -> Iterator[MemoryLine]:
    width = 2 if config.model.dtype == "bfloat16" else 4
    yield MemoryLine(role=role, what="weights", bytes=facts.parameters * width)
    if role in TRAINED:
        tokens = micro_batch_tokens(config, actors)
        block = 14 * facts.hidden + 4 * facts.intermediate
        yield MemoryLine(role=role, what="gradients", bytes=facts.parameters * width)
        yield MemoryLine(role=role, what="optimizer", bytes=facts.parameters * 8)
        yield MemoryLine(role=role, what="activations", bytes=tokens * facts.layers * block * width)
        if role == ACTOR:
            yield MemoryLine(role=role, what="logits", bytes=tokens * facts.vocab * 12)
    if role == ROLLOUT:
        length = config.data.max_prompt_tokens + config.data.max_response_tokens
        token = 2 * facts.layers * facts.kv_heads * facts.head_dim * width
        yield MemoryLine(role=role, what="KV cache", bytes=config.rollout.slots * length * token)
        yield MemoryLine(role=role, what="sampling", bytes=config.rollout.slots * facts.vocab * 8)


def micro_batch_tokens(config: Config, actors: int) -> int:
    """Most tokens of one forward and backward pass of a rank."""
    rows = -(-config.trainer.prompts_per_step * config.algorithm.group_size // config.trainer.minibatches // max(1, actors))
    length = config.data.max_prompt_tokens + config.data.max_response_tokens
    return min(max(config.trainer.micro_batch_tokens, length), rows * length)


def check_memory(
    nodes: Sequence[NodeInfo], memory: Sequence[PoolMemory], places: Sequence[dict[int, int]], gpus: dict[str, int]
) -> list[Problem]:
    """Nodes and GPUs that cannot hold their processes. `places[i]` counts the processes of `memory[i]` by node; `gpus` are those of one
    slot by pool. Nodes in the same trouble are told once."""
    problems: dict[str, tuple[Problem, int]] = {}
    needs: dict[int, int] = {}
    for entry, counts in zip(memory, places, strict=True):
        for node, count in counts.items():
            needs[node] = needs.get(node, 0) + count * entry.host_bytes
            if problem := _gpu_problem(entry, nodes[node], gpus.get(entry.pool, 0)):
                _count(problems, f"gpu {entry.pool}", problem)
    for node, need in needs.items():
        if need > nodes[node].memory_bytes:
            _count(problems, f"host {need} {nodes[node].memory_bytes}", _node_problem(nodes[node], need, memory))
    return [
        problem if count == 1 else replace(problem, subject=f"{problem.subject} (and {count - 1} more)")
        for problem, count in problems.values()
    ]


def _count(problems: dict[str, tuple[Problem, int]], kind: str, problem: Problem) -> None:
    first, count = problems.get(kind, (problem, 0))
    problems[kind] = (first, count + 1)


def _gpu_problem(entry: PoolMemory, node: NodeInfo, gpus: int) -> Problem | None:
    # 0 bytes of GPU memory means that nobody knows.
    free = node.gpu_memory_bytes * gpus
    if not free or entry.gpu_bytes <= free:
        return None
    return Problem(
        subject=f"pool {entry.pool} on node {node.name}",
        need=f"GPU memory: a slot needs about {size(entry.gpu_bytes)}",
        free=f"{size(free)} on {gpus} GPU{'' if gpus == 1 else 's'}",
        remedy=_remedy([entry]),
    )


def _node_problem(node: NodeInfo, need: int, memory: Sequence[PoolMemory]) -> Problem:
    return Problem(
        subject=f"node {node.name}",
        need=f"memory: its processes need about {size(need)}",
        free=size(node.memory_bytes),
        remedy=_remedy(memory),
    )


_LOWER: Final = {
    "process": "Give the pools fewer slots",
    "KV cache": "Lower rollout.slots or data.max_response_tokens",
    "sampling": "Lower rollout.slots",
    "activations": "Lower trainer.micro_batch_tokens",
    "logits": "Lower trainer.micro_batch_tokens",
}


def _remedy(memory: Sequence[PoolMemory]) -> str:
    """The setting that lowers the largest part."""
    line = max((line for entry in memory for line in entry.lines), key=lambda line: line.bytes)
    owner = f"{line.what} of {line.role}" if line.role else line.what
    return f"{_LOWER.get(line.what, 'Use a smaller model')}; the largest part is {owner}, {size(line.bytes)} each"


def size(count: float) -> str:
    """Bytes in the largest binary unit that keeps the number above 1: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
