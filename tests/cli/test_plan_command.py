"""`rolemesh plan` as a process of its own: size, speed, output and exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EVERY_ROLE = (
    "pools.main={nodes: auto, gpus: 1}",
    "roles={actor: {pool: main}, rollout: {pool: main}, ref: {pool: main}, critic: {pool: main}, reward: {pool: main}}",
    "algorithm.name=ppo",
)


MEASURE = """
import json, resource, subprocess, sys
code = subprocess.run([sys.executable, "-m", "rolemesh.cli", "plan", *sys.argv[2:]]).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    json.dump([usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024], file)
sys.exit(code)
"""
"""Between this process and the one that is measured, because a child's peak begins with the size of its parent."""


def plan(folder: Path, *arguments: str, check: int = 0) -> tuple[str, str, float, float]:
    """(standard output, errors, CPU seconds, peak MB) of one call."""
    command = [sys.executable, "-c", MEASURE, str(folder / "usage"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == check, done.stderr
    spent, peak = json.loads((folder / "usage").read_text())
    return done.stdout, done.stderr, spent, peak


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["drawn", "json"])
def test_ten_thousand_gpus_with_every_role_in_little_time_and_memory(tmp_path, form):
    shown, _, spent, peak = plan(tmp_path, "demo", *EVERY_ROLE, "--nodes", "1250x8", *form)
    assert spent < 3  # about 0.8 s
    assert peak < 300
    if form:
        found = json.loads(shown)
        assert len(found["workers"]) == 5 * 10_000
        assert {worker["role"] for worker in found["workers"]} == {"actor", "rollout", "ref", "critic", "reward"}
        assert found["workers"][9_999]["node"] == "node-1249"
        assert found["problems"] == []
    else:
        assert "node-0 … node-1249 (1250), each" in shown
        assert len(shown.splitlines()) < 120


def test_planning_loads_no_library_of_numbers(tmp_path):
    code = (
        "import sys\n"
        "sys.argv = ['rolemesh', 'plan', 'demo', '--nodes', '2x8']\n"
        "from rolemesh.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'numpy', 'pyarrow', 'torch', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_several_groups_of_nodes(tmp_path):
    shown, *_ = plan(tmp_path, "demo", "pools.main={nodes: auto, gpus: 1}", "--nodes", "2x8", "--nodes", "4x2", "--json")
    found = json.loads(shown)
    assert [node["gpus"] for node in found["nodes"]] == [8, 8, 2, 2, 2, 2]
    assert found["origin"] == "--nodes 2x8 --nodes 4x2"
    assert len([worker for worker in found["workers"] if worker["role"] == "actor"]) == 24
    assert set(found["versions"]) == {"ray", "torch", "transformers"}


def test_wrong_nodes_are_a_config_error(tmp_path):
    _, errors, *_ = plan(tmp_path, "demo", "--nodes", "2x8", "--nodes", "eight", check=2)
    assert "--nodes" in errors
    assert "'eight'" in errors


def test_names_of_rewards_are_checked(tmp_path):
    _, errors, *_ = plan(tmp_path, "demo", "reward=[{name: reasoning_gym, model: {path: nowhere}}, {name: exakt}]", check=2)
    assert "this is the name of a built-in verifier; found 'reasoning_gym'" in errors
    assert "Did you mean 'exact'?" in errors


def test_S29_known_bad_versions_refuse_a_plan(tmp_path):
    """With a distribution of torchvision for CUDA on the path, beside torch for CPUs."""
    import importlib.metadata

    if "+cpu" not in importlib.metadata.version("torch"):
        pytest.skip("needs torch for CPUs")
    folder = tmp_path / "site" / "torchvision-0.28.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    code = "from rolemesh.cli.main import main; import sys; sys.argv = ['rolemesh', 'plan', 'demo']; main()"
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "version of torch and torchvision" in done.stderr


def test_what_decides_about_an_engine_comes_first_and_imagined_nodes_need_no_package_here(tmp_path):
    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("needs an environment without SGLang")
    _, errors, *_ = plan(tmp_path, "demo", "rollout.engine=sglang", check=2)
    subjects = [line.removeprefix("✗ ").partition(": ")[0] for line in errors.splitlines()]
    assert subjects == ["rollout.engine", "model.dtype", "version of sglang"]
    on_gpus = ("rollout.engine=sglang", "model.dtype=bfloat16", "pools.main={nodes: [2], gpus: 1}")
    _, errors, *_ = plan(tmp_path, "demo", *on_gpus, "pools.main.accelerator_type=H100", check=2)
    assert errors.startswith("✗ pools.main.accelerator_type: "), "no such node is here, so the package would not help"
    assert "✗ version of sglang" in errors
    drawn, *_ = plan(tmp_path, "demo", *on_gpus, "--nodes", "1x2")
    assert "sglang has not run yet" in " ".join(drawn.split())
