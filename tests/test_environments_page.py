"""The files of docs/environments.md do what it says of them."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from rolemesh.cli.running import train
from rolemesh.environments.tools import load_tools

PAGE = Path(__file__).parents[1] / "docs" / "environments.md"
SHORT = [
    "backend=local",
    "pools.main.nodes=[1]",
    "sft.steps=30",
    "trainer.steps=1",
    "trainer.eval_every=0",
    "trainer.prompts_per_step=4",
    "data.eval_size=8",
    "algorithm.no_signal=train",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """All files of the page in one folder."""
    for text, name in re.findall(r"```(?:python|yaml)\n(# (\S+)\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_its_tool_is_one(folder):
    assert load_tools(["shop:stock"])["stock"].schema["function"]["parameters"]["required"] == ["fruit"]


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_its_model_writes_python(folder):
    runpy.run_path("make_lessons.py")
    command = re.search(r"rolemesh train tools (sft.*)\n", PAGE.read_text(encoding="utf-8"))
    train(["tools", *shlex.split(command[1]), *SHORT, "sft.steps=80"], resume=None, runs_dir=Path("runs"))
    (run,) = (folder / "runs").iterdir()
    row = next(row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "reward/mean" in row)
    assert row["environment/python_errors"] < row["environment/tool_calls"] / 2
    assert row["environment/failed"] == 0


@pytest.mark.slow
def test_its_own_environment_trains(folder):
    runpy.run_path("make_games.py")
    assert "rolemesh train guess.yaml" in PAGE.read_text(encoding="utf-8")
    train(["guess.yaml", *SHORT], resume=None, runs_dir=Path("runs"))
    (run,) = (folder / "runs").iterdir()
    row = next(row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "reward/mean" in row)
    assert row["environment/turns/mean"] > 1
    assert row["samples/trained"] + row["samples/masked"] == 32
