"""Models under training that sleep while other roles use their slots: the same run, with other memory."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_helpers import ONE_PROCESS, PPO, Quiet, only_run, rows, small

from rolemesh.config.schema import Config
from rolemesh.observe import RunDirectory
from rolemesh.plan.memory import COMPUTING, TRAINED
from rolemesh.roles.actor import ActorWorker
from rolemesh.training.launch import run_training
from rolemesh.training.session import Session

REWARD = "reward=[{name: 'test_offload:varied'}]"
FAST = ("trainer.learning_rate=0.001", "trainer.warmup_steps=0", REWARD, "deterministic=true")
SHARDED = ("pools.main={nodes: [2], cpus: 0.4}", "trainer.sharding=fsdp")
LORA = ("model.lora.rank=4", "roles={actor: {}, rollout: {}, reward: {}, ref: {}}")


def varied(sample: Any, **options: object) -> float:
    """Differs within a group even before the model can answer anything."""
    return float(sum(map(ord, sample.response)) % 7)


def train(folder: Path, *overrides: str) -> RunDirectory:
    run_training(small(folder, *FAST, *overrides), Quiet())
    return only_run(folder)


def served(run: RunDirectory) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoint(2) / "model" / "model.safetensors")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((*ONE_PROCESS, *PPO), id="ppo", marks=pytest.mark.slow),
        pytest.param((*ONE_PROCESS, *LORA), id="adapter"),
        pytest.param((*SHARDED, *PPO), id="ppo-sharded", marks=[pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]),
    ],
)
def test_F01_F02_a_run_whose_models_sleep_in_between_is_the_same_to_the_last_bit(tmp_path: Path, layout: tuple[str, ...]) -> None:
    plain, offloaded = train(tmp_path / "plain", *layout), train(tmp_path / "offloaded", *layout, "trainer.offload=true")
    expected, found = served(plain), served(offloaded)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for before, after in zip(rows(plain), rows(offloaded), strict=True):
        same = [key for key in before if key.startswith(("reward/m", "policy/", "critic/", "actor/", "rollout/", "weights/", "samples/"))]
        assert {key: before[key] for key in same} == {key: after[key] for key in same}
    trained = ("actor", "critic") if "critic" in str(layout) else ("actor",)
    for before, after in zip(rows(plain), rows(offloaded), strict=True):
        for role in trained if "reward/mean" in before else ():
            assert before[f"memory/{role}/asleep"] == 0
            assert after[f"memory/{role}/weights"] == before[f"memory/{role}/weights"] > 0
            slept = after[f"memory/{role}/asleep"] - after[f"memory/{role}/weights"]
            assert slept in (0, after[f"memory/{role}/optimizer"]), "weights, and moments once there are some"
            assert slept or before["step"] == 1
            assert f"time/{role}/wake" in after


class Watching(ActorWorker):
    """Says when it is sent to sleep and woken."""

    def __init__(self, context: Any, *, config: Config) -> None:
        super().__init__(context, config=config)
        self.told: list[str] = []

    def sleep(self) -> int:
        assert self.engine.memory()["weights"] > 0, "sent to sleep twice"
        freed = super().sleep()
        assert self.engine.memory()["weights"] == 0 < self.engine.memory()["asleep"]
        self.metrics.last("watch/slept", 1)
        return freed

    def wake(self) -> None:
        assert self.engine.memory()["weights"] == 0, "woken twice"
        super().wake()


def test_it_sleeps_once_for_each_generation_and_wakes_for_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, holding = dict[str, set[str]](), Session.holding
    monkeypatch.setattr(Session, "holding", lambda self, phase, *roles: held.update({phase: {*roles}}) or holding(self, phase, *roles))
    watched = "roles={actor: {worker: 'test_offload:Watching'}, rollout: {}, reward: {}, ref: {}, critic: {}}"
    run = train(tmp_path, *ONE_PROCESS, *PPO, watched, "sft=null", "trainer.offload=true")
    watched_calls = ("actor.sleep", "actor.wake", "actor.update", "rollout.load_weights", "rollout.generate")
    events = [event for event in json.loads(run.trace.read_text())["traceEvents"] if event["name"] in watched_calls]
    calls = [name for name, _ in itertools.groupby(event["name"] for event in sorted(events, key=lambda event: event["ts"]))]
    step = ["actor.sleep", "rollout.generate", "actor.wake", "actor.update", "rollout.load_weights"]
    start = calls.index("rollout.generate") - 1
    assert calls[start : start + 10] == [*step, *step]
    assert {phase: held[phase] for phase in COMPUTING} == {phase: {*roles} for phase, roles in COMPUTING.items()}
    assert all(roles & {*TRAINED} <= {*COMPUTING["update"]} for roles in held.values()), "the plan knows the phases with most awake"
