"""What machines there are: this one, or imagined ones (`--nodes 2x8`). A cluster's inventory comes from its backend, ordered by
`order_nodes`.

Called by the command line and by sessions; the result goes into `build_plan`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import psutil

from rolemesh.errors import ConfigError
from rolemesh.plan.gpus import visible_gpus
from rolemesh.plan.schema import Inventory, NodeInfo

GIB: Final = 1024**3
ASSUMED_CPUS_PER_GPU: Final = 8
ASSUMED_GPU_MEMORY: Final = 80 * GIB
ASSUMED_MEMORY_PER_GPU: Final = 128 * GIB
ASSUMED_MEMORY_PER_CPU: Final = 4 * GIB

_NODES = re.compile(r"^(?P<count>\d+)x(?P<gpus>\d+)(?::(?P<cpus>\d+)c)?$")


def local_inventory() -> Inventory:
    """This machine as its processes may use it: CPU affinity, container limits and `CUDA_VISIBLE_DEVICES` respected."""
    cpu_limit, memory_limit = cgroup_limits()
    gpus = visible_gpus()
    node = NodeInfo(
        name=socket.gethostname(),
        cpus=min(_usable_cpus(), cpu_limit),
        memory_bytes=min(psutil.virtual_memory().total, memory_limit),
        gpus=len(gpus),
        gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=0),
        gpu_type=gpus[0].name if gpus else "",
    )
    return Inventory(nodes=(node,), origin="this machine")


def _usable_cpus() -> float:
    if hasattr(os, "sched_getaffinity"):
        return float(len(os.sched_getaffinity(0)))
    return float(os.cpu_count() or 1)


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


def parse_nodes(text: str) -> Inventory:
    """Imagined machines: `2x8` is two nodes with 8 GPUs each, `2x8,1x4` three nodes, `2x8:64c` gives the CPUs of a node, `1x0:2c` is a
    node without GPUs.

    Assumed where not said: 8 CPUs a GPU, 80 GiB of memory on a GPU, and node memory of 128 GiB a GPU (4 GiB a CPU without GPUs).
    Raises ConfigError on any other form.
    """
    nodes: list[NodeInfo] = []
    for part in text.replace(" ", ",").split(","):
        if not part:
            continue
        match = _NODES.match(part)
        count, gpus = (int(match["count"]), int(match["gpus"])) if match else (0, 0)
        cpus = int(match["cpus"]) if match and match["cpus"] else ASSUMED_CPUS_PER_GPU * gpus
        if count == 0 or cpus == 0:
            raise ConfigError.one(
                "--nodes",
                "must look like 2x8 (two nodes with 8 GPUs each), 2x8:64c (64 CPUs a node), 1x0:2c (no GPUs) or 2x8,1x4",
                repr(part),
                "Give at least one node, and CPUs where there are no GPUs",
            )
        nodes += [_imagined(len(nodes) + offset, gpus, cpus) for offset in range(count)]
    if not nodes:
        raise ConfigError.one("--nodes", "must name at least one node", repr(text), "Write for example 2x8")
    return Inventory(nodes=tuple(nodes), origin=f"--nodes {text}")


def _imagined(index: int, gpus: int, cpus: int) -> NodeInfo:
    return NodeInfo(
        name=f"node-{index}",
        cpus=float(cpus),
        memory_bytes=max(ASSUMED_MEMORY_PER_GPU * gpus, ASSUMED_MEMORY_PER_CPU * cpus),
        gpus=gpus,
        gpu_memory_bytes=ASSUMED_GPU_MEMORY if gpus else 0,
    )


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
