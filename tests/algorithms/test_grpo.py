import math

import numpy as np
import pytest
import torch

from rolemesh.algorithms import ALGORITHMS, Grpo, create_algorithm
from rolemesh.batch import Batch
from rolemesh.config.schema import AlgorithmConfig, Config, TrainerConfig
from rolemesh.errors import BatchError, ConfigError
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import TokenBatch


def step(groups: dict[int, list[float]], lengths: list[int] | None = None) -> Batch:
    """Rows of a step: rewards by draw; nan is a missing one. Every answer has 2 tokens unless told otherwise."""
    ids = [(draw, sample) for draw, rewards in groups.items() for sample in range(len(rewards))]
    return Batch.from_columns(
        {
            "draw": [draw for draw, _ in ids],
            "sample": [sample for _, sample in ids],
            "reward": np.array([reward for rewards in groups.values() for reward in rewards]),
            "response_length": lengths or [2] * len(ids),
        }
    )


def grpo(minibatches: int = 1, **options) -> Grpo:
    return Grpo(AlgorithmConfig(**{"group_size": 4, **options}), minibatches=minibatches)


def prepare(batch: Batch, minibatches: int = 1, **options) -> tuple[Batch, dict[str, float]]:
    metrics = Metrics()
    return grpo(minibatches, **options).prepare(batch, metrics), metrics.reduce()


def tokens(logprobs: list[float], old: list[float], advantages: list[float], weights: list[float], entropy: float = 1.0) -> TokenBatch:
    return TokenBatch(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        entropy=torch.full((len(logprobs),), entropy),
        old_logprobs=torch.tensor(old),
        advantages=torch.tensor(advantages),
        weights=torch.tensor(weights),
        row=torch.arange(len(logprobs)),
    )


def test_prepare_by_hand():
    # Draw 5: rewards 0, 1 -> -+0.5 / (sqrt(0.5) + 1e-6) = -+0.707106. Draw 2: rewards 3, missing -> 0, 0; the missing row is masked.
    # Two mini-batches in order of the draws: draw 2 is 0, draw 5 is 1. token_mean: draw 2 trains 4 tokens, draw 5 trains 1 + 3.
    batch = step({5: [0, 1], 2: [3, math.nan]}, lengths=[1, 3, 4, 9])
    found, _ = prepare(batch, minibatches=2)
    assert found.ids.tolist() == batch.ids.tolist()
    assert found.scalars("advantage") == pytest.approx([-0.707106, 0.707106, 0, 0], abs=1e-6)
    assert found.scalars("token_weight") == pytest.approx([1 / 4, 1 / 4, 1 / 4, 0])
    assert found.scalars("minibatch").tolist() == [1, 1, 0, 0]


def test_prepare_leaves_the_other_columns_alone():
    batch = step({0: [0, 1]})
    found, _ = prepare(batch)
    assert found.select(["reward", "response_length"]).equals(batch)


def test_order_of_the_rows_changes_no_bit():
    random = np.random.default_rng(0)
    batch = step({draw: random.normal(size=4).tolist() for draw in range(6)}, lengths=random.integers(1, 9, 24).tolist())
    order = random.permutation(24)
    straight, _ = prepare(batch, minibatches=3)
    turned, _ = prepare(batch.take(order), minibatches=3)
    assert turned.equals(straight.take(order))


def test_D03_D04_missing_reward_masks_its_row():
    with_missing, _ = prepare(step({0: [1, 0, 0.5, math.nan]}))
    without, _ = prepare(step({0: [1, 0, 0.5]}))
    assert with_missing.scalars("advantage")[:3].tolist() == without.scalars("advantage").tolist()
    assert with_missing.scalars("token_weight").tolist() == [1 / 6, 1 / 6, 1 / 6, 0]


def test_answer_without_tokens_keeps_its_say_in_the_baseline_but_is_masked():
    found, _ = prepare(step({0: [1, 0]}, lengths=[0, 5]), normalize_std=False)
    assert found.scalars("advantage").tolist() == [0.5, -0.5]
    assert found.scalars("token_weight").tolist() == [0, 1 / 5]


def test_C13_shares_of_groups_all_right_and_all_wrong():
    # 5 groups: spread; all at 1, the highest of the step; all at 0; all at 0.5 (neither); no reward at all (left out): 4 count.
    _, found = prepare(step({0: [0, 1], 1: [1, 1], 2: [0, 0], 3: [0.5, 0.5], 4: [math.nan, math.nan]}))
    assert found["reward/zero_spread_groups"] == pytest.approx(3 / 4)
    assert found["reward/all_right_groups"] == pytest.approx(1 / 4)
    assert found["reward/all_wrong_groups"] == pytest.approx(1 / 4)


@pytest.mark.parametrize(("reward", "right", "wrong"), [(0.0, 0, 1), (1.0, 1, 0), (-1.0, 0, 1)])
def test_C13_step_of_equal_rewards(reward: float, right: float, wrong: float):
    prepared, found = prepare(step({0: [reward] * 4, 1: [reward] * 4}))
    assert (found["reward/all_right_groups"], found["reward/all_wrong_groups"]) == (right, wrong)
    assert found["reward/zero_spread_groups"] == 1
    assert not grpo().has_signal(prepared)


def test_has_signal():
    assert grpo().has_signal(prepare(step({0: [1, 1], 1: [1, 0]}))[0])
    # The only advantages belong to answers without tokens: nothing can be trained.
    assert not grpo().has_signal(prepare(step({0: [1, 0]}, lengths=[0, 0]))[0])


def test_step_without_any_reward():
    prepared, found = prepare(step({0: [math.nan, math.nan]}))
    assert prepared.scalars("token_weight").tolist() == [0, 0]
    assert found == {}
    assert not grpo().has_signal(prepared)


def test_C22_more_answers_than_the_group_size_are_refused():
    with pytest.raises(BatchError, match=r"prompt 9 has 6 answers, expected at most algorithm.group_size = 4"):
        prepare(step({8: [0, 1], 9: [0, 1, 0, 1, 0, 1]}))


def test_loss_is_the_weighted_sum_and_its_metrics_are_weighted_by_tokens():
    # Ratios 1.5, 0.5, 1: with clips 0.8 and 1.2 and advantages 1, -1, 2 the losses are -1.2 (clipped high), 0.8 (clipped low), -2.
    # Weights 0.5, 0.25, 0.25: -0.6 + 0.2 - 0.5 = -0.9. The fourth token is masked.
    batch = tokens([math.log(1.5), math.log(0.5), 0.0, 9.0], [0.0, 0.0, 0.0, 0.0], [1.0, -1.0, 2.0, 5.0], [0.5, 0.25, 0.25, 0.0])
    metrics = Metrics()
    loss = grpo().loss(batch, metrics)
    found = metrics.reduce()
    assert loss.item() == pytest.approx(-0.9)
    assert found["policy/loss"] == pytest.approx(-0.9)
    assert found["policy/ratio_mean"] == pytest.approx(1.0)
    assert found["policy/ratio_max_deviation"] == pytest.approx(0.5)
    assert found["policy/clip_high_share"] == pytest.approx(1 / 3)
    assert found["policy/clip_low_share"] == pytest.approx(1 / 3)
    assert found["policy/clip_dual_share"] == 0
    # k3: 0.5 - ln 1.5 = 0.094535, -0.5 + ln 2 = 0.193147, 0; mean 0.095894.
    assert found["policy/kl_engine"] == pytest.approx(0.095894, abs=1e-6)


def test_H07_metrics_of_uneven_micro_batches_are_those_of_the_whole():
    # 1 token of entropy 4 and 3 tokens of entropy 0: mean 1, not 2.
    metrics = Metrics()
    grpo().loss(tokens([0.0], [0.0], [1.0], [0.25], entropy=4.0), metrics)
    grpo().loss(tokens([0.0] * 3, [0.0] * 3, [1.0] * 3, [0.25] * 3, entropy=0.0), metrics)
    assert metrics.reduce()["policy/entropy"] == 1


def test_masked_token_with_a_broken_number_reaches_neither_loss_nor_gradient():
    batch = tokens([0.0, 0.0], [0.0, math.nan], [1.0, math.nan], [1.0, 0.0])
    loss = grpo().loss(batch, Metrics())
    loss.backward()
    assert loss.item() == -1
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.tolist() == [-1, 0]


def test_micro_batch_of_masked_tokens_only_is_zero_and_records_nothing():
    batch, metrics = tokens([0.0], [1.0], [1.0], [0.0]), Metrics()
    loss = grpo().loss(batch, metrics)
    loss.backward()
    assert loss.item() == 0
    assert metrics.reduce() == {}


def test_options_reach_the_loss():
    # clip_high 0.5: ratio 1.5 passes. dual_clip 2: ratio 4, A -1 costs 2 instead of 4.
    assert grpo(clip_high=0.5).loss(tokens([math.log(1.5)], [0.0], [1.0], [1.0]), Metrics()).item() == pytest.approx(-1.5)
    assert grpo(dual_clip=2.0).loss(tokens([math.log(4)], [0.0], [-1.0], [1.0]), Metrics()).item() == pytest.approx(2)


def test_D06_whitening_weighs_answers_and_not_tokens():
    # Centred in their groups: 1, -1 and 3, -3. The answer without tokens is not trained; of 1, 3, -3 the mean is 1 / 3 and the squares
    # (4 + 64 + 100) / 9 = 56 / 3, / 2, std sqrt(28 / 3). Lengths 1 and 100 weigh the same.
    found, _ = prepare(step({0: [2, 0], 1: [6, 0]}, lengths=[1, 0, 100, 1]), normalize_std=False, whiten_advantages=True)
    expected = (np.array([1, 3, -3]) - 1 / 3) / (math.sqrt(28 / 3) + 1e-6)
    assert found.scalars("advantage")[[0, 2, 3]] == pytest.approx(expected, abs=1e-12)


def test_whitening_of_a_step_without_any_spread_stays_without_signal():
    prepared, _ = prepare(step({0: [1, 1], 1: [0.1, 0.1, 0.1]}), normalize_std=False, whiten_advantages=True)
    assert prepared.scalars("advantage").tolist() == [0] * 5
    assert not grpo().has_signal(prepared)


def test_kl_to_the_reference_is_recorded_over_trained_tokens():
    # 2 tokens of 0.1 and 4 of 0.4: 1.8 / 6 = 0.3; the row without reward does not count.
    batch = step({0: [0, 1, math.nan]}, lengths=[2, 4, 8]).with_columns({"kl": [0.1, 0.4, 7.0]})
    _, found = prepare(batch, kl_coefficient=0.1)
    assert found["policy/kl_ref"] == pytest.approx(0.3)


def test_create_algorithm_by_name_and_by_import_path():
    config = Config(algorithm=AlgorithmConfig(group_size=3), trainer=TrainerConfig(minibatches=2))
    made = create_algorithm(config)
    assert isinstance(made, Grpo)
    assert (made.config.group_size, made.minibatches) == (3, 2)
    own = create_algorithm(Config(algorithm=AlgorithmConfig(name="rolemesh.algorithms.grpo:Grpo")))
    assert isinstance(own, Grpo)


def test_unknown_algorithm_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="Did you mean 'grpo'"):
        create_algorithm(Config(algorithm=AlgorithmConfig(name="gprpo")))


def test_names_of_the_table_are_those_of_the_classes():
    assert {name: factory.name for name, factory in ALGORITHMS.items()} == {"grpo": "grpo", "ppo": "ppo"}
