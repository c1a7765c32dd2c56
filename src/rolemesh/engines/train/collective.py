"""Collectives on a process group by itself. Used by the train engine.

The functions of `torch.distributed` want a registered default group; a worker's communicator has a group of its own, so that it can be
taken apart and formed again and several roles can share a process. The timeout is that of the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_reduce(group: ProcessGroup, tensor: torch.Tensor, op: Literal["sum", "min", "max"]) -> None:
    """Reduce `tensor` over all ranks of `group`, in place. Raises RuntimeError when a rank is lost or the group's timeout passes."""
    from torch.distributed import AllreduceOptions, ReduceOp

    options = AllreduceOptions()
    options.reduceOp = ReduceOp({"sum": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX}[op])
    group.allreduce([tensor], options).wait()
