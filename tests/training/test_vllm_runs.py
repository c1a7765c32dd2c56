"""Whole runs with vLLM. Run where it is installed (docs/engines.md)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from training_helpers import SMALL, Quiet, contract_problems, only_run, rows, small

from rolemesh.batch import Batch
from rolemesh.observe import RunDirectory
from rolemesh.roles.rollout import RolloutWorker
from rolemesh.training.launch import run_training

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(500),
]
SPLIT = (
    "pools={train: {nodes: [1], cpus: 0.4}, serve: {nodes: [2], cpus: 0.4}}",
    "roles={actor: {pool: train}, rollout: {pool: serve}, reward: {pool: serve, workers: 1, cpus: 0.2}}",
    "trainer.bucket_mib=1",
)


ADAPTER = ("model.lora.rank=4", "trainer.publish=adapter", "trainer.publish_folder=.")
"""From a folder, and merged by the worker."""


@pytest.mark.parametrize(
    "pools",
    [("pools.main.nodes=[2]", "trainer.sharding=fsdp"), SPLIT, (*SPLIT, *ADAPTER)],
    ids=["colocated", "split", "adapter on disk"],
)
def test_D15_a_run_on_vllm_trains_on_its_own_logprobs(tmp_path: Path, pools: tuple[str, ...]) -> None:
    more = ("rollout.engine=vllm", "rollout.temperature=1.3", "trainer.steps=3", "trainer.learning_rate=0.001")
    reward = "reward=[{name: regex, options: {pattern: '[a-e0-4]'}}]"
    command = [sys.executable, "-m", "rolemesh.cli", "train", *SMALL, f"runs_dir={tmp_path / 'runs'}", *more, *pools, reward]
    done = subprocess.run(command, capture_output=True, text=True, timeout=450, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(tmp_path)
    assert contract_problems(run, 3) == "contract holds"
    steps = [row for row in rows(run) if "rollout/logprob_gap_max" in row]
    assert [row["weights/version"] for row in steps] == [1, 2, 3]
    assert all(0 < row["rollout/logprob_gap_max"] < 1e-4 for row in steps)
    assert sum(row["actor/grad_norm"] > 0 for row in steps) >= 1, "weights change"
    plan = json.loads(run.plan.read_text())
    assert "vllm" in " ".join(plan["versions"])


class Dying(RolloutWorker):
    """The first process of rank 1 is killed while vLLM generates, in the first step."""

    samples = False

    def take_on(self, batch: Batch, **settings: Any) -> None:
        self.samples = settings["temperature"] > 0  # unlike an evaluation
        super().take_on(batch, **settings)

    def hand_in(self, **settings: Any) -> Batch:
        if self.samples and self.context.rank == 1 and self.context.process.endswith(".1"):
            for _ in range(3):
                self.engine.step()
            health = self.engine.health()
            (Path(self.config.runs_dir) / "killed").write_text(f"{self.engine.name} {health.running} {health.tokens}")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().hand_in(**settings)


def test_S23_a_run_goes_on_when_a_replica_on_vllm_is_killed_in_mid_generation(tmp_path: Path) -> None:
    pools, reward = SPLIT[0], "reward=[{name: regex, options: {pattern: '[a-e0-4]'}}]"
    roles = (
        "roles={actor: {pool: train}, rollout: {pool: serve, worker: 'test_vllm_runs:Dying'}, reward: {pool: serve, workers: 1, cpus: 0.2}}"
    )
    more = (
        "rollout.engine=vllm",
        "rollout.slots=4",
        "trainer.steps=3",
        "trainer.learning_rate=0.001",
        "trainer.save_samples_every=1",
        "sft=null",
    )
    shown = Quiet()
    run_training(small(tmp_path, pools, roles, reward, *more), shown)
    engine, running, tokens = (tmp_path / "runs" / "killed").read_text().split()
    assert engine == "vllm"
    assert int(running) > 0, "killed while sequences ran"
    assert int(tokens) > int(running)
    lost, back = (note for note in shown.notes if "serve" in note)
    assert lost.startswith("rollout rank 1 serves no more, 1 of 2 do: rollout rank 1 ")
    assert back == "rollout rank 1 serves again"
    runs = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert len(runs) == 1
    run = RunDirectory.open(runs[0])
    assert contract_problems(run, 3) == "contract holds"
    steps = [row for row in rows(run) if "samples/trained" in row]
    assert [row["weights/version"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["samples/trained"] + row["samples/masked"] + row["samples/skipped"] == 16
        assert row["samples/lost"] == 0
        assert row["rollout/requests/0"] + row["rollout/requests/1"] >= 16
        assert 0 < row["rollout/logprob_gap_max"] < 1e-4
    assert steps[0]["rollout/requests/0"] >= 16, "the other replica answered everything"
    assert steps[-1]["rollout/requests/1"] > 0, "the new process takes its share"
    for number in (1, 2, 3):
        samples = Batch.from_parquet(run.samples / f"step-{number:06d}.parquet")
        assert len({tuple(id) for id in samples.ids.tolist()}) == 16
        assert set(samples.scalars("engine")) == {"vllm"}
        assert set(samples.scalars("weight_version")) == {number - 1}
