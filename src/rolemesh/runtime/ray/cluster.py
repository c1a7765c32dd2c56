"""The Ray cluster that a backend works on: joined, or started for one run and ended with it."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import ray

from rolemesh.errors import RolemeshError
from rolemesh.runtime.ray.standing import NAMESPACE
from rolemesh.runtime.ray.waiting import first_lines


class RayCluster:
    """`address` is None for a cluster of this run alone, on this machine, that ends with it."""

    def __init__(
        self,
        address: str | None,
        *,
        num_cpus: float | None,
        num_gpus: int | None,
        object_store_bytes: int | None,
        pythonpath: Sequence[str],
    ) -> None:
        self._address, self._num_cpus, self._num_gpus = address, num_cpus, num_gpus
        self._object_store_bytes, self._pythonpath = object_store_bytes, tuple(pythonpath)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._started = False

    def start(self) -> None:
        """Join the cluster, or start one. Does nothing when it has."""
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

    @property
    def address(self) -> str:
        """HOST:PORT of the cluster that was joined or started; empty before."""
        return str(ray.get_runtime_context().gcs_address) if self._started else ""

    def stop(self) -> None:
        """End the cluster if it is this run's own, else leave it."""
        if self._started:
            ray.shutdown()
            self._started = False
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None


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
        text = f"Ray did not start {where}: {first_lines(error)}. A machine that is busy may need another try; Ray's own logs say more"
        raise RolemeshError(text=text) from error
