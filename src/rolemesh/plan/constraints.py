"""What a pool demands of its nodes beside room: type of accelerator, labels, resources that not every node has. Called by `placement.py`.

These bind every process of the pool: its slots and spares, processes beside them, and through the nodes chosen also helpers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rolemesh.config.schema import Config, PoolConfig
from rolemesh.errors import Problem
from rolemesh.plan.ledger import GPU, many
from rolemesh.plan.schema import NodeInfo
from rolemesh.registry import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """One demand: the option that makes it, in words, and how a node is judged."""

    option: str
    key: str
    """What the option names: a type, a label, a resource."""
    words: str
    met: Callable[[NodeInfo], bool]
    found: Callable[[NodeInfo], str]
    """What the node has instead, in words."""
    hint: str


def constraints(name: str, pool: PoolConfig) -> Iterator[Constraint]:
    """All demands of the pool `name`."""
    if (wanted := pool.accelerator_type) is not None:
        yield Constraint(
            option=f"pools.{name}.accelerator_type",
            key=wanted,
            words=f"accelerators of type {wanted}",
            met=lambda node: same_type(wanted, node.gpu_type),
            found=lambda node: node.gpu_type or "an unknown type",
            hint=f"for imagined nodes say the type: --nodes 1x8:{wanted}",
        )
    for key, value in pool.labels.items():
        yield Constraint(
            option=f"pools.{name}.labels",
            key=key,
            words=f"the label {key}={value}",
            met=lambda node, key=key, value=value: node.labels.get(key) == value,  # type: ignore[misc]
            found=lambda node, key=key: f"{key}={node.labels[key]}" if key in node.labels else f"no label {key}",  # type: ignore[misc]
            hint=f"for imagined nodes say the label: --nodes 1x8:{key}={value}",
        )
    for resource in pool.resources:
        yield Constraint(
            option=f"pools.{name}.resources",
            key=resource,
            words=f"the resource {resource}",
            met=lambda node, resource=resource: node.resources.get(resource, 0) > 0,  # type: ignore[misc]
            found=lambda node: ", ".join(node.resources) or "no other resources",
            hint=f"pools.{name}.gpus counts GPUs" if resource == GPU else f"for imagined nodes say the resource: --nodes 1x8:4*{resource}",
        )


def eligible(name: str, pool: PoolConfig, nodes: Sequence[NodeInfo]) -> list[bool]:
    """Which nodes may hold processes of the pool, however full they are."""
    demands = list(constraints(name, pool))
    return [all(demand.met(node) for demand in demands) for node in nodes]


def nodes_allowed(config: Config, nodes: Sequence[NodeInfo]) -> set[int]:
    """Nodes that may hold processes of any of the config's pools."""
    return {index for name, pool in config.pools.items() for index, ok in enumerate(eligible(name, pool, nodes)) if ok}


def unmet(name: str, pool: PoolConfig, nodes: Sequence[NodeInfo], needed: int) -> Problem:
    """The problem that fewer than `needed` nodes meet all demands of the pool; its subject is the demand that fewest of them meet."""
    demands = list(constraints(name, pool))
    counts = [sum(demand.met(node) for node in nodes) for demand in demands]
    worst = demands[counts.index(min(counts))]
    met = sum(eligible(name, pool, nodes))
    others = Counter(worst.found(node) for node in nodes if not worst.met(node))
    found = ", ".join(f"{text} on {many(count, 'node')}" for text, count in others.most_common(3))
    known = [key for node in nodes for key in (*node.labels, *node.resources)]
    meant = did_you_mean(worst.key, known) if min(counts) == 0 else ""
    all_words = " and ".join(demand.words for demand in demands)
    return Problem(
        subject=worst.option,
        need=f"pool {name} needs {many(needed, 'node')} with {all_words}",
        free=f"{met} of {len(nodes)}" + (f" ({found})" if found else ""),
        remedy=f"{meant}Change {worst.option}, or add such nodes; {worst.hint}",
    )


def same_type(wanted: str, found: str) -> bool:
    """Whether a node's accelerator, as the cluster or its driver names it, is of the wanted type.

    All words of the wanted type must occur: `A100-80G` is met by `NVIDIA A100-SXM4-80GB`, and `H100` is not met by `H100L`.
    """
    words, have = (re.findall(r"[a-z0-9]+", re.sub(r"(\d+g)b\b", r"\1", text.casefold())) for text in (wanted, found))
    return bool(words) and set(words) <= set(have)
