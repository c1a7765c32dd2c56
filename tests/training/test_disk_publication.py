"""Publication through a folder that all nodes share: equal weights, equal runs, every fault, and nothing left of it afterwards."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from test_publication import SPLIT_LOCAL, check_equal, check_logprobs, digest, go, moved
from training_helpers import SMALL, Quiet, only_run, rows, small

from rolemesh.errors import ConfigError, WorkerDied, WorkerError
from rolemesh.roles.rollout import RolloutWorker
from rolemesh.runtime import register
from rolemesh.runtime.janitor import is_watched
from rolemesh.runtime.janitor_process import folder_of, read_record
from rolemesh.training import phases
from rolemesh.training.launch import run_training
from rolemesh.training.run import TrainingRun

NEW_NAMESPACE, PRIVATE = 0x20000, (1 << 18) | 0x4000
TWO_NODES = ("pools.main={nodes: [3, 1], cpus: 0.4}", "roles.actor.workers=2", "trainer.sharding=fsdp", "roles.reward.cpus=0.4")


class Blind(RolloutWorker):
    """A rollout worker on a machine that has another file system where the folder is."""

    @register(dispatch="all")
    def find_token(self, folder: str, token: str) -> str:
        if self.context.rank == 3:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.unshare(NEW_NAMESPACE) == 0, os.strerror(ctypes.get_errno())  # of this thread alone
            assert libc.mount(b"none", b"/", None, PRIVATE, None) == 0, os.strerror(ctypes.get_errno())
            assert libc.mount(b"tmpfs", str(Path(folder).parent).encode(), b"tmpfs", 0, None) == 0, os.strerror(ctypes.get_errno())
        return super().find_token(folder, token)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "published"
    path.mkdir()
    return path


def published(folder: Path) -> list[Path]:
    """Versions in the folder, of the only run there."""
    (run,) = folder.iterdir()
    return sorted(run.glob("version-*"))


def on_disk(folder: Path) -> dict[str, int]:
    """What others read there of the only version."""
    (version,) = published(folder)
    index = json.loads((version / "model.safetensors.index.json").read_text())
    return digest((name, load_file(version / file)[name]) for name, file in index["weight_map"].items())


def test_adapters_go_through_the_folder_too_and_an_earlier_version_is_not_read_again(tmp_path: Path, folder: Path) -> None:
    async def my_loop(run: TrainingRun) -> None:
        assert run.session.publisher.routes("rollout") == ["disk"]
        for number in range(3):
            await phases.publish(run)
            await check_equal(run)
            (version,) = published(folder)
            content = json.loads((version / "model.safetensors.index.json").read_text())["metadata"]
            assert (content["version"], content["content"]) == (run.progress.weight_version, "adapter" if number else "base")
            await moved(run)
        await run.session.groups["rollout"].replace(0)
        await phases.publish(run)
        await check_equal(run)
        await check_logprobs(run)

    go(tmp_path, my_loop, *SPLIT_LOCAL, "model.lora.rank=2", "trainer.publish=adapter", f"trainer.publish_folder={folder}")
    assert list(folder.iterdir()) == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_on_two_nodes_are_bit_equal_and_faults_leave_nobody_with_another_version(
    raylets: Any, tmp_path: Path, folder: Path
) -> None:
    """Weights spread over two ranks; one rollout worker beside them in another process, one on another node."""

    async def my_loop(run: TrainingRun) -> None:
        rollout, publisher = run.session.groups["rollout"], run.session.publisher
        routes = ["process", "process", "disk", "disk"]
        assert [worker.weights for worker in run.session.plan.of_role("rollout")] == publisher.routes("rollout") == routes
        for number in range(6):
            await phases.publish(run)
            await check_equal(run)
            assert on_disk(folder) == (await run.session.groups["actor"].digest()), "as anybody reads it"
            if number % 5 == 0:
                await check_logprobs(run)
            await moved(run)

        # One dies in the middle: the others get the weights anew, under other names.
        await rollout.call("stop_after", 7, signal.SIGKILL, ranks=[3])
        await phases.publish(run)
        assert publisher.without("rollout", run.progress.weight_version) == [3]
        await phases.generate(run, phases.draw(run))
        assert publisher.without("rollout", run.progress.weight_version) == []
        await check_equal(run)

        # One refuses in the middle; the next publication is whole.
        await moved(run)
        await rollout.call("stop_after", 3, 0, ranks=[2])
        with pytest.raises(WorkerError, match="no more of that"):
            await phases.publish(run)
        await phases.publish(run)
        await check_equal(run)

        # A file that changes before it is read is refused, and what refuses it serves nothing.
        await moved(run)
        spoiled = await _spoil(run, folder)
        with pytest.raises(WorkerError, match="does not have the checksum"):
            await publisher.give("rollout", run.progress.weight_version)
        assert spoiled.done()
        assert -1 in await rollout.version()
        await phases.publish(run)
        await check_equal(run)

        # The actor dies in the middle: it is named, and nobody on disk has the version.
        await run.session.groups["actor"].die_after(9)
        began = time.monotonic()
        with pytest.raises(WorkerDied, match="actor rank"):
            await publisher.give("rollout", run.progress.weight_version + 1)
        assert time.monotonic() - began < 60, "their deadline is 120 s"

    settings = (*TWO_NODES, f"cluster.address={raylets.address}", f"trainer.publish_folder={folder}", "trainer.verify_weights=full")
    go(tmp_path, my_loop, *settings)
    assert list(folder.iterdir()) == []


async def _spoil(run: TrainingRun, folder: Path) -> asyncio.Task[None]:
    """Change the first file of the next publication as soon as it has its name."""
    before = set(published(folder))

    async def spoil() -> None:
        while True:
            for path in (file for version in set(published(folder)) - before for file in version.glob("model-00001-*.safetensors")):
                with path.open("r+b") as file:
                    file.seek(-64, os.SEEK_END)
                    file.write(b"x" * 8)
                return
            await asyncio.sleep(0)

    return asyncio.ensure_future(spoil())


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_through_the_folder_has_the_samples_of_one_without(raylets: Any, tmp_path: Path, folder: Path) -> None:
    settings = (*TWO_NODES, f"cluster.address={raylets.address}", "trainer.steps=3", "trainer.learning_rate=1e-3")
    settings += ("trainer.save_samples_every=1", "deterministic=true", "reward=[{name: 'test_publication:length_reward'}]")
    runs = {}
    for name, more in {"default": (), "disk": (f"trainer.publish_folder={folder}",)}.items():
        run_training(small(tmp_path / name, *settings, *more), Quiet())
        runs[name] = only_run(tmp_path / name)
    ways = {name: {worker.get("weights") for worker in json.loads(run.plan.read_text())["workers"]} for name, run in runs.items()}
    assert ways == {"default": {None, "process", "shared_memory", "object_store"}, "disk": {None, "process", "disk"}}
    files = {name: sorted(path.name for path in run.samples.iterdir()) for name, run in runs.items()}
    assert files["default"] == files["disk"] == [f"step-00000{step}.parquet" for step in (1, 2, 3)]
    for file in files["disk"]:
        tables = [pq.read_table(run.samples / file).sort_by([("draw", "ascending"), ("sample", "ascending")]) for run in runs.values()]
        assert tables[0].num_rows == 16
        assert tables[0].equals(tables[1]), file
    norms = [[row["actor/grad_norm"] for row in rows(run) if "actor/grad_norm" in row] for run in runs.values()]
    assert norms[0] == norms[1]
    assert len(set(norms[0])) == 3, "weights change"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to mount")
def test_a_node_that_does_not_see_the_folder_is_named_before_anything_is_loaded(raylets: Any, tmp_path: Path, folder: Path) -> None:
    settings = (*TWO_NODES, f"cluster.address={raylets.address}", f"trainer.publish_folder={folder}")
    with pytest.raises(ConfigError) as caught:
        run_training(small(tmp_path, *settings, "roles.rollout.worker=test_disk_publication:Blind"), Quiet())
    (problem,) = caught.value.problems
    assert problem.subject == "trainer.publish_folder"
    assert problem.need.startswith("rollout rank 3 on node ")
    assert "must see what actor rank 0 on node" in problem.need
    assert problem.free.endswith("is not there after 10 s")
    assert list(folder.iterdir()) == []
    events = [json.loads(line) for line in only_run(tmp_path).events.read_text().splitlines()]
    assert not [event for event in events if event["stage"] == "load"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_left_in_the_folder_of_a_run_that_was_killed(tmp_path: Path, folder: Path) -> None:
    (folder / "mine").mkdir()
    pools = ("pools={main: {nodes: [1], cpus: 0.4}, serve: {nodes: [1], cpus: 0.4}}", "roles.rollout.pool=serve", "roles.reward.cpus=0.2")
    overrides = (*SMALL, "trainer.steps=1000", "sft=null", *pools, f"runs_dir={tmp_path / 'runs'}", f"trainer.publish_folder={folder}")
    command = [sys.executable, "-m", "rolemesh.cli", "train", "demo", *overrides]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as driver:
        try:
            ends = time.monotonic() + 400
            while not list(folder.glob("rolemesh-*/version-*/model.safetensors.index.json")):
                assert driver.poll() is None, driver.communicate()[1]
                assert time.monotonic() < ends
                time.sleep(0.1)
            run = only_run(tmp_path).name
            assert sorted(path.name for path in folder.iterdir()) == ["mine", f"rolemesh-{run}"]
            assert read_record(folder_of(run))["folders"] == [f"{folder}/rolemesh-{run}"]
        finally:
            driver.kill()
    ends = time.monotonic() + 60
    while is_watched(run) and time.monotonic() < ends:
        time.sleep(0.1)
    assert [path.name for path in folder.iterdir()] == ["mine"]
    assert not os.path.exists(folder_of(run))
