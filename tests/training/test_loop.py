"""The whole loop in one process (local backend): the same code path as on Ray, phase by phase."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from training_helpers import ONE_PROCESS, PPO, Quiet, contract_problems, only_run, rows, small

from rolemesh.algorithms import Grpo
from rolemesh.batch import Batch
from rolemesh.config.schema import Config, ModelConfig
from rolemesh.engines.rollout import rows as sampling_rows
from rolemesh.engines.rollout.sampling import uniforms
from rolemesh.engines.train import load_value_model
from rolemesh.errors import ConfigError, RolemeshError, RunStopped, WorkerError
from rolemesh.observe import Metrics, RunDirectory
from rolemesh.observe.catalogue import ROWS
from rolemesh.protocols.algorithm import StepTerms, TokenBatch
from rolemesh.training import health, phases
from rolemesh.training.launch import run_training
from rolemesh.training.tasks import run_evaluation, run_generation, run_sft


def failing_reward(sample: object, **options: object) -> float:
    raise RuntimeError("the judge is out")


def sometimes_failing(sample: object, **options: object) -> float:
    if sample.sample == 1:
        raise RuntimeError("not this one")
    return float(sample.sample == 0)


def equal_rewards(sample: object, **options: object) -> float:
    return 0.0


def abstains_at_first(sample: Any, **options: object) -> float | None:
    return None if sample.draw == 0 else varied(sample)


def varied(sample: Any, **options: object) -> float:
    """Differs within a group even before the model can answer anything."""
    return float(sum(map(ord, sample.response)) % 7)


def one(sample: object, **options: object) -> float:
    return 1.0


def one_with_extras(sample: object, **options: object) -> tuple[float, dict[str, object]]:
    return 1.0, {"format": 0.5, "note": "fine"}


def no_return(sample: object, **options: object) -> None:
    pass


def not_a_number(sample: object, **options: object) -> float:
    return float("nan")


def removes_the_run(sample: object, **options: object) -> float:
    shutil.rmtree(os.environ["RUN_TO_REMOVE"], ignore_errors=True)
    return float(sample.sample)


class LossOfNothing(Grpo):
    """A loss that is not a number, as a bug in an own algorithm would give."""

    def loss(self, tokens: TokenBatch, metrics: Metrics, terms: StepTerms | None = None) -> torch.Tensor:
        return super().loss(tokens, metrics, terms) * float("nan")


class BrokenSink:
    def __init__(self, folder: Path) -> None:
        self.rows = 0

    def write(self, step: int, values: object) -> None:
        self.rows += 1
        if self.rows == 3:
            raise OSError("tracker unreachable")

    def close(self) -> None:
        pass


def train(tmp_path: Path, *overrides: str, resume: RunDirectory | None = None) -> tuple[RunDirectory, Quiet]:
    display = Quiet()
    run_training(small(tmp_path, *ONE_PROCESS, *overrides), display, resume=resume)
    return resume or only_run(tmp_path), display


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run that has done its only step; tests go on from a copy of it."""
    return train(tmp_path_factory.mktemp("one"), "trainer.steps=1")[0]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Two steps without a warm start, both saved; tests go on from a copy of it."""
    return train(tmp_path_factory.mktemp("two"), "trainer.steps=2", "trainer.save_every=1", "sft=null")[0]


@pytest.fixture(scope="module")
def partly_failed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A step in which a quarter of the answers cannot be scored."""
    return train(tmp_path_factory.mktemp("failed"), "reward=[{name: 'test_loop:sometimes_failing'}]", "trainer.steps=1")[0]


@pytest.fixture(scope="module")
def not_finite(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, str]:
    """A run whose gradients are never finite, and what it ended with."""
    folder = tmp_path_factory.mktemp("nan")
    with pytest.raises(RunStopped) as caught:
        train(folder, "trainer.steps=9", "algorithm.name=test_loop:LossOfNothing")
    return only_run(folder), str(caught.value)


def copy_of(run: RunDirectory, tmp_path: Path) -> RunDirectory:
    """As if it had been made there."""
    here = tmp_path / "runs" / run.path.name
    shutil.copytree(run.path, here)
    copied = RunDirectory.open(here)
    copied.config.write_text(copied.config.read_text().replace(str(run.path.parent), str(here.parent)))
    return copied


def weights_of(run: RunDirectory, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoint(step) / "model" / "model.safetensors")


def state_of(run: RunDirectory, step: int) -> dict[str, Any]:
    """Every tensor of a checkpoint, and what its manifest says of data, progress and optimizers."""
    folder = run.checkpoint(step)
    tensors = {(path.name, name): tensor for path in sorted(folder.rglob("*.safetensors")) for name, tensor in load_file(path).items()}
    manifest = json.loads((folder / "state.json").read_text())
    return tensors | {name: manifest[name] for name in ("progress", "prompts", "roles", "seed")}


def assert_equal_states(expected: dict[Any, Any], found: dict[Any, Any]) -> None:
    assert found.keys() == expected.keys()
    assert len(expected) > 20
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


def sample_ids(run: RunDirectory) -> list[tuple[int, int]]:
    found = []
    for path in sorted(run.samples.glob("*.parquet")):
        table = pq.read_table(path)
        found += list(zip(table["draw"].to_pylist(), table["sample"].to_pylist(), table["response"].to_pylist(), strict=True))
    return found


def test_a_run_keeps_the_contract_of_its_directory(tmp_path: Path) -> None:
    run, display = train(tmp_path)
    assert contract_problems(run, steps=2) == "contract holds"
    assert display.started == (2, 0)
    assert [step for step, _ in display.evaluations] == [0, 2]
    summary = json.loads(run.summary.read_text())
    assert summary["state"] == "finished"
    assert (run.checkpoint(2) / "model" / "config.json").is_file()
    trained = [row for row in rows(run) if "reward/mean" in row]
    assert [row["weights/version"] for row in trained] == [1, 2]
    assert {row["samples/trained"] for row in trained} == {16}
    kinds = [[key for key in ROWS if key in row] for row in rows(run)]
    assert kinds == [["sft/step"], ["eval/accuracy"], ["reward/mean"], ["reward/mean"], ["eval/accuracy"], ["checkpoint/seconds"]]
    assert [row["step"] for row in rows(run)] == [0, 0, 1, 2, 2, 2], "as docs/reference/metrics.md tells of these kinds"
    assert any("kept" in note for note in display.notes), "counts of kept and removed prompts are always shown"


def test_D24_the_first_ratio_is_one_against_the_engines_own_logprobs(tmp_path: Path) -> None:
    run, _ = train(tmp_path, "rollout.temperature=0.6")
    for row in rows(run):
        if "reward/mean" in row:
            assert 0 < row["rollout/logprob_gap_max"] < 2e-5, "two programs for the same numbers differ a little"
            assert 0 < row["policy/ratio_first_minibatch_mean_deviation"] < row["policy/ratio_first_minibatch_max_deviation"] < 2e-5


def test_D25_a_ratio_above_the_bound_is_a_sign_that_tells_a_mismatch_from_the_rounding_of_few_tokens() -> None:
    run: Any = SimpleNamespace(config=Config())

    def signs(mean: float, largest: float) -> list[str]:
        found = {"policy/ratio_first_minibatch_mean_deviation": mean, "policy/ratio_first_minibatch_max_deviation": largest}
        return [text for _, text in health._signs(run, {"reward/failed": 0, "samples/drawn": 16, **found})]

    assert signs(3e-7, 9e-5) == []
    (mismatch,), (rounding,) = signs(5e-4, 2e-3), signs(3e-7, 1.2e-4)
    assert "off by 5.0e-04 on average and 2.0e-03 at most (expected below 1e-04): trainer and engine disagree" in mismatch
    assert "off by 3.0e-07 on average and 1.2e-04 at most (expected below 1e-04): with so small a mean it is few tokens" in rounding


def test_scoring_that_goes_wrong_for_many_answers_is_a_sign() -> None:
    run: Any = SimpleNamespace(config=Config())

    def signs(**statuses: int) -> list[str]:
        found = {f"reward/status/{status}": count for status, count in statuses.items()}
        row = {"reward/failed": 16 - statuses["ok"], "samples/drawn": 16, "reward/unscored/judge": 16 - statuses["ok"], **found}
        return [text for _, text in health._signs(run, row)]

    assert signs(ok=12, error=4) == signs(ok=2, abstained=14) == []
    (said,) = signs(ok=11, error=3, timeout=2)
    assert "many answers (ok 11, error 3, timeout 2; without a score of judge)" in said
    assert "deadline" in said
    assert "return" not in said


def test_ppo_trains_all_its_roles_and_begins_at_its_reference(tmp_path: Path) -> None:
    run, _ = train(tmp_path, *PPO, "algorithm.kl_in=reward", "trainer.minibatches=2", "trainer.epochs=2")
    assert contract_problems(run, steps=2) == "contract holds"
    first, second = [row for row in rows(run) if "reward/mean" in row]
    assert abs(first["policy/kl_ref"]) < 1e-7, "the reference is what the warm start left"
    assert second["policy/kl_ref"] > 1e-6
    assert first["critic/tokens_trained"] == first["actor/tokens_trained"]
    assert {"time/reward/score", "time/ref/logprobs", "time/critic/values", "time/critic/estimate"} <= first.keys()
    state = state_of(run, 2)
    assert state["roles"]["critic"]["optimizer_step"] == 8
    fresh = load_value_model(ModelConfig(path="tiny"), path=None, seed=0).head.weight
    assert not torch.equal(state["critic.safetensors", "head.weight"], fresh)


def test_a_reference_without_a_penalty_only_measures(tmp_path: Path) -> None:
    fast = ("trainer.learning_rate=0.01", "trainer.warmup_steps=0", "reward=[{name: 'test_loop:varied'}]")
    run, _ = train(tmp_path, *fast, "roles={actor: {}, rollout: {}, reward: {}, ref: {}}")
    plain, _ = train(tmp_path / "plain", *fast)
    assert [row["policy/kl_ref"] > 1e-6 for row in rows(run) if "policy/kl_ref" in row] == [False, True]
    for name, tensor in weights_of(plain, 2).items():
        assert torch.equal(weights_of(run, 2)[name], tensor), name


def test_E10_a_first_minibatch_without_any_reward_is_masked_and_the_ratio_compared_in_the_next(tmp_path: Path) -> None:
    one_prompt_each = ("trainer.minibatches=4", "trainer.steps=1", "reward=[{name: 'test_loop:abstains_at_first'}]")
    run, _ = train(tmp_path, *one_prompt_each)
    (row,) = [row for row in rows(run) if "reward/mean" in row]
    assert (row["samples/masked"], row["samples/trained"], row["actor/steps_skipped_empty"]) == (4, 12, 1)
    assert 0 < row["policy/ratio_first_minibatch_max_deviation"] < 2e-5


def test_a_checkpoint_without_the_state_of_a_role_is_refused_before_anything_starts(tmp_path: Path, one_step: RunDirectory) -> None:
    run = copy_of(one_step, tmp_path)
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, *PPO, "trainer.steps=2", resume=run)
    assert {problem.subject: problem.need for problem in caught.value.problems} == {
        "roles.critic": "the checkpoint must hold its state",
        "roles.ref": "the checkpoint must hold its state",
    }
    assert "model.path=" in caught.value.problems[0].remedy


def test_a_step_that_ends_the_run_is_done_and_its_prompts_are_not_drawn_again(not_finite: tuple[RunDirectory, str]) -> None:
    run, message = not_finite
    assert "not finite" in message
    state = json.loads((run.checkpoint(3) / "state.json").read_text())
    assert state["progress"]["step"] == 3
    assert json.dumps(state["prompts"]).count("12") > 0, "three steps of four prompts"


def test_the_critic_warms_up_before_the_policy_moves(tmp_path: Path) -> None:
    run, _ = train(tmp_path, *PPO, "algorithm.critic_warmup=2", "trainer.steps=3")
    trained = [row for row in rows(run) if "reward/mean" in row]
    assert [row["weights/version"] for row in trained] == [0, 0, 1]
    assert ["actor/tokens_trained" in row for row in trained] == [False, False, True]
    assert all(row["critic/tokens_trained"] > 0 for row in trained)
    assert contract_problems(run, steps=3) == "contract holds"


def test_the_coefficient_of_the_divergence_is_steered_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    """The KL of the first step is 0, far below the target, so the coefficient falls by 2 %; from then on as measured."""
    steered = (*PPO, "algorithm.kl_target=1.0", "trainer.learning_rate=0.0")
    run, _ = train(tmp_path, *steered, "trainer.steps=2")
    train(tmp_path, *steered, "trainer.steps=3", resume=run)
    found = [row["policy/kl_coefficient"] for row in rows(run) if "reward/mean" in row]
    assert found == pytest.approx([0.1, 0.098, 0.09604])
    train(tmp_path, *steered, "trainer.steps=4", "algorithm.kl_coefficient=0.5", resume=run)
    assert [row for row in rows(run) if "reward/mean" in row][-1]["policy/kl_coefficient"] == 0.5, "a new start value counts"


FEW = ("data.size=14", "trainer.save_samples_every=1", "trainer.keep_checkpoints=5")
"""The data wraps around within four steps."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return train(tmp_path_factory.mktemp("whole"), "trainer.steps=4", *FEW)[0]


@pytest.mark.parametrize("at", [1, 3])
def test_G05_G07_G10_resuming_gives_the_weights_moments_and_samples_of_a_run_nobody_stopped(
    tmp_path: Path, whole: RunDirectory, at: int
) -> None:
    check_resume(tmp_path, at, whole, FEW)


def test_F21_with_a_reference_a_resumed_run_samples_from_the_weights_of_its_policy(tmp_path: Path) -> None:
    """The weights move far from the reference in each step, so that samples of the wrong ones would differ."""
    moving = ("algorithm.kl_in=reward", "algorithm.kl_target=0.01", "trainer.learning_rate=0.01", "trainer.warmup_steps=0")
    options = (*FEW, *PPO, *moving, "reward=[{name: 'test_loop:varied'}]")
    check_resume(tmp_path, 3, train(tmp_path / "whole", "trainer.steps=4", *options)[0], options)


def check_resume(tmp_path: Path, at: int, whole: RunDirectory, few: tuple[str, ...]) -> None:
    """A run that is stopped after `at` of four steps and resumed ends as the whole one, which nobody stopped."""
    train(tmp_path / "cut", f"trainer.steps={at}", *few)
    cut = only_run(tmp_path / "cut")
    _, display = train(tmp_path / "cut", "trainer.steps=4", *few, resume=cut)
    assert display.started == (4, at), "H10: the bar begins at the checkpoint"
    assert any(f"resumed at step {at}" in note for note in display.notes)
    assert_equal_states(state_of(whole, 4), state_of(cut, 4))
    assert sample_ids(cut) == sample_ids(whole)
    assert [row["step"] for row in rows(cut) if "reward/mean" in row] == [1, 2, 3, 4]


def test_a_resume_makes_the_steps_after_its_checkpoint_again_without_a_gap(tmp_path: Path) -> None:
    run, _ = train(tmp_path, "trainer.steps=4", "trainer.save_every=2", "trainer.keep_checkpoints=5", "trainer.save_samples_every=1")
    before = {row["step"]: row["reward/mean"] for row in rows(run) if "reward/mean" in row}
    shutil.rmtree(run.checkpoint(4))  # as if it had died in step 4
    _, display = train(tmp_path, "trainer.steps=4", "trainer.save_samples_every=1", resume=run)
    assert any("resumed at step 2" in note for note in display.notes)
    after = [(row["step"], row["reward/mean"]) for row in rows(run) if "reward/mean" in row]
    assert after == sorted(before.items())


def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path: Path, one_step: RunDirectory) -> None:
    run = copy_of(one_step, tmp_path)
    kept = {path: path.read_text() for path in (run.config, run.plan, run.summary, run.metrics)}
    with pytest.raises(ConfigError, match="seed"):
        train(tmp_path, "trainer.steps=2", "seed=7", resume=run)
    with run.held(), pytest.raises(ConfigError, match="must not be running"):
        train(tmp_path, "trainer.steps=2", resume=run)
    assert {path: path.read_text() for path in kept} == kept


def test_G07_a_resume_that_has_nothing_left_to_do_leaves_the_config_as_it_was(tmp_path: Path, one_step: RunDirectory) -> None:
    run = copy_of(one_step, tmp_path)
    before = run.config.read_text()
    train(tmp_path, "trainer.steps=1", "trainer.learning_rate=0.5", resume=run)
    assert run.config.read_text() == before


def test_G16_a_resume_tells_path_step_and_changed_options(tmp_path: Path, one_step: RunDirectory) -> None:
    run = copy_of(one_step, tmp_path)
    _, display = train(tmp_path, "trainer.steps=2", "trainer.learning_rate=0.5", resume=run)
    (event,) = [json.loads(line) for line in run.events.read_text().splitlines() if '"resumed"' in line]
    assert event["changed_options"]["trainer"]["learning_rate"] == 0.5
    assert any(f"resumed at step 1 from {run.checkpoint(1)}" in note and "changed sections: trainer" in note for note in display.notes)


def test_G03_an_incomplete_checkpoint_is_skipped_and_named(tmp_path: Path, one_step: RunDirectory) -> None:
    run = copy_of(one_step, tmp_path)
    (run.checkpoints / "step-9").mkdir()
    (run.checkpoints / "step-9" / "critic.safetensors").write_bytes(b"half")
    _, display = train(tmp_path, "trainer.steps=2", resume=run)
    assert any("resumed at step 1" in note and "step-9" in note for note in display.notes)


@pytest.mark.parametrize("damaged", ["actor-optimizer.safetensors", "model/model.safetensors", "state.json"])
def test_G03_a_cut_checkpoint_counts_as_incomplete(tmp_path: Path, two_steps: RunDirectory, damaged: str) -> None:
    run = copy_of(two_steps, tmp_path)
    os.truncate(run.checkpoint(2) / damaged, 20)
    (run.checkpoints / "step-old").mkdir()  # whoever made it: no name of a checkpoint
    _, display = train(tmp_path, "trainer.steps=2", "sft=null", resume=run)
    assert any("resumed at step 1" in note and "step-2" in note and "step-old" not in note for note in display.notes)
    assert (run.checkpoints / "step-old").is_dir()


def test_a_run_whose_directory_is_removed_ends_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_TO_REMOVE", str(tmp_path / "runs"))
    with pytest.raises(RolemeshError, match=r"the run directory .*/runs/small-\S+ cannot be written any more"):
        train(tmp_path, "reward=[{name: 'test_loop:removes_the_run'}]", "sft=null")


def test_fewer_steps_than_were_done_are_refused(tmp_path: Path, two_steps: RunDirectory) -> None:
    run = copy_of(two_steps, tmp_path)
    with pytest.raises(ConfigError, match=r"trainer.steps: must be at least the 2 steps .*; found 1"):
        train(tmp_path, "trainer.steps=1", "sft=null", resume=run)


def test_H01_a_logger_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    run, _ = train(tmp_path, "trainer.sinks=['test_loop:BrokenSink']")
    assert len([row for row in rows(run) if "reward/mean" in row]) == 2
    warnings = [json.loads(line) for line in run.events.read_text().splitlines() if "sink_failed" in line]
    assert len(warnings) == 1
    assert "tracker unreachable" in warnings[0]["message"]


def test_H11_an_error_in_a_worker_ends_with_role_rank_and_the_original_message(tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        train(tmp_path, "reward=[{name: 'test_loop:failing_reward'}]")
    assert "reward rank 0" in str(caught.value)
    assert "the judge is out" in str(caught.value)
    run = only_run(tmp_path)
    assert "the judge is out" in (run.logs / "error.txt").read_text()
    assert json.loads(run.summary.read_text())["state"] == "failed"


@pytest.mark.parametrize("fault", ["one seed for all", "none"])
def test_answers_that_are_all_the_same_are_told_of_once_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(health, "SHORT", 0)  # a model that has learnt nothing may end an answer at any token
    if fault != "none":
        monkeypatch.setattr(sampling_rows, "uniforms", lambda seed, draws, samples, *more: uniforms(seed, draws, samples * 0, *more))
    reward = "reward=[{name: 'test_loop:equal_rewards'}]"
    run, display = train(tmp_path, "sft=null", "trainer.steps=3", reward)
    counts = [row["samples/identical_groups"] for row in rows(run) if "reward/mean" in row]
    said = [note for note in display.notes if "the same token for token" in note]
    if fault == "none":
        assert (counts, said) == ([0, 0, 0], [])
        return
    assert counts == [4, 4, 4]
    assert said == [note for note in said if note.startswith("step 1: the 4 answers to each of the 4 prompts are the same")]
    assert len(said) == 1


def test_only_whole_groups_of_long_answers_count_as_identical_and_only_all_of_a_step_are_a_sign() -> None:
    def count(*groups: list[tuple[int, int]]) -> float:
        """Of groups of (digest, length)."""
        told = [(draw, sample, *one) for draw, group in enumerate(groups) for sample, one in enumerate(group)]
        names = ("draw", "sample", "response_digest", "response_length")
        metrics = Metrics()
        phases._record_identical(Batch.from_columns(dict(zip(names, map(list, zip(*told, strict=True)), strict=True))), metrics)
        return metrics.reduce()["samples/identical_groups"]

    assert count([(1, 9)] * 3, [(2, 9)] * 2) == 2
    assert count([(1, 9), (1, 9), (2, 9)], [(3, 8)] * 3, [(4, 9)]) == 0  # one differs, short, a single answer
    assert count([(1, 9)] * 2, [(1, 9), (2, 9)]) == 1

    def signs(identical: int, temperature: float, warned: dict[str, int] | None = None) -> list[str]:
        config = Config.model_validate({"trainer": {"prompts_per_step": 4}, "rollout": {"temperature": temperature}})
        run: Any = SimpleNamespace(config=config, warned=warned or {})
        return [kind for kind, _ in health._signs(run, {"reward/failed": 0, "samples/drawn": 16, "samples/identical_groups": identical})]

    assert signs(4, 1.0) == signs(4, 0.1) == ["identical"]
    assert signs(3, 1.0) == signs(0, 1.0) == signs(4, 0.0) == signs(4, 1.0, {"identical": 1}) == []


def test_E10_a_failed_score_is_masked_and_counted(partly_failed: RunDirectory) -> None:
    (row,) = [row for row in rows(partly_failed) if "reward/mean" in row]
    assert (row["samples/masked"], row["samples/trained"], row["samples/lost"]) == (4, 12, 0)
    assert row["reward/failed"] == 4
    assert row["reward/mean"] == pytest.approx(1 / 3)
    assert row["reward/status/error"] == 4


def test_F16_lengths_are_those_of_all_answers_masked_ones_too(partly_failed: RunDirectory) -> None:
    (row,) = [row for row in rows(partly_failed) if "reward/mean" in row]
    table = pq.read_table(next(partly_failed.samples.glob("*.parquet")))
    lengths = table["response_length"].to_numpy()
    assert row["samples/masked"] == 4
    assert (row["response_length/min"], row["response_length/max"]) == (lengths.min(), lengths.max())
    assert row["response_length/mean"] == pytest.approx(lengths.mean())
    assert lengths.min() > 0


@pytest.mark.parametrize("reward", ["one", "one_with_extras"])
def test_H12_scores_with_and_without_extras_are_evaluated_alike(tmp_path: Path, reward: str) -> None:
    run, _ = train(tmp_path, f"reward=[{{name: 'test_loop:{reward}'}}]", "trainer.steps=1")
    evaluations = [row for row in rows(run) if "eval/accuracy" in row]
    assert [(row["eval/accuracy"], row["eval/reward_mean"], row["eval/failed"]) for row in evaluations] == [(1.0, 1.0, 0.0)] * 2


@pytest.mark.parametrize(("function", "status"), [("no_return", "abstained"), ("not_a_number", "not_finite")])
def test_D03_a_run_without_a_single_reward_ends_with_a_reason(tmp_path: Path, function: str, status: str) -> None:
    without = f"\\({status} 16; without a score of test_loop:{function}\\)"
    reward = f"reward=[{{name: exact}}, {{name: 'test_loop:{function}'}}]"
    with pytest.raises(RunStopped, match=f"last 3 steps has a reward {without}.*{status}: {re.escape(health.ADVICE[status])}"):
        train(tmp_path, reward, "trainer.steps=9", "sft=null", "algorithm.no_signal=train")
    run = only_run(tmp_path)
    trained = [row for row in rows(run) if "reward/mean" in row]
    assert [(row["step"], row["samples/trained"], row["samples/masked"], row["step/skipped"]) for row in trained] == [
        (1, 0, 16, 1), (2, 0, 16, 1), (3, 0, 16, 1)
    ]  # fmt: skip
    assert (run.checkpoint(2) / "state.json").is_file() or (run.checkpoint(3) / "state.json").is_file(), "what was reached is saved"


def test_C13_a_step_without_spread_follows_the_policy(tmp_path: Path) -> None:
    flat = ("reward=[{name: 'test_loop:equal_rewards'}]", "trainer.steps=1")
    run, display = train(tmp_path / "skip", *flat, "algorithm.no_signal=skip_step")
    (row,) = [row for row in rows(run) if "reward/mean" in row]
    assert (row["step/skipped"], row["weights/version"], row["reward/all_wrong_groups"]) == (1, 0, 1.0)
    assert (row["samples/trained"], row["samples/skipped"], row["samples/lost"]) == (0, 16, 0)
    assert any("no group has any spread" in note for note in display.notes)
    run, _ = train(tmp_path / "train", *flat, "algorithm.no_signal=train")
    (row,) = [row for row in rows(run) if "reward/mean" in row]
    assert (row["step/skipped"], row["weights/version"]) == (0, 1)
    assert row["samples/trained"] == 16
    with pytest.raises(RunStopped, match="100% all wrong"):
        train(tmp_path / "stop", *flat, "algorithm.no_signal=stop")
    stopped = only_run(tmp_path / "stop")
    assert (stopped.checkpoint(0) / "state.json").is_file(), "a policy that ends the run saves it"


def test_H18_groups_without_spread_bring_a_warning(tmp_path: Path) -> None:
    _, display = train(tmp_path, "reward=[{name: 'test_loop:equal_rewards'}]", "algorithm.no_signal=train")
    warnings = [note for note in display.notes if "100% of the groups have equal rewards" in note]
    assert len(warnings) == 1, "said once, not at every step"
    assert "algorithm.group_size (now 4)" in warnings[0]


def test_D03_a_run_without_finite_gradients_ends_with_a_reason(not_finite: tuple[RunDirectory, str]) -> None:
    assert "not finite" in not_finite[1]


def test_minibatches_and_epochs_are_optimizer_steps(tmp_path: Path) -> None:
    run, _ = train(tmp_path, "trainer.minibatches=2", "trainer.epochs=2", "trainer.steps=1")
    assert state_of(run, 1)["roles"]["actor"]["optimizer_step"] == 4


def test_sft_leaves_a_model_that_trains_evaluates_and_answers(tmp_path: Path) -> None:
    folder = run_sft(small(tmp_path, *ONE_PROCESS), Quiet())
    model = f"model.path={folder}"
    found = run_evaluation(small(tmp_path, *ONE_PROCESS, model))
    assert found["eval/samples"] == 8
    assert 0 <= found["eval/accuracy"] <= 1
    answers = run_generation(small(tmp_path, *ONE_PROCESS, model), ["State the sum: 1 + 2 =", "7 + 7 ="], 0.0)
    assert len(answers) == 2
    run, _ = train(tmp_path / "then", model, "sft=null", "trainer.steps=1")
    assert not np.isnan(rows(run)[0]["eval/accuracy"])
    assert rows(run)[0]["eval/accuracy"] == found["eval/accuracy"], "the same weights give the same greedy answers"


def test_resume_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", "empty")
    with pytest.raises(ConfigError, match="complete checkpoint"):
        train(tmp_path, resume=run)
