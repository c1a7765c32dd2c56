"""An event loop whose time is virtual: when nothing is ready it jumps to the next timer. Hours pass in milliseconds, the same each time.

It suits programs that live in one thread. A program in which nothing is ready and no timer runs would wait for ever; here it is ended
with an error that says where its tasks stand.
"""

from __future__ import annotations

import asyncio
import math
import selectors

from rolemesh.errors import StandStill


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of sleeping it moves the clock on."""

    def __init__(self, start: float, limit: float) -> None:
        super().__init__()
        self.now, self._limit = start, limit

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise StandStill(reason=f"at {self.now:g} s nothing is ready and no timer runs", tasks=_tasks())
        if timeout > 0:
            self.now = max(self.now + timeout, math.nextafter(self.now, math.inf))
        if self.now > self._limit:
            raise StandStill(reason=f"it has gone on for more than {self._limit:g} virtual seconds", tasks=_tasks())
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at `start` seconds. Raises StandStill when nothing can happen any more, or when its time is past `limit`."""

    def __init__(self, *, start: float = 0.0, limit: float = math.inf) -> None:
        self._jumping = _JumpingSelector(start, limit)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def _tasks() -> tuple[str, ...]:
    """What tasks there are and the line that each of them waits in."""
    told = []
    for task in asyncio.all_tasks():
        frames = task.get_stack(limit=1)
        where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "not started"
        told.append(f"{task.get_name()}: {getattr(task.get_coro(), '__qualname__', '?')} at {where}")
    return tuple(sorted(told))
