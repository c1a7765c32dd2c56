"""The reward role on top of the pool."""

from __future__ import annotations

import json
import time

import psutil
import pytest

from rolemesh.batch import Batch
from rolemesh.config.schema import Config, RewardConfig, RoleConfig
from rolemesh.rewards import InProcess, ScoringPool
from rolemesh.roles.reward import DETAILS, RewardWorker
from rolemesh.runtime import WorkerContext

CONTEXT = WorkerContext(group="reward", rank=0, world_size=1, local_rank=0, local_world_size=1, node="here", address="127.0.0.1")


@pytest.fixture
def worker_of():
    made = []

    def make(*names, role=None, backend="ray"):
        rewards = tuple(RewardConfig(name=name, deadline=0.5) for name in names)
        config = Config(reward=rewards, backend=backend, roles={"reward": role or RoleConfig()})
        made.append(RewardWorker(CONTEXT, config=config))
        made[-1].load()
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def batch_of(responses):
    count = len(responses)
    columns = {"draw": list(range(count)), "sample": [0] * count, "source": ["sums"] * count, "prompt": ["?"] * count}
    columns |= {"response": responses, "answer": ["5"] * count, "task": [None] * count, "finish_reason": ["stop"] * count}
    return Batch.from_columns(columns)


@pytest.mark.parametrize("backend", ["ray", "local"])
def test_rewards_states_and_counts(worker_of, backend):
    worker = worker_of("hostile_functions:act", role=RoleConfig(processes=3), backend=backend)
    bad = {"raise:odd": "error"} | ({"loop": "timeout", "segv": "error"} if backend == "ray" else {})
    responses = ["1", *bad, *["0.5"] * 20]
    scored = worker.score(batch_of(responses))
    assert scored.scalars("reward_status") == [bad.get(text, "ok") for text in responses]
    assert scored.table.column("reward").to_pylist() == [None if text in bad else float(text) for text in responses]
    details = [json.loads(text)["reward_error"] for text in scored.scalars(DETAILS) if text]
    assert len(details) == len(bad)
    metrics = worker.metrics.reduce()
    assert metrics["reward/status/ok"] == 21
    assert metrics["reward/process/replaced"] == len(bad) - 1
    assert 0 <= metrics["reward/process/samples_min"] <= metrics["reward/process/samples_max"] <= len(responses)
    assert 0 < metrics["reward/seconds/mean"] <= metrics["reward/seconds/max"]


@pytest.mark.parametrize(
    ("role", "processes"),
    [(RoleConfig(), 1), (RoleConfig(cpus=0.5), 1), (RoleConfig(cpus=2.5), 2), (RoleConfig(cpus=2, processes=3), 3)],
)
def test_a_process_for_each_cpu(worker_of, role, processes):
    executor = worker_of("exact", role=role)._executor
    assert isinstance(executor, ScoringPool)
    assert len(executor.pids) == processes


def test_the_local_backend_scores_where_a_debugger_sees_it(worker_of):
    assert isinstance(worker_of("exact", backend="local")._executor, InProcess)


def test_loading_again_and_closing_end_the_processes(worker_of):
    worker = worker_of("exact")
    pids = list(worker._executor.pids)
    worker.load()
    assert not any(map(psutil.pid_exists, pids))
    assert worker.score(batch_of(["5", "6"])).scalars("reward").tolist() == [1.0, 0.0]
    pids = list(worker._executor.pids)
    worker.close()
    worker.close()
    assert not any(map(psutil.pid_exists, pids))


def test_a_replaced_worker_takes_its_processes_with_it():
    worker = RewardWorker(CONTEXT, config=Config(reward=(RewardConfig(name="exact"),)))
    worker.load()
    (pid,) = worker._executor.pids
    del worker
    ends = time.monotonic() + 5
    while psutil.pid_exists(pid) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)
