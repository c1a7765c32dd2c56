"""The Ray actor around a `ProcessHost`: one thread computes, the concurrency group `control` always answers."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import psutil
import ray

from rolemesh.plan.inventory import network_interfaces
from rolemesh.protocols.backend import Call, Failure, Reply
from rolemesh.runtime.host import ProcessHost


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2})
class RayHost:
    """Lives in one bundle of a pool. Ray never restarts or moves it."""

    def __init__(self, name: str, node: str, log_path: str, interface: str | None) -> None:
        if log_path:
            _redirect_output(log_path)
        self._address = network_interfaces()[interface] if interface else ray.util.get_node_ip_address()
        self._host = ProcessHost(name, node)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def who(self) -> tuple[str, str, int, float]:
        """(node, address, pid, when this process started)."""
        return self._host.node, self._address, os.getpid(), psutil.Process().create_time()

    def add_worker(self, group: str, worker_class: type, context: Any, kwargs: dict[str, Any]) -> Failure | None:
        return self._host.add_worker(group, worker_class, context, kwargs)

    def execute(self, call: Call, *blocks: Any) -> tuple[Reply, Any, Any]:
        """Ray has fetched the blocks already: token data comes from where it lies, never through the controller."""
        reply, written = self._host.execute(call, blocks)
        return reply, *written

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def control(self, request: str, kwargs: dict[str, Any]) -> Any:
        return self._host.control(request, **kwargs)


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
