"""Batch: building, reading, columns, rows, joins by id."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from rolemesh.batch import Batch
from rolemesh.errors import BatchError


def small(**columns) -> Batch:
    """Three rows of ids (4,0), (4,1), (7,0) with ragged tokens of lengths 2, 0, 3 and 1, 3, 2."""
    base = {
        "draw": [4, 4, 7],
        "sample": [0, 1, 0],
        "prompt_ids": [[1, 2], [], [3, 4, 5]],
        "response_ids": [[9], [8, 8, 8], [7, 6]],
        "rollout_logprobs": [[-0.5], [-1.0, -2.0, 0.0], [-0.25, -4.0]],
        "response": ["a", "", "cc"],
        "reward": [1.0, None, 0.5],
    }
    return Batch.from_columns(base | columns)


def ids_of(batch: Batch) -> list[tuple[int, int]]:
    return [(int(draw), int(sample)) for draw, sample in batch.ids]


# -- building ---------------------------------------------------------------------------------------------------------------


def test_values_come_back_as_they_went_in():
    batch = small()
    assert len(batch) == batch.num_rows == 3
    assert batch.ids.tolist() == [[4, 0], [4, 1], [7, 0]]
    assert batch.ids.dtype == np.int64
    assert batch.rows("prompt_ids") == [[1, 2], [], [3, 4, 5]]
    assert batch.rows("rollout_logprobs") == [[-0.5], [-1.0, -2.0, 0.0], [-0.25, -4.0]]
    assert batch.scalars("response") == ["a", "", "cc"]
    assert batch.token_counts.tolist() == [3, 3, 5]
    assert batch.select(["prompt_ids"]).token_counts.tolist() == [2, 0, 3]
    assert batch.select([]).token_counts.tolist() == [0, 0, 0]
    assert batch.lengths("response_ids").tolist() == [1, 3, 2]
    assert batch.table.column("response_ids").type == pa.large_list(pa.int32())


def test_ids_stand_first_whatever_the_order_given():
    batch = Batch.from_columns({"reward": [1.0], "sample": [2], "draw": [3]})
    assert batch.names == ("draw", "sample", "reward")
    assert batch.ids.tolist() == [[3, 2]]


@pytest.mark.parametrize(
    "values",
    [
        [[1, 2], [], [3]],
        ((1, 2), (), (3,)),
        [np.array([1, 2]), np.array([], dtype=np.int64), np.array([3], dtype=np.int16)],
        [np.array([1, 2]), np.array([]), np.array([3])],  # an empty numpy array is of floats
        pa.array([[1, 2], [], [3]], pa.large_list(pa.int32())),
        pa.array([[1, 2], [], [3]], pa.list_(pa.int64())),
        pa.chunked_array([pa.array([[1, 2]]), pa.array([[], [3]], pa.list_(pa.int64()))]),
    ],
)
def test_token_lists_may_be_given_in_many_forms(values):
    assert small(prompt_ids=values).rows("prompt_ids") == [[1, 2], [], [3]]


def test_a_matrix_gives_one_row_a_line_and_empty_lists_have_a_type():
    assert small(prompt_ids=np.arange(6).reshape(3, 2)).rows("prompt_ids") == [[0, 1], [2, 3], [4, 5]]
    assert small(rollout_logprobs=[[], [], []]).rows("rollout_logprobs") == [[], [], []]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("prompt_ids", [[1.5], [], []], "truncated"),
        ("prompt_ids", [np.array([1.5]), [], []], "truncated"),
        ("prompt_ids", [[2**31], [], []], "not in range"),
        ("prompt_ids", [[True], [], []], "of kind tokens"),
        ("prompt_ids", [["a"], [], []], "of kind tokens"),
        ("prompt_ids", [1, 2, 3], "of kind tokens"),
        ("response_length", [1.5, 2.0, 3.0], "truncated"),
        ("response_length", [True, True, False], "of kind int"),
        ("response_length", ["1", "2", "3"], "of kind int"),
        ("reward", [[1.0], [2.0], [3.0]], "of kind float"),
        ("reward", [True, False, True], "of kind float"),
        ("reward", [1.0, "x", None], "cannot be stored"),
        ("response", [1, 2, 3], "of kind string"),
        ("extra/x", [[1], [2], [3]], "expected scalars of one kind"),
        ("extra/x", [{}, {}, {}], "expected scalars of one kind"),
        ("extra/x", [None, None, None], "all are missing"),
        ("reward", [1.0, 2.0], "differ in length: .*reward 2"),
    ],
)
def test_values_that_do_not_fit_are_refused_not_changed(name, values, message):
    with pytest.raises(BatchError, match=message):
        small(**{name: values})


def test_whole_numbers_pass_between_int_and_float():
    batch = small(reward=[1, 0, 1], response_length=[1.0, 3.0, 2.0])
    assert batch.scalars("reward").tolist() == [1.0, 0.0, 1.0]
    assert batch.scalars("response_length").tolist() == [1, 3, 2]


def test_own_columns_keep_their_kind():
    batch = small(**{"extra/i": [1, None, 3], "extra/f": [1.5, None, 2.0], "extra/b": [True, None, False], "extra/s": ["x", None, "z"]})
    assert [batch.kind(f"extra/{kind}") for kind in "ifbs"] == ["int", "float", "bool", "string"]
    assert batch.scalars("extra/s") == ["x", None, "z"]
    with pytest.raises(BatchError, match=r"int column 'extra/i' has no value \(null\) in 1 row\(s\), first \(draw 4, sample 1\)"):
        batch.scalars("extra/i")
    with pytest.raises(BatchError, match="bool column 'extra/b' has no value"):
        batch.scalars("extra/b")
    assert small(**{"extra/i": np.array([1, 2, 3], np.uint8)}).scalars("extra/i").dtype == np.int64


def test_ids_are_needed_and_may_not_be_null():
    with pytest.raises(BatchError, match="needs the id columns draw and sample; sample missing"):
        Batch.from_columns({"draw": [0], "reward": [1.0]})
    with pytest.raises(BatchError, match="id column 'sample' has a null"):
        Batch(pa.table({"draw": pa.array([0], pa.int64()), "sample": pa.array([None], pa.int64())}))


def test_a_column_twice_is_refused():
    ids = pa.array([0], pa.int64())
    with pytest.raises(BatchError, match="occur twice"):
        Batch(pa.table([ids, ids, ids], names=["draw", "sample", "draw"]))


# -- null and NaN -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [None, math.nan])
def test_C10_none_and_nan_both_mean_missing_in_nullable_columns(missing):
    batch = small(reward=[1.0, missing, 0.5], answer=["x", missing, "z"])
    assert batch.table.column("reward").null_count == 1
    np.testing.assert_array_equal(batch.scalars("reward"), [1.0, np.nan, 0.5])
    assert batch.scalars("answer") == ["x", None, "z"]
    assert batch.equals(small(answer=["x", None, "z"]))


def test_C10_an_empty_token_list_is_a_value_and_a_missing_one_is_refused():
    assert small(prompt_ids=[[], [], []]).lengths("prompt_ids").tolist() == [0, 0, 0]
    with pytest.raises(BatchError, match=r"'prompt_ids' has no value \(null\) in 1 row\(s\), first \(draw 4, sample 1\)"):
        small(prompt_ids=[[1], None, [2]])
    with pytest.raises(BatchError, match=r"'prompt_ids' has a null inside the list of row \(draw 7, sample 0\)"):
        small(prompt_ids=[[1], [], [2, None]])
    with pytest.raises(BatchError, match="'response' has no value"):
        small(response=["a", None, "c"])


def test_C10_a_null_outside_a_slice_does_not_spoil_the_slice():
    column = pa.array([None, [1], [2, 3]], pa.large_list(pa.int32()))
    table = pa.table({"draw": pa.array([0, 1, 2]), "sample": pa.array([0, 0, 0]), "prompt_ids": column})
    assert Batch(table.slice(1, 2)).rows("prompt_ids") == [[1], [2, 3]]
    with pytest.raises(BatchError, match="no value"):
        Batch(table.slice(0, 2))


def test_nan_in_a_column_that_may_not_lack_values_stays_nan():
    batch = small(advantage=[0.0, math.nan, 1.0])
    assert batch.table.column("advantage").null_count == 0
    assert math.isnan(batch.scalars("advantage")[1])


# -- private memory ---------------------------------------------------------------------------------------------------------


def test_changing_the_source_changes_no_batch():
    rewards, tokens, draws = np.array([1.0, 2.0]), np.array([[1, 2], [3, 4]], np.int32), np.array([0, 1])
    batch = Batch.from_columns({"draw": draws, "sample": np.zeros(2, np.int64), "reward": rewards, "prompt_ids": tokens})
    rewards[:], tokens[:], draws[:] = 9, 9, 9
    assert batch.scalars("reward").tolist() == [1.0, 2.0]
    assert batch.rows("prompt_ids") == [[1, 2], [3, 4]]
    assert batch.ids[:, 0].tolist() == [0, 1]


def test_changing_what_was_read_changes_no_batch():
    batch = small(advantage=[0.0, 1.0, 2.0])
    for array in (batch.ids, batch.scalars("advantage"), batch.token_counts, batch.lengths("prompt_ids"), *batch.ragged("prompt_ids")):
        array += 1
    assert batch.equals(small(advantage=[0.0, 1.0, 2.0]))


def test_ragged_of_a_slice_has_the_values_of_the_slice():
    values, offsets = small().slice(1, 2).ragged("response_ids")
    assert values.tolist() == [8, 8, 8, 7, 6]
    assert offsets.tolist() == [0, 3, 5]
    assert (values.dtype, offsets.dtype) == (np.int32, np.int64)
    values, offsets = Batch.concat([small().slice(2, 1), small().slice(0, 1)]).ragged("prompt_ids")
    assert (values.tolist(), offsets.tolist()) == ([3, 4, 5, 1, 2], [0, 3, 5])


def test_reading_lists_as_scalars_and_the_reverse_is_refused():
    with pytest.raises(BatchError, match="is ragged"):
        small().scalars("prompt_ids")
    for read in (small().ragged, small().rows, small().lengths):
        with pytest.raises(BatchError, match="holds scalars"):
            read("reward")


# -- columns ----------------------------------------------------------------------------------------------------------------


def test_select_and_drop_keep_the_ids():
    assert small().select(["reward"]).names == ("draw", "sample", "reward")
    assert small().select(["reward", "draw", "reward"]).names == ("draw", "sample", "reward")
    assert small().drop(["prompt_ids", "response"]).names == ("draw", "sample", "response_ids", "rollout_logprobs", "reward")
    with pytest.raises(BatchError, match="'draw' cannot be dropped"):
        small().drop(["draw"])


def test_a_missing_column_names_what_is_there_and_who_writes_it():
    with pytest.raises(BatchError, match=r"no column 'advantage' \(written by algorithm\); it has draw, sample, reward$"):
        small().select(["reward"]).select(["advantage"])
    with pytest.raises(BatchError, match=r"'rewardd' \(not declared; did you mean 'reward'\?\)"):
        small().scalars("rewardd")
    with pytest.raises(BatchError, match="written by rollout"):
        small().select([]).drop(["response_ids"])


def test_with_columns_adds_and_replaces_and_leaves_the_original():
    batch = small()
    wider = batch.with_columns({"advantage": [1.0, 2.0, 3.0], "reward": [0, 0, 0]})
    assert wider.scalars("advantage").tolist() == [1.0, 2.0, 3.0]
    assert wider.scalars("reward").tolist() == [0.0, 0.0, 0.0]
    assert batch.equals(small())
    with pytest.raises(BatchError, match="'advantage' has 2 values, the batch has 3 rows"):
        batch.with_columns({"advantage": [1.0, 2.0]})
    with pytest.raises(BatchError, match="id column 'sample' cannot be replaced"):
        batch.with_columns({"sample": [0, 1, 2]})
    with pytest.raises(BatchError, match="no value"):
        batch.with_columns({"response": ["a", None, "b"]})


# -- joins ------------------------------------------------------------------------------------------------------------------


def test_F13_the_order_of_completion_changes_nothing():
    prompts = Batch.from_columns({"draw": range(8), "sample": [0] * 8, "prompt_ids": [[draw] for draw in range(8)]}).repeat(4)
    rewards = [float(10 * draw + sample) for draw, sample in prompts.ids]
    scores = prompts.select([]).with_columns({"reward": rewards})
    expected = prompts.with_columns({"reward": rewards})
    for seed in range(5):
        shuffled = scores.take(np.random.default_rng(seed).permutation(32))
        assert prompts.join(shuffled).equals(expected)


def test_C15_filtered_rows_keep_their_own_values():
    made = Batch.from_columns({"draw": range(6), "sample": [0] * 6, "response": list("abcdef")})
    scores = made.select([]).with_columns({"reward": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]})
    kept = made.take([1, 3, 4]).slice(1, 2)
    with pytest.raises(
        BatchError, match=r"cannot join 2 and 6 rows by id: 4 row\(s\) missing from the left batch, first \(draw 0, sample 0\)"
    ):
        kept.join(scores)
    joined = kept.join(scores.take([4, 3]))
    assert joined.scalars("response") == ["d", "e"]
    assert joined.scalars("reward").tolist() == [3.0, 4.0]
    with pytest.raises(BatchError, match="'reward' has 6 values, the batch has 2 rows"):
        kept.with_columns({"reward": scores.scalars("reward")})


def test_join_names_missing_and_duplicate_rows():
    left = Batch.from_columns({"draw": [1, 2, 3], "sample": [0, 0, 1]})
    right = left.take([0, 1]).with_columns({"reward": [1.0, 2.0]})
    with pytest.raises(BatchError, match=r"1 row\(s\) missing from the right batch, first \(draw 3, sample 1\)"):
        left.join(right)
    with pytest.raises(BatchError, match=r"1 row\(s\) missing from the left batch, first \(draw 3, sample 1\)"):
        right.join(left)
    with pytest.raises(BatchError, match=r"1 duplicate row\(s\) in the right batch, first \(draw 2, sample 0\)"):
        left.join(right.take([0, 1, 1]))
    with pytest.raises(BatchError, match="in the left batch"):
        left.take([0, 0, 1]).join(left)
    far = Batch.from_columns({"draw": [0, 2**63 - 1, -2, 0], "sample": [0] * 4})  # steps that int64 cannot hold
    with pytest.raises(BatchError, match=r"1 duplicate row\(s\) in the left batch, first \(draw 0, sample 0\)"):
        far.join(far)


def test_C07_parts_are_independent_and_true_conflicts_are_named():
    first, second = small(weight_version=[1, 1, 1]).split_rows(2)
    edited = first.with_columns({"weight_version": [2, 2], "response": ["x", "y"]})
    assert first.scalars("weight_version").tolist() == [1, 1]
    assert second.scalars("weight_version").tolist() == [1]
    assert Batch.concat([edited, second]).scalars("weight_version").tolist() == [2, 2, 1]
    with pytest.raises(BatchError) as caught:
        first.join(edited)
    assert str(caught.value) == (
        "cannot join: column(s) 'response', 'weight_version' differ; first in row (draw 4, sample 0), where 'response' is 'a' on the left "
        "and 'x' on the right"
    )
    assert first.join(edited, replace=True).scalars("weight_version").tolist() == [2, 2]


@pytest.mark.parametrize(
    ("name", "other", "shown"),
    [
        ("reward", [1.0, None, 0.25], r"\(draw 7, sample 0\), where 'reward' is 0.5 on the left and 0.25 on the right"),
        ("reward", [1.0, 0.0, 0.5], r"\(draw 4, sample 1\), where 'reward' is None on the left and 0.0 on the right"),
        ("prompt_ids", [[1, 2], [], [3, 4, 6]], r"\(draw 7, sample 0\), where 'prompt_ids' is \[3, 4, 5\] .* \[3, 4, 6\]"),
        ("prompt_ids", [[1, 2], [3], [4, 5]], r"\(draw 4, sample 1\), where 'prompt_ids' is \[\] on the left and \[3\]"),
        ("response", ["a", "", "cd"], r"\(draw 7, sample 0\), where 'response' is 'cc' on the left and 'cd'"),
    ],
)
def test_C07_first_differing_row_of_each_kind(name, other, shown):
    with pytest.raises(BatchError, match=shown):
        small().join(small(**{name: other}).take([2, 0, 1]))


def test_a_shared_column_that_is_equal_joins_nan_and_null_included():
    left = small(advantage=[math.nan, 1.0, 2.0], rollout_logprobs=[[math.nan], [0.0, 0.0, 0.0], [1.0, 2.0]])
    right = left.take([2, 1, 0]).with_columns({"token_weight": [2.0, 1.0, 0.0]})
    joined = left.join(right)
    assert joined.drop(["token_weight"]).equals(left)
    assert joined.scalars("token_weight").tolist() == [0.0, 1.0, 2.0]


def test_own_columns_of_two_kinds_do_not_join():
    with pytest.raises(BatchError, match="'extra/x' is of kind int on the left and float on the right"):
        small(**{"extra/x": [1, 2, 3]}).join(small(**{"extra/x": [1.0, 2.0, 3.0]}))


# -- rows -------------------------------------------------------------------------------------------------------------------


def test_take_and_slice_refuse_what_is_not_there():
    assert ids_of(small().take([2, 0, 0])) == [(7, 0), (4, 0), (4, 0)]
    assert ids_of(small().take(np.array([], dtype=np.int32))) == []
    for indices, message in (([3], "position 3 is outside the batch of 3"), ([-1], "-1"), ([0.0], "integers"), ([[0]], "flat")):
        with pytest.raises(BatchError, match=message):
            small().take(indices)
    with pytest.raises(BatchError, match="flatnonzero"):
        small().take(np.array([True, False, True]))
    for start, length in ((0, 4), (3, 1), (-1, 1), (0, -1)):
        with pytest.raises(BatchError, match="does not lie within"):
            small().slice(start, length)
    assert small().slice(3, 0).num_rows == 0


def test_concat_needs_the_same_columns_in_any_order():
    left, right = small().slice(0, 2), small().slice(2, 1)
    reordered = right.select(["reward", "response", "rollout_logprobs", "response_ids", "prompt_ids"])
    assert Batch.concat([left, reordered]).equals(small())
    with pytest.raises(BatchError, match="part 1 lacks reward and has minibatch that the first lacks"):
        Batch.concat([left, right.drop(["reward"]).with_columns({"minibatch": [0]})])
    with pytest.raises(BatchError, match="'extra/x' is int64 in part 0 and double in part 1"):
        Batch.concat([left.with_columns({"extra/x": [1, 2]}), right.with_columns({"extra/x": [1.0]})])
    with pytest.raises(BatchError, match="no batches"):
        Batch.concat([])


def test_repeat_numbers_the_samples():
    prompts = Batch.from_columns({"draw": [5, 3], "sample": [0, 0], "prompt_ids": [[1], [2, 2]]})
    repeated = prompts.repeat(3)
    assert ids_of(repeated) == [(5, 0), (5, 1), (5, 2), (3, 0), (3, 1), (3, 2)]
    assert repeated.rows("prompt_ids") == [[1]] * 3 + [[2, 2]] * 3
    with pytest.raises(BatchError, match=r"cannot repeat 6 rows 3 times: draw 3 already has 3 rows.*Expected 2 rows"):
        repeated.repeat(3)
    with pytest.raises(BatchError, match="1 or more times"):
        prompts.repeat(0)


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"), [(10, 4, [3, 3, 2, 2]), (512, 6, [86, 86, 85, 85, 85, 85]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0])]
)
def test_C01_rows_that_do_not_divide_are_split_as_evenly_as_can_be(rows, parts, sizes):
    batch = Batch.from_columns({"draw": np.arange(rows), "sample": np.zeros(rows, np.int64), "reward": np.ones(rows)})
    split = batch.split_rows(parts)
    assert [len(part) for part in split] == sizes
    assert all(part.names == batch.names for part in split)
    assert Batch.concat(split).equals(batch)


def test_C04_split_by_tokens_leaves_no_part_empty_while_there_are_rows():
    batch = Batch.from_columns({"draw": range(9), "sample": [0] * 9, "response_ids": [[1, 2]] * 9})
    assert [len(part) for part in batch.split_tokens(4)] == [3, 2, 2, 2]
    assert [len(part) for part in batch.take([0, 1, 2]).split_tokens(4)] == [1, 1, 1, 0]
    parts = batch.split_tokens(2, counts=[8, 1, 1, 1, 1, 1, 1, 1, 1])
    assert [part.ids[:, 0].tolist() for part in parts] == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]
    with pytest.raises(BatchError, match=r"one number a row: expected 9, got shape \(2,\)"):
        batch.split_tokens(2, counts=[1, 2])
    with pytest.raises(BatchError, match="1 or more parts"):
        batch.split_rows(0)


def test_sort_by_id():
    batch = small().take([2, 1, 0])
    assert batch.sort_by_id().equals(small())
    assert ids_of(batch) == [(7, 0), (4, 1), (4, 0)]


def test_equals_sees_every_difference():
    assert small().equals(small().select(["reward", "response", "rollout_logprobs", "response_ids", "prompt_ids"]))
    assert small().equals(Batch.concat([small().slice(0, 1), small().slice(1, 2)]))
    for other in (
        small().take([1, 0, 2]),
        small().slice(0, 2),
        small().drop(["reward"]),
        small(reward=[1.0, None, 0.6]),
        small(reward=[1.0, 0.0, 0.5]),
        small(prompt_ids=[[1, 2], [3], [4, 5]]),
        small(rollout_logprobs=[[math.nan], [-1.0, -2.0, 0.0], [-0.25, -4.0]]),
    ):
        assert not small().equals(other)
    assert not small(**{"extra/x": [1, 2, 3]}).equals(small(**{"extra/x": [1.0, 2.0, 3.0]}))


def test_a_batch_has_nowhere_to_hang_shared_state():
    with pytest.raises(AttributeError):
        small().meta = {}
    metadata = small().table.replace_schema_metadata({"step": "3"})
    assert Batch(metadata).table.schema.metadata is None
