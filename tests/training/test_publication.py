"""Publication as a run does it: by every route, over every fault, and under every memory option the engines hold what the trainer holds."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_helpers import ONE_PROCESS, Quiet, only_run, small

from rolemesh.batch import Batch
from rolemesh.config.schema import ModelConfig
from rolemesh.errors import WorkerDied, WorkerError
from rolemesh.models import load_model
from rolemesh.models.lora import is_adapter
from rolemesh.observe import RunDirectory
from rolemesh.protocols.engine import LastingWeights
from rolemesh.roles.actor import ActorWorker
from rolemesh.roles.ref import RefWorker
from rolemesh.roles.rollout import RolloutWorker
from rolemesh.roles.saving import GATHERED
from rolemesh.runtime import register
from rolemesh.runtime.janitor_process import key_of
from rolemesh.training import loop, phases
from rolemesh.training.launch import run_training
from rolemesh.training.run import TrainingRun
from rolemesh.weights import Weights

PROBED = (
    "sft=null",
    "trainer.bucket_mib=1",
    "roles.actor.worker=test_publication:Moving",
    "roles.rollout.worker=test_publication:Probed",
    "reward=[{name: 'test_publication:length_reward'}]",
)
SPLIT_LOCAL = ("backend=local", "pools={main: {nodes: [1]}, serve: {nodes: [1]}}", "roles.rollout.pool=serve")


def length_reward(sample: Any, **options: object) -> float:
    """Differs within a group even before the model can answer anything."""
    return float(len(sample.response) + sum(map(ord, sample.response)) % 7)


def digest(weights: Weights, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    return {name: zlib.crc32(weight.detach().to(dtype).contiguous().view(torch.uint8).numpy()) for name, weight in weights}


class Moving(ActorWorker):
    """An actor whose weights change without training, and that dies in the middle of a publication when it is told to."""

    dies_after = -1

    @register(dispatch="all")
    def die_after(self, weights: int) -> None:
        self.dies_after = weights

    def named_weights(self) -> Weights:
        for number, item in enumerate(super().named_weights()):
            if number == self.dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    @register(dispatch="all", mutates=True)
    def move(self) -> None:
        tensors = self.engine._up.tensors
        for name in filter(is_adapter, tensors) if self.config.model.lora else tensors:
            tensors[name].mul_(1.001)
            if is_adapter(name):
                tensors[name].add_(0.001)  # a new one begins at 0

    @register(dispatch=GATHERED)
    def digest(self) -> dict[str, int]:
        """Of what an engine is to hold."""
        return digest(self.engine.merged_weights(), getattr(torch, self.config.model.dtype))

    @register(dispatch="balanced", reads=("prompt_ids", "response_ids", "rollout_logprobs"))
    def gap(self, batch: Batch, *, temperature: float) -> float:
        """Largest difference between log-probabilities of trainer and engine."""
        theirs = batch.rows("rollout_logprobs")
        return max(float(np.abs(mine - their).max()) for mine, their in zip(self.engine.logprobs(batch, temperature), theirs, strict=True))


class Probed(RolloutWorker):
    """A rollout worker that says what its engine holds, and stops in the middle of a publication when it is told to."""

    loads, stops_after, signal = 0, -1, 0

    @register(dispatch="all")
    def digest(self) -> dict[str, int]:
        return digest(self.engine._model.named_parameters(), getattr(torch, self.config.model.dtype))

    @register(dispatch="all")
    def counted(self) -> int:
        return self.loads

    @register(dispatch="all")
    def stop_after(self, weights: int, signal: int) -> None:
        """By an exception if the signal is 0."""
        self.stops_after, self.signal = weights, signal

    @register(dispatch="all")
    def version(self) -> int:
        return self.engine.weight_version

    def take_weights(self, weights: Weights, version: int) -> int:
        self.loads += 1

        def until() -> Weights:
            for number, item in enumerate(weights):
                if number == self.stops_after:
                    self.stops_after = -1
                    os.kill(os.getpid(), self.signal)
                    raise ValueError("no more of that")
                yield item

        if not isinstance(weights, LastingWeights):
            return super().take_weights(until(), version)
        lasting = LastingWeights(until())
        held = super().take_weights(lasting, version)
        weights.kept = lasting.kept
        return held

    @register(dispatch="all")
    def started_with(self, name: str) -> list[str]:
        """Of the environment that this process was started with."""
        variables = Path("/proc/self/environ").read_text().split("\0")
        return [variable for variable in variables if variable.startswith(f"{name}=")]

    @register(dispatch="all")
    def keeps(self) -> bool:
        """Whether the engine's weights are those in the node's shared memory."""
        return self._shared is not None and self._shared.kept and not self.overwritten


class ProbedRef(RefWorker):
    @register(dispatch="all")
    def digest(self) -> dict[str, int]:
        return digest(self.scorer.named_weights())


async def moved(run: TrainingRun) -> None:
    """A step that changes every weight."""
    await run.session.groups["actor"].move()
    run.progress.weight_version += 1


async def check_equal(run: TrainingRun) -> dict[str, int]:
    """Every engine holds the trainer's weights, bit for bit, under its version. Returns their digest."""
    expected, found = await run.session.groups["actor"].digest(), await run.session.groups["rollout"].digest()
    assert found == [expected] * len(found)
    assert await run.session.groups["rollout"].version() == [run.progress.weight_version] * len(found)
    return expected


async def check_logprobs(run: TrainingRun) -> None:
    samples = await phases.generate(run, phases.draw(run))
    assert max(await run.session.groups["actor"].gap(samples, temperature=run.config.rollout.temperature)) < 2e-5


def go(tmp_path: Path, my_loop: Callable[[TrainingRun], Awaitable[None]], *overrides: str) -> RunDirectory:
    run_training(small(tmp_path, *PROBED, *overrides), Quiet(), loop=my_loop)
    return only_run(tmp_path)


async def hundred(run: TrainingRun) -> None:
    seen = set()
    for version in range(100):
        await phases.publish(run)
        seen.add(tuple((await check_equal(run)).values()))
        assert run.session.publisher.without("rollout", run.progress.weight_version) == []
        if version % 33 == 0:
            await check_logprobs(run)
        await moved(run)
    assert len(seen) == 100, "the check needs weights that change"


@pytest.mark.parametrize(("layout", "route"), [(ONE_PROCESS, "process"), (SPLIT_LOCAL, "object_store")], ids=["process", "object-store"])
def test_engines_in_one_process_are_bit_equal_after_each_of_100_publications(tmp_path: Path, layout: tuple[str, ...], route: str) -> None:
    async def my_loop(run: TrainingRun) -> None:
        assert [worker.weights for worker in run.session.plan.of_role("rollout")] == run.session.publisher.routes("rollout") == [route]
        await hundred(run)

    go(tmp_path, my_loop, *layout)


def test_an_engine_in_another_format_is_sent_what_a_cast_makes_of_the_weights(tmp_path: Path) -> None:
    sizes = []

    async def my_loop(run: TrainingRun) -> None:
        for _ in range(3):
            await phases.publish(run)
            await check_equal(run)
            await moved(run)
        sizes.append(run.recorder.metrics.reduce()["weights/bytes"])

    for dtype in ("float32", "bfloat16"):
        go(tmp_path / dtype, my_loop, *SPLIT_LOCAL, f"model.dtype={dtype}")
    assert sizes[0] / sizes[1] == pytest.approx(2, rel=0.01)


def test_an_adapter_published_alone_makes_the_engines_weights_of_a_merged_publication(tmp_path: Path) -> None:
    async def my_loop(run: TrainingRun) -> None:
        bytes_, weights = [0.0], dict(load_model(ModelConfig(), seed=0).named_parameters())
        for _ in range(5):
            await phases.publish(run)
            await check_equal(run)  # the actor's are merged there, as it is done for a merged publication
            bytes_.append(run.recorder.metrics.reduce()["weights/bytes"])
            await moved(run)
        first, *later = np.diff(bytes_)
        adapter = 4 * sum(2 * sum(weight.shape) for name, weight in weights.items() if "_proj." in name)
        whole = 4 * sum(weight.numel() for weight in weights.values())
        assert whole + adapter <= first <= 1.01 * (whole + adapter)
        assert all(adapter <= sent <= 1.05 * adapter for sent in later)
        await run.session.groups["rollout"].replace(0)  # a new process has nothing to merge into
        await phases.publish(run)
        assert run.recorder.metrics.reduce()["weights/bytes"] - bytes_[-1] == first
        await check_equal(run)
        await check_logprobs(run)

    go(tmp_path, my_loop, *SPLIT_LOCAL, "model.lora.rank=2", "trainer.publish=adapter")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_routes_at_once_are_bit_equal_after_each_of_100_publications(raylets: Any, tmp_path: Path) -> None:
    """Weights spread over the two first of three slots on a node; the last slot is on another node."""

    async def my_loop(run: TrainingRun) -> None:
        routes = ["process", "process", "shared_memory", "object_store"]
        assert [worker.weights for worker in run.session.plan.of_role("rollout")] == run.session.publisher.routes("rollout") == routes
        await hundred(run)
        # An engine that refuses does not keep the other ranks, which need its parts of the weights, from reading theirs.
        await run.session.groups["rollout"].call("stop_after", 3, 0, ranks=[0])
        with pytest.raises(WorkerError, match="no more of that"):
            await phases.publish(run)
        assert run.session.publisher.without("rollout", run.progress.weight_version) == [0, 1, 2, 3]
        await phases.publish(run)
        await check_equal(run)

    settings = ("pools.main={nodes: [3, 1], cpus: 0.4}", "roles.actor.workers=2", "trainer.sharding=fsdp", "roles.reward.cpus=0.4")
    directory = go(tmp_path, my_loop, f"cluster.address={raylets.address}", *settings)
    assert shared_files(directory) == []


def shared_files(directory: RunDirectory) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"rolemesh-{key_of(directory.name)}")]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_taker_that_dies_is_late_or_was_replaced_never_serves_another_version(tmp_path: Path) -> None:
    async def my_loop(run: TrainingRun) -> None:
        rollout, publisher = run.session.groups["rollout"], run.session.publisher
        await phases.publish(run)
        await check_equal(run)
        assert shared_files(run.directory) == [f"rolemesh-{key_of(run.directory.name)}-weights"]
        tuned = ["GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x100000"]
        assert await rollout.started_with("GLIBC_TUNABLES") == [tuned, tuned]

        # One dies in the middle: the others get the weights anew, and it is back with them before it answers again.
        await moved(run)
        version = run.progress.weight_version
        await rollout.call("stop_after", 7, signal.SIGKILL, ranks=[1])
        await phases.publish(run)
        assert publisher.without("rollout", version) == [1]
        assert await rollout.call("version", ranks=[0]) == [version]
        with pytest.raises(WorkerDied):
            await rollout.call("version", ranks=[1])
        await phases.generate(run, phases.draw(run))
        assert publisher.without("rollout", version) == []
        await check_equal(run)

        # One that was replaced gets the present version before it serves, and nobody else has to load it again.
        loads = await rollout.counted()
        await rollout.replace(0)
        assert publisher.without("rollout", run.progress.weight_version) == [0]
        await phases.publish(run)
        assert await rollout.counted() == [1, loads[1]]
        assert await rollout.keeps() == [True, True]
        await check_equal(run)
        await check_logprobs(run)

        # What comes out of a warm start goes to the reference by the same way.
        await publisher.give("ref", run.progress.weight_version)
        assert await run.session.groups["ref"].digest() == [await run.session.groups["actor"].digest()]

        # One is late: the other gets the weights without it, and it takes them when it is idle again.
        await moved(run)
        rollout.deadlines = replace(rollout.deadlines, call=4.0, control=1.0)
        os.kill(rollout.processes[0].pid, signal.SIGSTOP)
        await phases.publish(run)
        assert re.search(r"waited 4.0 s for rollout.load_weights\(\) on rank 0 and gave up", str(rollout.replicas[0].out))
        assert publisher.without("rollout", run.progress.weight_version) == [0]
        os.kill(rollout.processes[0].pid, signal.SIGCONT)
        rollout.deadlines = replace(rollout.deadlines, call=120.0, control=10.0)
        async with asyncio.timeout(60):
            while publisher.without("rollout", run.progress.weight_version):  # also while it does what it was asked for before
                await phases.publish(run)
                await asyncio.sleep(0.1)
        await check_equal(run)

        # F05: requests that come while weights change wait, and are answered by the version that they were made for.
        for _ in range(3):
            await moved(run)
            _, samples = await asyncio.gather(phases.publish(run), phases.generate(run, phases.draw(run)))
            versions = (await run.session.read(samples, ["weight_version"])).scalars("weight_version")
            assert set(versions) == {run.progress.weight_version}

        # An engine whose memory has something else by now does not serve: here another version was begun, and nobody was told.
        held = run.progress.weight_version
        await run.session.groups["actor"].publish(held + 1, content="merged", dtype="float32", shared=True)
        assert await rollout.version() == [held, held]
        assert await rollout.keeps() == [False, False]
        with pytest.raises(WorkerError, match=f"StaleWeights: rollout rank . holds weight version -1, asked for {held}"):
            await rollout.call("generate", phases.draw(run), version=held, temperature=1.0, seed=0)

        # The actor dies in the middle: it is named, and those that read hear of it at once.
        await run.session.groups["actor"].die_after(9)
        began = time.monotonic()
        with pytest.raises(WorkerDied, match="actor rank 0"):
            await publisher.give("rollout", held + 2)
        assert time.monotonic() - began < 60, "their deadline is 120 s"
        assert await rollout.version() == [-1, -1]

    pools = "pools={main: {nodes: [1], cpus: 0.4}, serve: {nodes: [2], cpus: 0.4}}"
    ref = ("roles.ref={pool: serve, workers: 1, worker: 'test_publication:ProbedRef'}", "algorithm.kl_coefficient=0.1")
    directory = go(tmp_path, my_loop, pools, "roles.rollout.pool=serve", "roles.reward.cpus=0.4", *ref)
    assert shared_files(directory) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_F02_no_memory_option_keeps_an_engine_from_the_trainers_version(tmp_path: Path) -> None:
    async def cell(run: TrainingRun, *, sleeps: bool) -> None:
        await phases.publish(run)
        for number in run.steps():
            await loop.step(run)
            if sleeps:
                await run.session.groups["actor"].sleep()
            assert run.progress.weight_version == number
            await check_equal(run)

    cells = 0
    for sharding in ("none", "fsdp"):
        for checkpointing in ("false", "true"):
            for sleeps in (False, True):
                for name, layout in {"one": ONE_PROCESS, "split": SPLIT_LOCAL}.items():
                    options = (f"trainer.sharding={sharding}", f"trainer.activation_checkpointing={checkpointing}", "trainer.steps=3")
                    options += ("trainer.learning_rate=1e-3", *layout)
                    folder = tmp_path / f"{sharding}-{checkpointing}-{sleeps}-{name}"
                    go(folder, lambda run, sleeps=sleeps: cell(run, sleeps=sleeps), *options)
                    cells += 1
    assert cells == 16


@pytest.mark.slow
def test_F21_a_resumed_run_serves_the_actors_weights_and_not_those_of_the_reference(tmp_path: Path) -> None:
    roles = "roles={actor: {pool: main, worker: 'test_publication:Moving'}, ref: {pool: main}, reward: {pool: main}, rollout: {pool: main, "
    roles += "worker: 'test_publication:Probed'}}"
    options = (*PROBED, *ONE_PROCESS, roles, "algorithm.kl_coefficient=0.1", "trainer.learning_rate=1e-3")
    run_training(small(tmp_path, *options), Quiet())
    found: dict[str, Any] = {}

    async def my_loop(run: TrainingRun) -> None:
        await phases.publish(run)
        found["version"] = run.progress.weight_version
        await check_equal(run)
        found["engine"] = (await run.session.groups["rollout"].digest())[0]

    run_training(small(tmp_path, *options, "trainer.steps=3"), Quiet(), resume=only_run(tmp_path), loop=my_loop)
    saved = load_file(only_run(tmp_path).checkpoint(2) / "model" / "model.safetensors")
    assert found["version"] == 2
    assert found["engine"] == digest(saved.items())
