"""Placement, CPU budget and memory of a run, computed before anything starts. Needs neither torch nor Ray.

`build_plan(config, inventory)` is pure and reports every problem at once; `rolemesh plan` prints its result, a session launches exactly it.
Names are imported when they are used: a worker process knows nodes, and needs neither the options nor what draws a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolemesh.lazy import lazy_names

if TYPE_CHECKING:
    from rolemesh.plan.as_json import plan_json, plan_json_text
    from rolemesh.plan.build import RUN_HELPERS, Helper, build_plan
    from rolemesh.plan.constraints import nodes_allowed
    from rolemesh.plan.imagined import parse_nodes
    from rolemesh.plan.inventory import held_as_free, local_inventory, order_nodes
    from rolemesh.plan.needs import impossible, needed_nodes
    from rolemesh.plan.pools import merge_pools, split_pool
    from rolemesh.plan.render import render_plan
    from rolemesh.plan.schema import Inventory, NodeInfo, Plan, PoolPlan, Slot, WorkerPlan
    from rolemesh.plan.versions import VersionReport, check_versions, with_versions

__all__ = [
    "RUN_HELPERS",
    "Helper",
    "Inventory",
    "NodeInfo",
    "Plan",
    "PoolPlan",
    "Slot",
    "VersionReport",
    "WorkerPlan",
    "build_plan",
    "check_versions",
    "held_as_free",
    "impossible",
    "local_inventory",
    "merge_pools",
    "needed_nodes",
    "nodes_allowed",
    "order_nodes",
    "parse_nodes",
    "plan_json",
    "plan_json_text",
    "render_plan",
    "split_pool",
    "with_versions",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "as_json": ("plan_json", "plan_json_text"),
            "build": ("RUN_HELPERS", "Helper", "build_plan"),
            "constraints": ("nodes_allowed",),
            "imagined": ("parse_nodes",),
            "inventory": ("held_as_free", "local_inventory", "order_nodes"),
            "needs": ("impossible", "needed_nodes"),
            "pools": ("merge_pools", "split_pool"),
            "render": ("render_plan",),
            "schema": ("Inventory", "NodeInfo", "Plan", "PoolPlan", "Slot", "WorkerPlan"),
            "versions": ("VersionReport", "check_versions", "with_versions"),
        },
    )
