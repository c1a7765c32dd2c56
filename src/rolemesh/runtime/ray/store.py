"""The KV store as one asynchronous Ray actor per run, and the way to it from any process of the cluster."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rolemesh.errors import DeadlineExceeded, RolemeshError
from rolemesh.plan.schema import NODE_ID, NodeInfo
from rolemesh.protocols.store import StoreAnswer, StoreGone, StoreRequest
from rolemesh.runtime.kv_server import KvServer
from rolemesh.runtime.ray.host import end_process
from rolemesh.runtime.ray.standing import NAMESPACE, find_actor, named
from rolemesh.runtime.ray.waiting import within

T = TypeVar("T")
MOST_REQUESTS = 10_000
"""Requests that the actor holds at a time. Waiting reads are most of them."""
LOOKUP_SECONDS = 10.0
STOP_SECONDS = 2.0
"""How long a store may take to answer that it has stopped, before its process is killed."""


@ray.remote(max_restarts=0, max_task_retries=0, num_cpus=0, max_concurrency=MOST_REQUESTS)
class RayStore:
    """Ray never restarts it: that is for the one who started it, in a new life."""

    def __init__(self, incarnation: int) -> None:
        self._life = incarnation
        self._server = KvServer(incarnation)

    async def who(self) -> tuple[int, str, tuple[int, float]]:
        """(life, address, (pid, when this process started))."""
        return self._life, ray.util.get_node_ip_address(), (os.getpid(), psutil.Process().create_time())

    async def stop(self) -> None:
        """Before it is ended: whoever waits is told."""
        self._server.stop()

    async def answer(self, request: StoreRequest) -> StoreAnswer:
        return await self._server.answer(request)


class RayStoreLink:
    """Found by the run's name, so that it finds the next life of the store too. `lifetime` is Ray's, of the actor."""

    def __init__(self, run: str, node: NodeInfo | None = None, *, lifetime: str | None = None) -> None:
        self.run, self._node, self._life, self._lifetime = run, node, 0, lifetime
        self._actor: Any = None
        self._owned: Any = None
        """Where it was started: Ray ends an actor when the first handle to it is gone."""
        self._process: tuple[int, float] | None = None
        """Its process, if that is on this machine."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RayStoreLink, (self.run,)

    @property
    def _name(self) -> str:
        return f"{self.run}/kv"

    async def ask(self, request: StoreRequest, deadline: float) -> StoreAnswer:
        actor = self._actor = self._actor or await self._find()
        try:
            answer: StoreAnswer = await within(deadline, actor.answer.remote(request))
        except RayActorError as error:
            if self._actor is actor:  # it may be that of the next life by now
                self._actor = None
            raise StoreGone(str(error).splitlines()[0]) from error
        except TimeoutError as error:
            raise StoreGone(f"no answer in {deadline:g} s") from error
        return answer

    async def _find(self) -> Any:
        try:
            actor = await within(LOOKUP_SECONDS, asyncio.to_thread(find_actor, self._name))
        except RayError as error:
            raise StoreGone(f"there is no actor {self._name}: {error}") from error
        except TimeoutError as error:
            raise StoreGone(f"Ray's list of actors did not come in {LOOKUP_SECONDS:g} s") from error
        if actor is None:
            raise StoreGone(f"there is no actor {self._name}")
        return actor

    def drive(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """On a thread of its own, which keeps leases and facts while the worker computes."""
        task = asyncio.run_coroutine_threadsafe(work, _loop())
        try:
            return task.result(deadline)
        except TimeoutError as error:
            task.cancel()
            subject = f"the thread that asks the store of {self.run}"
            raise DeadlineExceeded(waiter="a worker", subject=subject, seconds=deadline) from error

    async def start(self, deadline: float) -> None:
        """Take over the store that a controller before has left, or start one."""
        left = None
        with suppress(StoreGone):
            left = await self._find() if self._lifetime else None
        if left is not None:
            try:
                await within(LOOKUP_SECONDS, self._own(left))
                return
            except (RayError, TimeoutError):
                ray.kill(left, no_restart=True)
        await self.restart(deadline)

    async def restart(self, deadline: float) -> None:
        await self.stop()
        clock = time.time_ns() // 1_000_000 if self._lifetime else 0  # higher than any before, whoever started that
        self._life = max(self._life + 1, clock)
        ends = time.monotonic() + deadline
        node = self._node.labels[NODE_ID] if self._node is not None else ray.get_runtime_context().get_node_id()
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        store = RayStore.options(  # type: ignore[attr-defined]
            name=self._name, namespace=NAMESPACE, lifetime=self._lifetime, scheduling_strategy=here
        )
        try:
            self._owned = self._actor = await named(self._name, lambda: store.remote(self._life), deadline)
            await within(max(ends - time.monotonic(), 0.01), self._own(self._owned))
        except RayError as error:
            raise RolemeshError(text=f"the store of {self.run} did not start: {error}") from error
        except TimeoutError as error:
            raise DeadlineExceeded(waiter="the controller", subject=f"the store of {self.run} to start", seconds=deadline) from error

    async def _own(self, actor: Any) -> None:
        self._life, address, process = await actor.who.remote()
        self._owned, self._process = actor, process if address == ray.util.get_node_ip_address() else None

    async def stop(self) -> None:
        """On this machine its process is ended even if it does not answer."""
        owned, process = self._owned, self._process
        self._owned = self._actor = self._process = None
        if owned is None:
            return
        try:
            await within(STOP_SECONDS, owned.stop.remote())
        except (RayError, TimeoutError):
            if process is not None:
                end_process(*process)
        ray.kill(owned, no_restart=True)


_STARTING = threading.Lock()
_LOOPS: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's store clients, in a thread of its own."""
    with _STARTING:
        if not _LOOPS:
            _LOOPS.append(asyncio.new_event_loop())
            threading.Thread(target=_LOOPS[0].run_forever, daemon=True, name="rolemesh-store").start()
    return _LOOPS[0]
