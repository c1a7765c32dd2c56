"""A crew of scoring processes that is kept complete: whoever ends is replaced at once. Used by `rewards.pool` alone, in one thread."""

from __future__ import annotations

import selectors
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rolemesh.rewards.child import Child
from rolemesh.rewards.functions import FunctionSpec
from rolemesh.rewards.link import START_SECONDS, NurseryLink, ScoringPoolError
from rolemesh.rewards.system import kill_group

KILL_SECONDS: Final = 5.0
"""A process that cannot be killed in this time (stuck in the kernel) is given up and replaced."""
FAILURES: Final = 4
"""So many processes in a row that end before they are ready, or nurseries that end during one call, are too many."""
ENDING_SECONDS: Final = 1.0
"""A process whose stream breaks has ended, as a rule, and its end is reported within this time."""
RETRY_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Ended:
    """A process is gone. `by_itself`: it was neither killed by us nor went down with the nursery."""

    how: str
    by_itself: bool


News: TypeAlias = tuple[Child, dict[str, Any] | Ended]
"""A process and the answer it gave, or its end, which comes after its last answer."""


class Crew:
    """`size` scoring processes and the nursery they come from.

    Raises ConfigError or ScoringPoolError when the functions cannot be imported.
    """

    def __init__(self, specs: Sequence[FunctionSpec], size: int) -> None:
        self._specs, self.size = specs, size
        self._children: dict[int, Child] = {}
        self._finalizer = weakref.finalize(self, _close_streams, self._children)
        self._started = 0
        self._failures = 0
        self._losses = 0
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self.link = self._open()
        """To the nursery of now."""

    @property
    def children(self) -> list[Child]:
        return list(self._children.values())

    @property
    def is_complete(self) -> bool:
        """Every place has a process that is ready for work."""
        return sum(child.ready for child in self._children.values()) == self.size

    def forgive(self) -> None:
        """A new call begins: what went wrong in earlier ones does not count any more."""
        self._losses = 0

    def kill(self, child: Child) -> None:
        """SIGKILL a process and its group. Its end is news of a later `wait`."""
        if not child.killed:
            child.killed, child.since = True, time.monotonic()
            self.link.kill(child.number)

    def flush(self, child: Child) -> None:
        """Send what the stream takes; `wait` sends the rest."""
        wanted = selectors.EVENT_READ if child.flush() else selectors.EVENT_READ | selectors.EVENT_WRITE
        if child.stream in self._selector.get_map() and self._selector.get_key(child.stream).events != wanted:
            self._selector.modify(child.stream, wanted, child)

    def wait(self, seconds: float) -> list[News]:
        """What happened, waiting for it if need be, at most `seconds`. Raises ScoringPoolError when the crew cannot be kept complete."""
        if self._closed:
            raise ScoringPoolError("the scoring pool is closed")
        news: list[News] = []
        heard = False
        for key, events in self._selector.select(seconds):
            if key.data is None:
                heard = True
                continue
            if events & selectors.EVENT_WRITE:
                self.flush(key.data)
            if events & selectors.EVENT_READ:
                news += self._read(key.data)
        if heard:  # last, because an end comes after the answers
            news += self._hear()
        return news + list(self._overdue())

    def close(self) -> None:
        """End all processes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._finalizer()
        self._selector.close()
        self.link.close()

    # -- inside ---------------------------------------------------------------------------------------------------------------

    def _open(self) -> NurseryLink:
        self.link = NurseryLink(self._specs)
        self._selector.register(self.link.control, selectors.EVENT_READ, None)
        for place in range(self.size):
            self._start(place)
        return self.link

    def _start(self, place: int) -> None:
        self._started += 1
        with suppress(OSError):  # then the nursery is gone, which `_hear` notices
            stream = self.link.start(self._started)
            child = Child(number=self._started, place=place, stream=stream, since=time.monotonic())
            self._children[child.number] = child
            self._selector.register(stream, selectors.EVENT_READ, child)

    def _read(self, child: Child) -> list[News]:
        messages, good = child.read()
        answers: list[News] = []
        for message in messages:
            if "ready" in message:
                child.pid, self._failures = message["ready"], 0
            else:
                answers.append((child, message))
        if not good and not child.broken:
            self._forget(child)
            child.broken = True
            if not child.killed:
                child.since = time.monotonic()
        return answers

    def _forget(self, child: Child) -> None:
        with suppress(KeyError):
            self._selector.unregister(child.stream)

    def _hear(self) -> list[News]:
        messages = self.link.hear()
        if messages is None:
            return self._lost()
        news: list[News] = []
        for message in messages:
            child = self._children.get(message["ended"])
            if child is not None:
                news += self._end(child, message["how"])
        return news

    def _end(self, child: Child, how: str) -> list[News]:
        """Take leave of a process: its last answers, its end, its replacement."""
        answers = self._read(child)
        self._drop(child)
        if not child.pid:
            self._failures += 1
            _back_off(self._failures, f"scoring processes end as they start: {how}")
        self._start(child.place)
        return [*answers, (child, Ended(how, by_itself=not child.killed))]

    def _drop(self, child: Child) -> None:
        self._forget(child)
        child.stream.close()
        del self._children[child.number]

    def _lost(self) -> list[News]:
        """The nursery has ended, and the kernel has ended the processes with it: begin anew."""
        news: list[News] = []
        for child in self.children:
            news += self._read(child)
            if child.pid:
                kill_group(child.pid)
            self._drop(child)
            news.append((child, Ended("the nursery has ended", by_itself=False)))
        self._selector.unregister(self.link.control)
        self.link.close()
        self._losses += 1
        _back_off(self._losses, "the process that scoring processes come from has ended")
        self._open()
        return news

    def _overdue(self) -> Iterator[News]:
        """Processes that take too long to start or to end are killed, those that cannot be killed are given up."""
        now = time.monotonic()
        for child in self.children:
            if child.broken and not child.killed and now > child.since + ENDING_SECONDS:
                self.link.kill(child.number)
                yield from self._end(child, "it closed its stream and went on")
            elif child.killed and now > child.since + KILL_SECONDS:
                yield from self._end(child, f"it could not be killed in {KILL_SECONDS:g} s")
            elif not child.killed and not child.pid and now > child.since + START_SECONDS:
                self.kill(child)


def _close_streams(children: dict[int, Child]) -> None:
    for child in children.values():
        child.stream.close()
    children.clear()


def _back_off(failures: int, text: str) -> None:
    if failures >= FAILURES:
        raise ScoringPoolError(f"{text}, {failures} times. The log of the reward worker has what they printed")
    time.sleep(RETRY_SECONDS * failures)
