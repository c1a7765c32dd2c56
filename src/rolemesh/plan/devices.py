"""Types of accelerators: what a plan assumes of their memory and speed. Used for imagined nodes and by the cost model.

Dense rates without sparsity, as the makers state them:

* NVIDIA data sheets: H200 (2024), H100 SXM (2023), B200 (HGX, 2025), A100 80 GB and 40 GB SXM (2021), L40S (2023), L4 (2023), A10G (AWS g5
  page and A10 data sheet, 2021), V100 SXM2 (2018), T4 (2019). V100 and T4 have no bfloat16; their rate is that of float16.
* AMD data sheet: Instinct MI300X (2023).

Float32 is the rate of plain float32 products; TF32 is not used unless somebody switches it on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rolemesh.plan.constraints import same_type

GIB: Final = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator: memory in bytes, FLOP/s in each format, and bytes/s to its own memory."""

    name: str
    memory_bytes: int
    bfloat16: float
    float32: float
    bandwidth: float


def _device(name: str, memory_gib: int, bfloat16_tera: float, float32_tera: float, giga_bytes: float) -> Device:
    return Device(
        name=name,
        memory_bytes=memory_gib * GIB,
        bfloat16=bfloat16_tera * 1e12,
        float32=float32_tera * 1e12,
        bandwidth=giga_bytes * 1e9,
    )


DEVICE_TYPES: Final = (
    _device("B200", 180, 2250, 75, 7700),
    _device("H200", 141, 989, 67, 4800),
    _device("H100", 80, 989, 67, 3350),
    _device("A100-40G", 40, 312, 19.5, 1555),
    _device("A100-80G", 80, 312, 19.5, 2039),
    _device("A100", 80, 312, 19.5, 2039),
    _device("MI300X", 192, 1307, 163, 5300),
    _device("L40S", 48, 362, 91.6, 864),
    _device("L4", 24, 121, 30.3, 300),
    _device("A10G", 24, 70, 31.2, 600),
    _device("V100", 32, 125, 15.7, 900),
    _device("T4", 16, 65, 8.1, 320),
)

UNKNOWN_DEVICE: Final = _device("unknown", 80, 312, 19.5, 2039)
"""What is assumed of an accelerator that nobody knows: an A100."""


def device_type(name: str) -> Device | None:
    """The table's entry for a type as a cluster or driver names it; None for one that is not in it."""
    return next((device for device in DEVICE_TYPES if same_type(device.name, name)), None)
