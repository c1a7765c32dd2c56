"""Process groups of one rank, and collectives on them. Used by the train engines.

Ranks stand in a grid: rank = data * tensor_size + tensor. Ranks of one row share a copy of the model (`tensor`), ranks of one column
have the same part of it and different rows of data (`data`). The functions of `torch.distributed` want a registered default group; a
worker's communicator has groups of its own, so that they can be taken apart and formed again and several roles can share a process.
The timeout is that of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups that this rank is in; None for one that would hold this rank alone."""

    world: ProcessGroup | None = None
    data: ProcessGroup | None = None
    tensor: ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return 0 if self.world is None else self.world.rank()

    @property
    def data_size(self) -> int:
        return 1 if self.data is None else self.data.size()

    @property
    def tensor_size(self) -> int:
        return 1 if self.tensor is None else self.tensor.size()

    @property
    def leads(self) -> bool:
        """Whether this rank is the one of its row that records what all of the row know."""
        return self.rank % self.tensor_size == 0


def all_reduce(group: ProcessGroup | None, tensor: torch.Tensor, op: Literal["sum", "max"]) -> None:
    """Reduce `tensor` over all ranks of `group`, in place. Raises RuntimeError when a rank is lost or the group's timeout passes."""
    if group is None:
        return
    from torch.distributed import AllreduceOptions, ReduceOp

    options = AllreduceOptions()
    options.reduceOp = ReduceOp(ReduceOp.SUM if op == "sum" else ReduceOp.MAX)
    group.allreduce([tensor], options).wait()


def all_gather(group: ProcessGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks of `group`, which have one shape, in rank order. Raises as `all_reduce`."""
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather([found], [tensor]).wait()
    return found


def agree(group: ProcessGroup | None, number: int, device: torch.device) -> int:
    """The largest number of all ranks."""
    found = torch.tensor([number], device=device)
    all_reduce(group, found, "max")
    return int(found)
