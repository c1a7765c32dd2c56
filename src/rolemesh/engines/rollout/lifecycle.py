"""What engines of this process share: which weights they serve, pauses, sleep, and what becomes of running sequences when weights change.

Base of `builtin.py` and `fake.py`, which know how to compute. For what the methods promise see `protocols/engine.py`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from rolemesh.engines.rollout.checks import check_load
from rolemesh.errors import StaleWeights
from rolemesh.protocols.engine import Completion, EngineHealth, EngineState, InFlight, LogprobsKind

if TYPE_CHECKING:
    import torch


class Lifecycle(ABC):
    """States of an engine. Subclasses count sampled tokens in `_tokens`."""

    name: str
    sampling_kind: Literal["counter", "seeded"] = "counter"
    logprobs_kind: LogprobsKind = "after_temperature"
    in_flight: frozenset[InFlight] = frozenset({"refuse", "resume", "abort"})
    filters: bool = True
    sleeps: bool = True
    needs_contents: bool = True

    def __init__(self) -> None:
        self._version = -1
        self._asleep: Literal["kept", "dropped"] | None = None
        self._paused = False
        self._tokens = 0

    @abstractmethod
    def _advance(self, *, admit: bool) -> list[Completion]:
        """One step of computing; begins queued requests only with `admit`."""

    @abstractmethod
    def _take_over(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy the weights of this version in and forget what old ones made, except for running sequences."""

    @abstractmethod
    def _release(self, *, keep_weights: bool) -> None:
        """Free the memory of keys, values and weights."""

    @abstractmethod
    def _reclaim(self, *, kept: bool) -> None:
        """The opposite. Weights that were not kept may hold anything."""

    @abstractmethod
    def _running(self) -> list[tuple[int, int]]:
        """Ids of the sequences that run."""

    @property
    @abstractmethod
    def unfinished(self) -> int: ...

    @abstractmethod
    def abort(self, ids: Iterable[tuple[int, int]] | None = None) -> list[Completion]: ...

    @property
    def weight_version(self) -> int:
        return -1 if self._asleep else self._version

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, *, in_flight: InFlight = "refuse"
    ) -> list[Completion]:
        running = self._running()
        asleep = self._asleep is not None
        check_load(version, holds=self._version, running=len(running), in_flight=in_flight, able=self.in_flight, asleep=asleep)
        ended = self.abort(running) if in_flight == "abort" else []
        self._version = -1
        self._take_over(weights, version)
        self._version = version
        return ended

    def step(self) -> list[Completion]:
        self._require_weights()
        return [] if self._paused else self._advance(admit=True)

    def _require_weights(self) -> None:
        if self.weight_version < 0:
            asleep = ", which is asleep" if self._asleep else ""
            raise StaleWeights(where=f"rollout engine {self.name!r}{asleep}", holds=self.weight_version, asked=0)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def drain(self, seconds: float = math.inf) -> list[Completion]:
        self._require_weights()
        self._paused = True
        done: list[Completion] = []
        ends = time.monotonic() + seconds
        while self._running() and time.monotonic() < ends:
            done += self._advance(admit=False)
        return done

    def sleep(self, *, keep_weights: bool) -> None:
        if running := len(self._running()):
            raise ValueError(f"{running} requests are running; drain or abort them before the engine sleeps")
        if self._asleep is None:
            self._release(keep_weights=keep_weights)
            self._asleep = "kept" if keep_weights else "dropped"

    def wake(self) -> None:
        if self._asleep is None:
            return
        kept = self._asleep == "kept"
        self._reclaim(kept=kept)
        self._asleep = None
        if not kept:
            self._version = -1

    def health(self) -> EngineHealth:
        state: EngineState = "serving"
        if self._asleep or self._paused:
            state = "asleep" if self._asleep else "paused"
        elif self._version < 0:
            state = "empty"
        running = len(self._running())
        return EngineHealth(
            state=state, weight_version=self.weight_version, queued=self.unfinished - running, running=running, tokens=self._tokens
        )
