"""Machines that need not exist, from the text of `--nodes`. Called by the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rolemesh.errors import ConfigError
from rolemesh.plan.devices import DEVICE_TYPES, GIB, UNKNOWN_DEVICE, device_type
from rolemesh.plan.schema import Inventory, NodeInfo

ASSUMED_CPUS_PER_GPU: Final = 8
ASSUMED_MEMORY_PER_GPU: Final = 128 * GIB
ASSUMED_MEMORY_PER_CPU: Final = 4 * GIB
MOST_DEVICES: Final = 200_000
"""GPUs, and nodes, of all groups together: more than any cluster has, and a plan of them still takes less than a minute."""

_NODES: Final = re.compile(r"(?P<count>\d+)x(?P<gpus>\d+)(?P<more>(?::[^:]+)*)")
_CPUS: Final = re.compile(r"(\d{1,5})c")
_MEMORY: Final = re.compile(r"(\d+)G")
_RESOURCE: Final = re.compile(r"(\d+(?:\.\d+)?)\*([A-Za-z_][\w.-]*)")
_LABEL: Final = re.compile(r"([A-Za-z_][\w./-]*)=([\w./-]+)")
_FORM: Final = "must look like 2x8 (two nodes with 8 GPUs each), 1x0:2c (2 CPUs, no GPUs), 2x8:64c:512G:H100:team=red:4*NPU or 2x8,1x4"


def parse_nodes(text: str | Sequence[str]) -> Inventory:
    """Imagined machines: `2x8` is two nodes with 8 GPUs each, `2x8,1x4` (or a list of texts) three nodes, `1x0:2c` a node without GPUs.

    Behind colons, in any order: `64c` CPUs, `512G` GiB of node memory, a type of accelerator (`H100`), labels (`team=red`) and other
    resources (`8*NPU`). Assumed where not said: 8 CPUs a GPU, the memory of the type of GPU (80 GiB without one), and node memory of
    128 GiB a GPU, at least 4 GiB a CPU. Raises ConfigError on any other form.
    """
    parts = [text] if isinstance(text, str) else list(text)
    nodes: list[NodeInfo] = []
    devices = 0
    for part in ",".join(parts).replace(" ", ",").split(","):
        if part:
            devices += _devices(part)
            if devices > MOST_DEVICES:
                raise ConfigError.one("--nodes", f"must be at most {MOST_DEVICES} nodes and GPUs", f"{devices} up to {part!r}")
            nodes += _group(part, len(nodes))
    if not nodes:
        raise ConfigError.one("--nodes", "must name at least one node", repr(",".join(parts)), "Write for example 2x8")
    return Inventory(nodes=tuple(nodes), origin=" ".join(f"--nodes {part}" for part in parts))


def _devices(part: str) -> int:
    match = _NODES.fullmatch(part)
    return int(match["count"]) * max(int(match["gpus"]), 1) if match else 0


def _group(part: str, first: int) -> list[NodeInfo]:
    match = _NODES.fullmatch(part)
    count, gpus = (int(match["count"]), int(match["gpus"])) if match else (0, 0)
    node = NodeInfo(name="", cpus=float(ASSUMED_CPUS_PER_GPU * gpus), memory_bytes=0, gpus=gpus)
    if match:
        for word in match["more"].split(":")[1:]:
            node = _read(node, word, part)
    if count == 0 or node.cpus == 0:
        raise ConfigError.one("--nodes", _FORM, repr(part), "Give at least one node, and CPUs where there are no GPUs")
    if not node.memory_bytes:
        node = replace(node, memory_bytes=int(max(ASSUMED_MEMORY_PER_GPU * gpus, ASSUMED_MEMORY_PER_CPU * node.cpus)))
    if gpus > 0 or node.gpu_type:
        node = replace(node, gpu_memory_bytes=(device_type(node.gpu_type) or UNKNOWN_DEVICE).memory_bytes)
    return [replace(node, name=f"node-{first + offset}") for offset in range(count)]


def _read(node: NodeInfo, word: str, part: str) -> NodeInfo:
    if found := _CPUS.fullmatch(word):
        return replace(node, cpus=float(found[1]))
    if found := _MEMORY.fullmatch(word):
        return replace(node, memory_bytes=int(found[1]) * GIB)
    if found := _RESOURCE.fullmatch(word):
        return replace(node, resources={**node.resources, found[2]: float(found[1])})
    if found := _LABEL.fullmatch(word):
        return replace(node, labels={**node.labels, found[1]: found[2]})
    if device_type(word) or re.fullmatch(r"[A-Z][A-Za-z0-9-]*\d[A-Za-z0-9-]*", word):
        return replace(node, gpu_type=word)
    known = ", ".join(device.name for device in DEVICE_TYPES)
    raise ConfigError.one("--nodes", _FORM, f"{word!r} in {part!r}", f"Types of accelerators known by name: {known}")
