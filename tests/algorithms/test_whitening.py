import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.algorithms.whitening import combined, row_moments


def test_rows_and_their_combination_by_hand():
    # Rows (1, 3), (), (6): means 2, 0, 6, squares 2, 0, 0. Together mean 10 / 3; squared distances (49 + 1 + 64) / 9 = 38 / 3, / 2.
    row = np.array([0, 0, 2])
    means, spreads = row_moments(np.array([1.0, 3.0, 6.0]), row, 3)
    assert means.tolist() == [2, 0, 6]
    assert spreads.tolist() == [2, 0, 0]
    found = combined(np.array([2, 0, 1]), means, spreads)
    assert (found.count, found.mean, found.std) == (3, pytest.approx(10 / 3), pytest.approx((19 / 3) ** 0.5))


def test_D06_one_number_for_each_answer_is_weighed_by_answers():
    # Answers of 1 and 100 tokens with advantages 3 and 1: mean 2 and std sqrt(2) over answers; over tokens the mean would be 103 / 101.
    found = combined(np.ones(2), [3.0, 1.0], np.zeros(2))
    assert (found.mean, found.std) == (2, pytest.approx(2**0.5))
    assert combined(np.array([1, 100]), [3.0, 1.0], np.zeros(2)).mean == pytest.approx(103 / 101)


@pytest.mark.parametrize(("numbers", "std"), [([], 0), ([4.0], 0), ([2.0, 2.0], 0)])
def test_without_spread(numbers: list[float], std: float):
    found = combined(np.ones(len(numbers)), numbers, np.zeros(len(numbers)))
    assert found.std == std
    assert np.isfinite(found.scale)


def test_small_spread_on_a_large_offset_survives():
    # 1e8 + {0, 1}: std sqrt(0.5); the difference of the sums of squares (2e16) would have no digit left for it.
    found = combined(np.ones(2), [1e8, 1e8 + 1], np.zeros(2))
    assert found.std == pytest.approx(0.5**0.5)


@given(st.lists(st.lists(st.floats(-100, 100), max_size=6), min_size=1, max_size=8))
@settings(deadline=None, max_examples=80)
def test_any_cut_into_rows_gives_the_moments_of_all_numbers(rows: list[list[float]]):
    numbers = np.array([number for row in rows for number in row])
    of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    found = combined(np.array([len(row) for row in rows]), *row_moments(numbers, of, len(rows)))
    assert found.count == len(numbers)
    assert found.mean == pytest.approx(numbers.mean() if len(numbers) else 0, abs=1e-9)
    assert found.std == pytest.approx(numbers.std(ddof=1) if len(numbers) > 1 else 0, abs=1e-9)
