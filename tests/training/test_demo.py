"""The demos as the README promises them: minutes on two cores, from a model that sometimes answers right to one that mostly does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from training_helpers import contract_problems, only_run, rows

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("recipe", ["demo", "demo-ppo"])
def test_the_demo_rises_to_nine_in_ten(tmp_path: Path, recipe: str, seed: int) -> None:
    command = [sys.executable, "-m", "rolemesh.cli", "train", recipe, f"seed={seed}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(tmp_path)
    assert contract_problems(run, steps=10) == "contract holds"
    summary = json.loads(run.summary.read_text())
    assert 0.1 <= summary["eval/accuracy/first"] <= 0.6
    assert summary["eval/accuracy/last"] >= 0.9
    assert max(row["policy/ratio_first_minibatch_max_deviation"] for row in rows(run) if "reward/mean" in row) < 1e-4
