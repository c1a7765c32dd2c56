"""The Ray backend: processes are Ray actors in placement groups, blocks are Ray objects owned by the controller.

One placement group for each node that a pool touches, pinned to that node, so that Ray cannot move anything by itself. Ray neither
restarts actors nor retries tasks for us. A pool or a call that does not come to be ends with our own deadline and a message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
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

from rolemesh.errors import BatchError, ConfigError, DataLost, DeadlineExceeded, ResourceError, RolemeshError, WorkerDied, WorkerError
from rolemesh.plan.inventory import network_interfaces
from rolemesh.plan.schema import NODE_ID, Inventory, NodeInfo
from rolemesh.protocols.backend import Bundle, Call, Capability, OnAnswer, Process, ProcessSpec, WorkerSpec, taken
from rolemesh.runtime.ray.cluster import RayCluster
from rolemesh.runtime.ray.host import RayHost, end_process, find_process, flat_call, whole_reply
from rolemesh.runtime.ray.nodes import find_inventory, probe_nodes, request_nodes
from rolemesh.runtime.ray.reserve import ReservedPool, amounts, shortage
from rolemesh.runtime.ray.standing import NAMESPACE, Reserved, named, processes, reserved
from rolemesh.runtime.ray.store import RayStoreLink
from rolemesh.runtime.ray.waiting import first_lines, import_failure, plain, within

T = TypeVar("T")
LOG_TAIL_LINES = 20
ANSWER_SECONDS = 10.0
"""How long a process that is to be taken over gets to answer."""
KILL_SECONDS = 1.0
"""How long Ray gets to end a process itself; one ended behind its back it reports as a crash, on everybody's screen."""
GONE = (RayActorError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)
"""Ray's errors after which a process does not answer any more."""


class RayBackend:
    """Backend on Ray. `address` is None for a cluster of this run alone, on this machine, that ends with it.

    `num_cpus` and `num_gpus` tell such a cluster what the machine has (logical devices are fine in tests). What is made for the `run` ends
    with this process, however that ends; with `detached` pools, processes and stores live on, and another controller of the same run can
    take them over within `time_to_live` seconds.
    """

    name = "ray"

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: float | None = None,
        num_gpus: int | None = None,
        object_store_bytes: int | None = None,
        pythonpath: Sequence[str] = (),
        run: str | None = None,
        detached: bool = False,
        time_to_live: float = 900,
    ) -> None:
        self.lacks: frozenset[Capability] = frozenset() if detached else frozenset({"detach"})
        self._lifetime = "detached" if detached else None
        self._time_to_live = time_to_live if detached else 0
        self._kept: set[str] = set()
        """What was detached, pools and stores: it lives on when this process leaves."""
        if detached and run is None:
            raise ConfigError.one("run", "is needed for what is detached", "none", "Name it; whoever takes over gives the same name")
        self._cluster = RayCluster(
            address,
            run=run,
            time_to_live=self._time_to_live,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_bytes=object_store_bytes,
            pythonpath=pythonpath,
        )
        self.prefix = f"{self._cluster.run}/"
        self._pools: dict[str, ReservedPool] = {}
        self._stores: list[RayStoreLink] = []

    # -- life -----------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the cluster, or start one. Called by the first `run`."""
        self._cluster.start()

    @property
    def address(self) -> str:
        return self._cluster.address

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        try:
            self.start()
        except BaseException:
            main.close()  # else Python complains that nobody has awaited it
            raise
        return asyncio.run(main)

    def entrust(self, run: str, folder: str) -> None:
        self._cluster.entrust(folder)

    def time(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def start_store(self, run: str, deadline: float, node: NodeInfo | None = None) -> RayStoreLink:
        link = RayStoreLink(run, node, lifetime=self._lifetime)
        self._stores.append(link)
        self._kept.discard(run)
        await link.start(deadline)
        return link

    def find_store(self, run: str) -> RayStoreLink:
        return RayStoreLink(run)

    async def close(self) -> None:
        while self._stores:
            await self._stores.pop().stop()
        for name in list(self._pools):
            await self.release_pool(name)

    def stop(self) -> None:
        """End what is left on this machine, the cluster too if it is this run's own, else leave that."""
        if self._kept:
            self._cluster.leave()
        else:
            self._cluster.stop()

    # -- resources ------------------------------------------------------------------------------------------------------------

    async def inventory(self) -> Inventory:
        return await find_inventory()

    async def probe(self, inventory: Inventory, nodes: Collection[int], deadline: float) -> Inventory:
        return await probe_nodes(inventory, nodes, deadline)

    async def ask_for(self, wanted: Sequence[NodeInfo]) -> None:
        await request_nodes(wanted)

    async def create_pool(self, name: str, bundles: Sequence[Bundle], nodes: Sequence[NodeInfo], deadline: float) -> None:
        alive = {info.labels.get(NODE_ID): info.name for info in (await find_inventory()).nodes}
        gone = [nodes[bundle.node].name for bundle in bundles if nodes[bundle.node].labels.get(NODE_ID) not in alive]
        if gone:
            known = ", ".join(alive.values())
            raise ResourceError.one(f"pool {name}", f"node {gone[0]}", f"alive: {known}", "Plan again with the nodes there are")
        if name in self._pools:
            raise taken(name)
        pool = self._pools[name] = ReservedPool(bundles=tuple(bundles), nodes=tuple(nodes))
        self._kept.discard(name)
        ends = self.time() + deadline
        try:
            for node in sorted({bundle.node for bundle in bundles}):
                shares, homes = pool.layout(node)
                selector = [{NODE_ID: nodes[node].labels[NODE_ID]}] * len(shares)
                pool.groups[node] = placement_group(
                    shares, strategy="PACK", name=f"{name}@{node}", lifetime=self._lifetime, bundle_label_selector=selector
                )
                pool.homes.update(homes)
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

    async def attach_pool(self, name: str, bundles: Sequence[Bundle], nodes: Sequence[NodeInfo], deadline: float) -> list[Process] | None:
        there = (await reserved(name)).get(name, [])
        pool = ReservedPool(bundles=tuple(bundles), nodes=tuple(nodes))
        touched = {bundle.node for bundle in bundles}
        for node in touched:
            shares, homes = pool.layout(node)
            standing = next((found.group for found in there if found.holds(nodes[node].labels[NODE_ID], shares)), None)
            if standing is not None:
                pool.groups[node] = standing
                pool.homes.update(homes)
        if not touched or len(there) != len(touched) or pool.groups.keys() != touched:
            _remove(there)
            return None
        self._pools[name] = pool
        self._kept.discard(name)
        found = await asyncio.gather(*(self._living(actors, deadline) for actors in (await processes(name)).values()))
        return [process for process in found if process is not None]

    async def _living(self, numbered: Sequence[tuple[int, Any]], deadline: float) -> Process | None:
        """The newest process of a bundle, unless it does not answer. The others are killed."""
        *older, (_, newest) = numbered
        for _, actor in older:
            ray.kill(actor, no_restart=True)
        try:
            spec, node, address, pid, created = await within(min(deadline, ANSWER_SECONDS), newest.who.remote())
        except (RayError, TimeoutError):
            ray.kill(newest, no_restart=True)
            return None
        return Process(spec=spec, node=node, address=address, pid=pid, created=created, handle=newest)

    def detach(self, name: str) -> None:
        self._kept.add(name)
        self._pools.pop(name, None)
        self._stores = [store for store in self._stores if store.run != name]

    async def give_back(self, keep: Collection[str]) -> None:
        for name, groups in (await reserved(self.prefix)).items():
            if name not in keep:
                _remove(groups)

    # -- processes ------------------------------------------------------------------------------------------------------------

    async def spawn(self, spec: ProcessSpec, deadline: float) -> Process:
        pool = self._pools[spec.pool]
        bundle, node = pool.bundles[spec.bundle], pool.nodes[pool.bundles[spec.bundle].node]
        group = pool.groups[bundle.node]
        shares = amounts(bundle)
        ends = self.time() + deadline
        host = RayHost.options(  # type: ignore[attr-defined]
            name=spec.name,
            namespace=NAMESPACE,
            lifetime=self._lifetime,
            num_cpus=shares.pop("CPU", 0),
            num_gpus=shares.pop("GPU", 0),
            resources=shares,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=pool.homes[spec.bundle]),
        )
        try:
            actor = await named(lambda: host.remote(spec, node.name, self._time_to_live), ends)
        except TimeoutError as error:
            raise DeadlineExceeded(waiter="the controller", subject=f"the name {spec.name} to be free", seconds=deadline) from error
        starting = Process(spec=spec, node=node.name, address="", pid=0, handle=actor)
        try:
            subject = f"process {spec.name} to start"
            _, _, address, pid, created = await self._settle(actor.who.remote(), ends - self.time(), subject, starting)
        except BaseException:  # also when nobody waits for it any more: it must not start later
            ray.kill(actor, no_restart=True)
            raise
        return replace(starting, address=address, pid=pid, created=created)

    async def add_worker(self, process: Process, spec: WorkerSpec, deadline: float) -> None:
        rank = spec.context.rank
        failure = await self._settle(process.handle.add_worker.remote(spec), deadline, f"{spec.group} rank {rank} to be made", process)
        if failure is not None:
            raise WorkerError(
                group=spec.group, rank=rank, node=process.node, pid=process.pid, method="__init__",
                original_type=failure.type, original_message=failure.message, original_traceback=failure.traceback,
                log_path=process.spec.log_path,
            ) from failure.error  # fmt: skip

    def call(self, process: Process, call: Call, blocks: Sequence[Any], answered: OnAnswer) -> tuple[Any, Any]:
        numbers = others = None
        try:
            if call.writes:
                reply, numbers, others = process.handle.execute.remote(flat_call(call), *blocks)
            else:
                reply = process.handle.answer.remote(flat_call(call), *blocks)
        except Exception as error:  # noqa: BLE001 - the process boundary: arguments are pickled, by code of their own
            answered(_unsent(process, call, error))
            return None, None
        # What `reply.future()` does itself, without a future, which costs more than all the rest here. It needs the reference until then.
        reply._on_completed(partial(_tell, answered, process, reply))
        return numbers, others

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


def _tell(answered: OnAnswer, process: Process, reply: Any, found: list[Any] | Exception) -> None:
    """On a thread of Ray's: what came for the reference `reply`."""
    if not isinstance(found, Exception):
        answered(whole_reply(found))
        return
    told = _failed(process, found) if isinstance(found, RayError) else found
    if told is not found:
        told.__cause__ = found
    answered(told)


def _unsent(process: Process, call: Call, error: Exception) -> BatchError:
    found = f"{type(error).__name__}: {first_lines(error)}"
    told = BatchError(f"{call.group}.{call.method}(): the arguments for process {process.spec.name} cannot be sent: {found}")
    told.__cause__ = error
    return told


def _remove(groups: Iterable[Reserved]) -> None:
    """Ray ends what runs in them."""
    for found in groups:
        remove_placement_group(found.group)


async def _placed(group: PlacementGroup, seconds: float) -> bool:
    try:
        await within(max(seconds, 0.01), group.ready())
    except TimeoutError:
        return False
    return True


def _failed(process: Process, error: RayError) -> RolemeshError:
    """What a Ray error means for a call: data or a process that is gone, an error of ours, or one around the method (pickling)."""
    cause = _cause(error)
    if isinstance(cause, RolemeshError):
        return cause
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
