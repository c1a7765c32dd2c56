"""Functions that block, beside the event loop of the episodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from rolemesh.environments.waiting import in_line

T = TypeVar("T")

THREADS: Final = 64
"""Of one event loop at a time; further calls wait for one."""

_free: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def all_held(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a further function would have to wait."""
    return loop in _free and _free[loop].locked()


async def in_thread(function: Callable[[], T]) -> T:
    """What `function` returns or raises in a thread of its own. Whoever stops waiting leaves it behind: it keeps one of the `THREADS`
    until it ends, and holds up no one else, nor the end of the process."""
    loop = asyncio.get_running_loop()
    free = _free.setdefault(loop, asyncio.Semaphore(THREADS))
    with in_line():
        await free.acquire()
    done: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def settle(outcome: tuple[Any, BaseException | None]) -> None:
        free.release()
        if not done.done():
            done.set_result(outcome)

    def work() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = function(), None
        except BaseException as error:  # noqa: BLE001 - raised again by the one that waits
            outcome = None, error
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, outcome)

    try:
        threading.Thread(target=work, daemon=True, name="tool").start()
    except RuntimeError:  # the system has no thread for it
        free.release()
        raise
    result, error = await done
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
