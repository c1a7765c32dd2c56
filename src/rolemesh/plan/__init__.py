"""Placement, CPU budget and memory of a run, computed before anything starts. Needs neither torch nor Ray.

`build_plan(config, inventory)` is pure and reports every problem at once; `rolemesh plan` prints its result, a session launches exactly it.
"""

from rolemesh.plan.build import build_plan
from rolemesh.plan.inventory import local_inventory, order_nodes, parse_nodes
from rolemesh.plan.render import plan_json, render_plan
from rolemesh.plan.schema import Inventory, NodeInfo, Plan, PoolPlan, Slot, WorkerPlan

__all__ = [
    "Inventory",
    "NodeInfo",
    "Plan",
    "PoolPlan",
    "Slot",
    "WorkerPlan",
    "build_plan",
    "local_inventory",
    "order_nodes",
    "parse_nodes",
    "plan_json",
    "render_plan",
]
