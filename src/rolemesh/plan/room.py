"""Whether nodes and devices have room for the memory that was estimated, and what to do where they have not. Called by `build.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

from rolemesh.errors import Problem
from rolemesh.plan.ledger import many
from rolemesh.plan.memory import COPY, size
from rolemesh.plan.schema import MemoryLine, NodeInfo, PoolMemory

Cheaper = Callable[[str], Sequence[tuple[str, int]]]
"""Pool -> options with which a slot of it needs less of a device, and how much then."""


def check_memory(
    nodes: Sequence[NodeInfo],
    memory: Sequence[PoolMemory],
    places: Sequence[Mapping[int, int]],
    devices: Mapping[str, float],
    cheaper: Cheaper,
) -> list[Problem]:
    """Nodes and devices that cannot hold their processes. `places[i]` counts the processes of `memory[i]` by node; `devices` are those
    of one slot by pool, a share of one counting as such. Nodes in the same trouble are told once."""
    problems: dict[str, list[Problem]] = {}
    needs: dict[int, int] = {}
    cheaper = cache(cheaper)
    for entry, counts in zip(memory, places, strict=True):
        for node, count in counts.items():
            needs[node] = needs.get(node, 0) + count * entry.host_bytes
            if problem := _device_problem(entry, nodes[node], devices.get(entry.pool, 0), cheaper):
                problems.setdefault(f"device {entry.pool} {nodes[node].gpu_memory_bytes}", []).append(problem)
    for node, need in needs.items():
        if need > nodes[node].usable_memory:
            here = [entry for entry, counts in zip(memory, places, strict=True) if node in counts]
            problems.setdefault(f"host {need} {nodes[node].usable_memory}", []).append(_node_problem(nodes[node], need, here))
    return [first if not more else replace(first, subject=f"{first.subject} (and {len(more)} more)") for first, *more in problems.values()]


def _device_problem(entry: PoolMemory, node: NodeInfo, devices: float, cheaper: Cheaper) -> Problem | None:
    # 0 bytes of device memory means that nobody knows.
    free = round(node.gpu_memory_bytes * devices)
    if not free or entry.gpu_bytes <= free:
        return None
    what = f"1/{round(1 / devices)} GPU" if devices < 1 else many(devices, "GPU")
    phase = max(entry.phases, key=entry.phase_bytes.__getitem__, default=None)
    lines = entry.phases[phase] if phase is not None else tuple(line for line in entry.lines if line.on_gpu)
    others = [f"{size(need)} with {option}" for option, need in cheaper(entry.pool)]
    return Problem(
        subject=f"pool {entry.pool} on node {node.name}",
        need=f"GPU memory: a slot needs about {size(entry.gpu_bytes)}" + (f", most of all to {phase}" if phase else ""),
        free=f"{size(free)} on {what}",
        remedy=_remedy(lines) + (f". It would need {', '.join(others)}" if others else ""),
    )


def _node_problem(node: NodeInfo, need: int, memory: Sequence[PoolMemory]) -> Problem:
    taken = "" if node.free_memory_bytes is None else f" free of {size(node.memory_bytes)}"
    return Problem(
        subject=f"node {node.name}",
        need=f"memory: its processes need about {size(need)}",
        free=f"{size(node.usable_memory)}{taken}",
        remedy=_remedy([line for entry in memory for line in entry.lines if not line.on_gpu]),
    )


_LOWER: Final = {
    "process": "Give the pools fewer slots",
    "loading": "Give the pools fewer slots a node",
    "context": "Lower pools.<pool>.share",
    "KV cache": "Lower rollout.slots or data.max_response_tokens",
    "sampling": "Lower rollout.slots",
    "passes": "Lower rollout.slots or data.max_prompt_tokens",
    "activations": "Lower trainer.micro_batch_tokens",
    "logits": "Lower trainer.micro_batch_tokens",
    COPY: "Set trainer.async_save=false",
}


def _remedy(lines: Sequence[MemoryLine]) -> str:
    """The setting that lowers the largest part."""
    line = max(lines, key=lambda line: line.bytes)
    owner = f"{line.what} of {line.role}" if line.role else line.what
    return f"{_LOWER.get(line.what, 'Use a smaller model')}; the largest part is {owner}, {size(line.bytes)} each"
