"""Waits on Ray that end, and what its errors say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def plain(ref: Awaitable[T]) -> T:
    return await ref


async def within(seconds: float, awaited: Awaitable[T]) -> T:
    """Wait no longer than that. Not `asyncio.wait_for`, which in Python 3.11 forgets a cancellation that arrives together with the
    result: a run would go on although it was interrupted."""
    async with asyncio.timeout(seconds):
        return await awaited


def first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4])
