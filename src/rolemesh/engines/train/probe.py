"""Trying a model with a few tokens: that it is causal, and that packed rows come out as they do alone. Used by the train engines.

Trying is more reliable than a list of architectures: a model may mix positions by convolutions, or by a state that runs on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from rolemesh.engines.train.packing import Packing, use_plain_attention

logger = logging.getLogger(__name__)

Forward = Callable[[dict[str, Any]], Tensor]
"""Keyword arguments of a forward pass -> its output [B, N, ...]."""
LENGTHS: Final = (8, 8, 7, 3)
"""Rows that packing is tried with: two of equal length, one that is padded beside them, one by itself."""


def probe_tokens(model: nn.Module, device: torch.device) -> Tensor:
    """A few tokens [1, 8] to try a model with."""
    return torch.arange(8, device=device)[None] % int(cast(Any, model).get_input_embeddings().num_embeddings)


def try_rows(model: nn.Module, forward: Forward, probe: Tensor, *, packing: bool) -> bool:
    """Whether rows are to be packed, given that they should. Raises ValueError for a model that is not causal. `model` gets plain
    attention back when packing does not work."""
    found = forward({"input_ids": probe})
    other = probe.clone()
    other[0, -1] = probe[0, -2]
    if not near(forward({"input_ids": other})[:, :-1], found[:, :-1]):
        raise ValueError(
            f"{type(model).__name__} is not causal: a later token changed the prediction of an earlier one; use a causal model"
        )
    if packing and not _packs(forward, probe):
        logger.warning("%s: packed rows come out otherwise than alone, so rows are padded", type(model).__name__)
        use_plain_attention(model)
        return False
    return packing


def _packs(forward: Forward, probe: Tensor) -> bool:
    rows = [probe[:, :length].roll(shift, 1) for shift, length in enumerate(LENGTHS)]
    packing = Packing.of(np.array(LENGTHS), probe.device)
    packed = forward({"input_ids": torch.cat(rows, 1), "position_ids": packing.position_ids, "packing": packing})
    return near(packed, torch.cat([forward({"input_ids": row}) for row in rows], 1))


def near(found: Tensor, expected: Tensor) -> bool:
    """Equal but for the order in which sums are taken."""
    if found.dtype == torch.float32:
        return torch.allclose(found, expected, rtol=1e-3, atol=1e-4)
    return float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())  # products of rows in other company, in bfloat16
