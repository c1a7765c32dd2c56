"""Splitting and merging of pools: pure functions from pool plans to pool plans. Slots keep node and size and are numbered anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rolemesh.errors import ConfigError
from rolemesh.plan.schema import PoolPlan, Slot


def split_pool(pool: PoolPlan, parts: Mapping[str, int], *, unit: int = 1) -> dict[str, PoolPlan]:
    """The pool's slots in named parts of the given sizes, in order, so that neighbours stay together. Spares go to the last part.

    With `unit` > 1 (tensor parallelism), each part must consist of whole runs of `unit` slots on one node. Raises ConfigError unless
    the sizes are above 0, add up to the slots and keep such runs whole.
    """
    total = sum(parts.values())
    if not parts or min(parts.values(), default=0) < 1 or total != len(pool.slots):
        raise ConfigError.one(
            f"pool {pool.name}",
            f"parts above 0 that add up to its {len(pool.slots)} slots",
            ", ".join(f"{name} {count}" for name, count in parts.items()) or "none",
            "Give every slot to one part",
        )
    found: dict[str, PoolPlan] = {}
    start = 0
    for position, (name, count) in enumerate(parts.items()):
        part = pool.slots[start : start + count]
        _check_runs(pool.name, name, part, unit)
        spares = pool.spares if position == len(parts) - 1 else ()
        found[name] = PoolPlan(name=name, slots=_numbered(part), spares=_numbered(spares, part))
        start += count
    return found


def _check_runs(pool: str, name: str, part: Sequence[Slot], unit: int) -> None:
    for start in range(0, len(part), unit):
        run = part[start : start + unit]
        if len(run) < unit or len({slot.node for slot in run}) > 1:
            raise ConfigError.one(
                f"pool {pool}",
                f"runs of {unit} slots on one node in part {name}: ranks that share a model never lie on different nodes",
                f"slots {run[0].index} to {run[-1].index} on nodes {sorted({slot.node for slot in run})}",
                f"Give {name} a multiple of {unit} slots of each node",
            )


def merge_pools(name: str, pools: Sequence[PoolPlan]) -> PoolPlan:
    """One pool of all slots, in the order of their nodes; spares stay spares.

    Raises ConfigError when there is none, or when slots differ in CPUs, GPUs or other resources: rank i of a role may then not fit slot i.
    """
    slots = [slot for pool in pools for slot in (*pool.slots, *pool.spares)]
    shapes = {(slot.cpus, slot.gpus, tuple(sorted(slot.resources.items()))): slot for slot in slots}
    if len(shapes) != 1:
        sizes = "; ".join(f"{slot.cpus:g} CPUs, {slot.gpus:g} GPUs {dict(slot.resources) or ''}".rstrip() for slot in shapes.values())
        names = ", ".join(pool.name for pool in pools)
        raise ConfigError.one(f"pool {name}", "pools with equal slots", f"{names}: {sizes or 'no slots'}", "Merge pools of one shape only")
    used = sorted((slot for pool in pools for slot in pool.slots), key=lambda slot: slot.node)
    spare = sorted((slot for pool in pools for slot in pool.spares), key=lambda slot: slot.node)
    return PoolPlan(name=name, slots=_numbered(used), spares=_numbered(spare, used))


def _numbered(slots: Sequence[Slot], before: Sequence[Slot] = ()) -> tuple[Slot, ...]:
    """The slots with indices and, on each node, local indices that go on behind those of `before`."""
    seen = Counter(slot.node for slot in before)
    numbered = []
    for index, slot in enumerate(slots, len(before)):
        numbered.append(replace(slot, index=index, local_index=seen[slot.node]))
        seen[slot.node] += 1
    return tuple(numbered)
