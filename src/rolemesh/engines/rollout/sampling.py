"""Random numbers that depend on nothing but (seed, request id, position), and the choice of tokens with them. Called by the engines.

Counter-based: the n-th number of a request is a pure function of its name, so it is the same whatever else is generated, in which
order, on how many engines, and after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    `counter` has shape [4, ...] and holds 32-bit words in 64-bit places; so has the result. `key` is two 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> _HALF) ^ c1 ^ np.uint64(k0), right & _MASK, (left >> _HALF) ^ c3 ^ np.uint64(k1), left & _MASK
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def uniforms(seed: int, draws: npt.ArrayLike, samples: npt.ArrayLike, positions: int, starts: npt.ArrayLike = 0) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) for m requests at the `positions` response positions from `starts` on, shape [m, positions], 53 random bits each.

    Key: the 64 bits of `seed`. Counter: draw (64 bits), sample (32), position (32)."""
    draw, sample = np.asarray(draws, np.uint64), np.asarray(samples, np.uint64)
    counter = np.empty((4, len(draw), positions), np.uint64)
    counter[0], counter[1], counter[2] = (draw & _MASK)[:, None], (draw >> _HALF)[:, None], sample[:, None]
    counter[3] = np.asarray(starts, np.uint64)[..., None] + np.arange(positions, dtype=np.uint64)
    high, low, _, _ = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    numbers: npt.NDArray[np.float64] = ((high >> np.uint64(5)) * 2.0**26 + (low >> np.uint64(6))) / 2.0**53  # 27 and 26 bits
    return numbers


@dataclass(slots=True, kw_only=True)
class RowSettings:
    """How to sample n rows; None where no row asks for it, so that the common case costs nothing. All on the device of the logits."""

    temperature: torch.Tensor | None = None
    """[n, 1] float32; 1 for greedy rows, whose log-probabilities are those of temperature 1."""
    greedy: torch.Tensor | None = None
    """[n] bool."""
    top_k: torch.Tensor | None = None
    """[n, 1] int64, the vocabulary size where off."""
    top_p: torch.Tensor | None = None
    """[n, 1] float32, infinity where off; set whenever `top_k` is."""


def choose(logits: torch.Tensor, numbers: torch.Tensor, settings: RowSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token a row by inverting the cumulative distribution in float64.

    `logits` [n, vocabulary], `numbers` [n] float64 in [0, 1) -> token ids [n] int64 and their log-probabilities [n] float32 under
    softmax(logits / temperature), never under the distribution cut by top-k or top-p. Rows that are not finite give nan."""
    scaled = logits.float()
    if settings.temperature is not None:
        scaled = scaled / settings.temperature
    weights = torch.softmax(scaled, -1)
    kept = weights if settings.top_k is None or settings.top_p is None else _cut(weights, settings.top_k, settings.top_p)
    cumulative = kept.cumsum(-1, dtype=torch.float64)
    target = numbers[:, None] * cumulative[:, -1:]
    # right=True finds the first entry above the target, so a token of probability 0 is never taken; the clamp matters for nan only
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_max_(logits.shape[-1] - 1)[:, 0]
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy, scaled.argmax(-1), tokens)
    return tokens, weights.gather(-1, tokens[:, None])[:, 0].log_()


def _cut(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the `top_k` likeliest tokens, and of those all after the first whose sum reaches `top_p`."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    before = ordered.cumsum(-1) - ordered
    cut = (rank >= top_k) | ((before >= top_p) & (rank > 0))  # the likeliest stays, also where top_p is too small for float32
    return torch.zeros_like(weights).scatter_(-1, order, ordered.masked_fill(cut, 0.0))
