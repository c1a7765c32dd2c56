"""`PlacedModel`: a model set up on the ranks of some groups, each with its part of the weights. Made by `Replica`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rolemesh.engines.train.fsdp import Root, Shards, replace_parameters
from rolemesh.engines.train.gradients import FlatGradients, Gradients, ShardedGradients
from rolemesh.engines.train.groups import Groups, agree
from rolemesh.engines.train.layout import Layout, Part, Sliceable
from rolemesh.engines.train.tensor_file import Block, StoredTensor, TensorFile
from rolemesh.engines.train.tensor_parallel import TensorPlan, split_forward, tensor_plan
from rolemesh.engines.train.weights import check_fit, named_weights


@dataclass(frozen=True, slots=True)
class Weights:
    """Blocks of the weights of a model by name: all of each, or what one rank held."""

    blocks: Mapping[str, Sliceable]
    parts: Mapping[str, Part]

    @classmethod
    def whole(cls, blocks: Mapping[str, Sliceable], like: nn.Module) -> Self:
        return cls(blocks, {name: Part.all_of(tuple(tensor.shape)) for name, tensor in named_weights(like)})

    def read(self, name: str, part: Part) -> Tensor:
        return part.read(self.blocks[name], self.parts[name])


class PlacedModel:
    """The model and this rank's parts of its weights. After the first pass, `settle` has to be called."""

    parameters: Mapping[str, nn.Parameter]
    """This rank's parts of what is trained, as plain tensors."""
    tensors: Mapping[str, Tensor]
    """This rank's parts of all weights."""
    gradients: Gradients

    def __init__(
        self,
        skeleton: nn.Module,
        weights: Weights,
        groups: Groups,
        *,
        device: torch.device,
        dtype: torch.dtype,
        sharding: Literal["none", "fsdp"],
        activation_checkpointing: bool,
    ) -> None:
        """Raises ValueError for a model that cannot be split as the groups ask for, and when `weights` has other parts."""
        self.model = copy.deepcopy(skeleton)
        self.root = Root(self.model)
        self._plan = tensor_plan(self.model, groups.tensor_size) if groups.tensor is not None else TensorPlan()
        wholes = {name: part.whole for name, part in weights.parts.items()}
        names = {name for name, _ in self.model.named_parameters()}
        self.layout = Layout(
            groups=groups,
            sharded=sharding == "fsdp" and groups.data is not None,
            tensor_dims=self._plan.dims,
            buffers=frozenset(wholes.keys() - names),
        )
        self.parts = {name: self.layout.part(name, whole) for name, whole in wholes.items()}
        self._check_parts(weights, device)
        formats = {name: tensor.dtype for name, tensor in named_weights(self.model)}
        self.tensors = {name: weights.read(name, part).to(device, formats[name]) for name, part in self.parts.items()}
        self._prepare_modules(groups, recompute=activation_checkpointing)
        self._device = device
        self._shards = self._shard(groups, device, dtype)

    def _check_parts(self, weights: Weights, device: torch.device) -> None:
        """All ranks decide alike, or some would wait for those that found their parts missing."""
        lacking = [name for name, part in self.parts.items() if part.within(weights.parts[name]) is None]
        if agree(self.layout.groups.world, len(lacking), device):
            found = f"; this one needs {self.parts[lacking[0]]} of {lacking[0]} and has {weights.parts[lacking[0]]}" if lacking else ""
            raise ValueError(
                f"ranks do not hold the parts that this group gives them: it was formed with other ranks than before{found}. "
                "Load a checkpoint or snapshot of all ranks"
            )

    def _prepare_modules(self, groups: Groups, *, recompute: bool) -> None:
        if groups.tensor is not None:
            split_forward(self.model, self._plan, groups.tensor)
        if recompute:
            for block in blocks(self.model):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        for name in self.layout.buffers:
            module, _, key = name.rpartition(".")
            self.model.get_submodule(module)._buffers[key] = self.tensors[name]

    def _shard(self, groups: Groups, device: torch.device, dtype: torch.dtype) -> Shards | None:
        fresh: dict[int, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            local = self.tensors[name] if self.layout.shards is None else torch.empty(self._row_shape(name), device="meta")
            fresh[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
        replace_parameters(self.model, fresh)
        if self.layout.shards is None:
            return None
        shards = Shards(self.root, blocks(self.model), self.layout.shards, device, dtype)
        shards.fill(self.tensors)
        return shards

    def _row_shape(self, name: str) -> tuple[int, ...]:
        """Shape of what the ranks of a column have together."""
        unsharded = Layout(groups=self.layout.groups, sharded=False, tensor_dims=self._plan.dims)
        return unsharded.part(name, self.parts[name].whole).shape

    def settle(self) -> None:
        """The first pass is done: from here on `tensors`, `parameters` and `gradients` can be used."""
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        if self._shards is None:
            self.parameters = trained
            self.gradients = FlatGradients(self.parameters, self.layout, self._plan.partial, self._device)
            return
        sharded = self._shards.parameters()
        self.tensors = {**self.tensors, **{name: parameter.to_local().detach() for name, parameter in sharded.items()}}
        self.parameters = {name: nn.Parameter(self.tensors[name]) for name in trained}
        self.gradients = ShardedGradients(self.parameters, self.layout, self._plan.partial, self._device, sharded)

    def gathered(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of this weight, or of a gradient or moment of it. Collective where it is split."""
        return self.layout.gathered(name, tensor, self.parts[name].whole)

    def cut(
        self, given: Iterable[tuple[str, Tensor | StoredTensor]], *, keep: Callable[[str], bool] = lambda name: False
    ) -> dict[str, Tensor]:
        """Copies of this rank's parts of whole weights that come one after the other, so that no more than one of these is held. Those of
        which `keep` is true must not come. Raises ValueError when names or shapes do not fit."""
        parts = {name: part for name, part in self.parts.items() if not keep(name)}
        shapes, found = dict[str, torch.Size](), dict[str, Tensor]()
        for name, weight in given:
            shapes[name] = weight.shape
            if name in parts and tuple(weight.shape) == parts[name].whole:
                found[name] = weight[parts[name].index].clone(memory_format=torch.contiguous_format)
            del weight  # before the next one comes
        check_fit({name: torch.Size(part.whole) for name, part in parts.items()}, shapes)
        return found

    def file(self, tensors: Mapping[str, tuple[str, Tensor]], changed: Mapping[str, Callable[[], Tensor]] | None = None) -> TensorFile:
        """A file that all ranks write together: `tensors` gives by name in the file a weight, and what this rank has there for it.
        `changed`, where it has that name, gives instead what is written, of the same shape and format, when it is written."""
        blocks = {}
        for key, (name, tensor) in tensors.items():
            own = self.layout.own(name, self.parts[name].whole) if tensor.ndim else Part.all_of(())
            index = own.within(self.parts[name]) if tensor.ndim else ()
            assert index is not None
            contents = (changed or {}).get(key, partial(Tensor.detach, tensor))
            blocks[key] = Block(own, tensor.dtype, partial(_cut, contents, index))
        return TensorFile(blocks, leads=self.layout.groups.rank == 0)

    def close(self) -> None:
        """Let go of the groups. The model must not be used afterwards."""
        if self._shards is not None:
            self._shards.close()
        for parameter in self.parameters.values():
            parameter.grad = None


def _cut(contents: Callable[[], Tensor], index: tuple[slice, ...]) -> Tensor:
    return contents()[index]


def without_weights(model: nn.Module) -> nn.Module:
    """A copy whose parameters have shapes and no contents."""
    empty: dict[int, Any] = {}
    for parameter in model.parameters():
        empty[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, empty)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that follow each other: its outermost list of modules."""
    return list(next((module for module in model.modules() if isinstance(module, nn.ModuleList)), ()))
