"""The local backend: every worker in this process, every call run where it is made. For tests and for a debugger.

What it cannot do it says (`lacks`): workers share one process (a kill is simulated: the process object refuses from then on), ranks
cannot form a communicator, and a stuck call stops everything.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import time
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, TypeVar

from rolemesh.errors import DeadlineExceeded, ResourceError, WorkerDied, WorkerError
from rolemesh.plan.inventory import local_inventory
from rolemesh.plan.schema import Inventory, NodeInfo
from rolemesh.protocols.backend import Bundle, Call, Capability, OnAnswer, Process, ProcessSpec, WorkerSpec, taken
from rolemesh.protocols.store import StoreAnswer, StoreGone, StoreRequest
from rolemesh.runtime.host import ProcessHost
from rolemesh.runtime.janitor import JanitorLink
from rolemesh.runtime.kv_server import KvServer

T = TypeVar("T")
ADDRESS = "127.0.0.1"
ROUNDING = 1e-6
"""Shares of a CPU that are wanted fit although their sum is a little more than the whole."""


class Held:
    """A stored value: equal to itself only, as a reference is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class LocalStoreLink:
    """The KV store in this process. What passes is copied, as if it travelled."""

    def __init__(self, run: str) -> None:
        self.run, self._life = run, 1
        self._server: KvServer | None = KvServer(self._life)

    async def ask(self, request: StoreRequest, deadline: float) -> StoreAnswer:
        if self._server is None:
            raise StoreGone(f"the store of {self.run} was stopped")
        return copy.deepcopy(await self._server.answer(copy.deepcopy(request)))

    def drive(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """A worker shares the controller's thread: its work is done at once, or never."""
        try:
            work.send(None)
        except StopIteration as done:
            answer: T = done.value
            return answer
        work.close()
        reason = "workers share the controller's thread here, so nobody could answer while one waits"
        raise DeadlineExceeded(waiter="a worker", subject=f"the store of {self.run}", seconds=0.0, last_report=reason)

    async def restart(self, deadline: float) -> None:
        await self.stop()
        self._life += 1
        self._server = KvServer(self._life)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


class LocalBackend:
    """Backend of one process. See `protocols/backend.py` for the methods."""

    name = "local"
    address = prefix = ""
    lacks: frozenset[Capability] = frozenset({"processes", "communicators", "preempt", "detach"})

    def __init__(self) -> None:
        self._hosts: dict[str, ProcessHost] = {}
        self._pools: dict[str, tuple[Bundle, ...]] = {}
        self._stores: list[LocalStoreLink] = []
        self._janitor: JanitorLink | None = None

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(main)

    def entrust(self, run: str, folder: str) -> None:
        if self._janitor is None:
            self._janitor = JanitorLink(run, "drive", own=True, address="", ttl=0)
        self._janitor.entrust(folder)

    def stop(self) -> None:
        if self._janitor is not None:  # else nothing was started beside this process
            self._janitor.bye()
            self._janitor = None

    def time(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def inventory(self) -> Inventory:
        return local_inventory()

    async def probe(self, inventory: Inventory, nodes: Collection[int], deadline: float) -> Inventory:
        return inventory  # it knows all there is to know

    async def ask_for(self, wanted: Sequence[NodeInfo]) -> None:
        pass  # there is nobody to ask

    async def create_pool(self, name: str, bundles: Sequence[Bundle], nodes: Sequence[NodeInfo], deadline: float) -> None:
        if name in self._pools:
            raise taken(name)
        used = math.fsum(bundle.cpus for pool in self._pools.values() for bundle in pool)
        for index, node in enumerate(nodes):
            wanted, free = math.fsum(bundle.cpus for bundle in bundles if bundle.node == index), node.cpus - used
            if wanted - free > ROUNDING:
                raise ResourceError.one(
                    f"pool {name}, node {node.name}", f"CPU: needs {wanted:g}", f"free {free:g} of {node.cpus:g}",
                    f"Lower pools.{name}.nodes or pools.{name}.cpus",
                )  # fmt: skip
        self._pools[name] = tuple(bundles)

    async def attach_pool(self, name: str, bundles: Sequence[Bundle], nodes: Sequence[NodeInfo], deadline: float) -> list[Process] | None:
        return None  # what an earlier controller had ended with its process

    def detach(self, name: str) -> None:
        raise NotImplementedError(f"the {self.name} backend lacks detach")

    async def give_back(self, keep: Collection[str]) -> None:
        pass

    async def spawn(self, spec: ProcessSpec, deadline: float) -> Process:
        node = "local"
        self._hosts[spec.name] = ProcessHost(spec.name, node)
        return Process(spec=spec, node=node, address=ADDRESS, pid=os.getpid(), handle=self._hosts[spec.name])

    async def add_worker(self, process: Process, spec: WorkerSpec, deadline: float) -> None:
        self._check_alive(process)
        failure = process.handle.add_worker(spec)
        if failure is not None:
            raise WorkerError(
                group=spec.group, rank=spec.context.rank, node=process.node, pid=process.pid, method="__init__",
                original_type=failure.type, original_message=failure.message, original_traceback=failure.traceback,
            ) from failure.error  # fmt: skip

    def call(self, process: Process, call: Call, blocks: Sequence[Any], answered: OnAnswer) -> tuple[Any, Any]:
        try:
            self._check_alive(process)
        except WorkerDied as error:
            answered(error)
            return None, None
        reply, (numbers, others) = process.handle.execute(call, [block.value for block in blocks])
        answered(reply)
        return Held(numbers), Held(others)

    async def control(self, process: Process, request: str, deadline: float, **kwargs: Any) -> Any:
        self._check_alive(process)
        return process.handle.control(request, **kwargs)

    def put(self, value: Any) -> Any:
        return Held(value)

    async def fetch(self, refs: Sequence[Any], deadline: float) -> list[Any]:
        return [ref.value for ref in refs]

    async def kill(self, process: Process) -> None:
        self._hosts.pop(process.spec.name, None)

    async def release_pool(self, name: str) -> None:
        self._pools.pop(name, None)

    async def start_store(self, run: str, deadline: float, node: NodeInfo | None = None) -> LocalStoreLink:
        self._stores.append(LocalStoreLink(run))
        return self._stores[-1]

    def find_store(self, run: str) -> LocalStoreLink:
        return next(link for link in self._stores if link.run == run)

    async def close(self) -> None:
        for store in self._stores:
            await store.stop()
        self._stores.clear()
        self._hosts.clear()
        self._pools.clear()

    def _check_alive(self, process: Process) -> None:
        if self._hosts.get(process.spec.name) is not process.handle:
            raise WorkerDied(
                group="", rank=-1, node=process.node, pid=process.pid, method="", original_type="Killed",
                original_message=f"process {process.spec.name} was ended",
            )  # fmt: skip
