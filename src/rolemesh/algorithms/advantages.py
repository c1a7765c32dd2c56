"""Rewards of a step -> one advantage per answer. Pure numpy, float64, no state; the algorithms call it on the controller.

An answer without a usable reward (scoring failed or abstained: nan, or anything not finite) gets advantage 0 and takes no part in the
baseline of its siblings, as if it had never been sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rolemesh.algorithms.whitening import EPS, Floats, Ints, row_moments


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Rewards of each group (prompt), over its valid rows only. G groups in ascending order of their id."""

    group: Ints
    """[N] index into the arrays below of every row."""
    valid: npt.NDArray[np.bool_]
    """[N] whether the row has a finite reward."""
    count: Ints
    """[G] valid rows."""
    mean: Floats
    """[G] mean reward, 0 without valid rows."""
    std: Floats
    """[G] sample standard deviation (ddof 1), 0 with fewer than two valid rows."""
    low: Floats
    """[G] smallest reward, inf without valid rows."""
    high: Floats
    """[G] largest reward, -inf without valid rows."""

    @property
    def has_spread(self) -> npt.NDArray[np.bool_]:
        """[G] whether two answers of the group were rewarded differently, however little."""
        return self.high > self.low


def group_stats(rewards: npt.ArrayLike, groups: npt.NDArray[Any]) -> GroupStats:
    """Statistics of the finite `rewards` [N] of each group of `groups` [N]."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.shape != groups.shape or values.ndim != 1:
        raise ValueError(f"rewards and groups must be two vectors of one length, found shapes {values.shape} and {groups.shape}")
    ids, group = np.unique(groups, return_inverse=True)
    valid = np.isfinite(values)
    rows, of = values[valid], group[valid]
    count = np.bincount(of, minlength=len(ids))
    mean, squares = row_moments(rows, of, len(ids))
    low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.minimum.at(low, of, rows)
    np.maximum.at(high, of, rows)
    std = np.sqrt(squares / np.maximum(count - 1, 1))
    return GroupStats(group=group.astype(np.int64), valid=valid, count=count.astype(np.int64), mean=mean, std=std, low=low, high=high)


def group_advantages(rewards: npt.ArrayLike, groups: npt.NDArray[Any], *, normalize_std: bool, eps: float = EPS) -> Floats:
    """Advantage [N] of every row against the other answers to its prompt.

    With `normalize_std`, (r - mean) / (std + eps) with the sample standard deviation (ddof 1) of the group: GRPO, Shao et al. 2024,
    arXiv:2402.03300, eq. 3. Without, r - mean: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783. Rows without a finite reward get 0, and so
    does every row of a group without spread: exactly, whatever the rounding of its mean.
    """
    return advantages_from(group_stats(rewards, groups), rewards, normalize_std=normalize_std, eps=eps)


def advantages_from(stats: GroupStats, rewards: npt.ArrayLike, *, normalize_std: bool, eps: float = EPS) -> Floats:
    """`group_advantages` for statistics that are already there."""
    usable = stats.valid & stats.has_spread[stats.group]
    of = stats.group[usable]
    advantages = np.zeros(len(usable))
    advantages[usable] = np.asarray(rewards, dtype=np.float64)[usable] - stats.mean[of]
    if normalize_std:
        advantages[usable] /= stats.std[of] + eps
    return advantages
