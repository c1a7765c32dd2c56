"""Splitting and merging of pools: other cuts of places that are reserved already. Nothing moves and no process starts by it.

rollout, actor = split(pool, [6, 2])      # two parts of one pool, for groups that shall not meet
everything = merge("both", [pool, other]) # one pool for a group over the places of two
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rolemesh.errors import ResourceError
from rolemesh.plan.schema import NodeInfo
from rolemesh.protocols.backend import Backend, Bundle
from rolemesh.runtime.pool import Pool


@dataclass(frozen=True, slots=True)
class PoolView:
    """Places of one or several pools under numbers of its own, for worker groups. Processes are those of the pools, which also create
    and close them."""

    name: str
    places: tuple[tuple[Pool, int], ...]
    """Pool and bundle of each place."""

    @property
    def backend(self) -> Backend:
        return self.places[0][0].backend

    @property
    def nodes(self) -> tuple[NodeInfo, ...]:
        """The nodes of the pools, each once."""
        return tuple({node.name: node for pool, _ in self.places for node in pool.nodes}.values())

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """Of each place, on its node as numbered in `nodes`."""
        index = {node.name: number for number, node in enumerate(self.nodes)}
        found = [(pool, pool.bundles[bundle]) for pool, bundle in self.places]
        return tuple(replace(bundle, node=index[pool.nodes[bundle.node].name]) for pool, bundle in found)


def split(pool: Pool | PoolView, sizes: Sequence[int]) -> list[PoolView]:
    """Cut a pool into parts of so many places each, in order. Raises ResourceError when they do not add up to the pool."""
    places = pool.places
    if sum(sizes) != len(places) or min(sizes, default=0) < 1:
        need = f"parts of at least one place that add up to its {len(places)}"
        raise ResourceError.one(f"pool {pool.name}", need, f"parts of {', '.join(map(str, sizes)) or 'nothing'}", "Give other sizes")
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return [
        PoolView(f"{pool.name}[{start}:{start + size}]", places[start : start + size]) for start, size in zip(starts, sizes, strict=True)
    ]


def merge(name: str, pools: Sequence[Pool | PoolView]) -> PoolView:
    """One pool of the places of several, in order. Raises ResourceError for none, for a place that comes twice, and for pools of
    different backends."""
    places = tuple(place for pool in pools for place in pool.places)
    backends = {id(pool.backend) for pool in pools}
    if len(backends) != 1 or len(set(places)) < len(places):
        found = f"{len(pools)} pools of {len(backends)} backends with {len(places)} places, {len(set(places))} of them different"
        raise ResourceError.one(f"pool {name}", "pools of one backend without a place in common", found, "Merge others")
    return PoolView(name, places)
