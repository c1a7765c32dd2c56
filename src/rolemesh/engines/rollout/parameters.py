"""Taking over published weights into a module, all or nothing as far as names and shapes go. Called by the engines' `load_weights`."""

from __future__ import annotations

from collections.abc import Iterable

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
        """Copy `weights` in; those that last, have a parameter's format and are where it is become the parameter. Raises ValueError for an
        unknown, doubled or missing name, a wrong shape, or two values of a tied one; parameters before the faulty one are then already
        overwritten, so the caller must not serve."""
        seen: set[str] = set()
        tied: list[tuple[str, torch.Tensor]] = []
        for name, value in weights:
            target = self._target(name, value)
            if name in seen:
                raise ValueError(f"parameter {name!r} came twice; send every parameter once")
            seen.add(name)
            if name in self._aliases:
                tied.append((name, value.clone()))  # valid only until the next is asked for
            elif isinstance(weights, LastingWeights) and (value.dtype, value.device) == (target.dtype, target.device):
                target.data, weights.kept = value, True
                self._foreign.add(name)
            else:
                self._copy(name, target, value)
        missing = [name for name in self._parameters if name not in seen]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ValueError(f"weights lack {', '.join(missing[:3])}{more}; send every parameter of the model")
        for name, value in tied:
            if not torch.equal(self._aliases[name], value.to(self._aliases[name])):
                raise ValueError(f"parameter {name!r} is tied in this model but came with other values than the one it is tied to")

    def _copy(self, name: str, target: nn.Parameter, value: torch.Tensor) -> None:
        if name in self._foreign:
            target.data = torch.empty_like(target)
            self._foreign.remove(name)
        copy_into(target, value)

    def _target(self, name: str, value: torch.Tensor) -> nn.Parameter:
        target = self._parameters.get(name)
        if target is None:
            target = self._aliases.get(name)
        if target is None:
            raise ValueError(f"the model has no parameter {name!r}; send the names of model.named_parameters()")
        if target.shape != value.shape:
            raise ValueError(f"parameter {name!r} came with shape {list(value.shape)}, the model has {list(target.shape)}")
        return target
