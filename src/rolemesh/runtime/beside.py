"""Work that goes on beside a block of code and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None], told: Callable[[str], None], what: str) -> AsyncIterator[None]:
    """Run `work` meanwhile, which is not expected to end by itself. If it fails the block goes on, and `told` hears at once that `what`
    does not happen any more, and why."""
    task = asyncio.ensure_future(work)

    def tell(done: asyncio.Future[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            told(f"{what} any more: {type(error).__name__}: {error}")

    task.add_done_callback(tell)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
