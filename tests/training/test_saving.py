"""Saves beside the steps: what a kill, a full disk or a slow worker leaves is a complete checkpoint, chosen and named (G02, G03)."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_loop import assert_equal_states, sample_ids, state_of
from training_helpers import ONE_PROCESS, Quiet, only_run, rows, small

from rolemesh.config.schema import ModelConfig
from rolemesh.engines.train import OptimizerSettings, TrainEngine
from rolemesh.errors import ConfigError, RolemeshError
from rolemesh.models import load_model, load_tokenizer, save_model
from rolemesh.observe import RunDirectory, read_json_lines
from rolemesh.roles import marks
from rolemesh.roles import saving as part
from rolemesh.training import checkpoint, loop, phases, saving
from rolemesh.training.launch import Loop, run_training
from rolemesh.training.run import TrainingRun

FEW = ("sft=null", "trainer.save_every=1", "trainer.keep_checkpoints=1")
ADAPTER = (
    "model.lora.rank=4",
    "roles={actor: {}, rollout: {}, reward: {}, ref: {}}",
    "algorithm.kl_coefficient=0.1",
    "sft={steps: 2, batch_size: 8, learning_rate: 0.001, warmup_steps: 1}",
)
"""With a reference that a warm start leaves, so that a checkpoint has two adapters."""
MOVING = ("reward=[{name: 'test_loop:varied'}]", "trainer.learning_rate=0.01", "trainer.warmup_steps=0")


def train(tmp_path: Path, *overrides: str, by: Loop = loop.train) -> tuple[RunDirectory, Quiet]:
    display = Quiet()
    run_training(small(tmp_path, *ONE_PROCESS, *FEW, *overrides), display, loop=by)
    return only_run(tmp_path), display


def saves(run: RunDirectory) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(run.events) if event["stage"] == "save"]


def names(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_save_goes_on_beside_the_next_step_and_holds_the_state_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, gate = part._write, threading.Event()

    def when_told(*arguments: Any) -> None:
        assert gate.wait(60)
        write(*arguments)

    async def my_loop(run: TrainingRun) -> None:
        await phases.publish(run)
        await phases.evaluate(run)
        for number in run.steps():
            await loop.step(run)
            if number == 1:
                monkeypatch.setattr(part, "_write", when_told)
                await phases.save(run)
            assert checkpoint.complete(run.directory) == []
        gate.set()
        await saving.finish(run)

    beside, _ = train(tmp_path / "beside", *MOVING, by=my_loop)
    monkeypatch.setattr(part, "_write", write)
    waited, _ = train(tmp_path / "waited", *MOVING, "trainer.async_save=false", "trainer.keep_checkpoints=2")
    assert_equal_states(state_of(waited, 1), state_of(beside, 1))
    assert names(waited) == ["step-1", "step-2"]
    saved, later = (load_file(run.checkpoint(step) / "model" / "model.safetensors") for run, step in ((beside, 1), (waited, 2)))
    assert any(not torch.equal(later[name], weight) for name, weight in saved.items())
    for run in (beside, waited):
        (row, *_) = [row for row in rows(run) if "checkpoint/seconds" in row]
        assert row["step"] == 1
        assert row["checkpoint/bytes"] == sum(path.stat().st_size for path in run.checkpoint(1).rglob("*.*") if path.name != "state.json")
        assert 0 < row["checkpoint/stall_seconds"] <= row["checkpoint/seconds"]


def test_the_manifest_says_everything(tmp_path: Path) -> None:
    run, _ = train(tmp_path, "trainer.steps=1")
    state = checkpoint.read_state(run.checkpoint(1))
    assert state.keys() == {"format", "versions", "progress", "prompts", "seed", "roles", "config", "files"}
    assert state["roles"] == {"actor": {"files": ["model/model.safetensors", "actor-optimizer.safetensors"], "optimizer_step": 1}}
    assert {"model/model.safetensors", "model/config.json", "model/tokenizer.json", "actor-optimizer.safetensors"} <= state["files"].keys()
    assert state["config"]["trainer"]["steps"] == 1
    assert state["versions"].keys() == {"rolemesh", "torch", "transformers", "ray"}
    assert (state["progress"]["step"], state["seed"]) == (1, 0)


@pytest.mark.slow
def test_a_late_worker_is_named_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, ended = part._write, threading.Event()
    monkeypatch.setattr(part, "_write", lambda *arguments: ended.wait(60))

    async def my_loop(run: TrainingRun) -> None:
        await phases.publish(run)
        for number in run.steps():
            await loop.step(run)
            await phases.save(run)
            if number == 1:
                await saving.finish(run)
                monkeypatch.setattr(part, "_write", write)

    run, display = train(tmp_path, "deadlines.call=10", by=my_loop)
    ended.set()
    assert [(event["kind"], event.get("step")) for event in saves(run)] == [("failed", None), ("saved", 2)]
    assert "waited 10" in saves(run)[0]["message"]
    assert "for actor rank 0 to write step 1" in saves(run)[0]["message"]
    assert any("the checkpoint of step 1 was not written" in note for note in display.notes)
    assert names(run) == ["step-2"], "what the failed save had begun is gone"


def test_an_error_of_the_run_leaves_a_save_under_way_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = part._write

    def slowly(*arguments: Any) -> None:
        time.sleep(1)
        write(*arguments)

    async def my_loop(run: TrainingRun) -> None:
        monkeypatch.setattr(part, "_write", slowly)
        await phases.save(run)
        raise RolemeshError(text="the end")

    with pytest.raises(RolemeshError, match="the end"):
        train(tmp_path, by=my_loop)
    assert names(only_run(tmp_path)) == ["step-0"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 22 MiB; a checkpoint of the tiny model takes 13."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=22m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def check_full(tmp_path: Path, what: str) -> RunDirectory:
    """The first save fits, the second and third do not: the run goes on after the second, and ends with the reason of the third."""
    with pytest.raises(RolemeshError, match=rf"the last checkpoint was not written, and the newest complete one is \S+step-1\. {what}"):
        train(tmp_path, "trainer.steps=3")
    run = only_run(tmp_path)
    assert [event["kind"] for event in saves(run)] == ["saved", "failed", "failed"]
    assert [row["step"] for row in rows(run) if "reward/mean" in row] == [1, 2, 3]
    assert names(run) == ["step-1"], "the last complete one stays, and what was begun is cleared away"
    assert checkpoint.newest(run)[0] == run.checkpoint(1)
    assert load_file(run.checkpoint(1) / "actor-optimizer.safetensors")
    return run


def test_G02_a_full_disk_is_named_with_bytes_needed_and_free_before_anything_is_written(small_disk: Path) -> None:
    check_full(small_disk, r"OSError: no room in \S+: the checkpoint needs 14,\d+,\d+ bytes \(\S+ MiB\), [\d,]+ bytes \(\S+ MiB\) are free")


@pytest.mark.slow
def test_G02_a_disk_that_is_full_in_mid_write_leaves_the_checkpoint_before(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_check_room", lambda folder, need: None)
    what = (
        r"OSError: actor rank 0 could not write its part of \S+: OSError: \[Errno 28\] No space left on device\. The checkpoint needs 14,"
    )
    check_full(small_disk, what)


def test_G02_a_file_that_may_not_grow_so_far_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """As with a quota; and without the rights to mount anything."""

    async def my_loop(run: TrainingRun) -> None:
        await phases.publish(run)
        for number in run.steps():
            await loop.step(run)
            if number == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (6 * 2**20, limits[1]))
            await phases.save(run)
            await saving.finish(run)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(RolemeshError, match=r"newest complete one is \S+step-1\. OSError: actor rank 0 .* File too large"):
            train(tmp_path, by=my_loop)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(only_run(tmp_path)) == ["step-1"]


def test_a_run_is_not_resumed_with_a_model_of_other_sizes_or_tokens_nor_from_another_format(tmp_path: Path) -> None:
    run, _ = train(tmp_path, "trainer.steps=1")
    before = sorted(path.stat().st_mtime_ns for path in run.path.rglob("*"))
    model, tokenizer = load_model(ModelConfig(), seed=0), load_tokenizer(ModelConfig())
    words = tmp_path / "words"
    save_model(words, model, tokenizer)
    file = words / "tokenizer.json"
    text = json.loads(file.read_text())
    vocabulary = text["model"]["vocab"]
    one, other = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(text))
    small_ = tmp_path / "small"
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 2
    save_model(small_, type(model)(config), tokenizer)

    def refused(*overrides: str) -> str:
        with pytest.raises(ConfigError) as error:
            run_training(small(tmp_path, *ONE_PROCESS, *FEW, "trainer.steps=2", *overrides), Quiet(), resume=run)
        return str(error.value)

    assert "layers 2 instead of 4" in refused(f"model.path={small_}")
    assert "model.tokenizer: must have the vocabulary of" in refused(f"model.tokenizer={words}")
    assert "model.path: must have the vocabulary of" in refused(f"model.path={words}")
    assert sorted(path.stat().st_mtime_ns for path in run.path.rglob("*")) == before
    file = run.checkpoint(1) / "state.json"
    state = json.loads(file.read_text())
    for damaged, what in (
        ({"progress": {"steps": 1}}, "must say where the run stands"),
        ({"config": None}, "must hold all of its sections"),
    ):
        file.write_text(json.dumps(state | damaged))
        assert what in refused()
    file.write_text(json.dumps({"format": 2, "rolemesh": "0.1", "files": {}}))
    (run.checkpoints / "notes.txt").write_text("mine")
    assert checkpoint.newest(run)[1] == [], "what is no checkpoint is none that was skipped"
    with pytest.raises(ConfigError, match=r"must be of format 3; found format 2 in \S+step-1, written by rolemesh 0\.1\. .*step-1/model"):
        run_training(small(tmp_path, *ONE_PROCESS, *FEW, "trainer.steps=2"), Quiet(), resume=run)


def test_a_checkpoint_that_lies_elsewhere_behind_a_symlink_is_kept_in_its_turn_and_let_go(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "links")
    for step in (1, 2):
        (tmp_path / f"disk-{step}").mkdir()
        run.checkpoint(step).symlink_to(tmp_path / f"disk-{step}")
        (run.checkpoint(step) / "state.json").write_text("{}")
    (run.checkpoints / "step-9-mine").mkdir()
    checkpoint.retain(run, 1)
    assert names(run) == ["step-2", "step-9-mine"]
    assert (tmp_path / "disk-1" / "state.json").is_file(), "only the link is the run's"


# -- killed at any moment -----------------------------------------------------------------------------------------------------


def save_for_ever(path: str, first: int) -> None:
    """A process that does nothing but save, with a real engine: every weight of step n is n."""
    run = RunDirectory(Path(path))
    model = load_model(ModelConfig(), seed=0)
    engine = TrainEngine(model, optimizer=OptimizerSettings(learning_rate=1e-3), micro_batch_tokens=64)
    for step in range(first, 10**9):
        with torch.no_grad():
            for _, weight in engine.named_weights():
                weight.fill_(step)
        checkpoint.clean(run)
        folder = checkpoint.new_folder(run, step)
        mark = marks.mark_path(folder, "actor", 0)
        marks.make_mark(mark)
        files = dict(zip(("model/model.safetensors", "actor-optimizer.safetensors"), engine.files(), strict=True))
        part.write_part(mark, files, None, engine.copying)
        engine.copying.wait()
        with torch.no_grad():
            for _, weight in engine.named_weights():
                weight.fill_(-1.0)  # the next step begins
        while marks.read_mark(mark) is None:
            time.sleep(0.001)
        mark.unlink()
        checkpoint.publish(folder, run.checkpoint(step), {"progress": {"step": step}, "prompts": {}, "roles": {}, "config": {}})
        checkpoint.retain(run, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_G02_G03_thirty_kills_in_the_middle_of_saves_always_leave_the_newest_one(tmp_path: Path) -> None:
    run, random_moment, newest, cut = RunDirectory.create(tmp_path, "killed"), random.Random(0), 0, 0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rolemesh.training.checkpoint", "rolemesh.engines.train", "rolemesh.models"])
    for _ in range(30):
        process = context.Process(target=save_for_ever, args=(str(run.path), newest + 1), daemon=True)
        process.start()
        ends = time.monotonic() + 60
        while not run.checkpoint(newest + 1).exists():
            assert time.monotonic() < ends
            time.sleep(0.002)
        time.sleep(random_moment.uniform(0, 0.15))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        found, skipped = checkpoint.newest(run)
        step = checkpoint.read_state(found)["progress"]["step"]
        assert found == run.checkpoint(step)
        assert step > newest, "what was complete is never lost"
        weights = load_file(found / "model" / "model.safetensors")
        assert all(bool((weight == step).all()) for weight in weights.values()), "one moment, whole"
        assert len(checkpoint.complete(run)) <= 2, "the one before at most, if the kill came before it was removed"
        assert all(told.partition(" ")[0].endswith(".partial") for told in skipped)
        newest, cut = step, cut + bool(skipped)
    assert cut > 5, "most kills have to fall into a save"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("at", "model"), [(1, ()), (3, ()), (2, ADAPTER)])
def test_G05_G10_a_killed_run_goes_on_to_the_state_of_one_that_nobody_killed(tmp_path: Path, at: int, model: tuple[str, ...]) -> None:
    """Over the end of an epoch; the kill falls anywhere into the step after `at`, or into its save."""
    few = (*MOVING, *model, "data.size=14", "trainer.save_samples_every=1", "trainer.steps=5", "trainer.keep_checkpoints=9")
    whole, _ = train(tmp_path / "whole", *few)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=train, args=(tmp_path / "cut", *few), daemon=True)
    process.start()
    ends = time.monotonic() + 120
    while not list((tmp_path / "cut").glob(f"runs/*/checkpoints/step-{at}")):
        assert time.monotonic() < ends
        time.sleep(0.01)
    time.sleep(random.Random(at).uniform(0, 0.3))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    cut = only_run(tmp_path / "cut")
    assert at <= int(checkpoint.newest(cut)[0].name.removeprefix("step-")) < 5, "the test needs a run that is not done"
    run_training(small(tmp_path / "cut", *ONE_PROCESS, *FEW, *few), Quiet(), resume=cut)
    assert_equal_states(state_of(whole, 5), state_of(cut, 5))
    assert sample_ids(cut) == sample_ids(whole)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_G08_a_run_saved_by_two_workers_goes_on_with_four_and_with_one(tmp_path: Path) -> None:
    few = (*FEW, *MOVING, "trainer.save_samples_every=1", "trainer.keep_checkpoints=9", "trainer.sharding=fsdp")
    run_training(small(tmp_path, *few, "pools.main.nodes=[2]", "trainer.steps=1"), Quiet())
    run = only_run(tmp_path)
    run_training(small(tmp_path, *few, "pools.main.nodes=[4]", "trainer.steps=2"), Quiet(), resume=run)
    run_training(small(tmp_path, *few, *ONE_PROCESS, "trainer.steps=3"), Quiet(), resume=run)
    draws = [draw for draw, sample, _ in sample_ids(run) if sample == 0]
    assert draws == list(range(12)), "each prompt once, in order"
    assert [row["step"] for row in rows(run) if "reward/mean" in row] == [1, 2, 3]
