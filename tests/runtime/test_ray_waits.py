"""Waits and the start of the Ray backend, as far as they need no cluster."""

import asyncio
import signal

import pytest

from rolemesh.errors import RolemeshError
from rolemesh.runtime.ray.backend import _start_ray, _within


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


def test_a_cluster_that_does_not_come_up_is_an_error_of_ours_and_handlers_stay(monkeypatch):
    def fail(**options):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray leaves one of its own
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("rolemesh.runtime.ray.backend.ray.init", fail)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RolemeshError, match="Ray did not start on this machine: The current node timed out"):
        _start_ray({"address": "local"})
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_the_cluster_starts_waits_until_it_can_be_ended_whole(monkeypatch, number):
    came = []

    def start(**options):
        signal.raise_signal(number)
        came.append("up")

    monkeypatch.setattr("rolemesh.runtime.ray.backend.ray.init", start)
    with pytest.raises(KeyboardInterrupt):
        _start_ray({"address": "local"})
    assert came == ["up"]
