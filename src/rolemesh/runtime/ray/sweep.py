"""What runs have in a Ray cluster under their names, and freeing it: for `rolemesh clean`, and for a janitor whose run has lost its driver
(`python -m rolemesh.runtime.ray.sweep ADDRESS RUN orphaned`; without the last word it is freed even if it has a driver)."""

from __future__ import annotations

import math
import sys
import time
from typing import NamedTuple

import ray

from rolemesh.runtime.janitor_process import DRIVEN
from rolemesh.runtime.ray.cluster import join
from rolemesh.runtime.ray.holders import driven_runs, driven_until
from rolemesh.runtime.ray.standing import NAMESPACE, find_actor, find_group


class Standing(NamedTuple):
    """What a run has in a cluster: names of actors and of placement groups, and whether it has a driver, wherever that is."""

    actors: list[str]
    groups: list[str]
    driven: bool


def standing(address: str) -> dict[str, Standing]:
    """By run. Stays in the cluster."""
    if not ray.is_initialized():
        join(address)
    actors = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True) if row["namespace"] == NAMESPACE]
    groups = [row["name"] for row in ray.util.placement_group_table().values() if row["state"] != "REMOVED"]
    driven = driven_runs()
    runs = {name.partition("/")[0] for name in actors + groups if "/" in name} | driven
    return {run: Standing(_of(run, actors), _of(run, groups), run in driven) for run in sorted(runs)}


def _of(run: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(f"{run}/")]


def sweep(address: str, run: str, *, orphaned: bool = False) -> bool:
    """Kill the actors of a run and give its places back. False, and nothing done, if it is to be `orphaned` and has a driver."""
    actors, groups, driven = standing(address).get(run, Standing([], [], False))
    if orphaned and driven:
        return False
    for name in actors:
        if (actor := find_actor(name)) is not None:
            ray.kill(actor, no_restart=True)
    for name in groups:
        if (group := find_group(name)) is not None:
            ray.util.remove_placement_group(group)
    return True


def end_orphan(run: str, time_to_live: float) -> None:
    """In a process of a detached run, on a thread of its own: end the run when it has had no driver for so many seconds, this process too.

    The janitor of the last driver's machine does that sooner, unless it is lost together with that machine."""
    ended, since = math.inf, time.monotonic()
    while ended == math.inf or time.monotonic() < since + time_to_live:
        time.sleep(time_to_live / 4)
        latest = driven_until().get(run, 0.0)
        if latest != ended:  # also for a driver that came and went meanwhile
            ended, since = latest, time.monotonic()
    if (store := find_actor(f"{run}/kv")) is not None:
        ray.kill(store, no_restart=True)
    here = ray.util.get_current_placement_group()
    groups = [group for name in standing("")[run].groups if (group := find_group(name)) is not None]
    for group in sorted(groups, key=lambda group: here is not None and group.id == here.id):  # this process ends with its own
        ray.util.remove_placement_group(group)


if __name__ == "__main__":
    swept = sweep(*sys.argv[1:3], orphaned=len(sys.argv) > 3)
    ray.shutdown()
    sys.exit(0 if swept else DRIVEN)
