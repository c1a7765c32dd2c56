"""Weights of a model by name, and taking over weights from elsewhere. Used by all engines of this package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, as they are (no copies), tensors that are tied once under their first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def check_fit(expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size]) -> None:
    """Raise ValueError listing every name that is missing, unknown or of another shape."""
    problems = [f"{name} is missing" for name in expected.keys() - found.keys()]
    problems += [f"{name} is unknown" for name in found.keys() - expected.keys()]
    problems += [
        f"{name} has shape {tuple(found[name])}, expected {tuple(shape)}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    if problems:
        raise ValueError(f"state does not fit the model: {'; '.join(sorted(problems))}. Load the state of the same model")
