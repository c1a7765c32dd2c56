"""The tutorial's own files do what it says of them."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rolemesh.cli.running import train
from rolemesh.config import check_config, load_config

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
SHORT = [
    "backend=local",
    "pools.main.nodes=[1]",
    "sft.steps=11",
    "trainer.steps=1",
    "trainer.prompts_per_step=4",
    "data.eval_size=8",
    "algorithm.no_signal=train",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """All files of the page in one folder, as it asks for."""
    blocks = re.findall(r"```(?:python|yaml)\n(# (\S+)\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for text, name in blocks:
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def commands():
    """The `rolemesh train` commands of the page, continuation lines joined."""
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"^rolemesh train (larger\.yaml.*)$", text, re.MULTILINE)


def row_of(folder):
    (run,) = (folder / "runs").iterdir()
    return next(row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "reward/mean" in row)


@pytest.mark.parametrize("number", [1, 2])
def test_its_commands_train(folder, number):
    runpy.run_path("make_data.py")
    assert len(commands()) == 3
    train([*shlex.split(commands()[number]), *SHORT], resume=None, runs_dir=Path("runs"))
    row = row_of(folder)
    assert row["samples/trained"] == 32
    assert ("reward/extra/is_number" in row, "critic/loss" in row) == (number == 1, number == 2)


def test_its_own_role_and_loop_change_the_rewards(folder, monkeypatch):
    runpy.run_path("make_data.py")
    monkeypatch.setattr(sys, "argv", ["train_brief.py", *SHORT])
    runpy.run_path("train_brief.py", run_name="__main__")
    row = row_of(folder)
    assert -0.1 <= row["reward/extra/brevity"] < 0
    assert row["reward/min"] < 0, "a wrong answer's reward of 0 is less by what its length costs"


@pytest.mark.slow
@pytest.mark.ray
def test_its_worker_group_knows_the_mean_of_all(folder):
    done = subprocess.run([sys.executable, "mean_of_all.py"], capture_output=True, text=True, check=False, timeout=200)
    assert "[4.0, 4.0]" in done.stdout, done.stderr


def test_its_recipe_with_reward_models_lacks_their_files_alone(folder):
    config = load_config("judged.yaml", [])
    assert [name for name, reward in enumerate(config.reward) if reward.model is not None] == [1, 2]
    subjects = {problem.subject for problem in check_config(config)}
    assert subjects == {"model.path", "data.train", "reward.1.model.path", "reward.2.model.path"}
