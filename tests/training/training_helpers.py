"""Small runs that the training tests share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rolemesh.config import load_config
from rolemesh.config.schema import Config
from rolemesh.observe import RunDirectory

CONTRACT = Path(__file__).parents[2] / "tools" / "run_contract.py"

SMALL = (
    "name=small",
    "trainer.steps=2",
    "trainer.prompts_per_step=4",
    "trainer.minibatches=1",
    "trainer.eval_every=0",
    "trainer.save_samples_every=10",
    "algorithm.group_size=4",
    "algorithm.no_signal=train",
    "data.eval_size=8",
    "data.size=200",
    "data.options={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}",
    "data.max_prompt_tokens=48",
    "data.max_response_tokens=6",
    "rollout.slots=16",
    "sft={steps: 1, batch_size: 8, learning_rate: 0.001, warmup_steps: 1}",
)
PPO = (
    "algorithm.name=ppo",
    "algorithm.kl_coefficient=0.1",
    "algorithm.critic_learning_rate=0.001",
    "roles={actor: {pool: main}, rollout: {pool: main}, reward: {pool: main}, ref: {pool: main}, critic: {pool: main}}",
)
ONE_PROCESS = ("backend=local", "pools.main.nodes=[1]")


class Quiet:
    """A display that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.started: tuple[int, int] | None = None
        self.total = 0
        self.evaluations: list[Any] = []
        self.summary: dict[str, Any] = {}

    def start(self, total: int, first: int = 0, history: Any = ()) -> None:
        self.started = (total, first)
        self.total = total

    def extend(self, total: int) -> None:
        self.total = total

    def phase(self, name: str, detail: str = "") -> None:
        pass

    def step(self, step: int, values: Any) -> None:
        pass

    def evaluation(self, step: int, values: Any) -> None:
        self.evaluations.append((step, values))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stop(self) -> None:
        pass

    def finish(self, summary: Any) -> None:
        self.summary = dict(summary)


def small(tmp_path: Path, *overrides: str) -> Config:
    return load_config("demo", [*SMALL, f"runs_dir={tmp_path / 'runs'}", *overrides])


def rows(directory: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in directory.metrics.read_text().splitlines()]


def only_run(tmp_path: Path) -> RunDirectory:
    (path,) = (tmp_path / "runs").iterdir()
    return RunDirectory.open(path)


def contract_problems(directory: RunDirectory, steps: int) -> str:
    command = [sys.executable, str(CONTRACT), str(directory.path), "--min-steps", str(steps)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
