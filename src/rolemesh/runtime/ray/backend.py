"""The Ray backend: processes are Ray actors in placement groups, blocks are Ray objects owned by the controller.

One placement group for each node that a pool touches, pinned to that node, so that Ray cannot move anything by itself. Ray neither
restarts actors nor retries tasks for us. A pool or a call that does not come to be ends with our own deadline and a message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rolemesh.errors import DataLost, DeadlineExceeded, ResourceError, RolemeshError, WorkerDied, WorkerError
from rolemesh.plan.inventory import network_interfaces
from rolemesh.plan.schema import Inventory, NodeInfo
from rolemesh.protocols.backend import Bundle, Call, Capability, Pending, Process, ProcessSpec, Reply
from rolemesh.runtime.ray.cluster import RayCluster
from rolemesh.runtime.ray.host import RayHost, end_process, find_process
from rolemesh.runtime.ray.nodes import NODE_LABEL, find_inventory, probe_nodes, request_nodes
from rolemesh.runtime.ray.reserve import ReservedPool, amounts, reservations, shortage
from rolemesh.runtime.ray.store import RayStoreLink
from rolemesh.runtime.ray.waiting import first_lines, import_failure, plain, within

T = TypeVar("T")
LOG_TAIL_LINES = 20
KILL_SECONDS = 1.0
"""How long Ray gets to end a process itself; one ended behind its back it reports as a crash, on everybody's screen."""
GONE = (RayActorError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)
"""Ray's errors after which a process does not answer any more."""


class RayBackend:
    """Backend on Ray. `address` is None for a cluster of this run alone, on this machine, that ends with it.

    `num_cpus` and `num_gpus` tell such a cluster what the machine has (logical devices are fine in tests).
    """

    name = "ray"
    lacks: frozenset[Capability] = frozenset()

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: float | None = None,
        num_gpus: int | None = None,
        object_store_bytes: int | None = None,
        pythonpath: Sequence[str] = (),
    ) -> None:
        self._cluster = RayCluster(
            address, num_cpus=num_cpus, num_gpus=num_gpus, object_store_bytes=object_store_bytes, pythonpath=pythonpath
        )
        self._pools: dict[str, ReservedPool] = {}
        self._stores: list[RayStoreLink] = []

    # -- life -----------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the cluster, or start one. Called by the first `run`."""
        self._cluster.start()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        self.start()
        return asyncio.run(main)

    def time(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def start_store(self, run: str, deadline: float, node: NodeInfo | None = None) -> RayStoreLink:
        link = RayStoreLink(run, node)
        self._stores.append(link)
        await link.restart(deadline)
        return link

    async def close(self) -> None:
        while self._stores:
            await self._stores.pop().stop()
        for name in list(self._pools):
            await self.release_pool(name)

    def stop(self) -> None:
        """End the cluster if it is this run's own, else leave it."""
        self._cluster.stop()

    # -- resources ------------------------------------------------------------------------------------------------------------

    async def inventory(self) -> Inventory:
        return await find_inventory()

    async def probe(self, inventory: Inventory, nodes: Collection[int], deadline: float) -> Inventory:
        return await probe_nodes(inventory, nodes, deadline)

    async def ask_for(self, wanted: Sequence[NodeInfo]) -> None:
        await request_nodes(wanted)

    async def create_pool(self, name: str, bundles: Sequence[Bundle], nodes: Sequence[NodeInfo], deadline: float) -> None:
        alive = {info.labels.get(NODE_LABEL): info.name for info in (await find_inventory()).nodes}
        gone = [nodes[bundle.node].name for bundle in bundles if nodes[bundle.node].labels.get(NODE_LABEL) not in alive]
        if gone:
            known = ", ".join(alive.values())
            raise ResourceError.one(f"pool {name}", f"node {gone[0]}", f"alive: {known}", "Plan again with the nodes there are")
        pool = self._pools[name] = ReservedPool(bundles=tuple(bundles), nodes=tuple(nodes))
        for node in sorted({bundle.node for bundle in bundles}):
            here = [position for position, bundle in enumerate(bundles) if bundle.node == node]
            reserved, homes = reservations([bundles[position] for position in here])
            selector = [{NODE_LABEL: nodes[node].labels[NODE_LABEL]}] * len(reserved)
            pool.groups[node] = placement_group(reserved, strategy="PACK", name=f"{name}@{node}", bundle_label_selector=selector)
            pool.homes.update(zip(here, homes, strict=True))
        ends = self.time() + deadline
        try:
            waiting = [node for node, group in pool.groups.items() if not await _placed(group, ends - self.time())]
            problems = shortage(name, pool, waiting, await find_inventory()) if waiting else []
        except BaseException:
            await self.release_pool(name)
            raise
        if problems:
            await self.release_pool(name)
            raise ResourceError(problems=problems)

    async def release_pool(self, name: str) -> None:
        pool = self._pools.pop(name, None)
        for group in pool.groups.values() if pool is not None else ():
            remove_placement_group(group)

    # -- processes ------------------------------------------------------------------------------------------------------------

    async def spawn(self, spec: ProcessSpec, deadline: float) -> Process:
        pool = self._pools[spec.pool]
        bundle, node = pool.bundles[spec.bundle], pool.nodes[pool.bundles[spec.bundle].node]
        group = pool.groups[bundle.node]
        taken = amounts(bundle)
        actor = RayHost.options(  # type: ignore[attr-defined]
            num_cpus=taken.pop("CPU", 0),
            num_gpus=taken.pop("GPU", 0),
            resources=taken,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=pool.homes[spec.bundle]),
            runtime_env={"env_vars": dict(spec.env)},
        ).remote(spec.name, node.name, spec.log_path, spec.interface)
        starting = Process(spec=spec, node=node.name, address="", pid=0, handle=actor)
        try:
            _, address, pid, created = await self._settle(actor.who.remote(), deadline, f"process {spec.name} to start", starting)
        except BaseException:  # also when nobody waits for it any more: it must not start later
            ray.kill(actor, no_restart=True)
            raise
        return replace(starting, address=address, pid=pid, created=created)

    async def add_worker(
        self, process: Process, group: str, worker_class: type, context: Any, kwargs: Mapping[str, Any], deadline: float
    ) -> None:
        ref = process.handle.add_worker.remote(group, worker_class, context, dict(kwargs))
        failure = await self._settle(ref, deadline, f"{group} rank {context.rank} to be made", process)
        if failure is not None:
            raise WorkerError(
                group=group, rank=context.rank, node=process.node, pid=process.pid, method="__init__",
                original_type=failure.type, original_message=failure.message, original_traceback=failure.traceback,
                log_path=process.spec.log_path,
            ) from failure.error  # fmt: skip

    def call(self, process: Process, call: Call, blocks: Sequence[Any]) -> Pending:
        reply_ref, numbers, others = process.handle.execute.options(num_returns=3).remote(call, *blocks)
        reply: asyncio.Future[Reply] = asyncio.ensure_future(self._reply(reply_ref, process))
        return Pending(process=process, call=call, reply=reply, blocks=(numbers, others))

    async def _reply(self, ref: Any, process: Process) -> Reply:
        try:
            answer: Reply = await ref
        except RayError as error:
            raise _failed(process, error) from error
        return answer

    async def control(self, process: Process, request: str, deadline: float, **kwargs: Any) -> Any:
        subject = f"the control thread of {process.spec.name} to answer {request!r}"
        return await self._settle(process.handle.control.remote(request, kwargs), deadline, subject, process)

    async def _settle(self, ref: Any, deadline: float, subject: str, process: Process) -> Any:
        try:
            return await within(deadline, ref)
        except RayError as error:
            raise _failed(process, error) from error
        except TimeoutError as error:
            raise DeadlineExceeded(waiter="the controller", subject=subject, seconds=deadline) from error

    async def kill(self, process: Process) -> None:
        ray.kill(process.handle, no_restart=True)
        if process.address in (ray.util.get_node_ip_address(), *network_interfaces().values()):
            ends = self.time() + KILL_SECONDS
            while find_process(process.pid, process.created) is not None and self.time() < ends:
                await self.sleep(0.02)
            end_process(process.pid, process.created)

    # -- values ---------------------------------------------------------------------------------------------------------------

    def put(self, value: Any) -> Any:
        return ray.put(value)

    async def fetch(self, refs: Sequence[Any], deadline: float) -> list[Any]:
        try:
            return list(await within(deadline, asyncio.gather(*map(plain, refs))))
        except RayError as error:
            raise DataLost(waiter="the controller", cause=first_lines(_cause(error))) from error
        except TimeoutError as error:
            raise DeadlineExceeded(waiter="the controller", subject=f"{len(refs)} stored values", seconds=deadline) from error


async def _placed(group: PlacementGroup, seconds: float) -> bool:
    try:
        await within(max(seconds, 0.01), group.ready())
    except TimeoutError:
        return False
    return True


def _failed(process: Process, error: RayError) -> RolemeshError:
    """What a Ray error means for a call: data that is gone, a process that is gone, or an error around the method (pickling)."""
    cause = _cause(error)
    if isinstance(cause, ObjectLostError):
        return DataLost(waiter=f"process {process.spec.name}", cause=first_lines(cause))
    if missing := import_failure(process.node, cause):
        return _worker_error(WorkerError, process, "ModuleNotFoundError", missing, original_traceback=str(error))
    if not isinstance(error, GONE):
        return _worker_error(WorkerError, process, type(cause).__name__, str(cause), original_traceback=str(error))
    reason = "unreachable" if isinstance(error, ActorUnavailableError) else "died"
    message = f"process {process.spec.name} {reason}: {first_lines(error)}"
    return _worker_error(WorkerDied, process, type(error).__name__, message, log_tail=_tail(process.spec.log_path))


def _worker_error(kind: type[WorkerError], process: Process, original: str, message: str, **more: str) -> WorkerError:
    return kind(
        group="", rank=-1, node=process.node, pid=process.pid, method="", original_type=original, original_message=message,
        log_path=process.spec.log_path, **more,
    )  # fmt: skip


def _cause(error: RayError) -> Exception:
    """Of an error in a worker's process, what was raised there: Ray wraps it in a text of its own."""
    cause: Exception = error.cause if isinstance(error, RayTaskError) else error
    return cause


def _tail(log_path: str) -> str:
    path = Path(log_path)
    if not log_path or not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:])
