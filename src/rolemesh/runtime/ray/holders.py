"""Who holds what is not free on the nodes of a Ray cluster, as its head node knows it. Called by `nodes.py`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import ray
from ray.core.generated import gcs_pb2

from rolemesh.plan.ledger import amounts_text
from rolemesh.runtime.janitor_process import RUN

SLACK = 1e-3
"""Ray counts in parts of 1/10000, so three thirds are a little less than one."""


@dataclass(slots=True)
class Holdings:
    """What placement groups and actors hold, by Ray's node id."""

    parts: dict[str, list[tuple[str, Mapping[str, float]]]] = field(default_factory=dict)
    """(holder, amounts) of each bundle and each actor outside of them."""
    pending: tuple[str, ...] = ()
    """Groups that wait for room, in words."""

    def on(self, node: str) -> Mapping[str, Mapping[str, float]]:
        """Amounts by resource of each holder on a node."""
        found: dict[str, Counter[str]] = {}
        for holder, amounts in self.parts.get(node, ()):
            found.setdefault(holder, Counter()).update(amounts)
        return found

    def pieces(self, node: str, name: str) -> list[float]:
        """Amounts of one resource that were taken at once."""
        return [amounts[name] for _, amounts in self.parts.get(node, ()) if amounts.get(name)]


def find_holders() -> Holdings:
    """Blocks; the amounts of actors are in no public answer of Ray that comes without its dashboard."""
    tables = ray._private.state.state._connect_and_get_accessor()
    groups = [gcs_pb2.PlacementGroupTableData.FromString(raw) for raw in tables.get_placement_group_table()]
    actors = [gcs_pb2.ActorTableData.FromString(raw) for raw in tables.get_actor_table(None, None)]
    found, pending, driven = Holdings(), [], driven_runs()
    for group in groups:
        if group.state == gcs_pb2.PlacementGroupTableData.CREATED:
            for bundle in group.bundles:
                found.parts.setdefault(bundle.node_id.hex(), []).append((_holder(group, driven), _sorted(bundle.unit_resources)))
        elif group.state != gcs_pb2.PlacementGroupTableData.REMOVED:
            wanted: Counter[str] = Counter()
            for bundle in group.bundles:
                wanted.update(bundle.unit_resources)
            pending.append(f"{_holder(group, driven)} waits for {amounts_text(_sorted(wanted))}")
    for actor in actors:
        if actor.state == gcs_pb2.ActorTableData.ALIVE and not actor.placement_group_id and actor.required_resources:
            name = actor.name or actor.class_name
            found.parts.setdefault(actor.address.node_id.hex(), []).append((f"actor {name}", _sorted(actor.required_resources)))
    found.pending = tuple(pending)
    return found


def driven_until() -> dict[str, float]:
    """When the last driver of each run ended, wherever it was; infinity for one that has a driver now. Milliseconds of the head's clock.

    Drivers give their jobs the mark of the run for all workers. Blocks."""
    tables = ray._private.state.state._connect_and_get_accessor()
    found: dict[str, float] = {}
    for raw in tables.get_job_table(skip_submission_job_info_field=True, skip_is_running_tasks_field=True):
        job = gcs_pb2.JobTableData.FromString(raw)
        environment = json.loads(job.config.runtime_env_info.serialized_runtime_env or "{}")
        if run := environment.get("env_vars", {}).get(RUN):
            found[run] = max(found.get(run, 0.0), job.end_time if job.is_dead else math.inf)
    return found


def driven_runs() -> set[str]:
    """Runs that have a driver now. Blocks."""
    return {run for run, ended in driven_until().items() if ended == math.inf}


def _sorted(amounts: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(amounts.items()))


def _holder(group: gcs_pb2.PlacementGroupTableData, driven: Collection[str]) -> str:
    """The pools of a run are called RUN/POOL, their groups RUN/POOL@NODE."""
    name = group.name.rpartition("@")[0] or group.name or f"placement group {group.placement_group_id.hex()[:8]}"
    run = name.partition("/")[0]
    if group.is_detached and group.creator_job_dead and run not in driven:  # whom another driver may have taken over
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
