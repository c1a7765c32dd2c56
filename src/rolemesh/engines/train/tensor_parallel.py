"""Tensor parallelism by the plan that a model of transformers brings: which layers are split over the ranks of a row, and how.

`colwise` splits the outputs of a layer, `rowwise` the inputs of the next one, so that a pair needs one sum over the ranks forward and
one backward (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Weights are plain tensors with this rank's block; everything that
is not in the plan is whole on each rank and computed alike. Used by the train engines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rolemesh.engines.train.groups import all_gather, all_reduce

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

COLWISE, ROWWISE, HEAD, PARTIAL = "colwise", "rowwise", "colwise_gather_output", "replicated_with_grad_allreduce"
ALIASES: Final = {"colwise_rep": HEAD}
"""Names of older versions."""
VOCABULARY: Final = "embedding_rowwise"
"""Splits an embedding by tokens: what a tied head wants too."""
WEIGHT_DIM: Final = {COLWISE: 0, HEAD: 0, VOCABULARY: 0, ROWWISE: 1}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How the modules of a model are split over a row of ranks."""

    styles: dict[str, str] = field(default_factory=dict)
    """By the name of the module."""
    dims: dict[str, int] = field(default_factory=dict)
    """Dimension along which a parameter is split, by its name."""
    partial: tuple[str, ...] = ()
    """Parameters whose gradient each rank has a part of."""


def tensor_plan(model: nn.Module, size: int) -> TensorPlan:
    """The plan for a row of `size` ranks; parts of `model` that are models of transformers bring it. Raises ValueError for a model that
    has none, or cannot be split so."""
    styles = dict(_styles(model))
    if COLWISE not in styles.values():
        raise ValueError(f"{_name(model)} has no plan for tensor parallelism in transformers; use tensor_parallel 1 for it")
    unknown = sorted(set(styles.values()) - {*WEIGHT_DIM, PARTIAL})
    if unknown:
        raise ValueError(
            f"{_name(model)} needs tensor parallelism of a kind that is not supported: {', '.join(unknown)}; use tensor_parallel 1"
        )
    _check_heads(model, size)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in [name for name, style in styles.items() if style in (HEAD, VOCABULARY)]:
        weight = cast(Tensor, modules[name].weight)
        same = [other for other, module in modules.items() if getattr(module, "weight", None) is weight]
        if weight.shape[0] % size:
            styles.pop(name, None)  # a vocabulary that cannot be divided stays whole on each rank
        else:
            styles |= {other: VOCABULARY if isinstance(modules[other], nn.Embedding) else HEAD for other in same}
    dims: dict[str, int] = {}
    for name, style in styles.items():
        if style in WEIGHT_DIM:
            dims |= dict(_parameter_dims(name, modules[name], style, size))
    parts = tuple(f"{name}.{key}" for name, style in styles.items() if style == PARTIAL for key, _ in modules[name].named_parameters())
    return TensorPlan(styles, dims, parts)


def _styles(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(module, style) of every module that a plan names: the outermost model of transformers in `model` speaks for those inside."""
    from transformers import PreTrainedModel

    outer = next((name for name, module in model.named_modules() if isinstance(module, PreTrainedModel)), None)
    if outer is None:
        return
    inner = model.get_submodule(outer)
    names = [name for name, _ in (*inner.named_modules(), *inner.named_parameters())]
    for pattern, style in (cast(Any, inner).tp_plan or {}).items():
        matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        yield from ((f"{outer}.{name}".lstrip("."), ALIASES.get(style, style)) for name in names if matches(name))


def _check_heads(model: nn.Module, size: int) -> None:
    config = next(cast(Any, module).config for module in model.modules() if hasattr(module, "config"))
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if heads is not None and heads % size:
            raise ValueError(f"tensor_parallel must divide {key} of {_name(model)}, which is {heads}; found {size}")


def _parameter_dims(name: str, module: nn.Module, style: str, size: int) -> Iterator[tuple[str, int]]:
    if not isinstance(module, nn.Embedding if style == VOCABULARY else nn.Linear):
        raise ValueError(f"{name} is a {type(module).__name__} and cannot be split {style}; use tensor_parallel 1")
    for key, parameter in module.named_parameters():
        dim = WEIGHT_DIM[style]
        if key == "bias" and style == ROWWISE:
            continue
        if parameter.shape[dim] % size:
            raise ValueError(f"tensor_parallel must divide dimension {dim} of {name}.{key}, which is {parameter.shape[dim]}; found {size}")
        yield f"{name}.{key}", dim


def _name(model: nn.Module) -> str:
    return type(next((module for module in model.modules() if hasattr(module, "config")), model)).__name__


def split_forward(model: nn.Module, plan: TensorPlan, group: ProcessGroup) -> None:
    """Make the modules of the plan compute with this rank's block of their weights."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, style in plan.styles.items():
        if style in _FORWARD:
            modules[name].forward = partial(_FORWARD[style], modules[name], group)


def _colwise(module: nn.Linear, group: ProcessGroup, hidden: Tensor) -> Tensor:
    return F.linear(_apply(_Same, hidden, group), module.weight, module.bias)


def _rowwise(module: nn.Linear, group: ProcessGroup, hidden: Tensor) -> Tensor:
    found = _apply(_Sum, F.linear(hidden, module.weight), group)
    return found if module.bias is None else found + module.bias


def _head(module: nn.Linear, group: ProcessGroup, hidden: Tensor) -> Tensor:
    return _apply(_Gather, _colwise(module, group, hidden), group)


def _vocabulary(module: nn.Embedding, group: ProcessGroup, ids: Tensor) -> Tensor:
    size, first = module.weight.shape[0], group.rank() * module.weight.shape[0]
    local = ids - first
    mine = (local >= 0) & (local < size)
    padding = None if module.padding_idx is None else module.padding_idx - first  # a row that is not trained
    if padding is not None and not 0 <= padding < size:
        padding = None
    found = F.embedding(local.clamp(0, size - 1), module.weight, padding) * mine[..., None]
    return _apply(_Sum, found, group)


_FORWARD: Final[dict[str, Callable[..., Tensor]]] = {COLWISE: _colwise, ROWWISE: _rowwise, HEAD: _head, VOCABULARY: _vocabulary}


class _Same(torch.autograd.Function):
    """Forward as it is; the gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over all ranks; every rank has the whole gradient already."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    """The last dimension of all ranks, one behind the other; each rank takes its part of the gradient, which is the same on all."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.rank, ctx.size = group.rank(), tensor.shape[-1]
        return torch.cat(all_gather(group, tensor.contiguous()), dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].narrow(-1, ctx.rank * ctx.size, ctx.size).contiguous(), None


def _apply(function: type[torch.autograd.Function], tensor: Tensor, group: ProcessGroup) -> Tensor:
    return cast(Tensor, function.apply(tensor, group))  # type: ignore[no-untyped-call]


def _summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    found = tensor.clone(memory_format=torch.contiguous_format)
    all_reduce(group, found, "sum")
    return found
