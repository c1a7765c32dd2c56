"""Faults of a simulation (`runtime/simulated.py`): what goes wrong in which call, by seed or by script, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rolemesh.protocols.backend import Call

FaultKind = Literal["death", "hang", "slow", "lost_reply"]
"""`death`: the process ends in the middle of the call. `hang`: the call never ends; the control thread answers. `slow`: it takes longer.
`lost_reply`: the call is made, and its answer never arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault to happen for certain: in the `nth` call (from 1) of a method on a rank. Empty and None match all."""

    kind: FaultKind
    method: str = ""
    rank: int | None = None
    nth: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong. `rates` are probabilities for each call on each rank, `methods` restricts them to some (none: all)."""

    seed: int = 0
    rates: Mapping[FaultKind, float] = field(default_factory=dict)
    methods: frozenset[str] = frozenset()
    script: Sequence[Fault] = ()
    slow_factor: float = 10.0
    slow_seconds: float = 10.0
    """A slow call takes its duration times the factor and these seconds."""

    def strike(self, call: Call, rank: int, nth: int) -> FaultKind | None:
        """The fault of the `nth` call of this method on this rank, if any. Depends on nothing else, so neither on order nor on time."""
        for fault in self.script:
            if fault.nth == nth and fault.method in ("", call.method) and fault.rank in (None, rank):
                return fault.kind
        if self.methods and call.method not in self.methods:
            return None
        drawn = random.Random(f"{self.seed} {call.group} {call.method} {rank} {nth}").random()
        for kind, rate in self.rates.items():
            if drawn < rate:
                return kind
            drawn -= rate
        return None
