"""The Ray cluster that a backend works on: joined, or started for one run. A janitor ends what the run leaves on this machine."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default, ensure_token_if_auth_enabled

from rolemesh.errors import DeadlineExceeded, RolemeshError
from rolemesh.runtime.janitor import JanitorLink
from rolemesh.runtime.janitor_process import RUN
from rolemesh.runtime.ray.standing import NAMESPACE
from rolemesh.runtime.ray.waiting import first_lines

HEAD = str(Path(__file__).with_name("head.py"))
HEAD_SECONDS = 180.0
UNDISTURBED = {"RAY_kill_child_processes_on_worker_exit": "false", "RAY_process_group_cleanup_enabled": "false"}
"""Ray kills the direct children of a worker at once, also those that remove its shared memory. The janitor does it after a moment."""


class RayCluster:
    """`address` is None for a cluster of this run alone, on this machine. `time_to_live` is how many seconds the run's processes may live
    without a driver; with 0 they end with it."""

    def __init__(
        self,
        address: str | None,
        *,
        run: str | None,
        time_to_live: float,
        num_cpus: float | None,
        num_gpus: int | None,
        object_store_bytes: int | None,
        pythonpath: Sequence[str],
    ) -> None:
        self.run = run or f"program-{secrets.token_hex(6)}"
        self._address, self._time_to_live, self._num_cpus, self._num_gpus = address, time_to_live, num_cpus, num_gpus
        self._object_store_bytes, self._pythonpath = object_store_bytes, tuple(pythonpath)
        self._janitor: JanitorLink | None = None

    def start(self) -> None:
        """Join the cluster, or start one; the cluster that an earlier driver of this run left alive is joined. Does nothing when it has."""
        if self._janitor is not None:
            return
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # the workers are the job here, not background work
        self._janitor = JanitorLink(
            self.run, "drive", own=self._address is None, address=self._address or "", ttl=self._time_to_live
        )  # from here on there is something to end
        address = self._janitor.answer["address"]
        logging.getLogger("ray").setLevel(logging.ERROR)
        if self._address is None:
            enable_token_auth_by_default()
            ensure_token_if_auth_enabled()
            if not address:
                address = self._start_head(self._janitor.folder)
                self._janitor.tell("address", address=address)
        env = {RUN: self.run}
        if self._pythonpath:
            env["PYTHONPATH"] = os.pathsep.join(self._pythonpath)
        join({"address": address, "namespace": NAMESPACE, "runtime_env": {"env_vars": env}})

    def _start_head(self, folder: Path) -> str:
        """In a session of its own, so that signals to this process's group or terminal do not reach it."""
        options = {
            "num_cpus": self._num_cpus,
            "num_gpus": self._num_gpus,
            "object_store_memory": self._object_store_bytes,
            "temp_dir": str(folder / "ray"),
        }
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | UNDISTURBED | {RUN: self.run}
        try:
            ended = subprocess.run(
                [sys.executable, "-P", HEAD, json.dumps(options)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                env=environment, start_new_session=True, timeout=HEAD_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(waiter="the controller", subject="Ray to start on this machine", seconds=HEAD_SECONDS) from error
        if ended.returncode:
            raise _not_started("on this machine", ended.stderr.strip().rpartition("\n")[2])
        return ended.stdout.split()[-1]

    @property
    def address(self) -> str:
        """HOST:PORT of the cluster that was joined or started; empty before."""
        return str(ray.get_runtime_context().gcs_address) if self._janitor is not None else ""

    def stop(self) -> None:
        """Leave the cluster and end what the run has on this machine, the cluster too if it is the run's own."""
        if self._janitor is not None:
            ray.shutdown()
            self._janitor.bye()
            self._janitor = None

    def leave(self) -> None:
        """Leave everything as it is, for a driver that comes back within the time to live."""
        if self._janitor is not None:
            ray.shutdown()
            self._janitor.close()
            self._janitor = None


def join(options: dict[str, Any]) -> None:
    """`ray.init`, whole: cut short by an exception of a signal handler it crashes as the process ends.

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
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray raises plain Exception when its processes do not come up in time
        raise _not_started(f"at {options['address']}", first_lines(error)) from error


def _not_started(where: str, found: str) -> RolemeshError:
    text = f"Ray did not start {where}: {found}. A machine that is busy may need another try; Ray's own logs say more"
    return RolemeshError(text=text)
