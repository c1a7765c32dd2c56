import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.algorithms.aggregation import assign_minibatches, token_weights

LENGTHS = np.array([2, 3, 5, 4, 1])
VALID = np.array([True, True, False, True, True])
MINIBATCHES = np.array([0, 0, 0, 1, 1])

# Mini-batch 0 trains rows of 2 and 3 tokens (the row of 5 is masked): 5 tokens, 2 rows. Mini-batch 1: rows of 4 and 1: 5 tokens, 2 rows.
BY_HAND = {
    "token_mean": [1 / 5, 1 / 5, 0, 1 / 5, 1 / 5],
    "seq_mean_token_mean": [1 / 4, 1 / 6, 0, 1 / 8, 1 / 2],
    "seq_mean_token_sum": [1 / 2, 1 / 2, 0, 1 / 2, 1 / 2],
    "token_sum": [1, 1, 0, 1, 1],
}


@pytest.mark.parametrize("mode", BY_HAND)
def test_weights_by_hand(mode):
    assert token_weights(LENGTHS, VALID, MINIBATCHES, mode) == pytest.approx(BY_HAND[mode], abs=1e-15)


def test_every_mini_batch_is_normalised_by_itself():
    # Row of 1 token alone, rows of 10 and 30 together: 1, and 1 / 40 each.
    found = token_weights(np.array([10, 1, 30]), np.ones(3, dtype=bool), np.array([1, 0, 1]), "token_mean")
    assert found == pytest.approx([1 / 40, 1, 1 / 40], abs=1e-15)


@pytest.mark.parametrize("mode", BY_HAND)
def test_row_without_tokens_counts_nowhere(mode):
    with_empty = token_weights(np.array([0, 2, 3]), np.ones(3, dtype=bool), np.zeros(3, dtype=np.int64), mode)
    assert with_empty[0] == 0
    assert with_empty[1:].tolist() == token_weights(np.array([2, 3]), np.ones(2, dtype=bool), np.zeros(2, dtype=np.int64), mode).tolist()


@pytest.mark.parametrize("mode", BY_HAND)
def test_mini_batch_without_any_valid_row_has_weight_zero(mode):
    found = token_weights(np.array([4, 2]), np.array([False, True]), np.array([0, 1]), mode)
    assert found[0] == 0
    assert found[1] > 0


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="unknown aggregation 'median'"):
        token_weights(LENGTHS, VALID, MINIBATCHES, "median")


def test_mini_batches_hold_whole_prompts_in_order_of_their_id():
    # Prompts 10, 11, 12, 13 into two: {10, 11} and {12, 13}, whatever the order of the rows.
    draws = np.array([13, 10, 12, 11, 10, 13, 11, 12])
    assert assign_minibatches(draws, 2).tolist() == [1, 0, 1, 0, 0, 1, 0, 1]


def test_uneven_shares_differ_by_one_prompt_the_larger_first():
    assert assign_minibatches(np.arange(7), 3).tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_fewer_prompts_than_mini_batches_fill_the_first_ones():
    assert assign_minibatches(np.array([4, 9, 9]), 5).tolist() == [0, 1, 1]
    assert assign_minibatches(np.array([], dtype=np.int64), 2).tolist() == []


def test_no_mini_batch_is_refused():
    with pytest.raises(ValueError, match="found 0"):
        assign_minibatches(np.arange(3), 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), min_size=1, max_size=20), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_sums_of_token_weights(rows: list[tuple[int, int, bool]], n: int):
    draws, lengths, valid = (np.array(column) for column in zip(*rows, strict=True))
    minibatches = assign_minibatches(draws, n)
    for index in set(minibatches[valid].tolist()):
        mine = valid & (minibatches == index)
        mean = token_weights(lengths, valid, minibatches, "token_mean")
        assert (mean * lengths)[mine].sum() == pytest.approx(1)
        rowwise = token_weights(lengths, valid, minibatches, "seq_mean_token_mean")
        assert rowwise[mine] * lengths[mine] == pytest.approx(np.full(mine.sum(), 1 / mine.sum()))
