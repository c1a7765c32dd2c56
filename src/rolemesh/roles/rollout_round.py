"""Who answers which prompt: the book-keeping of one round of `rollout_manager.py`. Decides, and calls nobody.

The answers to one prompt form a piece and stay together, so that they share its prefill. A replica that is free takes pieces, always
the one with the least to do first, until it holds a certain number of rows; it then runs until some of them are answered, hands these
in and takes more. So engines never run empty while there is work, and a slow replica holds up no more than it has taken.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence

import numpy as np

from rolemesh.batch import BatchRef
from rolemesh.observe import Metrics

AHEAD = 1.5
"""Rows that a replica holds for each of its slots: what ends is followed at once by what waits in the engine."""
HAND_IN = 4
"""A replica hands in after this part of its slots, while others still wait: engines admit in batches of about that size."""
UNEVEN = 3.0
"""A replica with so many times the mean is worth a warning."""


class Round:
    """Rows of one batch, by position: waiting, held by a replica, or answered. `answer` is the expected length of one in tokens."""

    def __init__(self, batch: BatchRef, *, replicas: int, slots: int, answer: float) -> None:
        self._position = {(draw, sample): row for row, (draw, sample) in enumerate(batch.ids.tolist())}
        self._draws = batch.ids[:, 0]
        self._limit, self._hand_in = int(slots * AHEAD), max(1, slots // HAND_IN)
        self._waiting = deque(self._pieces(range(len(batch))))
        prompts = batch.token_counts
        self._cost = np.zeros(len(batch))
        for piece in self._waiting:
            self._cost[piece] = answer + prompts[piece[0]] / len(piece)
        self._held: list[set[int]] = [set() for _ in range(replicas)]
        self._load = np.zeros(replicas)
        """Cost of the rows held."""
        self._left = len(batch)
        self.answers: list[BatchRef] = []
        self.requests, self.tokens = Counter[int](), Counter[int]()
        """Rows given to, and tokens answered by, each replica."""

    def _pieces(self, rows: Collection[int]) -> list[list[int]]:
        """Neighbouring rows of one prompt, in the order of rows."""
        pieces: list[list[int]] = []
        for row in sorted(rows):
            if pieces and self._draws[pieces[-1][-1]] == self._draws[row]:
                pieces[-1].append(row)
            else:
                pieces.append([row])
        return pieces

    @property
    def done(self) -> bool:
        return self._left == 0

    @property
    def loads(self) -> dict[int, float]:
        """Cost of the rows that each replica holds, in tokens."""
        return dict(enumerate(self._load.tolist()))

    def assign(self, free: Sequence[int]) -> dict[int, list[int]]:
        """Rows for replicas that are free, each with those that it is given now; a replica that holds rows already may get none."""
        given: dict[int, list[int]] = defaultdict(list)
        while self._waiting and (open_ := [replica for replica in free if len(self._held[replica]) < self._limit]):
            replica = min(open_, key=lambda one: (self._load[one], one))
            piece = self._waiting.popleft()
            self._held[replica].update(piece)
            self._load[replica] += self._cost[piece].sum()
            self.requests[replica] += len(piece)
            given[replica] += piece
        return {replica: given[replica] for replica in free if self._held[replica]}

    def at_least(self) -> int:
        """How many answers a replica hands in at a time: all that it has when nothing waits."""
        return self._hand_in if self._waiting else self._left

    def take(self, replica: int, answers: BatchRef) -> None:
        """A replica has handed these in."""
        rows = [self._position[draw, sample] for draw, sample in answers.ids.tolist()]
        self._held[replica].difference_update(rows)
        self._load[replica] -= self._cost[rows].sum()
        self._left -= len(rows)
        self.tokens[replica] += int(answers.lengths("response_ids").sum())
        self.answers.append(answers)

    def give_back(self, replica: int) -> None:
        """A replica will not answer what it holds: others do, before anything else."""
        rows = self._held[replica]
        self._held[replica], self._load[replica] = set(), 0.0
        self._waiting.extendleft(reversed(self._pieces(rows)))

    def metrics(self) -> Metrics:
        """Requests and answered tokens of each replica."""
        metrics = Metrics()
        for replica in range(len(self._held)):
            metrics.sum(f"rollout/requests/{replica}", self.requests[replica])
            metrics.sum(f"rollout/tokens/{replica}", self.tokens[replica])
        return metrics

    def uneven(self) -> str:
        """What to warn of when one replica did much more than the mean of all; empty otherwise."""
        replicas = len(self._held)
        for what, counts in (("requests", self.requests), ("tokens", self.tokens)):
            replica = max(range(replicas), key=counts.__getitem__)
            most, mean = counts[replica], counts.total() / replicas
            if most > UNEVEN * mean:
                return f"rollout replica {replica} had {most} {what} of {counts.total()}, {most / mean:.1f} times the mean of {replicas}"
        return ""
