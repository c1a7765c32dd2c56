"""What a Ray cluster consists of: its nodes, what is free on them, who holds the rest, and what only a process on a node can tell."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rolemesh.errors import DeadlineExceeded, RolemeshError
from rolemesh.plan.inventory import look_around, node_order_key
from rolemesh.plan.ledger import DEVICES
from rolemesh.plan.schema import NODE_ID, Inventory, NodeInfo
from rolemesh.runtime.calls import together
from rolemesh.runtime.ray.holders import SLACK, Holdings, find_holders, whole_devices
from rolemesh.runtime.ray.waiting import import_failure, in_time

NODES_SECONDS = 30.0

ACCELERATOR = "accelerator_type:"
TRACE = 0.001
"""Of the mark of an accelerator type that a request carries, so that a node with the mark serves any number of them."""
OWN_MARKS = ("node:", ACCELERATOR, "bundle_group")
OWN_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
"""What Ray counts beside accelerators and a user's own resources."""


async def find_inventory() -> Inventory:
    """The nodes that are alive. Ray asks its head node and blocks meanwhile, so a thread does it."""
    return await in_time(NODES_SECONDS, asyncio.to_thread(_inventory), "Ray's list of nodes")


def _inventory() -> Inventory:
    # What is free on each node has no public call without Ray's dashboard; the public `available_resources` only has the sum.
    free, holdings = ray._private.state.available_resources_per_node(), find_holders()
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: (node_order_key(node["NodeName"]), node["NodeID"]))
    times = Counter(node["NodeName"] for node in alive)
    nodes = tuple(_node_info(node, times[node["NodeName"]] == 1, free.get(node["NodeID"], {}), holdings) for node in alive)
    return Inventory(nodes=nodes, origin="ray cluster", pending=holdings.pending)


def _node_info(node: Mapping[str, Any], alone: bool, free: Mapping[str, float], holdings: Holdings) -> NodeInfo:
    key, total = node["NodeID"], node["Resources"]
    others = [name for name in total if name not in OWN_RESOURCES and not name.startswith(OWN_MARKS)]
    left = {name: free.get(name, 0.0) for name in ("CPU", "GPU", *others)}
    holders = {
        holder: {name: amount for name, amount in amounts.items() if name in left and amount > SLACK}
        for holder, amounts in holdings.on(key).items()
    }
    rest = {name: total.get(name, 0.0) - left[name] - sum(held.get(name, 0.0) for held in holders.values()) for name in left}
    if rest := {name: amount for name, amount in rest.items() if amount > SLACK}:
        holders["others"] = rest
    for name in left:
        if name in DEVICES:
            left[name] = whole_devices(total.get(name, 0.0), left[name], holdings.pieces(key, name))
    return NodeInfo(
        # Several nodes of a test cluster share one address.
        name=node["NodeName"] if alone else f"{node['NodeName']}#{key[:6]}",
        address=node["NodeManagerAddress"],
        cpus=float(total.get("CPU", 0)),
        gpus=int(total.get("GPU", 0)),
        gpu_type=next((name.removeprefix(ACCELERATOR) for name in total if name.startswith(ACCELERATOR)), ""),
        memory_bytes=int(total.get("memory", 0)),
        resources={name: total[name] for name in others},
        labels=node["Labels"],
        free_cpus=left["CPU"],
        free_gpus=int(left["GPU"]),
        free_memory_bytes=int(free.get("memory", 0)),
        free_resources={name: left[name] for name in others},
        holders={name: held for name, held in holders.items() if held},
    )


async def probe_nodes(inventory: Inventory, nodes: Collection[int], deadline: float) -> Inventory:
    """The inventory with what processes on these nodes see. Raises RolemeshError naming a node where they cannot run."""

    seen: dict[int, NodeInfo] = {}
    look = ray.remote(num_cpus=0, max_retries=0)(look_around)

    async def probe(index: int) -> None:
        node = inventory.nodes[index]
        here = NodeAffinitySchedulingStrategy(node.labels[NODE_ID], soft=False)
        try:
            sight: NodeInfo = await look.options(scheduling_strategy=here).remote()
        except RayError as error:
            raise RolemeshError(text=import_failure(node.name, error) or f"node {node.name} runs no process: {error}") from error
        seen[index] = _seen(node, sight)

    try:
        async with asyncio.timeout(deadline):
            await together(probe(index) for index in nodes)
    except TimeoutError as error:
        silent = ", ".join(inventory.nodes[index].name for index in nodes if index not in seen)
        raise DeadlineExceeded(waiter="the controller", subject=f"a first process on {silent}", seconds=deadline) from error
    return replace(inventory, nodes=tuple(seen.get(index, node) for index, node in enumerate(inventory.nodes)))


def _seen(node: NodeInfo, sight: NodeInfo) -> NodeInfo:
    """Counts stay those of Ray; memory is what both allow."""
    return replace(
        node,
        memory_bytes=min(node.memory_bytes, sight.memory_bytes),
        free_memory_bytes=min(node.usable_memory, sight.memory_bytes, sight.usable_memory),
        gpu_memory_bytes=sight.gpu_memory_bytes if node.gpus else 0,
        gpu_type=node.gpu_type or (sight.gpu_type if node.gpus else ""),
        visible_devices=sight.visible_devices,
        interfaces=sight.interfaces,
    )


async def request_nodes(wanted: Sequence[NodeInfo]) -> None:
    """Tell Ray's autoscaler what the cluster should have room for: what others hold, and these nodes; nothing beyond what is in use when
    there are none. The latest request of all programs is the one that counts."""

    def ask() -> None:
        held = [amounts for node in _inventory().nodes for amounts in node.holders.values()] if wanted else []
        bundles = [{name: amount for name, amount in amounts.items() if amount} for amounts in (*held, *map(_bundle, wanted))]
        selectors: list[dict[str, str]] = [{}] * len(held) + [dict(node.labels) for node in wanted]
        request_resources(bundles=bundles, bundle_label_selectors=selectors)

    await in_time(NODES_SECONDS, asyncio.to_thread(ask), "Ray's autoscaler")


def _bundle(node: NodeInfo) -> dict[str, float]:
    kind = {f"{ACCELERATOR}{node.gpu_type}": TRACE} if node.gpu_type else {}
    return {"CPU": node.cpus, "GPU": node.gpus, **node.resources, **kind}
