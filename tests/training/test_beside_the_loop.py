"""What happens beside the loop: options that change while a run trains, devices that phases hold, calls that take long."""

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from training_helpers import ONE_PROCESS, SMALL, Quiet, only_run, rows, small

from rolemesh.config import load_config
from rolemesh.errors import ConfigError, DeadlineExceeded, RunStopped
from rolemesh.observe import RunDirectory, read_json_lines
from rolemesh.protocols.backend import Report
from rolemesh.training import loop, phases, settings
from rolemesh.training.launch import run_training
from rolemesh.training.run import TrainingRun
from rolemesh.training.watch import SlowCalls, describe


def train(tmp_path: Path, my_loop: Any, *overrides: str) -> tuple[RunDirectory, Quiet]:
    display = Quiet()
    run_training(small(tmp_path, *ONE_PROCESS, "sft=null", *overrides), display, loop=my_loop)
    return only_run(tmp_path), display


def test_options_change_while_the_run_trains_and_stay_for_a_resume(tmp_path: Path) -> None:
    answers: list[int] = []

    async def my_loop(run: TrainingRun) -> None:
        await phases.publish(run)
        for _ in run.steps():
            await loop.step(run)
            if run.progress.step == 2:
                answers.append(await settings.ask(run.session.kv, ["trainer.steps=4", "rollout.temperature=0.5"], 30))

    directory, display = train(tmp_path, my_loop)
    assert answers == [3]
    assert [row["step"] for row in rows(directory)] == [1, 2, 3, 4]
    saved = load_config(directory.config)
    assert (saved.trainer.steps, saved.rollout.temperature) == (4, 0.5)
    assert "from step 3 on: trainer.steps=4, rollout.temperature=0.5" in display.notes
    assert display.total == 4
    assert directory.read_status()["steps"] == 4


def test_options_that_cannot_change_or_do_not_fit_are_refused_and_change_nothing(tmp_path: Path) -> None:
    refused: list[str] = []

    async def my_loop(run: TrainingRun) -> None:
        for wish in (["trainer.learning_rate=1"], ["algorithm.kl_coefficient=0.1"], ["trainer.steps=0"], ["trainer.steps"]):
            with pytest.raises(ConfigError) as error:
                await settings.ask(run.session.kv, wish, 30)
            refused.append(str(error.value))
        await loop.train(run)

    directory, _ = train(tmp_path, my_loop)
    assert "trainer.learning_rate=1: key=value, where key is one of trainer.steps, " in refused[0]
    assert "Did you mean" not in refused[0]  # it is an option, only not one that changes
    assert "roles.ref" in refused[1]
    assert "trainer.steps: must be" in refused[2]
    assert "trainer.steps: key=value" in refused[3]
    assert len(rows(directory)) >= 2
    assert load_config(directory.config) == small(tmp_path, *ONE_PROCESS, "sft=null")


def test_a_run_is_not_to_end_before_the_step_that_is_under_way(tmp_path: Path) -> None:
    """Its last step is the one that is evaluated and saved. Other options change in that step too."""
    refused: list[str] = []

    async def my_loop(run: TrainingRun) -> None:
        await phases.publish(run)
        for number in run.steps():
            if number == 2:
                with pytest.raises(ConfigError) as error:
                    await settings.ask(run.session.kv, ["trainer.steps=2"], 30)
                refused.append(str(error.value))
            await loop.step(run)
            if number == 3:
                assert await settings.ask(run.session.kv, ["trainer.save_every=1"], 30) == 4

    directory, _ = train(tmp_path, my_loop, "trainer.steps=3")
    assert len(refused) == 1
    assert "at least 3, since step 2 is under way" in refused[0]
    assert [row["step"] for row in rows(directory)] == [1, 2, 3]


def test_a_coefficient_that_is_changed_replaces_what_was_adapted(tmp_path: Path) -> None:
    used: list[float] = []

    async def my_loop(run: TrainingRun) -> None:
        await phases.publish(run)
        for _ in run.steps():
            await loop.step(run)
            used.append(run.kl_coefficient)
            if run.progress.step == 1:
                await settings.ask(run.session.kv, ["algorithm.kl_coefficient=0.5"], 30)

    roles = "roles={actor: {pool: main}, rollout: {pool: main}, reward: {pool: main}, ref: {pool: main}}"
    train(tmp_path, my_loop, "algorithm.kl_coefficient=0.1", roles)
    assert used == [0.1, 0.5]


def test_a_run_that_nobody_can_reach_is_not_asked(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "idle")
    with pytest.raises(ConfigError, match=r"must be running on a Ray cluster; found idle-\S+ is not running.*--resume"):
        settings.change(directory, ["trainer.steps=4"], 5)


def test_S15_phases_hold_devices_and_others_wait_for_them_by_name(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    async def my_loop(run: TrainingRun) -> None:
        session = run.session
        async with session.holding("mine", "actor"):
            generating = asyncio.ensure_future(phases.generate(run, phases.draw(run)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            seen["during"] = session.devices()
            await asyncio.sleep(0.05)
            assert not generating.done()
            session.guard.add_slots("other", 1)
            with pytest.raises(DeadlineExceeded, match=r"late waited.*1 slot \(0\) of main.*mine holds slots 0"):
                await session.guard.acquire("main", slots=[0], who="late", deadline=0.05)
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)
        seen["after"] = session.devices()[0]
        raise RunStopped("seen enough")

    with pytest.raises(RunStopped):
        train(tmp_path, my_loop)
    (pool,) = seen["during"]
    assert (pool["pool"], pool["slots"], pool["free"]) == ("main", 1, 0)
    assert [(one["who"], one["slots"]) for one in pool["holders"]] == [("mine", [0])]
    assert [(one["who"], one["slots"]) for one in pool["waiting"]] == [("generate", 1)]
    assert (seen["after"]["free"], seen["after"]["holders"], seen["after"]["waiting"]) == (1, [], [])


def test_S21_a_run_tells_its_store_where_its_workers_are(tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    async def my_loop(run: TrainingRun) -> None:
        found.update(await run.session.kv.list("groups/"))
        raise RunStopped("seen enough")

    with pytest.raises(RunStopped):
        train(tmp_path, my_loop)
    assert {key for key in found if key.count("/") == 1} == {"groups/actor", "groups/rollout", "groups/reward"}
    assert found["groups/actor"] == {"workers": 1, "generation": 0, "epoch": 1}
    assert set(found["groups/actor/0"]) == {"node", "address", "pid", "process"}


def computing(group: str, since: float) -> dict[str, Any]:
    return {"group": group, "state": "computing", "since": since}


def test_H14_a_call_that_takes_long_is_told_of_at_doubling_intervals() -> None:
    slow = SlowCalls(first=60)
    call = [computing("actor", 1000.0), {"group": "rollout", "state": "idle", "since": 0.0}]
    told = [seconds for seconds in range(0, 1000, 10) if slow.due(call, 1000.0 + seconds)]
    assert told == [60, 120, 240, 480, 960]
    assert slow.due([computing("actor", 3000.0)], 3050.0) == []
    assert slow.due([computing("actor", 3000.0)], 3060.0) == ["actor"]


async def test_H14_what_is_told_names_ranks_call_and_place_in_the_code() -> None:
    stack = 'Stack\n  File "/a/b/loss.py", line 12, in backward\n    x()\n  File "/a/torch/nn.py", line 7, in matmul\n    y()\n'

    class Busy:
        name = "actor"

        async def reports(self, *, stack: bool) -> list[Any]:
            assert stack
            one = Report(pid=7, node="n1", workers=("actor",), state="computing", call="actor.update", since=time.time() - 90, stack=text)
            return [one, TimeoutError("gone")]

    text = stack
    told = await describe(Busy(), 1800)  # type: ignore[arg-type]
    assert "actor takes long; its calls end after 1800 s" in told
    assert "rank 0 (pid 7 on n1) has computed actor.update for 90 s" in told
    assert "nn.py:7 matmul <- loss.py:12 backward" in told
    assert "rank 1 does not answer: gone" in told


@pytest.mark.slow
@pytest.mark.ray
def test_set_reaches_a_run_of_another_process(tmp_path: Path) -> None:
    config = small(tmp_path, "trainer.steps=500", "pools.main.nodes=[1]", "sft=null")
    overrides = [f"runs_dir={config.runs_dir}", "trainer.steps=500", "pools.main.nodes=[1]", "sft=null"]
    command = [sys.executable, "-m", "rolemesh.cli", "train", "demo", *SMALL, *overrides]

    def runs() -> list[RunDirectory]:
        return [RunDirectory(path) for path in config.runs_dir.glob("*") if (path / "metrics.jsonl").exists()]

    training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ends = time.monotonic() + 120
        while (
            not (runs := list(config.runs_dir.glob("*")))
            or not RunDirectory(runs[0]).metrics.exists()
            or len(rows(RunDirectory(runs[0]))) < 3
        ):
            assert time.monotonic() < ends, "the run did not start"
            time.sleep(0.5)
        directory = RunDirectory.open(runs[0])
        changing = [sys.executable, "-m", "rolemesh.cli", "set", str(directory.path)]
        refused = subprocess.run([*changing, "trainer.steps=1"], capture_output=True, text=True, check=False, timeout=90)
        assert refused.returncode == 2
        (least,) = re.findall(r"at least (\d+)", refused.stderr)
        last = int(least) + 60
        done = subprocess.run([*changing, f"trainer.steps={last}"], capture_output=True, text=True, check=False, timeout=90)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert f"trainer.steps={last} from step" in done.stdout
        assert training.wait(180) == 0
    finally:
        training.kill()
    assert directory.checkpoint(last).is_dir()
    assert any(f"trainer.steps={last}" in str(event) for event in read_json_lines(directory.events))
