import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.algorithms.advantages import group_advantages, group_stats


def one_group(rewards: list[float], **options) -> np.ndarray:
    return group_advantages(np.array(rewards), np.zeros(len(rewards), dtype=np.int64), **{"normalize_std": True, **options})


def test_group_of_four_by_hand():
    # Rewards 1, 0, 0, 1: mean 0.5, squares 4 * 0.25 = 1, sample variance 1 / 3, std 0.57735; +-0.5 / (0.57735 + 1e-6) = +-0.866024.
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert one_group([1, 0, 0, 1]) == pytest.approx([expected, -expected, -expected, expected], abs=1e-12)
    assert expected == pytest.approx(0.866024, abs=1e-6)


def test_without_normalize_std_only_the_mean_is_removed():
    # Rewards 3, 1, 2: mean 2.
    assert one_group([3, 1, 2], normalize_std=False).tolist() == [1.0, -1.0, 0.0]


def test_D01_tiny_spread_is_treated_like_any_other():
    # Rewards 1.0 and 1.00001: mean 1.000005, deviations -+5e-6, sample std 5e-6 * sqrt(2) = 7.07107e-6 (ddof 1),
    # 5e-6 / (7.07107e-6 + 1e-6) = 5 / 8.07107 = 0.619497.
    assert one_group([1.0, 1.00001]) == pytest.approx([-0.619497, 0.619497], abs=1e-5)


def test_D01_tiny_spread_of_four_evenly_spaced_rewards():
    # 1 + k * 1e-5 / 3, k = 0..3, step d = 3.33333e-6: deviations -1.5 d, -0.5 d, 0.5 d, 1.5 d; squares 5 d^2, / 3, std 1.290994 d
    # = 4.303315e-6. -1.5 d / (4.303315e-6 + 1e-6) = -5e-6 / 5.303315e-6 = -0.942806; a third of it for the inner ones: -0.314269.
    found = one_group([1 + k * 1e-5 / 3 for k in range(4)])
    assert found == pytest.approx([-0.942806, -0.314269, 0.314269, 0.942806], abs=1e-5)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-300, -7.3])
def test_no_spread_gives_exactly_zero(reward: float):
    # 0.1 + 0.1 + 0.1 is not 3 * 0.1 in floating point, so a mean would leave a residue.
    assert one_group([reward] * 3).tolist() == [0.0, 0.0, 0.0]


def test_D03_missing_reward_masks_only_its_row():
    rewards = [float(k % 2) for k in range(16)]
    rewards[5] = math.nan
    found = one_group(rewards)
    assert np.isfinite(found).all()
    assert found[5] == 0
    assert (found[[k for k in range(16) if k != 5]] != 0).all()


def test_D04_masked_answer_does_not_move_the_baseline_of_its_siblings():
    # The fourth answer, reward 10, was rejected: its siblings stand as in a group of three.
    assert one_group([1.0, 0.0, 0.5, math.nan])[:3].tolist() == one_group([1.0, 0.0, 0.5]).tolist()
    assert one_group([1.0, 0.0, 0.5, math.nan], normalize_std=False) == pytest.approx([0.5, -0.5, 0.0, 0.0], abs=1e-15)


def test_D07_baseline_is_that_of_the_own_group():
    # Group 7: rewards 0, 1; group 3: rewards 10, 12. Each is centred on its own mean, 0.5 and 11.
    found = group_advantages([0.0, 10.0, 1.0, 12.0], np.array([7, 3, 7, 3]), normalize_std=False)
    assert found.tolist() == [-0.5, -1.0, 0.5, 1.0]


def test_large_offset_does_not_drown_the_spread():
    # 1e8 + {0, 1}: difference of sums of squares (1e16) would keep no digit of the variance 0.5.
    assert one_group([1e8, 1e8 + 1]) == pytest.approx([-0.7071058, 0.7071058], abs=1e-6)


@pytest.mark.parametrize("rewards", [[2.0], [math.nan, 5.0, math.nan], [math.nan, math.nan], [math.inf, 1.0], []])
def test_fewer_than_two_usable_rewards_give_no_signal(rewards: list[float]):
    assert one_group(rewards).tolist() == [0.0] * len(rewards)


def test_group_stats_by_hand():
    stats = group_stats([1.0, 4.0, math.nan, 2.0, math.nan], np.array([5, 5, 5, 9, 11]))
    assert stats.count.tolist() == [2, 1, 0]
    assert stats.mean.tolist() == [2.5, 2.0, 0.0]
    assert stats.std.tolist() == [math.sqrt(4.5), 0.0, 0.0]  # (1.5^2 + 1.5^2) / (2 - 1) = 4.5
    assert stats.has_spread.tolist() == [True, False, False]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match=r"found shapes \(2,\) and \(3,\)"):
        group_advantages([1.0, 2.0], np.array([0, 0, 1]), normalize_std=True)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-100, 100) | st.just(math.nan)), max_size=20),
    st.floats(-50, 50),
    st.floats(0.5, 4),
)
@settings(deadline=None, max_examples=60)
def test_centred_per_group_and_blind_to_a_shift(rows: list[tuple[int, float]], shift: float, scale: float):
    groups = np.array([group for group, _ in rows], dtype=np.int64)
    rewards = np.array([reward for _, reward in rows], dtype=np.float64)
    found = group_advantages(rewards, groups, normalize_std=False)
    for group in set(groups.tolist()):
        assert found[groups == group].sum() == pytest.approx(0, abs=1e-9)
    assert group_advantages(rewards * scale + shift, groups, normalize_std=False) == pytest.approx(found * scale, abs=1e-9)
