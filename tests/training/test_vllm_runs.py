"""Whole runs with vLLM. Run where it is installed (docs/engines.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from training_helpers import SMALL, contract_problems, only_run, rows

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
