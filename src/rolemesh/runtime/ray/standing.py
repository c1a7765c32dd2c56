"""What stands in a Ray cluster under our names, whoever made it: placement groups `POOL@NODE` and processes `POOL-BUNDLE.N`.

Asked by a controller that takes over pools of one that is gone. Ray blocks while it answers, so threads ask.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup

from rolemesh.errors import DeadlineExceeded
from rolemesh.runtime.ray.waiting import in_time

T = TypeVar("T")
NAMESPACE = "rolemesh"
"""Ray's namespace of all our actors; their names carry the run."""
UNIT = 1e-4
"""Smallest part of a resource that Ray tells apart."""
ASK_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A placement group as Ray has it: what its bundles take, and their nodes by Ray's id (none while it waits to be placed)."""

    group: PlacementGroup
    shares: Sequence[Mapping[str, float]]
    nodes: frozenset[str]

    def holds(self, node: str, shares: Sequence[Mapping[str, float]]) -> bool:
        """True when it has exactly these bundles, in this order, all on that node."""
        return self.nodes == {node} and len(self.shares) == len(shares) and all(map(_equal, self.shares, shares))


def _equal(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return all(abs(one.get(name, 0.0) - other.get(name, 0.0)) < 2 * UNIT for name in one.keys() | other.keys())


async def reserved(prefix: str) -> dict[str, list[Reserved]]:
    """Placement groups by pool, of the pools whose names begin so."""

    def ask() -> dict[str, list[Reserved]]:
        found: dict[str, list[Reserved]] = {}
        for row in ray.util.placement_group_table().values():
            pool, _, node = row["name"].rpartition("@")
            if row["state"] != "REMOVED" and pool.startswith(prefix) and node.isdigit() and (group := find_group(row["name"])) is not None:
                shares = [share for _, share in sorted(row["bundles"].items())]
                nodes = frozenset(row["bundles_to_node_id"].values() if row["state"] == "CREATED" else ())
                found.setdefault(pool, []).append(Reserved(group=group, shares=shares, nodes=nodes))
        return found

    return await in_time(ASK_SECONDS, asyncio.to_thread(ask), "Ray's list of placement groups")


def find_group(name: str) -> PlacementGroup | None:
    """The placement group of this name, if there is one. Blocks."""
    try:
        return ray.util.get_placement_group(name)
    except ValueError:  # another namespace's, or removed since
        return None


async def processes(pool: str) -> dict[int, list[tuple[int, Any]]]:
    """Actors of a pool by bundle, as (number, handle), the newest last."""

    def ask() -> dict[int, list[tuple[int, Any]]]:
        found: dict[int, list[tuple[int, Any]]] = {}
        for row in ray.util.list_named_actors(all_namespaces=True):
            match = re.fullmatch(rf"{re.escape(pool)}-(\d+)\.(\d+)", row["name"])
            if match and row["namespace"] == NAMESPACE and (actor := find_actor(row["name"])) is not None:
                found.setdefault(int(match[1]), []).append((int(match[2]), actor))
        return {bundle: sorted(actors, key=lambda numbered: numbered[0]) for bundle, actors in found.items()}

    return await in_time(ASK_SECONDS, asyncio.to_thread(ask), "Ray's list of actors")


def find_actor(name: str) -> Any | None:
    """The actor of this name, if there is one. Blocks."""
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


async def named(name: str, create: Callable[[], T], deadline: float) -> T:
    """Create the actor of this name as soon as the one before has left it, which takes Ray a moment after a death."""
    ends = time.monotonic() + deadline
    while True:
        try:
            return create()
        except ValueError as error:
            if time.monotonic() >= ends:
                raise DeadlineExceeded(waiter="the controller", subject=f"the name {name} to be free", seconds=deadline) from error
            await asyncio.sleep(0.05)
