"""How runs end: SIGTERM to everybody or to one rank, and teardowns while a checkpoint is written (I11, I13)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from training_helpers import ONE_PROCESS, SMALL, Quiet, only_run, rows, small

from rolemesh.runtime import WorkerGroup
from rolemesh.runtime.janitor import is_watched
from rolemesh.runtime.janitor_process import folder_of, owned
from rolemesh.training import checkpoint, loop, phases, saving
from rolemesh.training.launch import run_training
from rolemesh.training.run import TrainingRun


class SavesBy:
    """A worker group that saves in another way."""

    def __init__(self, group: WorkerGroup, save: Callable[..., Awaitable[Any]]) -> None:
        self._group, self.save = group, save

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("who", ["the process group", "one rank"])
def test_I11_SIGTERM_ends_the_run_after_its_step_with_everything_saved(tmp_path: Path, who: str) -> None:
    """`timeout` signals the whole group; a preemption warns one rank. Its reward children, and Ray, must not end by it."""
    command = [sys.executable, "-m", "rolemesh.cli", "train", "demo", *SMALL, "trainer.steps=2000", "pools.main.nodes=[2]"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True) as run:
        status: dict[str, Any] = {}
        ends = time.monotonic() + 240
        while status.get("step", 0) < 2:
            time.sleep(0.2)
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < ends
            found = list(tmp_path.glob("runs/*/status.json"))
            status = json.loads(found[0].read_text()) if found else {}
        if who == "one rank":
            os.kill(
                next(worker["pid"] for worker in status["workers"] if (worker["group"], worker["rank"]) == ("actor", 1)), signal.SIGTERM
            )
        else:
            os.killpg(run.pid, signal.SIGTERM)
        output, _ = run.communicate(timeout=120)
    directory = only_run(tmp_path)
    assert run.returncode == 130, output
    assert directory.read_status()["state"] == "interrupted"
    done = json.loads(directory.summary.read_text())["steps"]
    assert checkpoint.newest(directory)[0].name == f"step-{done}"
    assert [row["step"] for row in rows(directory) if "reward/mean" in row] == list(range(1, done + 1))
    assert (owned(directory.name), os.path.exists(folder_of(directory.name)), is_watched(directory.name)) == ([], False, False)
    if who == "one rank":
        assert "actor rank 1" in output
        assert "got SIGTERM" in output


def test_I13_a_save_that_is_cut_short_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    """As by a second Ctrl-C, or by a death of the driver at this moment."""

    async def my_loop(run: TrainingRun) -> None:
        await phases.publish(run)
        main = asyncio.current_task()
        assert main is not None

        async def cut_short(folder: str, *, beside: bool) -> None:
            Path(folder, "actor-optimizer.safetensors").write_bytes(b"half")
            main.cancel()
            await asyncio.sleep(60)

        for number in run.steps():
            await loop.step(run)
            if number == 2:
                run.session.groups["actor"] = SavesBy(run.session.groups["actor"], cut_short)
            run.progress.step = number
            await saving.begin(run)

    with pytest.raises(KeyboardInterrupt):
        run_training(small(tmp_path, *ONE_PROCESS, "sft=null", "trainer.save_every=0"), Quiet(), loop=my_loop)
    folder, skipped = checkpoint.newest(only_run(tmp_path))
    assert folder.name == "step-1"
    assert [name[:8] for name in skipped] == [".step-2."], "named, and not taken for one"
    checkpoint.read_state(folder)


@pytest.mark.ray
@pytest.mark.slow
def test_I13_a_save_is_finished_though_a_rollout_worker_dies_meanwhile(tmp_path: Path) -> None:
    async def my_loop(run: TrainingRun) -> None:
        actors, whole = run.session.groups["actor"], run.session.groups["actor"].save

        async def slowly(folder: str, *, beside: bool) -> Any:
            os.kill(run.session.groups["rollout"].processes[0].pid, signal.SIGKILL)
            await asyncio.sleep(10)
            return await whole(folder, beside=beside)

        run.session.groups["actor"] = SavesBy(actors, slowly)
        await saving.begin(run)

    pools = ("pools={a: {nodes: [1]}, b: {nodes: [1]}}", "roles={actor: {pool: a}, rollout: {pool: b}, reward: {pool: b, workers: 1}}")
    run_training(small(tmp_path, "sft=null", *pools), Quiet(), loop=my_loop)
    assert checkpoint.newest(only_run(tmp_path))[0].name == "step-0"
