"""Waits and the start of the Ray backend, as far as they need no cluster."""

import asyncio
import re
import signal
import socket
import threading
import time

import pytest

from rolemesh.errors import DeadlineExceeded, RolemeshError
from rolemesh.runtime import create_backend
from rolemesh.runtime.ray.cluster import join
from rolemesh.runtime.ray.waiting import within


async def test_an_interrupt_that_comes_together_with_the_result_is_not_lost():
    result = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(within(60, result))
    await asyncio.sleep(0)
    result.set_result("done")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_wait_ends_with_its_deadline():
    with pytest.raises(TimeoutError):
        await within(0.01, asyncio.get_running_loop().create_future())


@pytest.fixture
def listening(monkeypatch) -> str:
    """An address where a head has answered."""
    monkeypatch.setattr("rolemesh.runtime.ray.cluster._greet", lambda address: None)
    return "127.0.0.1:7"


def test_something_else_that_listens_there_is_no_cluster(monkeypatch):
    monkeypatch.setattr("rolemesh.runtime.ray.cluster.GREET_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(RolemeshError, match=f"there is no Ray cluster at {address}: (DEADLINE_EXCEEDED|UNAVAILABLE)"):
            join(address)


def test_a_cluster_that_does_not_come_up_is_an_error_of_ours_and_handlers_stay(monkeypatch, listening):
    def fail(address, **options):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("rolemesh.runtime.ray.cluster.ray.init", fail)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RolemeshError, match=f"Ray did not start at {listening}: The current node timed out"):
        join(listening)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_the_cluster_starts_waits_until_it_can_be_ended_whole(monkeypatch, listening, number):
    came = []

    def start(address, **options):
        signal.pthread_kill(threading.main_thread().ident, number)
        time.sleep(0.1)
        came.append("up")

    monkeypatch.setattr("rolemesh.runtime.ray.cluster.ray.init", start)
    with pytest.raises(KeyboardInterrupt):
        join(listening)
    assert came == ["up"]


def test_something_else_that_answers_there_ends_the_wait(monkeypatch, listening):
    monkeypatch.setattr("rolemesh.runtime.ray.cluster.ray.init", lambda address, **options: time.sleep(1))
    monkeypatch.setattr("rolemesh.runtime.ray.cluster.JOIN_SECONDS", 0.05)
    with pytest.raises(DeadlineExceeded, match=f"Ray at {listening} to let it in"):
        join(listening)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense", "[::1]:9", "127.0.0.1:99999"])
def test_a_cluster_that_is_not_there_is_named_at_once(address: str) -> None:
    async def nothing() -> None:
        pass

    backend, main = create_backend("ray", address=address), nothing()
    try:
        with pytest.raises(RolemeshError, match=rf"there is no Ray cluster at {re.escape(address)}: [A-Z_]+\. Check cluster.address"):
            backend.run(main)
    finally:
        main.close()
        backend.stop()
