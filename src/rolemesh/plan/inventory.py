"""What machines there are: this one; imagined ones are made in `imagined.py`, and a cluster's inventory comes from its backend, ordered
by `order_nodes`.

Called by the command line and by sessions; the result goes into `build_plan`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

from rolemesh.plan.gpus import VISIBLE_DEVICES, visible_gpus
from rolemesh.plan.schema import Inventory, NodeInfo


def local_inventory(environment: Mapping[str, str] = os.environ) -> Inventory:
    """This machine as processes with this environment may use it: CPU affinity, container limits and `CUDA_VISIBLE_DEVICES` respected."""
    cpu_limit, memory_limit = cgroup_limits()
    gpus, visible = visible_gpus(environment), environment.get(VISIBLE_DEVICES)
    node = NodeInfo(
        name=socket.gethostname(),
        cpus=min(_usable_cpus(), cpu_limit),
        memory_bytes=min(psutil.virtual_memory().total, memory_limit),
        gpus=len(gpus),
        gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=0),
        gpu_type=gpus[0].name if gpus else "",
        address="127.0.0.1",
        visible_devices=None if visible is None else f"{VISIBLE_DEVICES}={visible}",
        interfaces=network_interfaces(),
    )
    return Inventory(nodes=(node,), origin="this machine")


def look_around() -> NodeInfo:
    """This machine as the parent of this process may use it, and how much memory is free. Runs on the nodes of a cluster, whose processes
    may have lost sight of devices that they did not ask for."""
    node = local_inventory(psutil.Process(os.getppid()).environ()).nodes[0]
    return replace(node, free_memory_bytes=psutil.virtual_memory().available)


def network_interfaces() -> dict[str, str]:
    """Address of each network interface of this machine by its name; IPv4 where it has both."""
    found: dict[str, str] = {}
    for family in (socket.AF_INET6, socket.AF_INET):
        for name, addresses in psutil.net_if_addrs().items():
            usable = [address.address for address in addresses if address.family == family]
            if usable:
                found[name] = usable[0]
    return dict(sorted(found.items()))


def _usable_cpus() -> float:
    if hasattr(os, "sched_getaffinity"):
        return float(len(os.sched_getaffinity(0)))
    return float(os.cpu_count() or 1)


def held_as_free(inventory: Inventory, run: str) -> Inventory:
    """The nodes for a run that goes on: what is reserved under its own names, `RUN/...`, it will take over or give back."""
    return replace(inventory, nodes=tuple(_held_as_free(node, f"{run}/") for node in inventory.nodes))


def _held_as_free(node: NodeInfo, prefix: str) -> NodeInfo:
    mine: dict[str, float] = {}
    for name, amounts in node.holders.items():
        if name.startswith(prefix):
            mine |= {resource: mine.get(resource, 0) + amount for resource, amount in amounts.items()}
    if not mine:
        return node
    free = node.free_resources
    return replace(
        node,
        free_cpus=None if node.free_cpus is None else node.free_cpus + mine.get("CPU", 0),
        free_gpus=None if node.free_gpus is None else node.free_gpus + round(mine.get("GPU", 0)),
        free_resources=None if free is None else {name: free.get(name, 0) + mine.get(name, 0) for name in node.resources},
        free_memory_bytes=None,  # nobody knows how much of what is taken its processes have
        holders={name: amounts for name, amounts in node.holders.items() if not name.startswith(prefix)},
    )


_NO_MEMORY_LIMIT: Final = 1 << 62


def cgroup_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> tuple[float, int]:
    """CPUs and bytes that the container (control group v2 or v1) allows; (inf, 2**62) where there is no limit.

    A limit may be set on any ancestor of the process's group, so the smallest on the way up counts.
    """
    cpus, memory = float("inf"), _NO_MEMORY_LIMIT
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",") if controllers else [""]
        for name in names:
            for folder in _ancestors(root / name, path):
                cpus = min(cpus, _cpu_quota(folder))
                memory = min(memory, _memory_limit(folder))
    return cpus, memory


def _ancestors(base: Path, path: str) -> list[Path]:
    # Inside a container the path may be the host's and not exist below the mounted root; the root itself then holds the limits.
    folder = base / path.strip("/")
    return [candidate for candidate in (folder, *folder.parents) if candidate.is_relative_to(base) and candidate.is_dir()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _cpu_quota(folder: Path) -> float:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    limited = quota.isdigit() and period.isdigit()
    return int(quota) / int(period) if limited else float("inf")


def _memory_limit(folder: Path) -> int:
    text = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    return int(text) if text.isdigit() else _NO_MEMORY_LIMIT


def order_nodes(names: Iterable[str]) -> list[str]:
    """Addresses and host names in stable numeric order: IPv4, then IPv6, then names with `worker-2` before `worker-10`."""
    return sorted(names, key=node_order_key)


def node_order_key(name: str) -> tuple[int, tuple[tuple[int, int, str], ...], str]:
    """Sort key of one node name; needs no name resolution. Equal only for equal names."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        parts = re.split(r"(\d+)", name)
        return 9, tuple((0, int(part), "") if part.isdigit() and part.isascii() else (1, 0, part) for part in parts), name
    return address.version, ((0, int(address), ""),), name
