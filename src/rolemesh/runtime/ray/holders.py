"""Who holds what is not free on the nodes of a Ray cluster, as its head node knows it. Called by `nodes.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import ray
from ray.core.generated import gcs_pb2

from rolemesh.plan.ledger import amounts_text

SLACK = 1e-3
"""Ray counts in parts of 1/10000, so three thirds are a little less than one."""


@dataclass(slots=True)
class Holdings:
    """What placement groups and actors hold, by Ray's node id."""

    parts: dict[str, list[tuple[str, Mapping[str, float]]]] = field(default_factory=dict)
    """(holder, amounts) of each bundle and each actor outside of them."""
    pending: tuple[str, ...] = ()
    """Groups that wait for room, in words."""

    def on(self, node: str) -> dict[str, dict[str, float]]:
        """Amounts by resource of each holder on a node."""
        found: dict[str, dict[str, float]] = {}
        for holder, amounts in self.parts.get(node, ()):
            held = found.setdefault(holder, {})
            for name, amount in amounts.items():
                held[name] = held.get(name, 0.0) + amount
        return found

    def pieces(self, node: str, name: str) -> list[float]:
        """Amounts of one resource that were taken at once."""
        return [amounts[name] for _, amounts in self.parts.get(node, ()) if amounts.get(name)]


def find_holders() -> Holdings:
    """Blocks; the amounts of actors are in no public answer of Ray that comes without its dashboard."""
    tables = ray._private.state.state._connect_and_get_accessor()
    groups = [gcs_pb2.PlacementGroupTableData.FromString(raw) for raw in tables.get_placement_group_table()]
    actors = [gcs_pb2.ActorTableData.FromString(raw) for raw in tables.get_actor_table(None, None)]
    found, pending = Holdings(), []
    for group in groups:
        if group.state == gcs_pb2.PlacementGroupTableData.CREATED:
            for bundle in group.bundles:
                found.parts.setdefault(bundle.node_id.hex(), []).append((_holder(group), _sorted(bundle.unit_resources)))
        elif group.state != gcs_pb2.PlacementGroupTableData.REMOVED:
            wanted: dict[str, float] = {}
            for bundle in group.bundles:
                wanted |= {name: wanted.get(name, 0) + amount for name, amount in bundle.unit_resources.items()}
            pending.append(f"{_holder(group)} waits for {amounts_text(_sorted(wanted))}")
    for actor in actors:
        if actor.state == gcs_pb2.ActorTableData.ALIVE and not actor.placement_group_id and actor.required_resources:
            name = actor.name or actor.class_name
            found.parts.setdefault(actor.address.node_id.hex(), []).append((f"actor {name}", _sorted(actor.required_resources)))
    found.pending = tuple(pending)
    return found


def _sorted(amounts: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(amounts.items()))


def _holder(group: gcs_pb2.PlacementGroupTableData) -> str:
    """The pools of a run are called RUN/POOL, their groups RUN/POOL@NODE."""
    name = group.name.rpartition("@")[0] or group.name or f"placement group {group.placement_group_id.hex()[:8]}"
    if group.is_detached and group.creator_job_dead:
        run = name.partition("/")[0]
        return f"{name} (left by run {run}, which has no driver any more; `rolemesh clean {run}` frees it)"
    return name


def whole_devices(total: float, free: float, pieces: Iterable[float]) -> int:
    """Devices of which nobody holds a part. `pieces` are the amounts that are known to be held; Ray puts a part of a device on the fullest
    one that has room for it."""
    held = sorted(pieces, reverse=True)
    unknown = max(0.0, total - free - sum(held))
    rooms: list[float] = []
    for piece in (*held, math.floor(unknown + SLACK), math.fmod(unknown + SLACK, 1) - SLACK):
        if piece >= 1 - SLACK:
            rooms += [0.0] * round(piece)
        elif piece > SLACK:
            room = min((room for room in rooms if room >= piece - SLACK), default=1.0)
            if room in rooms:
                rooms.remove(room)
            rooms.append(room - piece)
    return max(0, min(math.floor(free + SLACK), round(total) - len(rooms)))
