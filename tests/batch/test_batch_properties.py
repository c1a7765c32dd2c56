"""Invariants of batches, and: every operation on a BatchRef equals the operation of the same name on the data."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.batch import Batch, BatchRef, assemble, block_meta


@st.composite
def batches(draw, max_rows: int = 8) -> Batch:
    """Rows with distinct draws in any order, ragged tokens, strings, and scalars with null and NaN."""
    draws = draw(st.lists(st.integers(0, 10**12), unique=True, max_size=max_rows))
    rows = len(draws)

    def column(values):
        return draw(st.lists(values, min_size=rows, max_size=rows))

    return Batch.from_columns(
        {
            "draw": np.array(draws, np.int64),
            "sample": np.zeros(rows, np.int64),
            "prompt_ids": column(st.lists(st.integers(0, 2**31 - 1), max_size=4)),
            "response_ids": column(st.lists(st.integers(0, 9), max_size=4)),
            "rollout_logprobs": column(st.lists(st.floats(width=32, allow_infinity=False), max_size=3)),
            "response": column(st.text(max_size=3)),
            "reward": column(st.none() | st.floats(allow_nan=False)),
            "extra/count": np.array(column(st.integers(-5, 5)), np.int64),
        }
    )


LAYERS = (["prompt_ids", "response"], ["response_ids", "rollout_logprobs", "extra/count"], ["reward"])


class World:
    """A dict as the store, and the pair (data, metadata) that operations are applied to."""

    def __init__(self, data: Batch, cuts: list[list[int]], orders: list[np.random.Generator]) -> None:
        self.store: dict[int, Batch] = {}
        self.data = data
        layers = [self.written(data.select(names), cut, order) for names, cut, order in zip(LAYERS, cuts, orders, strict=True)]
        self.ref = layers[0].join(layers[1]).join(layers[2])
        self.data = data.take(self.rows_of(self.ref.ids))

    def rows_of(self, ids) -> list[int]:
        where = {tuple(row): position for position, row in enumerate(self.data.ids.tolist())}
        return [where[tuple(row)] for row in ids.tolist()]

    def written(self, data: Batch, cut: list[int], order: np.random.Generator) -> BatchRef:
        """Store rows in a shuffled order, cut into objects, some of them empty."""
        shuffled = data.take(order.permutation(len(data)))
        ends = sorted(min(end, len(data)) for end in cut)
        blocks = []
        for start, end in zip([0, *ends], [*ends, len(data)], strict=True):
            key = len(self.store)
            self.store[key] = pickle.loads(pickle.dumps(shuffled.slice(start, end - start)))
            blocks.append((key, block_meta(self.store[key])))
        return BatchRef.from_blocks(blocks)

    def load(self, ref: BatchRef) -> Batch:
        refs, assembly = ref.assembly(ref.names)
        return assemble(assembly, [self.store[key] for key in refs])


def one_step(world: World, draw) -> None:
    """Apply one random operation to both sides."""
    rows = len(world.data)
    random = draw(st.randoms(use_true_random=False))
    name = draw(
        st.sampled_from(["take", "slice", "split_rows", "split_tokens", "sort", "select", "drop", "repeat", "rejoin", "replace", "regroup"])
    )
    both = (world.data, world.ref)
    match name:
        case "take":
            indices = random.sample(range(rows), random.randint(0, rows))
            both = tuple(side.take(indices) for side in both)
        case "slice":
            start = random.randint(0, rows)
            length = random.randint(0, rows - start)
            both = tuple(side.slice(start, length) for side in both)
        case "split_rows" | "split_tokens":
            parts, kept = random.randint(1, 4), random.randint(0, 3)
            split = [getattr(side, name)(parts) for side in both]
            assert [len(part) for part in split[0]] == [len(part) for part in split[1]]
            both = tuple(type(side).concat(pieces[kept:] + pieces[:kept]) for side, pieces in zip(both, split, strict=True))
        case "sort":
            both = tuple(side.sort_by_id() for side in both)
        case "select" | "drop":
            others = [column for column in world.data.names if column not in ("draw", "sample")]
            chosen = random.sample(others, random.randint(0, len(others)))
            both = tuple(getattr(side, name)(chosen) for side in both)
        case "repeat":
            if len(set(world.data.ids[:, 0].tolist())) == rows < 5:
                times = random.randint(1, 3)
                both = tuple(side.repeat(times) for side in both)
        case "rejoin":
            order = random.sample(range(rows), rows)
            both = tuple(side.join(side.take(order)) for side in both)
        case "replace":
            new = world.data.select([]).with_columns(
                {"reward": [float(random.randint(0, 9)) for _ in range(rows)], "weight_version": [3] * rows}
            )
            written = world.written(new, [random.randint(0, rows)], np.random.default_rng(random.randint(0, 99)))
            both = (world.data.join(new, replace=True), world.ref.join(written, replace=True))
        case "regroup":
            # the second half is written anew, all columns in one layer, and put beside the first half in its three layers
            half = random.randint(0, rows)
            rest = world.data.slice(half, rows - half)
            rewritten = world.written(rest, [random.randint(0, rows)], np.random.default_rng(0))
            where = {tuple(row): position for position, row in enumerate(rewritten.ids.tolist())}
            rewritten = rewritten.take([where[tuple(row)] for row in rest.ids.tolist()])
            both = (world.data, BatchRef.concat([world.ref.slice(0, half), rewritten]))
    world.data, world.ref = both


@settings(max_examples=40)
@given(st.data())
def test_every_operation_on_the_reference_equals_that_on_the_data(data):
    seeds = st.integers(0, 99).map(np.random.default_rng)
    world = World(
        data.draw(batches()),
        data.draw(st.lists(st.lists(st.integers(0, 8), max_size=2), min_size=3, max_size=3)),
        data.draw(st.lists(seeds, min_size=3, max_size=3)),
    )
    for _ in range(data.draw(st.integers(1, 5))):
        one_step(world, data.draw)
        assert set(world.ref.names) == set(world.data.names)
        np.testing.assert_array_equal(world.ref.ids, world.data.ids)
        np.testing.assert_array_equal(world.ref.token_counts, world.data.token_counts)
        assert world.load(world.ref).equals(world.data)


@settings(max_examples=40)
@given(batches(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_parts_put_together_again_are_the_whole(batch, parts, random):
    assert Batch.concat(batch.split_rows(parts)).equals(batch)
    assert Batch.concat(batch.split_tokens(parts)).sort_by_id().equals(batch.sort_by_id())
    order = random.sample(range(len(batch)), len(batch))
    columns = ["reward", "prompt_ids", "rollout_logprobs"]
    assert batch.drop(columns).join(batch.select(columns).take(order)).equals(batch)
    assert batch.join(batch.take(order)).equals(batch)


@settings(max_examples=40)
@given(batches(), st.randoms(use_true_random=False))
def test_pickling_and_compacting_change_nothing(batch, random):
    start = random.randint(0, len(batch))
    part = batch.slice(start, random.randint(0, len(batch) - start))
    for copy in (pickle.loads(pickle.dumps(part)), part.compact(), Batch(part.table)):
        assert copy.equals(part)
        np.testing.assert_array_equal(copy.ids, batch.ids[start : start + len(part)])
        assert copy.rows("prompt_ids") == batch.rows("prompt_ids")[start : start + len(part)]


@settings(max_examples=40)
@given(batches(), st.randoms(use_true_random=False))
def test_columns_read_back_equal_columns_read_by_row(batch, random):
    taken = batch.take(random.choices(range(len(batch)), k=5) if len(batch) else [])
    values, offsets = taken.ragged("response_ids")
    rows = [values[start:end].tolist() for start, end in pairwise(offsets)]
    assert rows == taken.rows("response_ids")
    assert taken.lengths("response_ids").tolist() == [len(row) for row in rows]
