"""Waits on Ray that end, and what its errors say."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import TypeVar

from rolemesh.errors import DeadlineExceeded

T = TypeVar("T")


async def within(seconds: float, awaited: Awaitable[T]) -> T:
    """Wait no longer than that. Not `asyncio.wait_for`, which in Python 3.11 forgets a cancellation that arrives together with the
    result: a run would go on although it was interrupted."""
    async with asyncio.timeout(seconds):
        return await awaited


async def in_time(seconds: float, awaited: Awaitable[T], subject: str) -> T:
    """The same for the controller: raises DeadlineExceeded."""
    try:
        return await within(seconds, awaited)
    except TimeoutError as error:
        raise DeadlineExceeded(waiter="the controller", subject=subject, seconds=seconds) from error


def first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4])


def import_failure(node: str, error: Exception) -> str | None:
    """What to say of a process that could not import what it was to run; None for any other error."""
    missing = re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", str(error))
    if missing is None:
        return None
    return (
        f"node {node} cannot import the module {missing[1]!r}. Nothing is uploaded to the nodes: install it there, or put its folder where "
        "every node sees it under the same path, and on PYTHONPATH"
    )
