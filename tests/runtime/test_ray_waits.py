"""Waits of the Ray backend that need no cluster."""

import asyncio

import pytest

from rolemesh.runtime.ray.backend import _within


async def test_an_interrupt_that_comes_together_with_the_result_is_not_lost():
    result = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(_within(60, result))
    await asyncio.sleep(0)
    result.set_result("done")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_wait_ends_with_its_deadline():
    with pytest.raises(TimeoutError):
        await _within(0.01, asyncio.get_running_loop().create_future())
