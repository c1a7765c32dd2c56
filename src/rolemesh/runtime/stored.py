"""Large objects that are no batches (weights, for example): they stay with the worker that made them and travel by reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

C = TypeVar("C", tuple[Any, ...], Mapping[str, Any])


@dataclass(frozen=True, slots=True)
class Stored:
    """A reference to such an object, as the controller holds it. Given to a group's call, the worker receives the object itself."""

    ref: Any


@dataclass(frozen=True, slots=True)
class _Place:
    index: int


def take_out(args: tuple[Any, ...], kwargs: Mapping[str, Any], offset: int) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """Replace every Stored argument by its place among the call's blocks (from `offset`); returns the references too."""
    refs: list[Any] = []
    if not (args or kwargs):
        return args, {}, refs

    def place(value: Any) -> Any:
        if not isinstance(value, Stored):
            return value
        refs.append(value.ref)
        return _Place(offset + len(refs) - 1)

    return tuple(place(value) for value in args), {name: place(value) for name, value in kwargs.items()}, refs


def fill(values: C, blocks: Sequence[Any]) -> C:
    """The inverse, in the worker: put the objects where their places are."""

    def put(value: Any) -> Any:
        return blocks[value.index] if isinstance(value, _Place) else value

    if isinstance(values, tuple):
        return tuple(put(value) for value in values)
    return {name: put(value) for name, value in values.items()}
