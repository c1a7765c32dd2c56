"""The command line as a user meets it: exit codes, messages without traceback, light commands that stay light."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rolemesh.cli.main import main
from rolemesh.config import load_config
from rolemesh.observe import RunDirectory, write_json
from rolemesh.runtime.janitor import JanitorLink, waits_until


def rolemesh(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rolemesh.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=150)


def answered(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has torch already: what starts no process needs none of its own."""
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["rolemesh", *arguments])
        patch.setattr(sys, "path", list(sys.path))
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plan"],
        ["plan", "--nodes", "2x8", "--json"],
        ["train", "--help"],
        ["status"],
        ["status", "light", "--json"],
        ["export", "light", "--to", "full"],
    ],
)
def test_what_starts_nothing_loads_neither_torch_nor_ray(tmp_path: Path, arguments: list[str]) -> None:
    run = RunDirectory.create(tmp_path / "runs", "light")
    run.write_status({"state": "finished", "pid": 1, "step": 3, "steps": 3, "workers": []})
    run.checkpoint(1).mkdir()
    write_json(
        run.checkpoint(1) / "state.json", {"format": 3, "progress": {}, "prompts": {}, "roles": {}, "config": {"model": {"path": "tiny"}}}
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("an export never replaces what is no model")
    expected = 2 if arguments[0] == "export" else 0
    code = (
        "import sys\n"
        f"sys.argv = ['rolemesh', *{arguments!r}]\n"
        "from rolemesh.cli.main import main\n"
        "try:\n    main()\n"
        f"except SystemExit as end:\n    assert (end.code or 0) == {expected}, end.code\n"
        "heavy = {'torch', 'ray', 'transformers', 'reasoning_gym', 'sympy', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_plan_json_has_the_promised_shape(tmp_path: Path) -> None:
    done = answered(tmp_path, "plan", "pools.main={nodes: [2, 2], gpus: 1}", "--nodes", "2x2", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert {"pools", "workers", "memory", "problems"} <= set(plan)
    actors = [worker for worker in plan["workers"] if worker["role"] == "actor"]
    assert [worker["rank"] for worker in actors] == [0, 1, 2, 3]
    assert len({worker["node"] for worker in actors[:2]}) == 1
    assert set(actors[0]) >= {"role", "rank", "pool", "node", "slot", "cpus", "gpus"}


def test_an_infeasible_plan_exits_with_3_and_names_pool_and_resource(tmp_path: Path) -> None:
    for command in (["plan"], ["train"]):
        done = answered(tmp_path, *command, "pools.main.nodes=[4000]")
        assert done.returncode == 3, done.stdout + done.stderr
        assert "main" in done.stdout + done.stderr
        assert "CPU" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_all_config_problems_come_in_one_go_with_exit_code_2(tmp_path: Path) -> None:
    done = rolemesh(
        tmp_path, "train", "algorithm.group_size=1", "rollout.temperature=0", "model.path=nowhere", "data.train=none.jsonl",
        "trainer.minibatches=5", "reward=[{name: exat}]", "pools.main.nodes=[64]",
    )  # fmt: skip
    assert done.returncode == 2
    for subject in ("algorithm.group_size", "rollout.temperature", "model.path", "data.train", "trainer.minibatches", "reward.0.name"):
        assert subject in done.stderr
    assert "Did you mean 'exact'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists(), "nothing has started"


def test_an_unknown_key_is_named_with_its_place_and_the_nearest_one(tmp_path: Path) -> None:
    done = answered(tmp_path, "train", "trainer.step=5")
    assert done.returncode == 2
    assert "trainer.step" in done.stderr
    assert "trainer.steps" in done.stderr


def test_C17_a_tokenizer_without_pad_is_refused_before_anything_starts(tmp_path: Path) -> None:
    from rolemesh.config import BUILTIN_MODELS

    model = tmp_path / "model"
    model.mkdir()
    for path in BUILTIN_MODELS["tiny"].iterdir():
        if path.suffix == ".json":
            text = path.read_text()
            if path.name == "tokenizer_config.json":
                text = json.dumps({key: value for key, value in json.loads(text).items() if key != "pad_token"})
            (model / path.name).write_text(text)
    done = answered(tmp_path, "train", "model.path=model")
    assert done.returncode == 2
    assert "pad" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_data_that_is_empty_after_filters_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"prompt": "1 + 1 = " * 200, "answer": "2"}) for _ in range(4)))
    done = answered(tmp_path, "train", "data.train=data.jsonl", "data.options={}", "data.overlong=drop", "reward=[{name: exact}]")
    assert done.returncode == 2, done.stderr
    assert "overlong" in done.stderr


def test_init_writes_a_recipe_that_plans_and_refuses_to_overwrite(tmp_path: Path) -> None:
    done = answered(tmp_path, "init", "mine")
    assert done.returncode == 0
    assert answered(tmp_path / "mine", "plan", "recipe.yaml").returncode == 0
    config = load_config(str(tmp_path / "mine" / "recipe.yaml"))
    assert (config.name, [reward.name for reward in config.reward]) == ("mine", ["rewards:score"])
    again = answered(tmp_path, "init", "mine")
    assert again.returncode == 2
    assert "recipe.yaml" in again.stderr


def test_status_of_a_run_whose_controller_is_gone(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", "gone")
    told = {"run": run.name, "state": "running", "pid": 2**22 + 1, "step": 3, "steps": 9, "phase": "step", "workers": []}
    run.write_status(told | {"memory": {"actor": {"weights": 3 * 2**20, "gradients": 2**20, "asleep": 0}, "ref": {"weights": 0}}})
    done = answered(tmp_path, "status", "--json")
    assert json.loads(done.stdout)["state"] == "dead"
    shown = answered(tmp_path, "status", run.name).stdout
    assert "step 3 of 9, step\n" in shown
    assert "memory of actor: weights 3.0 MiB, gradients 1.0 MiB" in shown
    assert "memory of ref: none of its own" in shown
    run.write_status({"state": "created", "step": 0})
    assert answered(tmp_path, "status", run.name).stdout.startswith(f"{run.name}: dead, step 0\n")
    assert answered(tmp_path, "status", "nothing").returncode == 2


@pytest.fixture
def orphaned(tmp_path: Path) -> Iterator[RunDirectory]:
    """A detached run whose driver was killed; its janitor waits for the next one."""
    run = RunDirectory.create(tmp_path / "runs", "orphan")
    run.write_status({"run": run.name, "state": "running", "pid": 2**22 + 1, "time": time.time(), "step": 3, "steps": 9, "workers": []})
    code = (
        "import os, signal, sys\nfrom rolemesh.runtime.janitor import JanitorLink\n"
        "link = JanitorLink(sys.argv[1], 'drive', own=True, address='', ttl=300.0)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, run.name], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    yield run
    JanitorLink(run.name, "look").bye("free")


def test_status_of_a_detached_run_whose_driver_was_killed(tmp_path: Path, orphaned: RunDirectory) -> None:
    ends = time.monotonic() + 10
    while waits_until(orphaned.name) is None and time.monotonic() < ends:
        time.sleep(0.02)
    shown = answered(tmp_path, "status").stdout.splitlines()
    assert shown[0] == f"{orphaned.name}: dead, step 3 of 9"
    left = re.fullmatch(
        r"its driver is gone; its workers wait for the next one for (\d+) s more \(cluster.time_to_live\), then they end", shown[1]
    )
    assert left, shown
    assert 200 < int(left[1]) <= 300
    assert shown[2:] == [f"`rolemesh clean {orphaned.name}` ends them"], "without a checkpoint nothing can go on"
    orphaned.checkpoint(2).mkdir()
    assert f"`rolemesh train --resume {orphaned.name}` goes on in them" in answered(tmp_path, "status").stdout
    told = json.loads(answered(tmp_path, "status", "--json").stdout)
    assert told["workers_until"] == waits_until(orphaned.name)
    assert answered(tmp_path, "clean", orphaned.name).returncode == 0
    assert answered(tmp_path, "status").stdout.splitlines()[1:] == [
        f"`rolemesh train --resume {orphaned.name}` goes on from its newest checkpoint"
    ]
    shown = answered(tmp_path.parent, "status", str(orphaned.path)).stdout
    assert f"--resume {orphaned.path}` goes on" in shown, "where the name alone would not be found"


def test_status_of_what_only_serves(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rolemesh.cli", "serve", "backend=local", "pools.main.nodes=[1]"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        ends, shown = time.monotonic() + 120, ""
        while "serving at" not in shown and time.monotonic() < ends:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.3)
            shown = answered(tmp_path, "status").stdout
        name, address = (told := json.loads(answered(tmp_path, "status", "--json").stdout))["run"], told["serving"]["address"]
        assert not {"step", "steps"} & told.keys()
        assert shown.startswith(f"{name}: running, serving\n")
        assert f"serving at {address}: answers under way 0" in shown
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert answered(tmp_path, "status").stdout == f"{name}: interrupted\n"


def test_H11_a_failing_run_exits_with_4_and_ends_on_the_cause(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def score(sample, **options):\n    raise RuntimeError('the judge is out')\n")
    done = rolemesh(
        tmp_path, "train", "backend=local", "pools.main.nodes=[1]", "sft=null", "reward=[{name: 'rewards:score'}]",
        "trainer.steps=1", "data.eval_size=4", "data.size=200", "trainer.prompts_per_step=2", "algorithm.group_size=2",
        "trainer.minibatches=1",
    )  # fmt: skip
    assert done.returncode == 4, done.stdout + done.stderr
    message = done.stderr[done.stderr.index("✗") :]
    assert "reward rank 0" in message
    assert "RuntimeError" in message
    assert "the judge is out" in message
    assert any("RuntimeError: the judge is out" in line for line in message.strip().splitlines()[-3:]), "the cause is the last thing seen"
    assert "launch.py" not in message, "no trace of the controller on the screen, it is in the file"
    (run,) = (tmp_path / "runs").iterdir()
    assert "rewards.py" in (run / "logs" / "error.txt").read_text()


def test_the_newest_model_is_that_of_a_run_which_trained(tmp_path: Path) -> None:
    trained = RunDirectory.create(tmp_path / "runs", "trained")
    serving = RunDirectory.create(tmp_path / "runs", "trained-serve")
    for run in (trained, serving):
        run.config.write_text("name: mine\n")
    (trained.checkpoint(1) / "model").mkdir(parents=True)
    done = rolemesh(tmp_path, "generate", "1 + 2 =")
    assert done.returncode == 2
    assert "step-1" in done.stderr, "what was found is told of: the checkpoint, which is not complete"


def test_a_recipe_beside_a_run_is_refused(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", "mine")
    run.config.write_text("name: mine\n")
    for command in (["train", "--resume", "mine"], ["eval", "--run", "mine"]):
        (run.checkpoint(1) / "model").mkdir(parents=True, exist_ok=True)
        (run.checkpoint(1) / "state.json").write_text("{}")
        done = answered(tmp_path, *command, "demo")
        assert done.returncode == 2
        assert f"none can be given with {command[1]}" in done.stderr


def test_init_says_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = answered(tmp_path, "init", "file")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "it must be possible to write into 'file'" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_at_the_first_moment_ends_with_130_and_without_a_trace(tmp_path: Path, number: int) -> None:
    code = (
        "import builtins, os, signal\nreal = builtins.__import__\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests with it ignored\n"
        "def slow(name, *rest, **more):\n"
        f"    if name == 'rolemesh.config':\n        os.kill(os.getpid(), {number:d})\n"
        "    return real(name, *rest, **more)\n"
        "from rolemesh.cli.__main__ import run\nbuiltins.__import__ = slow\nrun()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


def left_over(mark: str) -> list[int]:
    """Processes that have `mark` in their environment, which children inherit."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["created", "starting", "sft", "step"])
def test_an_interrupt_at_any_moment_ends_every_process(tmp_path: Path, moment: str, number: int) -> None:
    mark = f"ROLEMESH_TEST_{uuid.uuid4().hex}"
    options = ["trainer.steps=500", "trainer.prompts_per_step=4", "trainer.minibatches=1", "algorithm.group_size=4", "data.eval_size=8"]
    command = [sys.executable, "-m", "rolemesh.cli", "train", *options, "algorithm.no_signal=train"]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, mark: "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        ends = time.monotonic() + 120
        status: dict[str, object] = {}
        while moment not in (status.get("state"), status.get("phase")) and time.monotonic() < ends:
            assert run.poll() is None
            time.sleep(0.02)
            status = next((json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/status.json")), {})
        run.send_signal(number)
        assert run.wait(timeout=60) == 130
    while left_over(mark) and time.monotonic() < ends + 15:
        time.sleep(0.2)
    assert left_over(mark) == []
    (path,) = (tmp_path / "runs").iterdir()
    assert RunDirectory.open(path).read_status()["state"] == "interrupted"


def test_eval_samples_prints_and_writes_pass_at_k(tmp_path: Path) -> None:
    small = ("backend=local", "pools.main.nodes=[1]", "data.eval_size=4", "data.size=5000", "data.max_response_tokens=3", "rollout.slots=8")
    done = answered(tmp_path, "eval", *small, "--samples", "3", "--k", "1,3", "--output", "results/eval.json", "--json")
    assert done.returncode == 0, done.stderr
    printed, written = json.loads(done.stdout), json.loads((tmp_path / "results" / "eval.json").read_text())
    assert printed.keys() == {"eval/pass@1", "eval/pass@3", "eval/reward_mean", "eval/samples", "eval/failed"}
    assert printed["eval/samples"] == 12
    assert written == printed | {"model": "tiny", "samples": 3, "temperature": 1.0, "seed": 0}
