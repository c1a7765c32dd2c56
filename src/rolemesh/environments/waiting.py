"""The deadline of a step, which stands still while the step only waits for its turn: that others are many is not its fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar

_deadline: ContextVar[StepDeadline | None] = ContextVar("deadline of the step", default=None)


class StepDeadline:
    """A timeout that can stand still."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self.timeout = timeout
        self._waiting = 0
        self._left = 0.0
        self.interrupted: list[str] = []
        """Parts of the step (`part`) that were cut off."""

    def stop(self) -> None:
        """Somebody within the step begins to wait for a turn."""
        self._waiting += 1
        if self._waiting == 1 and (ends := self.timeout.when()) is not None:
            self._left = ends - asyncio.get_running_loop().time()
            self.timeout.reschedule(None)

    def go_on(self) -> None:
        """That one waits no longer."""
        self._waiting -= 1
        if self._waiting == 0:
            self.timeout.reschedule(asyncio.get_running_loop().time() + self._left)


@asynccontextmanager
async def step_deadline(seconds: float) -> AsyncIterator[StepDeadline]:
    """Raises TimeoutError when the block takes longer, not counting what it spends `in_line`."""
    async with asyncio.timeout(seconds) as timeout:
        deadline = StepDeadline(timeout)
        token = _deadline.set(deadline)
        try:
            yield deadline
        finally:
            _deadline.reset(token)


@contextmanager
def part(name: str) -> Iterator[None]:
    """For what is under way within a step, so that the error of the deadline can name it."""
    try:
        yield
    except asyncio.CancelledError:
        if (deadline := _deadline.get()) is not None:
            deadline.interrupted.append(name)
        raise


@contextmanager
def in_line() -> Iterator[None]:
    """For a wait that only depends on how many others there are."""
    deadline = _deadline.get()
    if deadline is None:
        yield
        return
    with suppress(RuntimeError):  # the step has ended already
        deadline.stop()
    try:
        yield
    finally:
        with suppress(RuntimeError):
            deadline.go_on()
