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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import ray
from ray._private.authentication.authentication_token_setup import (
    enable_token_auth_by_default,
    ensure_token_if_auth_enabled,
    maybe_enable_token_auth_if_token_available,
)

from rolemesh.errors import DeadlineExceeded, RolemeshError
from rolemesh.runtime.janitor import JanitorLink
from rolemesh.runtime.janitor_process import RUN
from rolemesh.runtime.ray.standing import NAMESPACE
from rolemesh.runtime.ray.waiting import first_lines

HEAD = str(Path(__file__).with_name("head.py"))
HEAD_SECONDS = 180.0
JOIN_SECONDS = 60.0
GREET_SECONDS = 10.0
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
UNDISTURBED = {"RAY_kill_child_processes_on_worker_exit": "false", "RAY_process_group_cleanup_enabled": "false"}
"""Ray kills the direct children of a worker at once, also those that remove its shared memory. The janitor does it after a moment."""

TUNABLES = "GLIBC_TUNABLES"
LARGE_COPIES = "glibc.cpu.x86_non_temporal_threshold=0x100000"
"""Copies of 1 MiB or more write past the caches, which takes a third less time: the target is not read first. The C library reads this as
a process starts; by itself it begins at 3/4 of the last cache, which where few processors see a large one is more than any weight."""


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
            address = address or self._start_head(self._janitor.folder)
        env = UNDISTURBED | {RUN: self.run, TUNABLES: os.environ.get(TUNABLES, LARGE_COPIES)}
        if self._pythonpath:
            env["PYTHONPATH"] = os.pathsep.join(self._pythonpath)
        join(address, runtime_env={"env_vars": env})
        self._janitor.tell("address", address=self.address)

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

    def entrust(self, folder: str) -> None:
        """Have the janitor remove a folder with the run."""
        if self._janitor is None:
            raise RuntimeError("the backend has not started: there is no run whose end would remove the folder")
        self._janitor.entrust(folder)

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


def join(address: str, **options: Any) -> None:
    """Join the cluster at HOST:PORT (`auto`: that of this machine). Raises RolemeshError, or DeadlineExceeded where something else answers.

    `ray.init` runs whole, in a thread of its own, where Ray leaves signal handlers alone: cut short by an exception of one it crashes as
    the process ends. A first SIGINT or SIGTERM meanwhile becomes KeyboardInterrupt afterwards; a second one does at once.
    """
    _greet(address)
    joined: Future[None] = Future()
    with _remembered_signals() as received:
        threading.Thread(target=_init, args=(address, options, joined), daemon=True, name="rolemesh-ray").start()
        try:
            joined.result(JOIN_SECONDS)
        except TimeoutError as error:
            raise DeadlineExceeded(waiter="the controller", subject=f"Ray at {address} to let it in", seconds=JOIN_SECONDS) from error
    if received:
        raise KeyboardInterrupt


@contextmanager
def _remembered_signals() -> Iterator[list[int]]:
    """Numbers of the SIGINT and SIGTERM that come meanwhile; the second one raises KeyboardInterrupt. In the main thread only."""
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, remember) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _greet(address: str) -> None:
    """Ask the head whether it is one and whether it wants tokens, which are used then. `ray.init` would try for minutes where there is
    none, uses no tokens for an address unless told so, and workers of a cluster without them cannot talk to a driver that does."""
    if address == "auto":
        return
    code = None
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=GREET_SECONDS)
        except grpc.RpcError as error:
            code = error.code()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        if not maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
            remedy = "Copy ~/.ray/auth_token of its head, or set RAY_AUTH_TOKEN; RAY_AUTH_MODE must be unset or `token`"
            raise RolemeshError(text=f"the Ray cluster at {address} wants a token, and there is none here. {remedy}")
    elif code is not None:
        remedy = "Check cluster.address, and that Ray runs there (`ray start --head`; its port is 6379 unless told otherwise)"
        raise RolemeshError(text=f"there is no Ray cluster at {address}: {code.name}. {remedy}")


def _init(address: str, options: dict[str, Any], joined: Future[None]) -> None:
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options)
        joined.set_result(None)
    except ConnectionError as error:
        if address != "auto":
            joined.set_exception(_not_started(f"at {address}", first_lines(error)))
        else:
            remedy = "Start one (`ray start --head`), or name another one by HOST:PORT"
            joined.set_exception(RolemeshError(text=f"cluster.address=auto: no Ray cluster runs on this machine. {remedy}"))
    except Exception as error:  # noqa: BLE001 - it travels to the waiting thread; Ray raises plain Exception, among others
        joined.set_exception(_not_started(f"at {address}", first_lines(error)))


def _not_started(where: str, found: str) -> RolemeshError:
    text = f"Ray did not start {where}: {found}. A machine that is busy may need another try; Ray's own logs say more"
    return RolemeshError(text=text)
