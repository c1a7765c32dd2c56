"""Cut rows into parts of equal work. Used by dispatch (`balanced by tokens`), `split_tokens` and the trainer's micro-batches.

Pure and deterministic: the same weights give the same parts in every process.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolemesh.errors import BatchError

Weights = Sequence[int] | Sequence[float] | NDArray[Any]


def balance(weights: Weights, parts: int) -> list[NDArray[np.int64]]:
    """Spread items over `parts` so that the sums of weights are near each other; positions [.] of each part, ascending.

    Longest processing time first (R. Graham, "Bounds on multiprocessing timing anomalies", 1969), then moves and swaps between
    the heaviest and the lightest part while they narrow the gap: as near as by largest differencing (Karmarkar and Karp), and the best
    there is more often for few items. Equal weights give counts as equal as possible (9 over 4 -> 3, 2, 2, 2). With at least `parts`
    items no part is empty; with fewer items the last parts are.
    Raises BatchError for negative or non-finite weights, or fewer than 1 part.
    """
    array = _checked(weights, parts)
    members: list[list[int]] = [[] for _ in range(parts)]
    # (sum, count, part): the count decides between equal sums, so items of weight 0 spread too and empty parts are filled first
    heap = [(0.0, 0, part) for part in range(parts)]
    values = array.tolist()
    for item in np.argsort(-array, kind="stable").tolist():
        total, count, part = heap[0]
        members[part].append(item)
        heapq.heapreplace(heap, (total + values[item], count + 1, part))
    return _refine([np.array(sorted(part), dtype=np.int64) for part in members], array)


def _checked(weights: Weights, parts: int) -> NDArray[np.float64]:
    array = np.asarray(weights, dtype=np.float64)
    if array.ndim != 1:
        raise BatchError(f"weights must be one number an item, got shape {array.shape}")
    if parts < 1:
        raise BatchError(f"items can be balanced over 1 or more parts, got {parts}")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        raise BatchError(f"weights must be finite and not negative, got {array[wrong[0]]} for item {wrong[0]}")
    return array


def _refine(members: list[NDArray[np.int64]], weights: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Move or swap items between the heaviest and lightest part while that narrows their gap, at most 8 times a part."""
    loads = np.array([weights[part].sum() for part in members])
    for _ in range(8 * len(members)):
        heavy, light = int(np.argmax(loads)), int(np.argmin(loads))
        found = _best_exchange(members[heavy], members[light], weights, float(loads[heavy] - loads[light]))
        if found is None:
            break
        out, back = found
        members[heavy] = np.sort(np.append(np.setdiff1d(members[heavy], out), back))
        members[light] = np.sort(np.append(np.setdiff1d(members[light], back), out))
        loads[heavy], loads[light] = weights[members[heavy]].sum(), weights[members[light]].sum()
    return members


def _best_exchange(
    heavy: NDArray[np.int64], light: NDArray[np.int64], weights: NDArray[np.float64], gap: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """(item to give, items to take back: one or none) that brings the two parts nearest; None when nothing narrows the gap.

    Giving weight a and taking b changes the gap to |gap - 2 (a - b)|, so for each a the best b lies next to a - gap / 2."""
    if len(heavy) == 0:
        return None
    order = np.argsort(weights[light], kind="stable")
    candidates = np.concatenate(([-1], light[order]))  # -1: take nothing back, weight 0, so the weights stay sorted
    candidate_weights = np.concatenate(([0.0], weights[light[order]]))
    given = weights[heavy]
    right = np.clip(np.searchsorted(candidate_weights, given - gap / 2), 0, len(candidates) - 1)
    left = np.maximum(right - 1, 0)
    gap_left, gap_right = np.abs(gap - 2 * (given - candidate_weights[left])), np.abs(gap - 2 * (given - candidate_weights[right]))
    best = int(np.argmin(np.minimum(gap_left, gap_right)))
    chosen = int(left[best] if gap_left[best] <= gap_right[best] else right[best])
    # a relative margin, so that rounding in sums of floats cannot make two parts exchange items for ever
    if min(gap_left[best], gap_right[best]) >= gap * (1 - 1e-12):
        return None
    return heavy[best : best + 1], candidates[chosen : chosen + 1] if chosen else np.empty(0, dtype=np.int64)


def token_chunks(counts: Weights, max_tokens: int, *, padded: bool = True) -> list[list[int]]:
    """Micro-batches under a budget of tokens: rows x longest <= max_tokens where rows are padded, else their sum. Positions of each,
    ascending; longest rows first.

    Rows of similar length go together, so little is padded; a row longer than the budget is a micro-batch of its own. The longest
    come first so that a budget too large for the memory shows at once. `counts` [N] are token counts.
    """
    array = _checked(counts, 1)
    if max_tokens < 1:
        raise BatchError(f"max_tokens must be 1 or more, got {max_tokens}")
    order = np.argsort(-array, kind="stable")
    sums = np.cumsum(array[order])
    chunks, start = [], 0
    while start < len(order):
        longest, done = array[order[start]], sums[start] - array[order[start]]
        if not padded:
            rows = int(np.searchsorted(sums, done + max_tokens, side="right")) - start
        else:
            rows = len(order) if longest == 0 else int(max_tokens // longest)
        chunks.append(np.sort(order[start : start + max(1, rows)]).tolist())
        start += max(1, rows)
    return chunks
