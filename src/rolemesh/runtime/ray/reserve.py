"""What to ask Ray for so that the bundles of a pool on one node get what the plan gave them. Called by `backend.py`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ray.util.placement_group import PlacementGroup

from rolemesh.errors import Problem
from rolemesh.plan.ledger import DEVICES, amounts_text
from rolemesh.plan.schema import NODE_ID, Inventory, NodeInfo
from rolemesh.protocols.backend import Bundle

RESOLUTION = 10_000
"""Ray counts in parts of this and rounds: six times 1/6 would be more than one device."""


class ReservedPool:
    """A pool that was asked for: one placement group for each node it touches, what these reserve, and where in them each bundle lives.

    As many equal bundles as share one device are reserved as one, which has the device to itself: else Ray would put the first of them
    beside a stranger's part. Those that are left reserve their parts, and may share a device with what other pools have left.
    """

    def __init__(self, bundles: Sequence[Bundle], nodes: Sequence[NodeInfo]) -> None:
        self.bundles, self.nodes = tuple(bundles), tuple(nodes)
        self.groups: dict[int, PlacementGroup] = {}
        self.shares: dict[int, list[dict[str, float]]] = {}
        self.homes: dict[int, int] = {}
        alike: dict[tuple[int, tuple[tuple[str, float], ...]], list[int]] = {}
        for position, bundle in enumerate(bundles):
            alike.setdefault((bundle.node, tuple(amounts(bundle).items())), []).append(position)
        for (node, shape), positions in alike.items():
            several = max((math.floor(1 / amount) for name, amount in shape if _shared(name, amount)), default=1)
            whole = {name: 1.0 if _shared(name, amount) else several * amount for name, amount in shape}
            for start in range(0, len(positions), several):
                members = positions[start : start + several]
                if len(members) == several:
                    self._reserve(node, whole, members)
                else:
                    for position in members:
                        self._reserve(node, dict(shape), [position])

    def _reserve(self, node: int, share: dict[str, float], members: Sequence[int]) -> None:
        shares = self.shares.setdefault(node, [])
        self.homes |= dict.fromkeys(members, len(shares))
        shares.append(share)


def amounts(bundle: Bundle) -> dict[str, float]:
    """What one bundle takes, by resource. A part 1/k of a device is rounded down, so that k of them fit on it."""
    wanted = {"CPU": bundle.cpus, "GPU": bundle.gpus, **bundle.resources}
    return {name: _part(amount) if _shared(name, amount) else amount for name, amount in wanted.items() if amount}


def _shared(name: str, amount: float) -> bool:
    return name in DEVICES and 0 < amount < 1


def _part(amount: float) -> float:
    return math.floor(RESOLUTION / round(1 / amount)) / RESOLUTION


def shortage(name: str, pool: ReservedPool, waiting: Sequence[int], now: Inventory) -> list[Problem]:
    """What the nodes lack on which a pool found no room: wanted, free, and who holds the rest."""
    nodes = {node.labels.get(NODE_ID): node for node in now.nodes}
    problems = []
    for index in waiting:
        wanted: Counter[str] = Counter()
        for bundle in pool.bundles:
            if bundle.node == index:
                wanted.update({"CPU": bundle.cpus, "GPU": bundle.gpus, **bundle.resources})
        node = nodes.get(pool.nodes[index].labels.get(NODE_ID))
        problems.append(
            Problem(
                subject=f"pool {name} on node {pool.nodes[index].name}",
                need=f"wanted {amounts_text(wanted)}",
                free=_free(node, wanted) if node is not None else "the node is gone",
                remedy="Free them, give pools.*.nodes fewer slots there, or lower pools.*.cpus",
            )
        )
    return problems


def _free(node: NodeInfo, names: Mapping[str, float]) -> str:
    totals = {"CPU": node.cpus, "GPU": node.gpus, **node.resources}
    free = ", ".join(f"{node.usable(name):g} of {totals.get(name, 0):g} {name}" for name in names if names[name] or name == "CPU")
    held = ", ".join(f"{holder} {amounts_text(held)}" for holder, held in node.holders.items())
    return f"free {free}" + (f"; held by {held}" if held else "")
