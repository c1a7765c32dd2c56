"""Token rewards -> advantages and returns by generalized advantage estimation. Pure numpy, float64; `Ppo` calls it in a worker.

Rows are ragged: flat arrays [T], row after row, and `offsets` [N + 1] that say where each row begins. Only the tokens of a mask take
part. The others (those that a tool wrote, or those of rows without a reward) are skipped as if they were not there: the state after a
sampled token is the one before the next *sampled* token of the row, however many tool tokens lie between.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rolemesh.algorithms.whitening import Floats, Ints

Bools = npt.NDArray[np.bool_]


def token_rewards(
    scores: npt.ArrayLike, offsets: Ints, mask: Bools, *, kl: npt.NDArray[Any] | None = None, coefficient: float = 0.0
) -> Floats:
    """Reward [T] of every token: -coefficient * `kl` [T] at each of the mask, and the row's score [N] added at its last one; else 0.

    Ziegler et al. 2019, arXiv:1909.08593, where the divergence is part of the reward.
    """
    rewards = np.zeros(len(mask))
    if kl is not None:
        rewards[mask] = -coefficient * kl[mask]
    tokens, row = np.flatnonzero(mask), _row(offsets)
    last = tokens[np.append(np.diff(row[tokens]) != 0, True)[: len(tokens)]]
    rewards[last] += np.asarray(scores, dtype=np.float64)[row[last]]
    return rewards


def gae(
    rewards: npt.NDArray[Any], values: npt.NDArray[Any], offsets: Ints, mask: Bools, *, gamma: float, lam: float
) -> tuple[Floats, Floats]:
    """(advantages, returns), both [T] and 0 outside the mask, from `rewards` and `values` [T] of the tokens.

    `values[t]` is the value of the state before token t. From the last token of each row backwards, with V and A 0 after it,

        delta_t = r_t + gamma V_(t+1) - V_t        A_t = delta_t + gamma lam A_(t+1)        return_t = A_t + V_t

    Schulman et al. 2016, arXiv:1506.02438, eq. 16. The end of a row is the end of the episode, also of a row that was cut at a length
    limit. A row's numbers do not depend on the other rows, to the last bit.
    """
    tokens = np.flatnonzero(mask)
    reward, value = (np.asarray(column, dtype=np.float64)[tokens] for column in (rewards, values))
    lengths = np.bincount(_row(offsets)[tokens], minlength=len(offsets) - 1)
    ends = np.cumsum(lengths)
    advantage = np.zeros(len(tokens))
    for back in range(int(lengths.max(initial=0))):  # all rows at once, the token `back` places before each row's last
        rows = lengths > back
        at = ends[rows] - 1 - back
        ahead = 1 if back else 0
        next_value, next_advantage = value[at + ahead] * ahead, advantage[at + ahead] * ahead
        advantage[at] = reward[at] + gamma * next_value - value[at] + gamma * lam * next_advantage
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    advantages[tokens], returns[tokens] = advantage, advantage + value
    return advantages, returns


def _row(offsets: Ints) -> Ints:
    """[T] row of every token."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
