"""Taking over published weights into a module, all or nothing as far as names and shapes go. Called by the engines' `load_weights`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import nn

from rolemesh.models.copying import copy_into
from rolemesh.protocols.engine import LastingWeights


class ParameterTable:
    """The parameters of a module by name, as `named_parameters()` gives them. A tied parameter may come under each of its names."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = dict(module.named_parameters())
        self._aliases = {
            name: parameter for name, parameter in module.named_parameters(remove_duplicate=False) if name not in self._parameters
        }
        self._foreign: set[str] = set()
        """Parameters that lie in memory for reading only."""

    def drop(self) -> None:
        """Free the memory; `restore` takes it again."""
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    def restore(self, device: torch.device) -> None:
        """Memory for all parameters, with anything in it: they have to be loaded."""
        for name, parameter in self._parameters.items():
            parameter.data = torch.empty(self._shapes[name], dtype=parameter.dtype, device=device)
        self._foreign.clear()

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy `weights` in; those that last, have a parameter's format and are where it is become the parameter. Raises ValueError as
        `checked`, and for two values of a tied parameter; parameters before the faulty one are then already overwritten, so the caller must
        not serve."""
        everything = self._parameters | self._aliases
        shapes = {name: parameter.shape for name, parameter in everything.items()}
        tied: list[tuple[str, torch.Tensor]] = []
        for name, value in checked(weights, shapes, optional=self._aliases):
            target = everything[name]
            if name in self._aliases:
                tied.append((name, value.clone()))  # valid only until the next is asked for
            elif isinstance(weights, LastingWeights) and (value.dtype, value.device) == (target.dtype, target.device):
                target.data, weights.kept = value, True
                self._foreign.add(name)
            else:
                self._copy(name, target, value)
        for name, value in tied:
            if not torch.equal(self._aliases[name], value.to(self._aliases[name])):
                raise ValueError(f"parameter {name!r} is tied in this model but came with other values than the one it is tied to")

    def _copy(self, name: str, target: nn.Parameter, value: torch.Tensor) -> None:
        if name in self._foreign:
            target.data = torch.empty_like(target)
            self._foreign.remove(name)
        copy_into(target, value)


def checked(
    weights: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, torch.Size], *, optional: Collection[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as they come. Raises ValueError for an unknown or doubled name, a wrong shape, and, once no more come, for names of
    `shapes` that did not come and are not `optional`."""
    seen: set[str] = set()
    for name, value in weights:
        if name not in shapes:
            raise ValueError(f"the model has no parameter {name!r}; send the names of model.named_parameters()")
        if shapes[name] != value.shape:
            raise ValueError(f"parameter {name!r} came with shape {list(value.shape)}, the model has {list(shapes[name])}")
        if name in seen:
            raise ValueError(f"parameter {name!r} came twice; send every parameter once")
        seen.add(name)
        yield name, value
    missing = [name for name in shapes if name not in seen and name not in optional]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"weights lack {', '.join(missing[:3])}{more}; send every parameter of the model")
