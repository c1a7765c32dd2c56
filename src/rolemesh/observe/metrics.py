"""Metrics that can be taken in pieces and put together: per token window, per micro-batch, per worker.

Algorithms and roles record into a `Metrics`, workers return it with their call, and the controller merges those of all ranks before
it writes one row. Every value carries how it is reduced and its weight, so that uneven pieces are weighed by what they hold and no
rank is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self, SupportsFloat

Reduction = Literal["mean", "sum", "max", "min", "last"]


@dataclass(slots=True)
class _Entry:
    """One metric so far. A mean keeps the weighted total; the other reductions keep their result in `total`."""

    reduction: Reduction
    total: float
    weight: float = 1.0

    def absorb(self, other: _Entry) -> None:
        if self.reduction in ("mean", "sum"):
            self.total += other.total
            self.weight += other.weight
        elif self.reduction == "last":
            self.total = other.total
        else:
            self.total = _extreme(self.total, other.total, self.reduction)

    @property
    def value(self) -> float:
        return self.total / self.weight if self.reduction == "mean" else self.total


def _extreme(first: float, second: float, reduction: Reduction) -> float:
    """Larger or smaller of two numbers. Not-a-number wins: the built-in max and min would lose it or not, depending on the order."""
    if math.isnan(first) or math.isnan(second):
        return math.nan
    return max(first, second) if reduction == "max" else min(first, second)


class Metrics:
    """An accumulator of named numbers. Picklable; merging pieces gives what recording everything in one place would have given.

    A name keeps the reduction it was first recorded with; recording or merging it with another one raises ValueError.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def mean(self, name: str, value: SupportsFloat, weight: SupportsFloat = 1.0) -> None:
        """Mean of all recorded values, weighted (by tokens or rows, say). Weight 0 records nothing; a negative one raises ValueError."""
        weight = float(weight)
        if not weight >= 0:
            raise ValueError(f"metric {name!r}: weight must be 0 or more, got {weight}")
        if weight > 0:
            self._record(name, _Entry("mean", float(value) * weight, weight))

    def sum(self, name: str, value: SupportsFloat) -> None:
        self._record(name, _Entry("sum", float(value)))

    def max(self, name: str, value: SupportsFloat) -> None:
        """Largest recorded value; not-a-number if one was recorded."""
        self._record(name, _Entry("max", float(value)))

    def min(self, name: str, value: SupportsFloat) -> None:
        """Smallest recorded value; not-a-number if one was recorded."""
        self._record(name, _Entry("min", float(value)))

    def last(self, name: str, value: SupportsFloat) -> None:
        """The value recorded or merged last: for numbers that are equal everywhere, such as the learning rate."""
        self._record(name, _Entry("last", float(value)))

    def merge(self, other: Metrics) -> Self:
        """Take in everything that `other` holds, which stays as it is. Returns self."""
        for name, entry in other._entries.items():
            self._record(name, replace(entry))
        return self

    def reduce(self) -> dict[str, float]:
        """One number for each name, in the order in which the names first appeared."""
        return {name: entry.value for name, entry in self._entries.items()}

    def _record(self, name: str, entry: _Entry) -> None:
        known = self._entries.setdefault(name, entry)
        if known.reduction != entry.reduction:
            raise ValueError(f"metric {name!r} is reduced by {known.reduction}, and now {entry.reduction} was asked for; use another name")
        if known is not entry:
            known.absorb(entry)

    def __repr__(self) -> str:
        return f"Metrics({self.reduce()})"
