"""Weights, gradients and moments spread over the data-parallel ranks: FSDP2 on a process group by itself. Used by the train engines.

FSDP2 wants a mesh whose group has a name in torch's table of groups; nothing else of `torch.distributed` is set up, and there is no
default group. A module that was sharded cannot be taken back, and is never used again after an exception passed through it: engines
build a new one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import GroupName
    from torch.distributed.tensor import DTensor

R = TypeVar("R")
_NUMBERS: Final = itertools.count()


class Root(nn.Module):
    """Runs any function of the model as its forward pass, so that the weights it uses are gathered by the hooks of `shard`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., R], *args: Any) -> R:
        return function(*args)


class Shards:
    """A model sharded over the ranks of a group, block by block."""

    def __init__(self, root: Root, blocks: list[nn.Module], group: ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        """The parameters of `root` have the shapes of whole ones and no contents (meta device); `fill` gives them theirs. Gathered
        weights and products are in `dtype`, gradients are summed in float32."""
        from torch.distributed.distributed_c10d import GroupName
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        self._name = GroupName(f"rolemesh-shards-{next(_NUMBERS)}")
        mesh = _mesh(self._name, group, device)
        policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
        for module in (*blocks, root):  # the root too is gathered anew for each pass, so that no pass sees weights of before a step
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # loss weights are global: gradients are summed
                module.set_force_sum_reduction_for_comms(True)
        self._model = root.model

    def fill(self, local: Mapping[str, Tensor]) -> None:
        """Give the parameters this rank's parts."""
        from torch.distributed.tensor import DTensor

        fresh: dict[int, nn.Parameter] = {}
        for name, parameter in self._model.named_parameters():
            sharded = cast(DTensor, parameter)
            filled = DTensor.from_local(
                local[name], sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
            )
            fresh[id(parameter)] = nn.Parameter(filled, requires_grad=parameter.requires_grad)
        replace_parameters(self._model, fresh)

    def parameters(self) -> dict[str, DTensor]:
        """Parameters by name. Only after the first pass are their parts where they stay."""
        return {name: cast("DTensor", parameter) for name, parameter in self._model.named_parameters()}

    def close(self) -> None:
        """Forget the group."""
        from torch._C._distributed_c10d import _unregister_process_group

        _unregister_process_group(self._name)


def _mesh(name: GroupName, group: ProcessGroup, device: torch.device) -> DeviceMesh:
    from torch._C._distributed_c10d import HashStore, _register_process_group
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    kind = ProcessGroup.BackendType.GLOO if device.type == "cpu" else ProcessGroup.BackendType.NCCL
    named = ProcessGroup(HashStore(), group.rank(), group.size())
    named._register_backend(device if device.type == "cpu" else torch.device("cuda"), kind, cast(Any, group))
    named._set_default_backend(kind)
    named._set_group_name(name)
    named._set_group_desc(name)
    _register_process_group(name, named)
    mesh = DeviceMesh(device.type, list(range(group.size())), mesh_dim_names=("data",), _init_backend=False, _rank=group.rank())
    mesh._dim_group_names = [name]
    mesh._pg_registry[name] = named
    return mesh


def replace_parameters(model: nn.Module, fresh: Mapping[int, nn.Parameter]) -> None:
    """Put new parameters in the places of those with these ids; tied ones stay tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = fresh[id(parameter)]
