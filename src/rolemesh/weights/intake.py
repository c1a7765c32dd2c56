"""Buckets that are handed over one by one become the stream that an engine's `load_weights` reads.

An engine pulls all weights in one call; buckets come in calls of their own, so that the engine's memory and a bucket or two are all that is
needed. Hence the engine's call runs in a thread, strictly in turn with the one that hands over: it works only while that one waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rolemesh.errors import DeadlineExceeded
from rolemesh.weights.buckets import Buffer, WeightManifest, Weights, unpack

T = TypeVar("T")


class Intake:
    """One publication as its taker sees it. `load` reads the whole stream and returns the version that is held then.

    Both sides wait for each other at most `deadline` seconds; `waiter` names the taker in what is raised then. Whatever goes wrong is
    raised inside `load`, so that an engine knows it and goes on refusing, and then by `take`.
    """

    def __init__(self, manifest: WeightManifest, load: Callable[[Weights], int], *, waiter: str, deadline: float) -> None:
        self._manifest, self._waiter, self._deadline = manifest, waiter, deadline
        self._given: queue.SimpleQueue[tuple[int, Buffer] | Exception] = queue.SimpleQueue()
        self._turn: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Has an entry when the engine has read all that was given."""
        self._result: Future[int] = Future()
        threading.Thread(target=self._run, args=(load,), daemon=True, name="rolemesh-weights").start()
        self._wait("its engine to begin with")

    @property
    def version(self) -> int:
        return self._manifest.version

    def take(self, number: int, buffer: Buffer) -> int | None:
        """Hand over the next bucket; returns when its memory may change again. Answers the version held after the last one, else None.
        Raises what `load` raises, ValueError when it has ended before, or DeadlineExceeded."""
        if self._result.done():
            held = self._result.result(timeout=0)
            raise ValueError(f"the engine holds version {held} but did not wait for bucket {number + 1} of version {self.version}")
        self._given.put((number, buffer))
        return self._wait(f"its engine to load bucket {number + 1} of")

    def close(self) -> None:
        """Give up, unless everything is there: the engine is told, and stays without weights."""
        if not self._result.done():
            self._given.put(ConnectionAbortedError(f"weight version {self.version} was given up half-way; publish again"))
            self._next(self._turn, f"its engine to give up weight version {self.version}")

    def _wait(self, what: str) -> int | None:
        self._next(self._turn, f"{what} weight version {self.version}")
        return self._result.result(timeout=0) if self._result.done() else None

    def _next(self, entries: queue.SimpleQueue[T], subject: str) -> T:
        try:
            return entries.get(timeout=self._deadline)
        except queue.Empty:
            raise DeadlineExceeded(waiter=self._waiter, subject=subject, seconds=self._deadline) from None

    def _run(self, load: Callable[[Weights], int]) -> None:
        try:
            self._result.set_result(load(self._stream()))
        except BaseException as error:  # noqa: BLE001 - the end of the thread: `take` raises it
            self._result.set_exception(error)
        self._turn.put(None)

    def _stream(self) -> Weights:
        for number in range(len(self._manifest.buckets)):
            self._turn.put(None)
            what = f"bucket {number + 1} of {len(self._manifest.buckets)}"
            given = self._next(self._given, f"{what} of weight version {self.version} from the actor")
            if isinstance(given, Exception):
                raise given
            if given[0] != number:
                came = f"bucket {given[0] + 1} of weight version {self.version} came where {number + 1} was next"
                raise ValueError(f"{came}: one is missing or came twice; publish again")
            yield from unpack(self._manifest, number, given[1])
