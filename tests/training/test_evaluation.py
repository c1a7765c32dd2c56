"""Held-out evaluation: pass@k against hand counts, results by source, and what a mixture of sources leaves in the metrics."""

from __future__ import annotations

import json
import math
from itertools import combinations

import pytest
from training_helpers import ONE_PROCESS, Quiet, contract_problems, only_run, rows, small

from rolemesh.training.evaluation import Sampling, pass_at_k
from rolemesh.training.launch import run_training
from rolemesh.training.tasks import run_evaluation


def right_for_some(sample: object, **options: object) -> float | None:
    """Of the answers to prompt d the first d % 3 are right; the last answer to prompt 7 cannot be scored."""
    if (sample.draw, sample.sample) == (7, 3):
        return None
    return float(sample.sample < sample.draw % 3)


def quarter(sample: object, **options: object) -> float:
    return 0.25


def one(sample: object, **options: object) -> dict[str, float]:
    return {"score": 1.0}


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 1 - 3 / 6  # of the 6 pairs of 4 answers, the 3 without the right one miss
    assert pass_at_k(4, 2, 2) == 1 - 1 / 6
    assert pass_at_k(5, 2, 3) == 1 - 1 / 10
    assert [pass_at_k(4, 0, k) for k in (1, 4)] == [0.0, 0.0]
    assert [pass_at_k(4, 4, k) for k in (1, 4)] == [1.0, 1.0]
    assert pass_at_k(4, 3, 2) == 1.0  # any two answers hold a right one
    assert math.isclose(pass_at_k(1000, 1, 100), 0.1)


@pytest.mark.parametrize(("n", "c", "k"), [(6, 2, 3), (7, 3, 2), (5, 4, 5)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(n, c, k):
    answers = [True] * c + [False] * (n - c)
    chosen = [any(choice) for choice in combinations(answers, k)]
    assert pass_at_k(n, c, k) == pytest.approx(sum(chosen) / len(chosen))


def test_pass_at_k_of_a_model_by_hand(tmp_path):
    config = small(tmp_path, *ONE_PROCESS, "reward=[{name: 'test_evaluation:right_for_some'}]")
    found = run_evaluation(config, Sampling(samples=4, ks=(1, 2, 4), temperature=1.0))
    # 8 prompts with 0, 1, 2, 0, 1, 2, 0, 1 right answers of 4
    assert found == {
        "eval/pass@1": pytest.approx((3 / 4 + 2 * 2 / 4) / 8),
        "eval/pass@2": pytest.approx((3 * (1 - 3 / 6) + 2 * (1 - 1 / 6)) / 8),
        "eval/pass@4": pytest.approx(5 / 8),
        "eval/reward_mean": pytest.approx(7 / 31),
        "eval/samples": 32.0,
        "eval/failed": 1.0,
    }
    greedy = run_evaluation(config)
    assert greedy["eval/accuracy"] == pytest.approx(5 / 8)  # the only answer is the first: right for 1 and 2


def mixture(tmp_path) -> tuple[str, ...]:
    for name, first in (("low", 10), ("high", 50)):
        lines = [json.dumps({"prompt": f"{first + n} + 1 =", "answer": str(first + n + 1)}) for n in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, json.dumps({"prompt": "1 + " * 60, "answer": "0"})]))
    return (
        f"data.train=[{{path: {tmp_path}/low.jsonl, weight: 3}}, {{path: {tmp_path}/high.jsonl, name: upper/half}}]",
        "data.overlong=drop",
        "reward=[{name: 'test_evaluation:one', sources: [low]}, {name: 'test_evaluation:quarter', sources: [upper/half], weight: 2}]",
    )


def test_H12_a_mixture_is_told_apart_in_every_count_and_result(tmp_path):
    run_training(small(tmp_path, *ONE_PROCESS, *mixture(tmp_path), "sft=null"), Quiet())
    run = only_run(tmp_path)
    assert contract_problems(run, steps=2) == "contract holds"
    trained = [row for row in rows(run) if "reward/mean" in row]
    for row in trained:  # 4 prompts of 4 answers, 3 of them from the file of weight 3
        assert (row["samples/drawn/low"], row["samples/drawn/upper_half"]) == (12, 4)
        assert (row["reward/mean/low"], row["reward/mean/upper_half"]) == (1.0, 0.5)
        assert row["reward/mean"] == pytest.approx((12 * 1.0 + 4 * 0.5) / 16)
        assert (row["data/removed/overlong"], row["data/removed/overlong/low"]) == (2, 1)
    evaluated = [row for row in rows(run) if "eval/accuracy" in row]
    assert len(evaluated) == 2
    for row in evaluated:  # 8 held-out prompts by weight: 6 and 2, but at most a fifth of 20 each: 4 and 2
        assert (row["eval/samples/low"], row["eval/samples/upper_half"], row["eval/samples"]) == (4, 2, 6)
        assert (row["eval/accuracy/low"], row["eval/accuracy/upper_half"]) == (1.0, 0.0)  # full is 1 for one, 2 for the other
        assert row["eval/accuracy"] == pytest.approx(4 / 6)
        assert (row["eval/reward_mean/low"], row["eval/reward_mean/upper_half"]) == (1.0, 0.5)


def test_samples_of_a_mixture_are_told_apart(tmp_path):
    config = small(tmp_path, *ONE_PROCESS, *mixture(tmp_path))
    found = run_evaluation(config, Sampling(samples=2, ks=(1, 2), temperature=1.0))
    assert (found["eval/pass@2/low"], found["eval/pass@2/upper_half"], found["eval/pass@2"]) == (1.0, 0.0, pytest.approx(4 / 6))
    assert (found["eval/samples/low"], found["eval/samples/upper_half"]) == (8, 4)


def test_evaluation_needs_room_for_its_own_roles_alone(tmp_path):
    huge = ("roles.actor.pool=trainers", "pools.trainers={nodes: [4], cpus: 4096}")
    config = small(tmp_path, *ONE_PROCESS, *huge)
    assert run_evaluation(config)["eval/samples"] == 8
