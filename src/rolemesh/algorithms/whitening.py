"""Mean and spread of numbers that lie in many places, from sums by row, so that no cut into shards changes them. Pure numpy, float64.

A worker reduces its rows (`row_moments`), the controller puts the rows of all workers together (`combined`). What is weighed is what is
counted: the tokens of each row for advantages of tokens, 1 for each row when an answer has one advantage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

EPS: Final = 1e-6
"""Added to a spread before dividing by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Of `count` numbers."""

    count: int
    mean: float
    """0 without any."""
    std: float
    """Sample standard deviation (ddof 1), 0 with fewer than two."""

    @property
    def scale(self) -> float:
        """1 / (std + eps): what centred numbers are multiplied with to have spread 1."""
        return 1.0 / (self.std + EPS)


def row_moments(values: npt.NDArray[Any], row: Ints, rows: int) -> tuple[Floats, Floats]:
    """(mean [N], sum of squared distances from it [N]) of the `values` [K] of each of `rows` rows; `row` [K] says whose each is."""
    numbers = np.asarray(values, dtype=np.float64)
    count = np.bincount(row, minlength=rows)
    mean: Floats = np.bincount(row, numbers, minlength=rows) / np.maximum(count, 1)
    # Two passes: squares of the distances, never the difference of two large sums, which loses a small spread.
    squares: Floats = np.bincount(row, (numbers - mean[row]) ** 2, minlength=rows).astype(np.float64)
    return mean, squares


def combined(counts: npt.NDArray[Any], means: npt.ArrayLike, spreads: npt.ArrayLike) -> Moments:
    """Moments of all numbers together, from the count, mean and sum of squared distances of each row.

    Chan, Golub & LeVeque 1983, "Algorithms for computing the sample variance": squares of differences only, never the
    difference of two large sums, which would lose a small spread.
    """
    count = int(counts.sum())
    weights, mean_of_row = np.asarray(counts, dtype=np.float64), np.asarray(means, dtype=np.float64)
    mean = float(weights @ mean_of_row) / max(count, 1)
    squares = float(np.sum(np.asarray(spreads, dtype=np.float64)) + weights @ (mean_of_row - mean) ** 2)
    return Moments(count=count, mean=mean, std=float(np.sqrt(squares / max(count - 1, 1))))
