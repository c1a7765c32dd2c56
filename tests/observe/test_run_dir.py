from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rolemesh.errors import ConfigError
from rolemesh.observe import JsonlSink, RunDirectory, find_run, list_runs, read_json_lines
from rolemesh.observe.run_dir import is_run


def make(runs_dir, name):
    path = runs_dir / name
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("name: x\n")
    return path


def test_create_makes_the_folders_of_the_contract(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "demo")
    assert run.path.parent == tmp_path / "runs"
    assert run.name.startswith("demo-")
    assert all(folder.is_dir() for folder in (run.samples, run.checkpoints, run.logs))
    names = [run.config, run.plan, run.metrics, run.events, run.journal, run.trace, run.summary, run.status]
    contract = "config.yaml plan.json metrics.jsonl events.jsonl journal trace.json summary.json status.json"
    assert [path.relative_to(run.path).as_posix() for path in names] == contract.split()
    assert run.checkpoint(7) == run.path / "checkpoints" / "step-7"
    assert RunDirectory.open(run.path) == run


def test_runs_started_in_the_same_second_get_their_own_directory(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: RunDirectory.create(tmp_path, "demo"), range(64)))
    assert len({run.path for run in runs}) == 64


def test_an_id_that_is_taken_is_drawn_again(tmp_path, monkeypatch):
    drawn = iter(["aaaa", "aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr("rolemesh.observe.run_dir.secrets.token_hex", lambda size: next(drawn))
    monkeypatch.setattr("rolemesh.observe.run_dir.time.gmtime", lambda: time.struct_time((2026, 1, 2, 3, 4, 5, 4, 2, 0)))
    monkeypatch.setattr("rolemesh.observe.run_dir.write_json", lambda path, value: None)
    names = [RunDirectory.create(tmp_path, "demo").name for _ in range(2)]
    assert names == ["demo-20260102-030405-aaaa", "demo-20260102-030405-bbbb"]


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "-x"])
def test_names_that_are_no_folder_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="must consist of letters"):
        RunDirectory.create(tmp_path, name)


def test_open_refuses_what_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="without them"):
        RunDirectory.open(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        RunDirectory.open(tmp_path / "gone")


def test_status_is_replaced_and_read_back(tmp_path):
    run = RunDirectory.create(tmp_path, "demo")
    assert run.read_status() == {"state": "created"}
    run.write_status({"state": "running", "step": 3})
    assert run.read_status() == {"state": "running", "step": 3}
    run.status.unlink()
    assert run.read_status() == {}


def test_resume_drops_the_rows_it_makes_again(tmp_path):
    run = RunDirectory.create(tmp_path, "demo")
    sink = JsonlSink(run.metrics)
    for step in range(5):
        sink.write(step, {"reward/mean": step / 4})
    sink.close()
    with run.metrics.open("a") as file:
        file.write('{"step": 5, "rew')
    assert run.truncate_metrics(after_step=2) == 2
    assert read_json_lines(run.metrics) == [{"step": step, "reward/mean": step / 4} for step in range(3)]
    before = run.metrics.read_bytes()
    assert run.truncate_metrics(after_step=2) == 0
    assert run.metrics.read_bytes() == before
    assert RunDirectory.create(tmp_path, "fresh").truncate_metrics(after_step=0) == 0


def test_find_run_by_path_name_and_beginning(tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    first = make(runs, "demo-20260101-000000-aaaa")
    second = make(runs, "demo-20260102-000000-bbbb")
    named = make(runs, "demo")
    elsewhere = make(tmp_path / "other", "sft-1")
    (runs / "notes").mkdir()
    assert find_run(runs, str(elsewhere)).path == elsewhere
    assert find_run(runs, "demo-20260101-000000-aaaa").path == first
    assert find_run(runs, "demo-20260102").path == second
    assert find_run(runs, "demo").path == named  # an exact name wins over those it begins
    assert find_run(runs, None).path == second
    assert [run.path for run in list_runs(runs)] == [named, first, second]
    # A folder of the working directory that is no run does not hide one.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert find_run(runs, "demo").path == named


def test_find_run_says_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match="rolemesh train"):
        find_run(tmp_path / "runs", None)
    with pytest.raises(ConfigError, match="found no runs"):
        find_run(tmp_path / "runs", "demo")
    make(tmp_path, "demo-20260101-000000-aaaa")
    make(tmp_path, "demo-20260102-000000-bbbb")
    with pytest.raises(ConfigError, match=r"must fit one run; found 2: demo-20260101-000000-aaaa, demo-20260102-000000-bbbb"):
        find_run(tmp_path, "demo-")
    with pytest.raises(ConfigError, match="Did you mean 'demo-20260101-000000-aaaa'"):
        find_run(tmp_path, "demo-20260101-000000-aaab")
    with pytest.raises(ConfigError, match=r"found 2 runs, the newest demo-20260102-000000-bbbb, demo-20260101-000000-aaaa"):
        find_run(tmp_path, "other")
    checkpoints = tmp_path / "demo-20260101-000000-aaaa" / "checkpoints"
    for step in (10, 8):
        (checkpoints / f"step-{step}").mkdir(parents=True)
    for step in (2, 8):  # whether it is there or not
        with pytest.raises(ConfigError, match=r"a run, not a checkpoint .*demo-20260101-000000-aaaa: step-8, step-10; trainer.keep_check"):
            find_run(tmp_path, str(checkpoints / f"step-{step}"))


def test_newest_run_of_one_second_is_the_last_started(tmp_path):
    paths = [make(tmp_path, f"{name}-20260101-000000-{name * 4}") for name in "cab"]
    for number, path in enumerate(paths):
        os.utime(path / "config.yaml", ns=(number, number))
    assert find_run(tmp_path, None).path == paths[-1]
    assert all(is_run(path) for path in paths)


# one controller a directory


def test_a_directory_has_one_holder_at_a_time(tmp_path):
    run = RunDirectory.create(tmp_path, "demo")
    assert not run.is_running()
    run.write_status({"state": "running", "pid": 4711})
    with run.held():
        assert run.is_running()
        with pytest.raises(ConfigError, match=r"must not be running; found controller with pid 4711"), run.held():
            pass
    assert not run.is_running()
    with run.held():
        pass


def test_the_hold_ends_with_its_process_and_not_with_a_pid(tmp_path):
    run = RunDirectory.create(tmp_path, "demo")
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom rolemesh.observe import RunDirectory\n"
        "with RunDirectory.open(Path(sys.argv[1])).held():\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert run.is_running()
        holder.kill()
        holder.wait(timeout=20)
    run.write_status({"state": "running", "pid": os.getpid()})  # a pid that lives, but is no controller of this run
    assert not run.is_running()


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_damaged_status_is_named(tmp_path, text):
    run = RunDirectory.create(tmp_path, "demo")
    run.status.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="must be as the run wrote it"):
        run.read_status()


@pytest.mark.parametrize("text", ["{}\n", "[1]\n", "{\n", "\xff\n", '{"step": "one"}\n'])
def test_damaged_metrics_are_named(tmp_path, text):
    run = RunDirectory.create(tmp_path, "demo")
    run.metrics.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="must be as the run wrote it"):
        run.truncate_metrics(0)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below", "nul\0"):
        with pytest.raises(ConfigError, match="runs_dir: it must be possible to make a folder"):
            RunDirectory.create(tmp_path / place, "demo")


def test_the_home_folder_is_the_same_for_making_and_finding(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = RunDirectory.create(Path("~/runs"), "demo")
    assert run.path.parent == tmp_path / "runs"
    assert find_run(Path("~/runs"), None) == run
    assert find_run(tmp_path / "nowhere", f"~/runs/{run.name}") == run
