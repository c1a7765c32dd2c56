"""Runs that join a cluster which others use: refused with numbers and names, or kept waiting in plain sight; placed on what is free now."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import get_placement_group, remove_placement_group
from training_helpers import SMALL, Quiet, only_run, rows, small

import rolemesh
from rolemesh.cli import inspecting
from rolemesh.errors import ConfigError, ResourceError
from rolemesh.plan import impossible, needed_nodes
from rolemesh.runtime import Backend, create_backend
from rolemesh.training import admission
from rolemesh.training.environment import check_environment
from rolemesh.training.launch import run_training
from rolemesh.training.tasks import run_evaluation

pytestmark = pytest.mark.ray
SOURCES = [str(Path(__file__).parent), str(Path(rolemesh.__file__).parents[1])]
GPU_POOL = "pools.main={nodes: [%s], gpus: 1, cpus: 0.5}"


PROGRAM = """
import sys, ray
from ray.util.placement_group import placement_group
from rolemesh.runtime import Bundle, create_backend

@ray.remote
class Hog:
    def there(self): return True

async def main():
    nodes = (await backend.inventory()).nodes
    if {leftover}:
        group = placement_group([{{"CPU": 1, "GPU": 6}}], name="math-0/main@0", lifetime="detached",
            bundle_label_selector=[{{"ray.io/node-id": nodes[0].labels["ray.io/node-id"]}}])
        await group.ready()
    elif {gpus}:
        await backend.create_pool("math-1/main", [Bundle(node=node, cpus=1, gpus=1) for node in (0, 1)] * {gpus}, nodes, 30)
    hog = Hog.options(name="hog", num_cpus={cpus}).remote()
    await hog.there.remote()
    print("there", flush=True)
    sys.stdin.read()

backend = create_backend("ray", address=sys.argv[1])
backend.run(main())
backend.stop()
"""


@contextmanager
def others(address: str, *, gpus: int = 0, cpus: float = 0, leftover: bool = False) -> Iterator[Callable[[], None]]:
    """Another program on the cluster: it holds so many GPUs (and CPUs) of each node in a pool, and an actor of so many CPUs; or leaves a
    detached group behind. Gives a function that ends it."""
    code = PROGRAM.format(gpus=gpus, cpus=cpus, leftover=leftover)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(SOURCES)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def end() -> None:
        process.communicate(timeout=30)

    try:
        assert process.stdout.readline() == "there\n"
        yield end
    finally:
        if process.poll() is None:
            end()


@contextmanager
def joined(address: str) -> Iterator[Backend]:
    backend = create_backend("ray", address=address, pythonpath=SOURCES)
    backend.start()
    try:
        yield backend
    finally:
        backend.stop()


def limit(seconds: float) -> float:
    """On a machine that has nothing else to do; more where several programs share each of its CPUs."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def settled(address: str) -> None:
    """Wait until nothing on the cluster is held; what was released is free again a moment later."""

    async def main(backend: Backend) -> None:
        async with asyncio.timeout(60):
            while any(node.holders for node in (await backend.inventory()).nodes):
                await asyncio.sleep(0.2)

    with joined(address) as backend:
        backend.run(main(backend))


def refused(tmp_path: Path, address: str, *overrides: str, within: float = 5) -> dict[str, str]:
    """Subject -> message of a run that the cluster cannot take, in seconds and without a trace."""
    config = small(tmp_path, f"cluster.address={address}", *overrides)
    began = time.monotonic()
    with pytest.raises(ResourceError) as caught:
        run_training(config, Quiet())
    assert time.monotonic() - began < limit(within)
    assert caught.value.exit_code == 3
    assert not list((tmp_path / "runs").glob("*"))
    assert all(problem.remedy for problem in caught.value.problems)
    return {problem.subject: str(problem) for problem in caught.value.problems}


OWN = "roles.judge={worker: 'rolemesh.roles.rollout:RolloutWorker', pool: main, tensor_parallel: %d}"
IMPOSSIBLE = {
    "GPUs of one node though the sum fits": ([GPU_POOL % 16], "pool main", "GPU: needs 16, free 8"),
    "CPUs of one node though the sum fits": (["pools.main={nodes: [4], cpus: 5}"], "pool main", "CPU: needs 20, free 16"),
    "accelerator type": (
        ["pools.main={nodes: [1], gpus: 1, accelerator_type: A100}"],
        "pools.main.accelerator_type",
        "found 0 of 2 (H100 on 1 node",
    ),
    "label": (["pools.main={nodes: [1], labels: {team: green}}"], "pools.main.labels", "team=red on 1 node, team=blue on 1 node"),
    "nodes with a label": (
        ["pools.main={nodes: [1, 1], labels: {team: red}}"],
        "pools.main.labels",
        "needs 2 nodes with the label team=red; found 1 of 2",
    ),
    "custom resource": (["pools.main={nodes: [1], resources: {NPX: 1}}"], "pools.main.resources", "Did you mean 'NPU'?"),
    "amount of a custom resource": (["pools.main={nodes: [5], resources: {NPU: 1}}"], "pool main", "NPU: needs 5, free 4"),
    "tensor parallelism across nodes": (
        ["pools.main={nodes: auto, gpus: 1}", OWN % 16],
        "roles.judge.tensor_parallel",
        "largest node worker-2: 8 slots fit",
    ),
    "shared devices": (["pools.main={nodes: [25], gpus: 1, share: 3, cpus: 0.1}"], "pool main", "GPU: needs 8.33, free 8"),
    "nodes": (["pools.main={nodes: [1, 1, 1]}"], "pool main", "nodes: needs 3, one for each entry of the pool's nodes; found 2 nodes"),
    "spare slots": (
        ["pools.main={nodes: [8, 8], gpus: 1, cpus: 1, capacity_factor: 1.1}"],
        "pools.main.capacity_factor",
        "needs 2 spare slots, 0 fit",
    ),
    "memory": (["pools.main.nodes=[1]", "rollout.slots=3000000"], "node worker-2", "memory: its processes need about"),
    "workers": (["pools.main={nodes: [2]}", "roles.rollout.workers=3"], "roles.rollout.workers", "3 workers need 3 places"),
    "network interface": (
        ["pools.main={nodes: [1], cpus: 0.5}", "cluster.interface=ib0"],
        "cluster.interface",
        "node worker-2 must have the network interface ib0",
    ),
}


OFTEN = ("GPUs of one node though the sum fits", "accelerator type")
"""What the default suite looks at: an amount and a property of live nodes. The plan's own tests have all of them without a cluster."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in IMPOSSIBLE])
def test_what_the_cluster_cannot_hold_is_refused_in_seconds(raylets: Any, tmp_path: Path, name: str) -> None:
    overrides, subject, text = IMPOSSIBLE[name]
    found = refused(tmp_path, raylets.address, *overrides)
    assert text in found[subject]


@pytest.mark.slow
def test_A05_counts_of_devices_come_with_the_variable_that_limits_them(
    raylets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "PROBE_FOR_REPORT_SECONDS", 30.0)
    found = refused(tmp_path, raylets.address, "pools.main={nodes: [9], gpus: 1, cpus: 0.5, labels: {team: blue}}", within=40)
    assert "GPU: needs 9, free 8" in found["pool main"]
    assert "pools.main.gpus" in found["pool main"]
    assert "CUDA_VISIBLE_DEVICES=1,3,5,7,9,11,13,15 is set there" in found["pool main"]


def check_live_plans(address: str) -> None:
    """`rolemesh plan --live` with two devices left on each node."""

    def plan(pool: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "rolemesh.cli", "plan", "demo", "--live", "--json", f"cluster.address={address}", pool]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(SOURCES)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    code, found = plan("pools.main={nodes: [2, 2], gpus: 1, cpus: 0.5}")
    assert (code, found["problems"]) == (0, [])
    assert [node["free_gpus"] for node in found["nodes"]] == [2, 2]
    assert found["nodes"][1]["interfaces"]["lo"] == "127.0.0.1"
    code, found = plan("pools.main={nodes: [3, 2], gpus: 1, cpus: 0.5}")
    assert (code, found["problems"][0]["subject"]) == (3, "pool main")


@pytest.mark.slow
def test_who_holds_the_cluster_is_named(raylets: Any, tmp_path: Path) -> None:
    with others(raylets.address, gpus=6, cpus=7):
        gpus = refused(tmp_path, raylets.address, GPU_POOL % 4)["pool main"]
        assert "GPU: needs 4, free 2" in gpus
        assert "held by math-1/main 6 CPUs and 6 GPUs" in gpus
        # A01: the node that the actor is on has 3 CPUs left, the other 10.
        cpus = refused(tmp_path, raylets.address, "pools.main={nodes: [4, 4], cpus: 1}")["pool main"]
        assert "CPU: needs 4, free 3" in cpus
        assert "actor hog 7 CPUs" in cpus
        assert "math-1/main 6 CPUs and 6 GPUs" in cpus
        check_live_plans(raylets.address)
    settled(raylets.address)


@pytest.mark.slow
def test_what_a_dead_run_has_left_is_named_with_its_remedy(raylets: Any, tmp_path: Path) -> None:
    with others(raylets.address, leftover=True) as end:
        end()
    found = refused(tmp_path, raylets.address, "pools.main={nodes: [4], gpus: 1, cpus: 0.5, labels: {team: red}}")["pool main"]
    assert "math-0/main (left by run math-0, which has no driver any more; `rolemesh clean math-0` frees it) 1 CPU and 6 GPUs" in found
    with joined(raylets.address):
        remove_placement_group(get_placement_group("math-0/main@0"))
    settled(raylets.address)


def waiting_run(tmp_path: Path, address: str, *overrides: str) -> subprocess.Popen[str]:
    """`rolemesh train` in a process of its own, once its status says that it waits."""
    command = [sys.executable, "-m", "rolemesh.cli", "train", "demo", *SMALL, f"runs_dir={tmp_path / 'runs'}", f"cluster.address={address}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(SOURCES)}
    process = subprocess.Popen([*command, *overrides], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    ends = time.monotonic() + 60
    while not list(tmp_path.glob("runs/*/status.json")) or only_run(tmp_path).read_status()["state"] != "waiting":
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < ends
        time.sleep(0.1)
    return process


def resource_request() -> Any:
    """What Ray's autoscaler was asked for last."""
    return json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or b"[]")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_wait_is_told_and_ends_at_once_when_interrupted(raylets: Any, tmp_path: Path, number: int) -> None:
    process = waiting_run(tmp_path, raylets.address, "pools.main={nodes: [9], gpus: 1, cpus: 0.5}", "cluster.wait=300")
    status = only_run(tmp_path).read_status()
    assert status["phase"].startswith("waiting for room on the cluster, 0 of 300 s, until ")
    assert "pool main: GPU: needs 9, free 8" in status["phase"]
    with joined(raylets.address):
        # The pool's one node: nine slots, and a reward process.
        assert resource_request() == [{"CPU": 5.5, "GPU": 9}]
    began = time.monotonic()
    process.send_signal(number)
    shown, errors = process.communicate(timeout=30)
    assert (process.returncode, time.monotonic() - began < limit(5)) == (130, True), errors
    assert "waiting for room on the cluster" in shown
    assert only_run(tmp_path).read_status()["state"] == "interrupted"
    with joined(raylets.address):
        assert resource_request() == []


@pytest.mark.slow
def test_a_wait_that_ends_says_the_same_and_how_long(raylets: Any, tmp_path: Path) -> None:
    config = small(tmp_path, f"cluster.address={raylets.address}", "pools.main={nodes: [1, 1, 1]}", "cluster.wait=2")
    began, display = time.monotonic(), Quiet()
    with pytest.raises(ResourceError) as caught:
        run_training(config, display)
    assert 2 <= time.monotonic() - began < limit(8)
    first, last = caught.value.problems
    assert str(first).startswith("pool main: nodes: needs 3")
    assert str(last) == "cluster.wait: waited 2 s for this; found no room. Raise cluster.wait, or make room as said above"
    assert only_run(tmp_path).read_status()["state"] == "failed"


@pytest.mark.slow
def test_I07_a_node_that_arrives_is_used_within_ten_seconds(raylets: Any, tmp_path: Path) -> None:
    pool = "pools.main={nodes: [1], gpus: 1, cpus: 0.5, labels: {team: green}}"
    process = waiting_run(tmp_path, raylets.address, pool, "cluster.wait=300")
    assert "pool main needs 1 node with the label team=green; found 0 of 2" in only_run(tmp_path).read_status()["phase"]
    time.sleep(10)
    common = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": 100_000_000}
    node = raylets.add_node(node_name="worker-7", labels={"team": "green"}, **common)
    began = time.monotonic()
    while only_run(tmp_path).read_status()["state"] == "waiting":
        assert time.monotonic() - began < 60
        time.sleep(0.1)
    seconds = time.monotonic() - began
    process.send_signal(signal.SIGTERM)
    shown, errors = process.communicate(timeout=60)
    raylets.remove_node(node)
    assert process.returncode == 130, errors
    workers = json.loads(only_run(tmp_path).plan.read_text())["workers"]
    assert {worker["node"] for worker in workers} == {"worker-7"}
    assert "ranks meet on worker-7 at " in shown
    assert seconds < limit(10)


@pytest.mark.slow
def test_a_run_on_two_nodes_that_others_use_too(raylets: Any, tmp_path: Path) -> None:
    """One rank on each node, where there is room, with store and probe; the other run's program ends meanwhile."""
    with others(raylets.address, gpus=7):
        config = small(
            tmp_path, f"cluster.address={raylets.address}", "cluster.interface=lo", "pools.main={nodes: [1, 1], cpus: 1}",
            "pools.score={nodes: [1], labels: {team: blue}}", "roles.reward.pool=score",
        )  # fmt: skip
        display = Quiet()
        summary = run_training(config, display)
    assert summary["steps"] == 2
    directory = only_run(tmp_path)
    assert rows(directory)[-1]["step"] == 2
    plan = json.loads(directory.plan.read_text())
    assert [(worker["role"], worker["node"]) for worker in plan["workers"]] == [
        ("actor", "worker-2"), ("actor", "worker-10"), ("rollout", "worker-2"), ("rollout", "worker-10"), ("reward", "worker-10"),
    ]  # fmt: skip
    assert plan["helpers"] == [{"name": "kv_store", "node": "worker-2"}]
    assert plan["nodes"][0]["holders"] == {"math-1/main": {"CPU": 7, "GPU": 7}}
    assert "ranks meet on worker-2 at 127.0.0.1, worker-10 at 127.0.0.1" in display.notes
    assert any("worker-2: ranks use 127.0.0.1 (lo), the cluster knows it as" in note for note in display.notes)
    settled(raylets.address)


@pytest.mark.slow
def test_an_evaluation_joins_too(raylets: Any, tmp_path: Path) -> None:
    found = run_evaluation(small(tmp_path, f"cluster.address={raylets.address}", "pools.main={nodes: [1], labels: {team: blue}}"))
    assert 0 <= found["eval/accuracy"] <= 1


def test_plan_live_needs_a_cluster(tmp_path: Path) -> None:
    for more in ([], ["--nodes", "2x8"]):
        with pytest.raises(ConfigError, match=r"--live: needs cluster\.address, and no --nodes"):
            inspecting.plan(["demo"], more[1:] or None, as_json=True, live=True)


def test_what_no_cluster_can_hold_is_known_before_one_is_joined(tmp_path: Path) -> None:
    config = small(tmp_path, "cluster.address=192.0.2.99:6379", "pools.main={nodes: [2]}", "roles.rollout.workers=3")
    with pytest.raises(ResourceError, match="3 workers need 3 places in pool main; found 2 places"):
        run_training(config, Quiet())


def test_needs_are_those_of_the_pools(tmp_path: Path) -> None:
    config = small(
        tmp_path, "pools.main={nodes: [8, 4], gpus: 1, share: 2, labels: {team: red}, accelerator_type: H100}",
        "pools.score={nodes: [3], cpus: 2}",
        "roles.reward.pool=score",
    )  # fmt: skip
    assert [(node.cpus, node.gpus, node.gpu_type, node.labels) for node in needed_nodes(config)] == [
        (4, 4, "H100", {"team": "red"}),
        (2, 2, "H100", {"team": "red"}),
        (6, 0, "", {}),
    ]
    assert impossible(config) == ()


def test_A20_an_environment_that_is_too_long_is_refused_with_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_environment(small(tmp_path))
    monkeypatch.setenv("LARGE", "x" * 200_000)
    with pytest.raises(ConfigError) as caught:
        run_training(small(tmp_path), Quiet())
    (problem,) = caught.value.problems
    assert problem.subject == "environment"
    assert "largest: LARGE 200007, " in problem.free
    check_environment(small(tmp_path, "cluster.address=auto"))  # nothing of it travels
    check_environment(small(tmp_path, "backend=local"))
