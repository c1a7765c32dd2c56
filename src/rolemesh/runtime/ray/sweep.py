"""What runs have in a Ray cluster under their names, and freeing it: for `rolemesh clean`, and for a janitor whose run has lost its driver
(`python -m rolemesh.runtime.ray.sweep ADDRESS RUN`)."""

from __future__ import annotations

import sys

import ray

from rolemesh.runtime.ray.cluster import join
from rolemesh.runtime.ray.standing import NAMESPACE, find_actor, find_group


def standing(address: str) -> dict[str, tuple[list[str], list[str]]]:
    """Names of actors and of placement groups by run. Stays in the cluster."""
    if not ray.is_initialized():
        join(address)
    actors = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True) if row["namespace"] == NAMESPACE]
    groups = [row["name"] for row in ray.util.placement_group_table().values() if row["state"] != "REMOVED"]
    runs = {name.partition("/")[0] for name in actors + groups if "/" in name}
    return {run: tuple([name for name in names if name.startswith(f"{run}/")] for names in (actors, groups)) for run in sorted(runs)}  # type: ignore[misc]


def sweep(address: str, run: str) -> None:
    """Kill the actors of a run and give its places back."""
    actors, groups = standing(address).get(run, ([], []))
    for name in actors:
        if (actor := find_actor(name)) is not None:
            ray.kill(actor, no_restart=True)
    for name in groups:
        if (group := find_group(name)) is not None:
            ray.util.remove_placement_group(group)


if __name__ == "__main__":
    sweep(*sys.argv[1:])
    ray.shutdown()
