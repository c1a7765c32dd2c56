"""The program on the page `docs/library.md` is run out of the page."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import rolemesh

ROOT = Path(__file__).parents[2]


def program(of: str = "KvStore") -> str:
    """The first program on the page that has this word."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(encoding="utf-8"), re.DOTALL)
    return next(text for text in found if of in text)


def test_S33_the_program_on_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "squares.py"
    script.write_text(program())
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == "squarer 1 is at 127.0.0.1\n[109, 116]\n"


def test_S33_the_program_on_the_page_runs_on_virtual_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "squares.py"
    script.write_text(program().replace('create_backend("local")', 'create_backend("simulated")'))
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == "squarer 1 is at sim-0\n[109, 116]\n"


@pytest.mark.ray
@pytest.mark.slow
def test_S33_the_program_on_the_page_runs_on_ray(tmp_path: Path) -> None:
    script = tmp_path / "squares.py"
    script.write_text(program().replace('create_backend("local")', 'create_backend("ray", num_cpus=2)'))
    path = str(Path(rolemesh.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=170, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert "[109, 116]" in done.stdout.splitlines()


@pytest.mark.ray
@pytest.mark.slow
def test_S19_the_program_that_detaches_finds_its_workers_again(tmp_path: Path) -> None:
    script, run = tmp_path / "counters.py", f"counters{os.getpid()}"
    detaching = program(of="pool.detach()").replace('run="counters"', f'run="{run}", num_cpus=2')
    script.write_text(detaching)
    ending = detaching.replace("pool.detach()", "await pool.close()")
    assert ending != detaching
    env = {**os.environ, "PYTHONPATH": str(Path(rolemesh.__file__).parents[1])}

    def printed() -> str:
        command = [sys.executable, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert printed() == "created [1, 1]\n"
    assert printed() == "attached [2, 2]\n"
    script.write_text(ending)
    assert printed() == "attached [3, 3]\n"
    assert printed() == "created [1, 1]\n", "closed is gone"


def test_S33_the_program_knows_nothing_of_reinforcement_learning() -> None:
    code = "import sys, rolemesh.runtime; print(*(name for name in sys.modules if name.startswith('rolemesh.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    packages = {name.split(".")[1] for name in done.stdout.split()}
    assert packages & {"algorithms", "data", "rewards", "engines", "weights", "roles", "training", "cli"} == set()
