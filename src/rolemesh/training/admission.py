"""Whether a run may start on a cluster that others use too: its plan against what is free now, and the wait until that is enough.

Called by `launch.py` and `tasks.py` for runs that join a cluster, and by `rolemesh plan --live`.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rolemesh.config.schema import Config
from rolemesh.errors import Problem, ResourceError, RolemeshError
from rolemesh.plan import Inventory, Plan, needed_nodes, nodes_allowed
from rolemesh.runtime import Backend, create_backend

PAUSE_SECONDS = 1.0
"""Between two looks at a cluster that has no room yet."""
TELL_SECONDS = 5.0
"""A wait is told again after these, and at once when its reason changes."""
PROBE_FOR_REPORT_SECONDS = 3.0
"""A refusal does not wait longer for what it would be nice to know."""

SHOWN = 8
"""Nodes whose address is told."""
REMEDY = "Raise cluster.wait, or make room as said above"

Make = Callable[[Inventory], Plan]


def joins_cluster(config: Config) -> bool:
    """Whether the run uses a Ray cluster that is there already."""
    return config.backend == "ray" and config.cluster.address is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A run that waits for room."""

    seconds: float
    limit: float
    until: float
    """Wall clock."""
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        until = time.strftime("%H:%M:%S", time.localtime(self.until))
        causes = "; ".join(str(problem) for problem in self.problems)
        return f"for room on the cluster, {self.seconds:.0f} of {self.limit:g} s, until {until}: {causes}"


async def admitted(config: Config, backend: Backend, make: Make, tell: Callable[[Wait], None]) -> Plan:
    """A plan without problems for the cluster as it is now, or as it will be within `cluster.wait` seconds. Raises ResourceError."""
    limit, began = config.cluster.wait, backend.time()
    asked, told = False, -TELL_SECONDS
    reasons: tuple[Problem, ...] = ()
    try:
        while True:
            waited = backend.time() - began
            plan = await survey(config, backend, make, report=waited >= limit)
            if not plan.problems:
                return plan
            if waited >= limit:
                late = Problem(subject="cluster.wait", need=f"waited {limit:g} s for this", free="no room", remedy=REMEDY)
                raise ResourceError(problems=[*plan.problems, *([late] if limit else [])])
            if plan.problems != reasons or waited - told >= TELL_SECONDS:
                tell(Wait(seconds=waited, limit=limit, until=time.time() + limit - waited, problems=plan.problems))
                told, reasons = waited, plan.problems
            if not asked:
                asked = True  # even if the request is interrupted
                await backend.ask_for(needed_nodes(config))
            await backend.sleep(min(PAUSE_SECONDS, limit - waited))
    finally:
        if asked:
            await backend.ask_for([])


async def survey(config: Config, backend: Backend, make: Make, *, report: bool = True) -> Plan:
    """The plan for what is free now. Where it would start something, processes look around first, and it is made again with what they
    see. Where it cannot, they do so for its `report` alone, and only if that is about GPUs, of which nodes may hide some; on the nodes
    that the config allows. No other node is touched."""
    inventory = await backend.inventory()
    plan = make(inventory)
    if not plan.problems:
        return make(await backend.probe(inventory, plan.used_nodes(), config.deadlines.create))
    if report and any(pool.gpus for pool in config.pools.values()):
        with suppress(RolemeshError):
            plan = make(await backend.probe(inventory, nodes_allowed(config, inventory.nodes), PROBE_FOR_REPORT_SECONDS))
    return plan


def live_plan(config: Config, make: Make) -> Plan:
    """The plan for the cluster of the config as it is now. Starts nothing but, on each node that matters, a process that looks around."""
    backend = create_backend("ray", address=config.cluster.address, pythonpath=python_path())
    try:
        return backend.run(survey(config, backend, make))
    finally:
        backend.stop()


def meeting_points(plan: Plan, interface: str | None) -> str:
    """The address of each node in use that ranks talk over."""
    used = sorted(plan.used_nodes())
    texts = [f"{plan.nodes[index].name} at {plan.nodes[index].address_of(interface)}" for index in used[:SHOWN]]
    return f"ranks meet on {', '.join(texts)}" + (f" and {len(used) - SHOWN} more nodes" if len(used) > SHOWN else "")


def python_path() -> list[str]:
    """Where the controller finds a user's own code (the working directory, PYTHONPATH, a script's folder), for its workers too."""
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [entry for entry in sys.path if Path(entry).is_dir() and not any(Path(entry).is_relative_to(folder) for folder in libraries)]
