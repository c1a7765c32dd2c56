"""Every benchmark runs, and says at its end what all say. Their figures are for a quiet machine and a long run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(700)]

FOLDER = Path(__file__).parents[1] / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))


def quick_run(name: str, *options: str) -> dict[str, Any]:
    """The final line of a short run."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def test_all_are_listed() -> None:
    page = (FOLDER.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}.py`" not in page] == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != "controller_overhead"])
def test_a_benchmark_runs(name: str) -> None:
    result = quick_run(name)
    assert result["name"] == name
    assert result["ratios"] or result["skipped"], "without its rival a benchmark has nothing to compare, and says so"
    assert min(result["ratios"].values(), default=1) > 0
    assert "rolemesh" in result["versions"]
    assert result["machine"]["cpus"] > 0


def test_what_the_controller_costs_is_told_beside_ray_and_a_rival_that_is_not_there_is_skipped_by_name() -> None:
    result = quick_run("controller_overhead", "--verl-python", sys.executable)
    what = {ratio.partition(",")[0] for ratio in result["ratios"]}
    assert what == {"no-op", "1 MB", "10 MB", "100 MB", "start"}
    assert min(result["ratios"].values()) > 0
    assert {f"{size} MB controller_ms" for size in (1, 10, 100)} <= result["figures"].keys()
    assert result["figures"]["dispatch to 1,000 ms"] > 0
    assert result["skipped"] == ["verl: No module named 'verl'"]
