"""What a Ray cluster consists of: its nodes, what is free on them, and who holds the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray

from rolemesh.errors import DeadlineExceeded
from rolemesh.plan.schema import NodeInfo
from rolemesh.runtime.ray.waiting import within

NODES_SECONDS = 30.0


async def find_nodes() -> dict[str, NodeInfo]:
    """The nodes that are alive by Ray's id. Ray asks its head node and blocks meanwhile, so a thread does it."""

    def ask() -> dict[str, NodeInfo]:
        # What is free on each node has no public call without Ray's dashboard; the public `available_resources` only has the sum.
        free = ray._private.state.available_resources_per_node()
        return {node["NodeID"]: _node_info(node, free.get(node["NodeID"], {})) for node in ray.nodes() if node["Alive"]}

    try:
        return await within(NODES_SECONDS, asyncio.to_thread(ask))
    except TimeoutError as error:
        raise DeadlineExceeded(waiter="the controller", subject="Ray's list of nodes", seconds=NODES_SECONDS) from error


def _node_info(node: Mapping[str, Any], free: Mapping[str, float]) -> NodeInfo:
    total = node["Resources"]
    accelerator = next((key.split(":", 1)[1] for key in total if key.startswith("accelerator_type:")), "")
    return NodeInfo(
        name=_node_name(node),
        cpus=float(total.get("CPU", 0)),
        memory_bytes=int(total.get("memory", 0)),
        gpus=int(total.get("GPU", 0)),
        gpu_type=accelerator,
        free_cpus=float(free.get("CPU", 0)),
        free_gpus=int(free.get("GPU", 0)),
    )


def _node_name(node: Mapping[str, Any]) -> str:
    """Address and a short id: several nodes of a test cluster share one address."""
    return f"{node['NodeManagerAddress']}#{node['NodeID'][:8]}"
