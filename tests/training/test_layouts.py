"""Real processes on Ray: other worker counts and other pools give the same first step; the controller stays small."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from safetensors.torch import load_file
from training_helpers import PPO, SMALL, Quiet, contract_problems, only_run, rows, small

from rolemesh.batch import Batch, BatchRef
from rolemesh.config.schema import Config, ModelConfig
from rolemesh.errors import WorkerError
from rolemesh.models import load_model, load_tokenizer, save_model
from rolemesh.observe import RunDirectory
from rolemesh.plan import local_inventory
from rolemesh.roles.rollout import RolloutWorker
from rolemesh.runtime import register
from rolemesh.training import loop, phases
from rolemesh.training.launch import backend_for, open_run, run_on, run_training
from rolemesh.training.preflight import prepare
from rolemesh.training.run import TrainingRun

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ONE = ("backend=local", "pools.main.nodes=[1]")
TWO = ("pools.main.nodes=[2]",)
SPLIT = (
    "pools={train: {nodes: [2], cpus: 0.4}, serve: {nodes: [1], cpus: 0.4}}",
    "roles={actor: {pool: train}, rollout: {pool: serve}, reward: {pool: serve, workers: 2, cpus: 0.2}}",
)
SHARDED = (*TWO, "trainer.sharding=fsdp", "trainer.activation_checkpointing=true")
ROWS = ("pools.main={nodes: [4], cpus: 0.4}", "roles.actor.tensor_parallel=2", "roles.critic.tensor_parallel=2", "trainer.sharding=fsdp")
ROWS_OF_ACTOR = (ROWS[0], ROWS[1], ROWS[3])
ALL_SPLIT = (
    "pools={a: {nodes: [2], cpus: 0.2}, b: {nodes: [2], cpus: 0.2}, c: {nodes: [1], cpus: 0.2}, d: {nodes: [1], cpus: 0.2}}",
    "roles={actor: {pool: a}, critic: {pool: b}, ref: {pool: c}, rollout: {pool: d}, reward: {pool: d, workers: 2, cpus: 0.2}}",
)


def backend_of(config: Config) -> Any:
    """For a run of this test alone on the machine."""
    return backend_for(config, local_inventory(), f"layouts-{secrets.token_hex(6)}")


@asynccontextmanager
async def opened(config: Config, backend: Any) -> AsyncIterator[TrainingRun]:
    prepared = prepare(config, local_inventory())
    directory = RunDirectory.create(config.runs_dir, config.name)
    async with open_run(prepared, directory, backend, Quiet()) as run:
        yield run


async def first_step(run: TrainingRun) -> dict[str, Any]:
    await phases.publish(run)
    samples = await phases.generate(run, phases.draw(run))
    step = await phases.advantages(run, await phases.score(run, samples))
    read, groups, cut = run.session.read, run.session.groups, {"minibatches": step.numbers.scalars("minibatch")}
    exact = await read(step.batch, ["response_ids", "rollout_logprobs", "reward", "token_weight", "minibatch"])
    close = {"advantage": step.numbers.scalars("advantage")}
    if "critic" in groups:
        for name in ("values", "ref_logprobs", "advantages", "returns"):
            close[name] = (await read(step.batch, [name])).sort_by_id().ragged(name)[0]
        close |= {f"critic {name}": value for name, value in (await groups["critic"].gradients(step.batch, **cut))[0].items()}
    policy = await groups["actor"].gradients(step.batch, **cut, temperature=run.config.rollout.temperature, terms=step.terms)
    return {"exact": exact, "close": close, "policy": policy[0]}


@pytest.mark.parametrize(
    ("algorithm", "layout"),
    [
        pytest.param("grpo", TWO, id="grpo-two", marks=pytest.mark.slow),
        pytest.param("grpo", SPLIT, id="grpo-split"),
        pytest.param("ppo", TWO, id="ppo-two", marks=pytest.mark.slow),
        pytest.param("ppo", SHARDED, id="ppo-sharded", marks=pytest.mark.slow),
        pytest.param("ppo", ROWS, id="ppo-rows-sharded", marks=pytest.mark.slow),
        pytest.param("adapter", SHARDED, id="adapter-sharded", marks=pytest.mark.slow),
        pytest.param("ppo", ALL_SPLIT, id="ppo-split", marks=pytest.mark.slow),
    ],
)
def test_worker_counts_and_pools_give_the_same_first_step(tmp_path: Path, algorithm: str, layout: tuple[str, ...]) -> None:
    """Samples and rewards are equal to the bit, values, log-probabilities and gradients to 1e-5 of the largest."""
    settings = ("deterministic=true", "reward=[{name: 'test_layouts:length_reward'}]", "trainer.prompts_per_step=8")
    settings += (*PPO, "algorithm.kl_in=reward") if algorithm != "grpo" else ()
    settings += ("model.lora.rank=4", "trainer.offload=true") if algorithm == "adapter" else ()
    found = {}
    for name, placed in {"one": ONE, "several": layout}.items():
        config = small(tmp_path / name, *settings, *placed)
        backend = backend_of(config)

        async def main(config: Config = config, backend: Any = backend) -> dict[str, Any]:
            async with opened(config, backend) as run:
                return await first_step(run)

        found[name] = run_on(backend, main())
    expected, other = found["one"], found["several"]
    assert np.ptp(expected["exact"].scalars("reward")) > 0, "the check needs gradients that are not zero"
    assert other["exact"].equals(expected["exact"]), "other samples, log-probabilities or rewards"
    for column, array in expected["close"].items():
        assert np.abs(other["close"][column] - array).max() <= 1e-5 * np.abs(array).max(), column
    bound = 1e-5 * max(np.abs(gradient).max() for gradient in expected["policy"].values())
    for parameter, gradient in expected["policy"].items():
        assert np.abs(other["policy"][parameter] - gradient).max() <= bound, parameter
    if layout is ALL_SPLIT:
        check_side_by_side(only_run(tmp_path / "several"))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "algorithm"), [(ROWS_OF_ACTOR, ()), (ROWS, PPO)], ids=["grpo", "ppo"])
def test_a_sharded_run_from_a_folder_goes_on_as_one_process(tmp_path: Path, layout: tuple[str, ...], algorithm: tuple[str, ...]) -> None:
    """Two rows of two ranks, sharded: weights are read in parts, published and saved from parts; one process resumes it."""
    save_model(tmp_path / "model", load_model(ModelConfig(), seed=1), load_tokenizer(ModelConfig()))
    settings = (f"model.path={tmp_path / 'model'}", "deterministic=true", "reward=[{name: 'test_layouts:length_reward'}]", "sft=null")
    settings += ("trainer.learning_rate=1e-4", "trainer.save_every=1", *algorithm)
    alone = run_training(small(tmp_path / "alone", *settings, *ONE, "trainer.steps=3"), Quiet())
    run_training(small(tmp_path / "parts", *settings, *layout), Quiet())
    run = only_run(tmp_path / "parts")
    trained = [row for row in rows(run) if "reward/mean" in row]
    memory = {name: value for name, value in trained[-1].items() if name.startswith("memory/actor/")}
    assert memory["memory/actor/weights"] < 4 * 1_115_264 / 2
    more = small(tmp_path / "parts", *settings, *ONE, "trainer.steps=3")
    parts = run_training(more, Quiet(), resume=run)
    found, expected = (load_file(Path(one["checkpoint"]) / "model" / "model.safetensors") for one in (parts, alone))
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    moved = max(float((expected[name] - start[name]).abs().max()) for name in expected)
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 0.02 * moved


def check_side_by_side(run: RunDirectory) -> None:
    """Roles of pools of their own work at the same time, as the trace shows."""
    calls = {event["name"]: event for event in json.loads(run.trace.read_text())["traceEvents"] if event.get("ph") == "X"}
    waiting = [calls[name] for name in ("reward.score", "ref.logprobs", "critic.values")]
    assert max(call["ts"] for call in waiting) < min(call["ts"] + call["dur"] for call in waiting)


def length_reward(sample: Any, **options: object) -> float:
    """Differs within a group even before the model can answer anything."""
    return float(len(sample.response) + sum(map(ord, sample.response)) % 7)


def test_a_stale_engine_refuses_to_generate(tmp_path: Path) -> None:
    config = small(tmp_path, *ONE, "sft=null")
    backend = backend_of(config)

    async def main() -> None:
        async with opened(config, backend) as run:
            await phases.publish(run)
            run.progress.weight_version = 1
            with pytest.raises(WorkerError, match="StaleWeights: rollout rank 0 holds weight version 0, asked for 1"):
                await phases.generate(run, phases.draw(run))

    run_on(backend, main())


@pytest.mark.slow
def test_the_controller_does_not_grow_with_the_batch(tmp_path: Path) -> None:
    """Workers write and read 2 MB, then 200 MB; anonymous and shared memory of the controller stay within 50 MB."""
    config = small(tmp_path, "pools.main.nodes=[2]", "sft=null", "roles.rollout.worker=test_layouts:Writer")
    backend = backend_of(config)

    async def main() -> list[float]:
        async with opened(config, backend) as run:
            sizes = []
            for tokens in (1_000, 100_000):
                rows = {"draw": np.arange(256), "sample": np.zeros(256, np.int64), "prompt_ids": [[1]] * 256}
                prompts = run.session.store(Batch.from_columns(rows))
                writer = run.session.groups["rollout"]
                batch: BatchRef = prompts.join(await writer.write(prompts, tokens=tokens))
                assert sum(await writer.check(batch)) == 256 * tokens
                numbers = await run.session.read(batch, ["response_length"])
                assert set(numbers.scalars("response_length")) == {tokens}
                sizes.append(controller_bytes())
                del batch
            return sizes

    small_size, large_size = run_on(backend, main())
    assert large_size - small_size < 50e6


class Writer(RolloutWorker):
    """Writes and reads token columns of any size."""

    def load(self) -> None:
        """Needs no engine."""

    @register(dispatch="data_parallel", reads=("prompt_ids",), writes=("response_ids", "rollout_logprobs", "response_length"))
    def write(self, batch: Batch, *, tokens: int) -> Batch:
        offsets = np.arange(len(batch) + 1, dtype=np.int64) * tokens
        size = len(batch) * tokens
        ids = pa.LargeListArray.from_arrays(offsets, np.ones(size, dtype=np.int32))
        floats = pa.LargeListArray.from_arrays(offsets, np.zeros(size, dtype=np.float32))
        lengths = np.full(len(batch), tokens)
        return batch.select([]).with_columns({"response_ids": ids, "rollout_logprobs": floats, "response_length": lengths})

    @register(dispatch="balanced", reads=("response_ids",))
    def check(self, batch: Batch) -> int:
        return int(batch.ragged("response_ids")[0].sum())


def controller_bytes() -> float:
    """Anonymous plus shared resident memory of this process."""
    text = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def cli(tmp_path: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rolemesh.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **options)


@pytest.mark.slow
def test_an_interrupted_run_saves_and_goes_on(tmp_path: Path) -> None:
    """Ctrl-C ends the run after its step with exit code 130 and a checkpoint; `--resume` goes on; no process is left."""
    process = cli(tmp_path, "train", "demo", *SMALL, "trainer.steps=2000", "pools.main.nodes=[2]")
    deadline = time.monotonic() + 150
    status: dict[str, Any] = {}
    while time.monotonic() < deadline and status.get("step", 0) < 2:
        time.sleep(0.5)
        assert process.poll() is None, process.communicate()[0]
        found = list(tmp_path.glob("runs/*/status.json"))
        status = json.loads(found[0].read_text()) if found else {}
    pids = {worker["pid"] for worker in status["workers"]}
    assert {worker["group"] for worker in status["workers"]} == {"actor", "rollout", "reward"}
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    run = only_run(tmp_path)
    assert json.loads(run.status.read_text())["state"] == "interrupted"
    done = json.loads(run.summary.read_text())["steps"]
    again = cli(tmp_path, "train", f"trainer.steps={done + 1}", "--resume", run.name)
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0, output
    assert f"resumed at step {done}" in output
    trained = [row["step"] for row in rows(run) if "reward/mean" in row]
    assert trained == list(range(1, done + 2))
    assert contract_problems(run, steps=done + 1) == "contract holds"
    seen = cli(tmp_path, "status", "--json")
    assert json.loads(seen.communicate(timeout=60)[0])["state"] == "finished"


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run_with_its_name(tmp_path: Path) -> None:
    config = small(tmp_path, "pools.main.nodes=[2]", "sft=null")
    backend = backend_of(config)

    async def main() -> str:
        async with opened(config, backend) as run:
            await phases.publish(run)
            os.kill(run.session.groups["actor"].processes[1].pid, signal.SIGKILL)
            await asyncio.sleep(1)
            with pytest.raises(WorkerError) as caught:
                await loop.step(run)  # the other engine answers everything, and then the actor is missed
            return str(caught.value)

    message = run_on(backend, main())
    assert "actor rank 1" in message
    assert "main-1.log" in message


class Dying(RolloutWorker):
    """The first process of rank 1 is killed in the middle of its third piece, which is in the first step."""

    pieces = 0

    def hand_in(self, **settings: Any) -> Batch:
        self.pieces += 1
        if self.context.rank == 1 and self.context.process.endswith(".1") and self.pieces == 3:
            self.engine.step()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().hand_in(**settings)


@pytest.mark.slow
def test_S23_a_run_whose_rollout_worker_is_killed_ends_with_the_same_weights(tmp_path: Path) -> None:
    pools = "pools={a: {nodes: [1], cpus: 0.2}, b: {nodes: [2], cpus: 0.2}}"
    weights = []
    for worker in ("rolemesh.roles.rollout:RolloutWorker", "test_layouts:Dying"):
        roles = f"roles={{actor: {{pool: a}}, rollout: {{pool: b, worker: '{worker}'}}, reward: {{pool: a, workers: 1, cpus: 0.2}}}}"
        shown = Quiet()
        run = run_training(small(tmp_path / worker, pools, roles, "deterministic=true", "rollout.slots=4"), shown)
        weights.append(load_file(Path(run["checkpoint"]) / "model" / "model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
    lost, back = (note for note in shown.notes if "serve" in note)
    assert lost.startswith("rollout rank 1 serves no more, 1 of 2 do: rollout rank 1 ")
    assert back == "rollout rank 1 serves again"
    steps = [row for row in rows(only_run(tmp_path / worker)) if "samples/trained" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["rollout/requests/0"] + row["rollout/requests/1"] >= 16
        assert row["samples/lost"] == 0
