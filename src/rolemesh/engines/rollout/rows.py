"""The engine's running sequences as arrays, one entry a row, so that a step has no Python loop over rows. Called by `builtin.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from rolemesh.engines.rollout.sampling import RowSettings, uniforms
from rolemesh.protocols.engine import Completion, Sampling, WeightSpan

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A queued request: at most `limit` tokens are generated (max_new_tokens, or what the model's context leaves)."""

    id: tuple[int, int]
    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    counter: tuple[int, int]
    """Decides the random numbers, with the seed."""
    start: int = 0
    """Position in the answer of the first token."""


class RowTable:
    """Rows 0..count-1 run. `slots` is the most rows, `longest` the most tokens of an answer."""

    def __init__(self, slots: int, longest: int, vocabulary: int, device: torch.device) -> None:
        self.count = 0
        self._device = device
        self._vocabulary = vocabulary
        self._all = np.arange(slots)
        self._tokens = np.zeros((slots, longest), np.int64)
        self._logprobs = np.zeros((slots, longest), np.float32)
        self._versions = np.zeros((slots, longest), np.int64)
        self._numbers = np.zeros((slots, longest), np.float64)
        self._length = np.zeros(slots, np.int64)
        self._limit = np.zeros(slots, np.int64)
        self._temperature = np.ones(slots, np.float32)
        self._top_p = np.ones(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._stop_set = np.zeros(slots, np.int64)
        self._ids = np.zeros((slots, 2), np.uint64)
        self._arrays = (
            *(self._tokens, self._logprobs, self._versions, self._numbers, self._length, self._limit, self._temperature),
            *(self._top_p, self._top_k, self._stop_set, self._ids),
        )
        self._stop_sets: dict[tuple[int, ...], int] = {}
        self._stops = np.zeros((0, vocabulary), np.bool_)
        self._settings: RowSettings | None = None

    def append(self, pendings: Sequence[Pending]) -> None:
        """Start rows count, count + 1, ... ."""
        rows = slice(self.count, self.count + len(pendings))
        self._ids[rows] = np.array([pending.id for pending in pendings], np.uint64)
        self._length[rows] = 0
        self._limit[rows] = [pending.limit for pending in pendings]
        self._temperature[rows] = [pending.sampling.temperature for pending in pendings]
        self._top_p[rows] = [pending.sampling.top_p for pending in pendings]
        self._top_k[rows] = [min(pending.sampling.top_k, self._vocabulary) for pending in pendings]
        self._stop_set[rows] = [self._stop_index(pending.sampling.stop_token_ids) for pending in pendings]
        seeds = np.array([pending.sampling.seed for pending in pendings], np.uint64)
        starts = np.array([pending.start for pending in pendings], np.uint64)
        counters = np.array([pending.counter for pending in pendings], np.uint64)
        for seed in np.unique(seeds):
            chosen = np.flatnonzero(seeds == seed)
            positions = int(self._limit[rows][chosen].max())
            draws, samples = counters[chosen].T
            self._numbers[chosen + self.count, :positions] = uniforms(int(seed), draws, samples, positions, starts[chosen])
        self.count += len(pendings)
        self._settings = None

    def _stop_index(self, tokens: tuple[int, ...]) -> int:
        if tokens not in self._stop_sets:
            table = np.zeros((1, self._vocabulary), np.bool_)
            table[0, list(tokens)] = True
            self._stop_sets[tokens] = len(self._stops)
            self._stops = np.concatenate([self._stops, table])
        return self._stop_sets[tokens]

    def last_tokens(self) -> Rows:
        """The newest token of each row, [count]."""
        tokens: Rows = self._tokens[self._all[: self.count], self._length[: self.count] - 1]
        return tokens

    def numbers(self, first: int) -> torch.Tensor:
        """The random number for the next token of each row from `first` on, float64."""
        return torch.from_numpy(self._numbers[self._all[first : self.count], self._length[first : self.count]]).to(self._device)

    def settings(self, first: int) -> RowSettings:
        """Sampling settings of the rows from `first` on; kept for all rows as long as the rows stay the same."""
        if first:
            return self._make_settings(slice(first, self.count))
        if self._settings is None:
            self._settings = self._make_settings(slice(0, self.count))
        return self._settings

    def _make_settings(self, rows: slice) -> RowSettings:
        settings = RowSettings()
        temperature, top_p, top_k = self._temperature[rows], self._top_p[rows], self._top_k[rows]
        greedy = temperature == 0
        if (temperature != 1).any():
            settings.temperature = torch.from_numpy(np.where(greedy, np.float32(1), temperature)).to(self._device)[:, None]
        if greedy.any():
            settings.greedy = torch.from_numpy(greedy).to(self._device)
        if (top_p < 1).any() or (top_k > 0).any():
            settings.top_p = torch.from_numpy(np.where(top_p < 1, top_p, np.float32(np.inf))).to(self._device)[:, None]
            settings.top_k = torch.from_numpy(np.where(top_k > 0, top_k, self._vocabulary)).to(self._device)[:, None]
        return settings

    def record(self, first: int, tokens: Rows, logprobs: npt.NDArray[np.float32], version: int) -> Rows:
        """Append a token to each row from `first` on; return the rows that end with it. Raises FloatingPointError for a log-probability
        that is not finite, before anything is recorded."""
        if not np.isfinite(logprobs).all():
            row = first + int(np.flatnonzero(~np.isfinite(logprobs))[0])
            raise FloatingPointError(
                f"weight version {version} gives logits that are not finite (request {self._id(row)}, token {int(self._length[row])}); "
                "abort the requests and load sound weights"
            )
        rows = slice(first, self.count)
        where = self._all[rows], self._length[rows]
        self._tokens[where] = tokens
        self._logprobs[where] = logprobs
        self._versions[where] = version
        self._length[rows] += 1
        ended = self._stops[self._stop_set[rows], tokens] | (self._length[rows] >= self._limit[rows])
        return np.flatnonzero(ended) + first

    def _id(self, row: int) -> tuple[int, int]:
        return int(self._ids[row, 0]), int(self._ids[row, 1])

    @property
    def ids(self) -> list[tuple[int, int]]:
        return [self._id(row) for row in range(self.count)]

    def find(self, ids: Collection[tuple[int, int]]) -> Rows:
        return np.array([row for row in range(self.count) if self._id(row) in ids], np.int64)

    def completion(self, row: int, version: int, reason: Literal["abort"] | None) -> Completion:
        """The answer of a row so far. Without a `reason` it ended by itself: by a stop token or by its limit."""
        length = int(self._length[row])
        stopped = bool(self._stops[self._stop_set[row], self._tokens[row, length - 1]])
        return Completion(
            id=self._id(row),
            token_ids=self._tokens[row, :length].tolist(),
            logprobs=self._logprobs[row, :length].tolist(),
            finish_reason=reason or ("stop" if stopped else "length"),
            spans=spans_of(self._versions[row, :length]) if length else (WeightSpan(version, 0, 0),),
        )

    def remove(self, rows: Rows) -> tuple[Rows, Rows]:
        """Take rows out and close the gaps with rows from the tail: row `to[i]` becomes what row `source[i]` was."""
        left = self.count - len(rows)
        to = rows[rows < left]
        tail = np.arange(left, self.count)
        source = tail[~np.isin(tail, rows)]
        for array in self._arrays:
            array[to] = array[source]
        self.count = left
        self._settings = None
        return to, source


def spans_of(versions: npt.NDArray[np.int64]) -> tuple[WeightSpan, ...]:
    """Runs of equal versions of an answer's tokens, of which there is at least one."""
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    stops = [*starts[1:], len(versions)]
    return tuple(WeightSpan(int(versions[start]), start, stop) for start, stop in zip(starts, stops, strict=True))
