"""The pool's view of one scoring process: its stream, what it holds, and since when. Used by `rewards.crew` and `rewards.pool`."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rolemesh.rewards.wire import CHUNK, Inbox, frame
from rolemesh.rewards.work import Fault


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """One scoring process. Times are readings of a monotonic clock."""

    number: int
    """Its name towards the nursery; never used again."""
    place: int
    """Its place in the pool, which its replacement takes over."""
    stream: socket.socket
    since: float
    """When it was asked for; when its stream broke or it was to be killed, once that has happened."""
    pid: int = 0
    """0 until it is ready for work."""
    part: int = -1
    """The function that it works on."""
    several: bool = False
    """What it holds is under way side by side (an asynchronous function), not one after another."""
    alone: bool = False
    """It gets nothing more until it is done, so that a fault can be laid to the one sample that it holds."""
    retiring: bool = False
    """It gets nothing more, and is replaced when it is done."""
    killed: bool = False
    broken: bool = False
    """Its stream came to an end, as a rule because it has ended."""
    held: dict[int, float] = field(default_factory=dict)
    """Numbers of the works it holds, oldest first, and when each began as far as the pool can know: never too early."""
    verdict: tuple[int, Fault] | None = None
    """The work for which it is killed, and the fault."""
    first_bytes: int = 0
    """Resident memory after its first answer."""
    _inbox: Inbox = field(default_factory=Inbox)
    _outbox: bytearray = field(default_factory=bytearray)

    @property
    def ready(self) -> bool:
        """It has reported for work and is not about to go."""
        return self.pid > 0 and not (self.killed or self.retiring or self.broken)

    def oldest(self) -> tuple[int, float]:
        """The work that is under way longest, and since when."""
        return next(iter(self.held.items()))

    def send(self, number: int, message: Mapping[str, Any], now: float) -> None:
        """Hand over a work; `flush` sends what the stream takes."""
        self.held[number] = now
        self._outbox += frame(message)

    def done(self, number: int, now: float) -> bool:
        """An answer arrived. False if it answers nothing that the process holds."""
        if self.held.pop(number, None) is None:
            return False
        if self.held and not self.several:
            self.held[self.oldest()[0]] = now  # the next one begins when this one ends
        self.alone = self.alone and bool(self.held)
        return True

    def flush(self) -> bool:
        """Send what waits; False while something is left."""
        try:
            while self._outbox:
                del self._outbox[: self.stream.send(self._outbox)]
        except BlockingIOError:
            return False
        except ConnectionError:
            self._outbox.clear()  # it is gone; its end is reported by the nursery
        return True

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """(Messages that have arrived, whether the stream is still good). A process that writes anything else is no longer good."""
        good = True
        try:
            while good and (data := self.stream.recv(CHUNK)):
                self._inbox.feed(data)
            good = False
        except BlockingIOError:
            pass
        except (ConnectionError, ValueError):
            good = False
        return self._inbox.take(), good
