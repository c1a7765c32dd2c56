"""The Ray backend: processes are Ray actors in placement groups, blocks are Ray objects owned by the controller.

One placement group for each node that a pool touches, pinned to that node, so that Ray cannot move anything by itself. Ray neither
restarts actors nor retries tasks for us. A pool or a call that does not come to be ends with our own deadline and a message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import FrameType
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

from rolemesh.errors import DataLost, DeadlineExceeded, Problem, ResourceError, RolemeshError, WorkerDied, WorkerError
from rolemesh.plan.inventory import order_nodes
from rolemesh.plan.schema import Inventory, NodeInfo
from rolemesh.protocols.backend import Bundle, Call, Capability, Pending, Process, ProcessSpec, Reply
from rolemesh.runtime.ray.host import RayHost, end_process, find_process
from rolemesh.runtime.ray.store import NAMESPACE, RayStoreLink

T = TypeVar("T")
NODE_LABEL = "ray.io/node-id"
LOG_TAIL_LINES = 20
NODES_SECONDS = 30.0
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
        self._address, self._num_cpus, self._num_gpus = address, num_cpus, num_gpus
        self._object_store_bytes, self._pythonpath = object_store_bytes, tuple(pythonpath)
        self._groups: dict[str, dict[int, PlacementGroup]] = {}
        self._bundles: dict[str, tuple[Bundle, ...]] = {}
        self._stores: list[RayStoreLink] = []
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._started = False

    # -- life -----------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the cluster, or start one. Called by the first `run`."""
        if self._started:
            return
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # the workers are the job here, not background work
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": NAMESPACE}
        if self._pythonpath:
            options["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(self._pythonpath)}}
        if self._address is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="rolemesh-", dir="/tmp", ignore_cleanup_errors=True)
            options |= {
                "address": "local",
                "include_dashboard": False,
                "num_cpus": self._num_cpus,
                "num_gpus": self._num_gpus,
                "object_store_memory": self._object_store_bytes,
                "_temp_dir": self._temporary.name,
            }
        else:
            options["address"] = self._address
        self._started = True  # even if the start is interrupted: then there is something to end
        _start_ray(options)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        self.start()
        return asyncio.run(main)

    def time(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def start_store(self, run: str, deadline: float) -> RayStoreLink:
        link = RayStoreLink(run)
        self._stores.append(link)
        await link.restart(deadline)
        return link

    async def close(self) -> None:
        while self._stores:
            await self._stores.pop().stop()
        for name in list(self._groups):
            await self.release_pool(name)

    def stop(self) -> None:
        """End the cluster if it is this run's own, else leave it."""
        if self._started:
            ray.shutdown()
            self._started = False
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    # -- resources ------------------------------------------------------------------------------------------------------------

    async def inventory(self) -> Inventory:
        by_name = {info.name: info for info in (await _nodes()).values()}
        return Inventory(nodes=tuple(by_name[name] for name in order_nodes(list(by_name))), origin="ray cluster")

    async def create_pool(self, name: str, bundles: Sequence[Bundle], nodes: Sequence[NodeInfo], deadline: float) -> None:
        ids = {info.name: node_id for node_id, info in (await _nodes()).items()}
        gone = [nodes[bundle.node].name for bundle in bundles if nodes[bundle.node].name not in ids]
        if gone:
            raise ResourceError.one(f"pool {name}", f"node {gone[0]}", f"alive: {', '.join(ids)}", "Plan again with the nodes there are")
        groups: dict[int, PlacementGroup] = {}
        self._groups[name], self._bundles[name] = groups, tuple(bundles)
        for node in sorted({bundle.node for bundle in bundles}):
            shares = [_resources(bundle) for bundle in bundles if bundle.node == node]
            selector = [{NODE_LABEL: ids[nodes[node].name]}] * len(shares)
            groups[node] = placement_group(shares, strategy="PACK", name=f"{name}@{node}", bundle_label_selector=selector)
        ends = self.time() + deadline
        for group in groups.values():
            if not await _placed(group, ends - self.time()):
                problems = await self._shortage(name, nodes)
                await self.release_pool(name)
                raise ResourceError(problems=problems)

    async def _shortage(self, name: str, nodes: Sequence[NodeInfo]) -> list[Problem]:
        """What each node of a pool that could not be placed lacks."""
        free = {info.name: info for info in (await self.inventory()).nodes}
        problems = []
        for node in sorted({bundle.node for bundle in self._bundles[name]}):
            mine = [bundle for bundle in self._bundles[name] if bundle.node == node]
            info = free.get(nodes[node].name)
            have = f"free CPU {info.free_cpus:g}, GPU {info.free_gpus}" if info else "the node is gone"
            need = f"CPU {sum(bundle.cpus for bundle in mine):g}, GPU {sum(bundle.gpus for bundle in mine)}"
            problems.append(
                Problem(
                    subject=f"pool {name} on node {nodes[node].name}", need=need, free=have, remedy="Lower pools.*.nodes or pools.*.cpus"
                )
            )
        return problems

    async def release_pool(self, name: str) -> None:
        for group in self._groups.pop(name, {}).values():
            remove_placement_group(group)
        self._bundles.pop(name, None)

    # -- processes ------------------------------------------------------------------------------------------------------------

    async def spawn(self, spec: ProcessSpec, deadline: float) -> Process:
        bundle = self._bundles[spec.pool][spec.bundle]
        index = [i for i, other in enumerate(self._bundles[spec.pool]) if other.node == bundle.node].index(spec.bundle)
        strategy = PlacementGroupSchedulingStrategy(self._groups[spec.pool][bundle.node], placement_group_bundle_index=index)
        actor = RayHost.options(  # type: ignore[attr-defined]
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": dict(spec.env)},
        ).remote(spec.name, spec.log_path)
        try:
            node, address, pid, created = await self._settle(actor.who.remote(), deadline, f"process {spec.name} to start", spec)
        except BaseException:  # also when nobody waits for it any more: it must not start later
            ray.kill(actor, no_restart=True)
            raise
        return Process(spec=spec, node=node, address=address, pid=pid, created=created, handle=actor)

    async def add_worker(
        self, process: Process, group: str, worker_class: type, context: Any, kwargs: Mapping[str, Any], deadline: float
    ) -> None:
        ref = process.handle.add_worker.remote(group, worker_class, context, dict(kwargs))
        failure = await self._settle(ref, deadline, f"{group} rank {context.rank} to be made", process.spec, process)
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
        return await self._settle(process.handle.control.remote(request, kwargs), deadline, subject, process.spec, process)

    async def _settle(self, ref: Any, deadline: float, subject: str, spec: ProcessSpec, process: Process | None = None) -> Any:
        try:
            return await _within(deadline, ref)
        except RayError as error:
            known = process or Process(spec=spec, node="", address="", pid=0, handle=None)
            raise _failed(known, error) from error
        except TimeoutError as error:
            raise DeadlineExceeded(waiter="the controller", subject=subject, seconds=deadline) from error

    async def kill(self, process: Process) -> None:
        ray.kill(process.handle, no_restart=True)
        if process.address == ray.util.get_node_ip_address():
            ends = self.time() + KILL_SECONDS
            while find_process(process.pid, process.created) is not None and self.time() < ends:
                await self.sleep(0.02)
            end_process(process.pid, process.created)

    # -- values ---------------------------------------------------------------------------------------------------------------

    def put(self, value: Any) -> Any:
        return ray.put(value)

    async def fetch(self, refs: Sequence[Any], deadline: float) -> list[Any]:
        try:
            return list(await _within(deadline, asyncio.gather(*map(_await, refs))))
        except RayError as error:
            raise DataLost(waiter="the controller", cause=_first_lines(_cause(error))) from error
        except TimeoutError as error:
            raise DeadlineExceeded(waiter="the controller", subject=f"{len(refs)} stored values", seconds=deadline) from error


def _start_ray(options: dict[str, Any]) -> None:
    """`ray.init`, whole: cut short by an exception of a signal handler it leaves processes behind, or crashes as the process ends.

    A first SIGINT or SIGTERM meanwhile becomes KeyboardInterrupt afterwards; a second one does at once. Ray's own handler of SIGTERM,
    which ends the process on the spot, does not stay.
    """
    if threading.current_thread() is not threading.main_thread():
        _init(options)
        return
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        _init(options)
    except SystemExit:  # Ray's handler
        received.append(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt


def _init(options: dict[str, Any]) -> None:
    try:
        ray.init(**options)
    except Exception as error:  # Ray raises plain Exception when its processes do not come up in time
        where = "on this machine" if options["address"] == "local" else f"at {options['address']}"
        text = f"Ray did not start {where}: {_first_lines(error)}. A machine that is busy may need another try; Ray's own logs say more"
        raise RolemeshError(text=text) from error


async def _await(ref: Awaitable[T]) -> T:
    return await ref


async def _within(seconds: float, awaited: Awaitable[T]) -> T:
    """Wait no longer than that. Not `asyncio.wait_for`, which in Python 3.11 forgets a cancellation that arrives together with the
    result: a run would go on although it was interrupted."""
    async with asyncio.timeout(seconds):
        return await awaited


async def _placed(group: PlacementGroup, seconds: float) -> bool:
    try:
        await _within(max(seconds, 0.01), group.ready())
    except TimeoutError:
        return False
    return True


async def _nodes() -> dict[str, NodeInfo]:
    """The nodes that are alive by Ray's id. Ray asks its head node and blocks meanwhile, so a thread does it."""

    def ask() -> dict[str, NodeInfo]:
        # What is free on each node has no public call without Ray's dashboard; the public `available_resources` only has the sum.
        free = ray._private.state.available_resources_per_node()
        return {node["NodeID"]: _node_info(node, free.get(node["NodeID"], {})) for node in ray.nodes() if node["Alive"]}

    try:
        return await _within(NODES_SECONDS, asyncio.to_thread(ask))
    except TimeoutError as error:
        raise DeadlineExceeded(waiter="the controller", subject="Ray's list of nodes", seconds=NODES_SECONDS) from error


def _node_info(node: Mapping[str, Any], free: Mapping[str, float]) -> NodeInfo:
    total = node["Resources"]
    accelerator = next((key.split(":", 1)[1] for key in total if key.startswith("accelerator_type:")), "")
    return NodeInfo(
        name=_node_name(node),
        cpus=float(total.get("CPU", 0)),
        memory_bytes=int(total.get("memory", 0)),
        gpus=int(total.get("GPU", 0)),
        gpu_type=accelerator,
        free_cpus=float(free.get("CPU", 0)),
        free_gpus=int(free.get("GPU", 0)),
    )


def _node_name(node: Mapping[str, Any]) -> str:
    """Address and a short id: several nodes of a test cluster share one address."""
    return f"{node['NodeManagerAddress']}#{node['NodeID'][:8]}"


def _resources(bundle: Bundle) -> dict[str, float]:
    return {"CPU": bundle.cpus} | ({"GPU": bundle.gpus} if bundle.gpus else {})


def _failed(process: Process, error: RayError) -> RolemeshError:
    """What a Ray error means for a call: data that is gone, a process that is gone, or an error around the method (pickling)."""
    cause = _cause(error)
    if isinstance(cause, ObjectLostError):
        return DataLost(waiter=f"process {process.spec.name}", cause=_first_lines(cause))
    if not isinstance(error, GONE):
        return _worker_error(WorkerError, process, type(cause).__name__, str(cause), original_traceback=str(error))
    reason = "unreachable" if isinstance(error, ActorUnavailableError) else "died"
    message = f"process {process.spec.name} {reason}: {_first_lines(error)}"
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


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4])


def _tail(log_path: str) -> str:
    path = Path(log_path)
    if not log_path or not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:])
