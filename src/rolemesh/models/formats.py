"""Number formats as safetensors files name them. Used by whoever writes such files."""

from __future__ import annotations

from typing import Final

import torch

FORMATS: Final = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The widest first."""
