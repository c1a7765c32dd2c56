import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.algorithms.gae import gae, token_rewards


def ragged(rows: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """(flat values, offsets)"""
    return np.array([value for row in rows for value in row]), np.cumsum([0, *map(len, rows)])


def all_of(values: np.ndarray) -> np.ndarray:
    return np.ones(len(values), dtype=bool)


def test_one_row_by_hand():
    # gamma = lam = 0.5, r = 0, 0, 1, V = 0.5, 0.25, 0.75.
    # delta_2 = 1 - 0.75 = 0.25           A_2 = 0.25
    # delta_1 = 0.5 * 0.75 - 0.25 = 0.125  A_1 = 0.125 + 0.25 * 0.25 = 0.1875
    # delta_0 = 0.5 * 0.25 - 0.5 = -0.375  A_0 = -0.375 + 0.25 * 0.1875 = -0.328125
    rewards, offsets = ragged([[0, 0, 1]])
    advantages, returns = gae(rewards, np.array([0.5, 0.25, 0.75]), offsets, all_of(rewards), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [-0.328125, 0.1875, 0.25]
    assert returns.tolist() == [0.171875, 0.4375, 1.0]


def test_D21_tool_tokens_are_skipped_and_values_link_the_sampled_ones():
    # Tokens 2 and 3 are a tool's. Sampled: V = 0.5, 1, 1.5, 1 and r = 0, 0, 0, 2; gamma 1, lam 0.5.
    # deltas 1 - 0.5 = 0.5, 1.5 - 1 = 0.5, 1 - 1.5 = -0.5, 2 - 1 = 1; A = 1, -0.5 + 0.5 = 0, 0.5 + 0 = 0.5, 0.5 + 0.25 = 0.75 from the end.
    mask = np.array([True, True, False, False, True, True])
    values = np.array([0.5, 1.0, 9.0, math.nan, 1.5, 1.0])
    offsets = np.array([0, 6])
    rewards = token_rewards([2.0], offsets, mask)
    assert rewards.tolist() == [0, 0, 0, 0, 0, 2]
    advantages, returns = gae(rewards, values, offsets, mask, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [0.75, 0.5, 0, 0, 0, 1]
    assert returns.tolist() == [1.25, 1.5, 0, 0, 1.5, 2]


def test_D21_answer_that_ends_in_tool_tokens_has_its_score_on_the_last_sampled_one():
    mask = np.array([True, False, True, False, False])
    assert token_rewards([3.0], np.array([0, 5]), mask).tolist() == [0, 0, 3, 0, 0]


def test_rows_of_unequal_length_by_hand():
    # gamma = lam = 1: A_t = score - V_t. Rows of 1, 0, 3 and 2 tokens; the last has no reward and is masked.
    offsets = np.array([0, 1, 1, 4, 6])
    mask = np.array([True, True, True, True, False, False])
    values = np.array([0.25, 1.0, 2.0, 3.0, 7.0, 8.0])
    rewards = token_rewards([1.0, 5.0, -1.0, math.nan], offsets, mask)
    assert rewards.tolist() == [1, 0, 0, -1, 0, 0]
    advantages, returns = gae(rewards, values, offsets, mask, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [0.75, -2, -3, -4, 0, 0]
    assert returns.tolist() == [1, -1, -1, -1, 0, 0]


def test_token_rewards_with_kl_by_hand():
    # beta 0.5: row 0 pays for its two sampled tokens, 0.05 and 0.15, and earns 2 at the last; row 1 has no tokens; row 2 no score.
    offsets = np.array([0, 3, 3, 4])
    mask = np.array([True, False, True, True])
    kl = np.array([0.1, math.nan, 0.3, -0.2])
    found = token_rewards([2.0, 1.0, 0.0], offsets, mask, kl=kl, coefficient=0.5)
    assert found.tolist() == pytest.approx([-0.05, 0, 1.85, 0.1])


def test_lam_0_is_the_temporal_difference_alone():
    # delta_0 = 0.9 * 2 - 1 = 0.8, delta_1 = 1 - 2 = -1.
    rewards, offsets = ragged([[0, 1]])
    advantages, returns = gae(rewards, np.array([1.0, 2.0]), offsets, all_of(rewards), gamma=0.9, lam=0.0)
    assert advantages.tolist() == pytest.approx([0.8, -1.0])
    assert returns.tolist() == pytest.approx([1.8, 1.0])


def test_nothing_at_all():
    for offsets, mask in (([0], []), ([0, 0, 0], []), ([0, 2], [False, False])):
        zeros = np.zeros(len(mask))
        found = gae(zeros, zeros, np.array(offsets), np.array(mask, dtype=bool), gamma=1.0, lam=1.0)
        assert [array.tolist() for array in found] == [zeros.tolist()] * 2


rows = st.lists(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.booleans()), max_size=7), min_size=1, max_size=6)


@given(rows, st.floats(0.1, 1), st.floats(0, 1))
@settings(deadline=None, max_examples=80)
def test_the_recursion_is_the_sum_of_the_definition(drawn: list[list[tuple[float, float, bool]]], gamma: float, lam: float):
    # A_t = sum_l (gamma lam)^l delta_(t+l) over the sampled tokens of each row.
    rewards, offsets = ragged([[reward for reward, _, _ in row] for row in drawn])
    values, _ = ragged([[value for _, value, _ in row] for row in drawn])
    mask = np.array([kept for row in drawn for _, _, kept in row], dtype=bool)
    found, returns = gae(rewards, values, offsets, mask, gamma=gamma, lam=lam)
    expected: list[float] = []
    for row in drawn:
        kept = [(reward, value) for reward, value, sampled in row if sampled]
        ahead = [*(value for _, value in kept[1:]), 0.0][: len(kept)]
        deltas = [reward + gamma * later - value for (reward, value), later in zip(kept, ahead, strict=True)]
        sums = iter([sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))])
        expected += [next(sums) if sampled else 0.0 for _, _, sampled in row]
    assert found == pytest.approx(expected, abs=1e-9)
    assert returns == pytest.approx(np.where(mask, found + values, 0.0), abs=1e-12)


def test_rows_do_not_depend_on_each_other_to_the_last_bit():
    random = np.random.default_rng(0)
    lengths = [5, 0, 12, 1, 7]
    offsets = np.cumsum([0, *lengths])
    rewards, values = random.normal(size=25), random.normal(size=25)
    mask = random.random(25) < 0.7
    whole = gae(rewards, values, offsets, mask, gamma=0.97, lam=0.9)
    for start, end in pairwise(offsets):
        alone = gae(rewards[start:end], values[start:end], np.array([0, end - start]), mask[start:end], gamma=0.97, lam=0.9)
        assert [array.tolist() for array in alone] == [array[start:end].tolist() for array in whole]
