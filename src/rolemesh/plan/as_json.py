"""The plan as plain data, for `rolemesh plan --json` and for `plan.json` in a run directory. Reads nothing but the plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rolemesh.plan.schema import HelperPlan, NodeInfo, PlacementGroup, Plan, PoolMemory, Slot, WorkerPlan


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data. Nodes are named; bytes are bytes, times are seconds."""
    names = [node.name for node in plan.nodes]
    return {
        "origin": plan.origin,
        "nodes": [_fields(node) for node in plan.nodes],
        "pools": {
            name: {
                "slots": [_placed(slot, names) for slot in pool.slots],
                "spares": [_placed(slot, names) for slot in pool.spares],
            }
            for name, pool in plan.pools.items()
        },
        "workers": [_placed(worker, names) for worker in plan.workers],
        "layouts": {role: asdict(layout) for role, layout in plan.layouts.items()},
        "helpers": [_placed(helper, names) for helper in plan.helpers],
        "placement_groups": [_placed(group, names) | {"slots": list(group.slots)} for group in plan.placement_groups()],
        "memory": {memory_name(entry): _memory(entry) for entry in plan.memory},
        "stages": [asdict(stage) for stage in plan.stages],
        "seconds_per_step": plan.seconds_per_step,
        "derived": dict(plan.derived),
        "versions": dict(plan.versions),
        "warnings": list(plan.warnings),
        "problems": [asdict(problem) for problem in plan.problems],
    }


def plan_json_text(plan: Plan) -> Iterator[str]:
    """The same as lines of text: an item of a list on each, of a very long list a hundred, which is faster."""
    data = plan_json(plan)
    last = len(data) - 1
    yield "{"
    for position, (key, value) in enumerate(data.items()):
        comma = "" if position == last else ","
        if isinstance(value, list) and value:
            step = 1 if len(value) <= 1000 else 100
            yield f"  {json.dumps(key)}: ["
            yield ",\n".join(f"    {json.dumps(value[start : start + step])[1:-1]}" for start in range(0, len(value), step))
            yield f"  ]{comma}"
        else:
            yield f"  {json.dumps(key)}: {json.dumps(value)}{comma}"
    yield "}"


def memory_name(entry: PoolMemory) -> str:
    """The pool for one of its slots; `pool/role` for a process beside the slots; `node` for what a node holds once."""
    if entry.process == "node":
        return "node"
    return entry.pool if entry.process == "slot" else f"{entry.pool}/{entry.process}"


def _fields(record: NodeInfo | Slot | WorkerPlan | HelperPlan | PlacementGroup) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def _placed(record: Slot | WorkerPlan | HelperPlan | PlacementGroup, names: list[str]) -> dict[str, Any]:
    """A record with its node by name, and without what only some have."""
    found = _fields(record) | {"node": names[record.node]}
    return {name: value for name, value in found.items() if value or name not in ("resources", "weights", "weight_format")}


def _memory(entry: PoolMemory) -> dict[str, Any]:
    lines = [asdict(line) for line in entry.lines]
    totals = {"total_bytes": entry.total_bytes, "host_bytes": entry.host_bytes, "gpu_bytes": entry.gpu_bytes}
    return totals | {"phases": entry.phase_bytes, "lines": lines}
