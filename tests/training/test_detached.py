"""S19: the driver of a run is killed with -9, and `rolemesh train --resume` goes on in the processes that live. Slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from training_helpers import SMALL, Quiet, only_run, rows, small

from rolemesh.observe import RunDirectory, read_json_lines
from rolemesh.plan import local_inventory
from rolemesh.training import phases
from rolemesh.training.launch import backend_for, open_run, run_on
from rolemesh.training.preflight import prepare

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]
STEPS = 6


def train(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rolemesh.cli", "train", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))}
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def demo() -> list[str]:
    options = ("pools.main.nodes=[2]", f"trainer.steps={STEPS}", "trainer.save_every=1", "trainer.keep_checkpoints=9")
    return ["demo", *SMALL, *options, "cluster.detached=true", "cluster.time_to_live=120"]


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    return output


def killed_after(folder: Path, step: int, process: subprocess.Popen[str]) -> tuple[RunDirectory, set[int]]:
    """Kill the driver in the step after a checkpoint; the run and the pids of its workers."""
    ends = time.monotonic() + 240
    while not list(folder.glob(f"runs/*/checkpoints/step-{step}")) or len(workers(folder)) < 5:
        assert time.monotonic() < ends
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    pids = workers(folder)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    return only_run(folder), set(pids)


def workers(folder: Path) -> list[int]:
    """Two actor, two rollout and one reward worker, by the pids of their processes."""
    found = list(folder.glob("runs/*/status.json"))
    return [worker["pid"] for worker in json.loads(found[0].read_text()).get("workers", [])] if found else []


def gone(pids: Iterable[int]) -> bool:
    """Who was killed is reaped a moment later."""
    ends = time.monotonic() + 15
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < ends:
        time.sleep(0.05)
    return not any(map(psutil.pid_exists, pids))


def kinds(run: RunDirectory, since: float, subject: str) -> list[str]:
    return [event["kind"] for event in read_json_lines(run.events) if event["subject"] == subject and event["time"] > since]


def calls(run: RunDirectory, since: float) -> set[str]:
    """Calls of the controller by group and method."""
    events = json.loads(run.trace.read_text())["traceEvents"]
    return {event["name"] for event in events if event["ph"] == "X" and event["ts"] > since * 1e6}


def when(run: RunDirectory, since: float, kind: str) -> float:
    """Seconds until the last event whose kind begins so."""
    return max(event["time"] for event in read_json_lines(run.events) if event["kind"].startswith(kind)) - since


def refused(folder: Path, run: RunDirectory) -> None:
    """A driver that finds a broken torch takes over all the same, as it needs none for that; then it is refused."""
    (folder / "broken").mkdir()
    (folder / "broken" / "torch.py").write_text("raise ImportError('no torch for this driver')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(folder / "broken"), os.environ.get("PYTHONPATH", ""))))
        again = train(folder, "--resume", run.name)
        output, _ = again.communicate(timeout=120)
    assert "no torch for this driver" in output
    assert again.returncode != 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("whole")
    finished(train(folder, *demo()))
    return only_run(folder)


def assert_same_end(run: RunDirectory, undisturbed: RunDirectory) -> None:
    for file in ("model/model.safetensors", "actor-optimizer.safetensors"):
        expected, found = (load_file(each.checkpoint(STEPS) / file) for each in (undisturbed, run))
        assert expected.keys() == found.keys()
        assert len(expected) > 5
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), name
    trained = [row["step"] for row in rows(run) if "reward/mean" in row]
    assert trained == list(range(1, STEPS + 1))


def test_S19_a_run_whose_driver_was_killed_goes_on_in_its_processes_to_the_same_weights(tmp_path: Path, undisturbed: RunDirectory) -> None:
    run, pids = killed_after(tmp_path, 2, train(tmp_path, *demo()))
    asked = [sys.executable, "-m", "rolemesh.cli", "status"]
    told = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "its workers wait for the next one for" in told
    assert f"`rolemesh train --resume {run.name}` goes on in them" in told
    before, began = run.status.read_text(), time.time()
    refused(tmp_path, run)
    assert kinds(run, began, "pool main") == ["attached, 3 of 3 processes live"]
    assert all(map(psutil.pid_exists, pids)), "who is refused leaves all as it was"
    assert run.status.read_text() == before
    began = time.time()
    again = train(tmp_path, "--resume", run.name)
    while (
        not workers(tmp_path) or json.loads(run.status.read_text())["state"] != "running" or kinds(run, began, "reward")[-1:] != ["ready"]
    ):
        assert again.poll() is None, again.communicate()[0]
        time.sleep(0.1)
    assert set(workers(tmp_path)) == pids
    finished(again)
    assert kinds(run, began, "pool main") == ["attached, 3 of 3 processes live"]
    assert calls(run, began) >= {"actor.restore", "actor.update"}
    assert not calls(run, began) & {"actor.load", "rollout.load", "reward.load"}, "workers stay as they are"
    assert_same_end(run, undisturbed)
    assert gone(pids), "a run that ends in order frees everything"
    times = [when(run, began, kind) for kind in ("attached", "loading", "resumed")]
    sys.stdout.write("attached after {:.1f} s, loading from {:.1f} s, at the checkpoint after {:.1f} s\n".format(*times))
    assert times == sorted(times)
    assert times[-1] < 60, "attached under 5 s on a machine that does nothing else"


def test_a_resume_with_other_pools_gives_the_old_ones_back_first(tmp_path: Path, undisturbed: RunDirectory) -> None:
    run, pids = killed_after(tmp_path, 1, train(tmp_path, *demo()))
    began = time.time()
    pools = "pools={main: {nodes: [2], cpus: 0.5}, other: {nodes: [1]}}"
    finished(train(tmp_path, "--resume", run.name, pools, "roles.reward.pool=other", f"trainer.steps={STEPS}"))
    assert kinds(run, began, "pool main") == ["placing", "placed"]
    assert kinds(run, began, "pool other") == ["placing", "placed"]
    assert gone(pids)
    assert_same_end(run, undisturbed)


def test_a_session_that_was_detached_is_taken_over_in_the_same_process(tmp_path: Path) -> None:
    config = small(tmp_path, "pools.main.nodes=[1]", "sft=null", "cluster.detached=true", "cluster.time_to_live=120")
    prepared = prepare(config, local_inventory())
    directory = RunDirectory.create(config.runs_dir, config.name)

    def opened(*, detach: bool) -> tuple[list[int], list[int]]:
        """Pids, and the generations and epochs that the groups were told."""
        backend = backend_for(config, local_inventory(), directory.name)

        async def main() -> tuple[list[int], list[int]]:
            async with open_run(prepared, directory, backend, Quiet()) as run:
                await phases.publish(run)
                groups = run.session.groups.values()
                told = await run.session.kv.get("groups/actor", deadline=10)
                found = sorted({process.pid for group in groups for process in group.processes}), [told["epoch"]]
                if detach:
                    run.session.detach()
                return found

        return run_on(backend, main())

    pids, told = opened(detach=True)
    assert (len(pids), told) == (2, [1])
    assert all(map(psutil.pid_exists, pids))
    assert opened(detach=False) == (pids, [2])
    assert gone(pids)
    assert [row["kind"] for row in read_json_lines(directory.events) if row["subject"] == "pool main"] == [
        "placing", "placed", "attached, 2 of 2 processes live"
    ]  # fmt: skip
