"""GPUs that processes on this machine may use, asked from `nvidia-smi` so that no CUDA library is loaded. Called by `inventory.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

QUERY_SECONDS: Final = 20.0
VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU: its physical index on the machine, and what it is."""

    index: int
    uuid: str
    name: str
    memory_bytes: int


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs of this machine in the order in which a process with this environment sees them; none without a working `nvidia-smi`."""
    return select_visible(installed_gpus(), environment.get(VISIBLE_DEVICES))


def installed_gpus() -> list[Gpu]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []  # installed but without a driver or a device, which is the same as no GPU
    return parse_query(answer.stdout)


def parse_query(text: str) -> list[Gpu]:
    """The answer of `nvidia-smi --query-gpu=index,uuid,memory.total,name`: one GPU a line, memory in MiB."""
    found = []
    for line in text.splitlines():
        index, uuid, memory, name = (part.strip() for part in line.split(",", 3))
        found.append(Gpu(index=int(index), uuid=uuid, name=name, memory_bytes=int(memory) * 2**20 if memory.isdigit() else 0))
    return found


def select_visible(installed: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """What `CUDA_VISIBLE_DEVICES` leaves, in its order. As in CUDA, the first entry that names no device ends the list.

    The position in the result is the number by which a process addresses the device; the physical index is not.
    """
    if visible is None:
        return list(installed)
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        gpu = next((gpu for gpu in installed if _names(entry.strip(), gpu)), None)
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return chosen


def _names(entry: str, gpu: Gpu) -> bool:
    return entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))


def device_numbers(visible: str) -> dict[str, int]:
    """Physical name in `CUDA_VISIBLE_DEVICES` -> number by which a process addresses it: `"3,5"` gives `{"3": 0, "5": 1}`."""
    return {entry.strip(): number for number, entry in enumerate(visible.split(",")) if entry.strip()}
