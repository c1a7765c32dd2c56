"""The Ray actor around a `ProcessHost`: one thread computes, the concurrency group `control` always answers."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

import psutil
import ray

from rolemesh.plan.inventory import network_interfaces
from rolemesh.protocols.backend import Call, Failure, ProcessSpec, Reply, WorkerSpec
from rolemesh.runtime.host import ProcessHost
from rolemesh.runtime.janitor import JanitorLink
from rolemesh.runtime.janitor_process import PROCESS, RUN
from rolemesh.runtime.ray.sweep import end_orphan

Flat = bytes | list[Any]
PLAIN = frozenset({bool, int, float, str, bytes})
"""Types that every process knows."""


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2})
class RayHost:
    """Lives in one bundle of a pool. Ray never restarts or moves it."""

    def __init__(self, spec: ProcessSpec, node: str, time_to_live: float) -> None:
        # Before what reads them is imported, and before there are children, which inherit the mark. Ray itself would start a process anew
        # for each set of variables.
        mark = f"{spec.name}~{secrets.token_hex(4)}"  # of this process alone: the janitor ends what the one before of this name has left
        os.environ.update({**spec.env, PROCESS: mark})
        if spec.log_path:
            _redirect_output(spec.log_path)
        self._spec = spec
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # forked children, whose environment does not have the mark, are known by their group
        self._janitor = JanitorLink(os.environ[RUN], "work", process=mark)
        self._address = network_interfaces()[spec.interface] if spec.interface else ray.util.get_node_ip_address()
        self._host = ProcessHost(spec.name, node, shared=False)
        signal.signal(signal.SIGTERM, self._leave)  # as before a preemption: the run ends in order, and ends this process
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        if time_to_live:
            threading.Thread(target=end_orphan, args=(os.environ[RUN], time_to_live), daemon=True, name="rolemesh-orphan").start()

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._host.leaving = True

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def who(self) -> tuple[ProcessSpec, str, str, int, float]:
        """(as what it was started, node, address, pid, when this process started)."""
        return self._spec, self._host.node, self._address, os.getpid(), psutil.Process().create_time()

    def add_worker(self, spec: WorkerSpec) -> Failure | None:
        return self._host.add_worker(spec)

    # No events for Ray's list of tasks: they cost a tenth of a call that does nothing, and the trace of the run says more.
    @ray.method(num_returns=3, enable_task_events=False)  # type: ignore[untyped-decorator]
    def execute(self, call: Flat, *blocks: Any) -> tuple[Flat, Any, Any]:
        """Ray has fetched the blocks already: token data comes from where it lies, never through the controller."""
        reply, written = self._host.execute(whole_call(call), blocks)
        return flat_reply(reply), *written

    @ray.method(enable_task_events=False)  # type: ignore[untyped-decorator]
    def answer(self, call: Flat, *blocks: Any) -> Flat:
        """`execute` of a method that writes nothing."""
        return flat_reply(self._host.execute(whole_call(call), blocks)[0])

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def control(self, request: str, kwargs: dict[str, Any]) -> Any:
        return self._host.control(request, **kwargs)


def flat_call(call: Call) -> Flat:
    """As bytes, which Ray sends as they are, where all that users put in is plain. Else Ray pickles it itself, by value where it must."""
    columns = call.assembly.columns if call.assembly is not None else ()
    return pickle.dumps(tuple(call), protocol=5) if _plain((*call.args, *columns)) and not call.kwargs else list(call)


def whole_call(flat: Flat) -> Call:
    """The inverse."""
    return Call(*(pickle.loads(flat) if isinstance(flat, bytes) else flat))


def flat_reply(reply: Reply) -> Flat:
    """As `flat_call`."""
    metrics = reply.metrics.reduce() if reply.metrics is not None else ()
    spans = [part for span in reply.spans for part in (span.name, *span.args, *span.args.values())]
    plain = reply.failure is None and _plain((reply.value, *metrics, *spans))
    return pickle.dumps(tuple(reply), protocol=5) if plain else list(reply)


def whole_reply(flat: Flat) -> Reply:
    """The inverse."""
    return Reply(*(pickle.loads(flat) if isinstance(flat, bytes) else flat))


def _plain(values: Iterable[Any]) -> bool:
    return all(value is None or type(value) in PLAIN for value in values)


def _redirect_output(log_path: str) -> None:
    """Everything this process prints, C++ libraries included, goes to the run's own log from here on."""
    os.makedirs(os.path.dirname(log_path), exist_ok=True)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def find_process(pid: int, created: float) -> psutil.Process | None:
    """A process of this machine, unless it has ended. The pid may be another process's by now."""
    try:
        found = psutil.Process(pid)
        same = abs(found.create_time() - created) < 1  # seconds: both follow the wall clock, which may be set in between
        return found if same and found.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def end_process(pid: int, created: float) -> None:
    """SIGKILL, for a process that Ray's own request does not reach, such as a stopped one."""
    found = find_process(pid, created)
    if found is not None:
        with suppress(psutil.NoSuchProcess):
            found.kill()
