"""BatchRef: rows as metadata, and the way back to the data. The store is a dict."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest

from rolemesh.batch import Batch, BatchRef, BlockMeta, assemble, block_meta
from rolemesh.errors import BatchError


class Store(dict):
    """Stored objects by key; counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def put(self, key: str, batch: Batch) -> tuple[str, BlockMeta]:
        self[key] = batch
        return key, pickle.loads(pickle.dumps(block_meta(batch)))

    def load(self, ref: BatchRef, reads) -> Batch:
        refs, assembly = ref.assembly(reads)
        self.read = refs
        return assemble(pickle.loads(pickle.dumps(assembly)), [self[key] for key in refs])


def prompts(draws) -> Batch:
    draws = list(draws)
    return Batch.from_columns(
        {
            "draw": draws,
            "sample": [0] * len(draws),
            "prompt_ids": [[draw] * (draw % 5) for draw in draws],
            "source": [f"s{draw}" for draw in draws],
        }
    )


def rewards(batch: Batch) -> Batch:
    """A reward that tells the row: 100 draw + sample."""
    return batch.select([]).with_columns({"reward": [100.0 * draw + sample for draw, sample in batch.ids]})


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def shards(store) -> BatchRef:
    """Draws 0..9 in two objects, six and four rows."""
    return BatchRef.from_blocks([store.put("p0", prompts(range(6))), store.put("p1", prompts(range(6, 10)))])


def test_metadata_of_blocks(store, shards):
    assert len(shards) == shards.num_rows == 10
    assert shards.names == ("draw", "sample", "prompt_ids", "source")
    assert shards.ids.tolist() == [[draw, 0] for draw in range(10)]
    assert shards.token_counts.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert shards.lengths("prompt_ids").tolist() == shards.token_counts.tolist()
    assert shards.select(["source"]).token_counts.tolist() == [0] * 10
    assert shards.refs == ["p0", "p1"]
    assert shards.nbytes == store["p0"].nbytes + store["p1"].nbytes
    assert repr(shards) == "BatchRef(10 rows: draw, sample, prompt_ids, source; 2 objects)"
    with pytest.raises(BatchError, match="lengths of column 'source' are not kept"):
        shards.lengths("source")
    with pytest.raises(BatchError, match=r"'response_ids' \(written by rollout\)"):
        shards.lengths("response_ids")


def test_a_worker_pulls_only_objects_that_hold_what_it_reads(store, shards):
    scored = shards.join(BatchRef.from_blocks([store.put("r", rewards(prompts(range(10))))]))
    assert store.load(scored, ["reward"]).names == ("draw", "sample", "reward")
    assert store.read == ["r"]
    assert store.load(scored.take([1, 2]), ["source", "draw"]).scalars("source") == ["s1", "s2"]
    assert store.read == ["p0"]
    both = store.load(scored.take([8, 1]), ["reward", "source"])
    assert store.read == ["p0", "p1", "r"]
    assert (both.names, both.scalars("source")) == (("draw", "sample", "reward", "source"), ["s8", "s1"])
    assert store.load(scored, []).equals(prompts(range(10)).select([]))
    assert store.read == []


def test_rows_of_one_object_in_order_are_not_copied(store, shards):
    part = store.load(shards.slice(1, 4), ["prompt_ids"])
    parent = store["p0"].table.column("prompt_ids").chunk(0).buffers()[-1]
    assert part.table.column("prompt_ids").chunk(0).buffers()[-1].address == parent.address


def test_metadata_is_read_only_and_its_copies_are_private(shards):
    for array in (shards.ids, shards.layers[0].row_in_block, shards.layers[0].block_of_row):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    for array in (shards.token_counts, shards.lengths("prompt_ids")):
        array += 1
    assert shards.token_counts.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_an_object_that_no_row_needs_is_let_go(shards):
    assert shards.take([7]).refs == ["p1"]
    assert shards.split_rows(2)[0].refs == ["p0"]
    assert shards.select([]).refs == []
    assert BatchRef.concat(shards.split_rows(5)).refs == ["p0", "p1"]


def test_repeated_rows_have_new_ids_and_join_what_is_written_for_them(store, shards):
    repeated = shards.take([3, 8]).repeat(2)
    data = store.load(repeated, ["source"])
    assert data.ids.tolist() == [[3, 0], [3, 1], [8, 0], [8, 1]]
    assert data.scalars("source") == ["s3", "s3", "s8", "s8"]
    scored = repeated.join(BatchRef.from_blocks([store.put("r", rewards(data).take([2, 0, 3, 1]))]))
    assert store.load(scored, ["reward"]).scalars("reward").tolist() == [300.0, 301.0, 800.0, 801.0]
    with pytest.raises(BatchError, match="draw 3 already has 2 rows"):
        repeated.repeat(2)


def test_F13_order_of_completion_changes_nothing(store, shards):
    data = store.load(shards.repeat(4), ["source"])
    expected = data.join(rewards(data))
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(40)
        late, early = rewards(data).take(order[:13]), rewards(data).take(order[13:])
        written = BatchRef.from_blocks([store.put(f"late{seed}", late), store.put(f"early{seed}", early)])
        assert store.load(shards.repeat(4).join(written), ["source", "reward"]).equals(expected)


def test_C15_filtered_rows_do_not_join_unfiltered_ones(store, shards):
    scores = BatchRef.from_blocks([store.put("r", rewards(prompts(range(10))))])
    kept = shards.take([2, 5, 9])
    with pytest.raises(
        BatchError, match=r"cannot join 3 and 10 rows by id: 7 row\(s\) missing from the left batch, first \(draw 0, sample 0\)"
    ):
        kept.join(scores)
    assert store.load(kept.join(scores.take([9, 2, 5])), ["reward"]).scalars("reward").tolist() == [200.0, 500.0, 900.0]


def test_join_of_columns_in_both(store, shards):
    assert store.load(shards.join(shards.take(range(9, -1, -1))), ["source"]).equals(store.load(shards, ["source"]))
    rewritten = prompts(range(10)).select(["source"]).with_columns({"source": list("abcdefghij")})
    other = BatchRef.from_blocks([store.put("new", rewritten)])
    with pytest.raises(
        BatchError, match=r"column\(s\) 'source' are in both batches and were written separately, first in row \(draw 0, sample 0\)"
    ):
        shards.join(other)
    replaced = shards.join(other, replace=True)
    assert store.load(replaced, ["source"]).scalars("source") == list("abcdefghij")
    assert store.read == ["new"]
    assert replaced.token_counts.tolist() == shards.token_counts.tolist()
    assert set(replaced.names) == {"draw", "sample", "prompt_ids", "source"}


def test_join_sees_where_the_same_object_gives_other_rows(store):
    twins = Batch.from_columns({"draw": [0, 0], "sample": [0, 1], "response": ["a", "b"]})
    ref = BatchRef.from_blocks([store.put("t", twins)])
    crossed = BatchRef(ref.ids, ref.take([1, 0]).layers)
    with pytest.raises(BatchError, match="'response' are in both"):
        ref.join(crossed)


def test_missing_columns_name_what_is_there_and_who_writes_them(shards):
    with pytest.raises(BatchError, match=r"no column 'reward' \(written by reward\); it has draw, sample, prompt_ids, source"):
        shards.assembly(["prompt_ids", "reward"])
    with pytest.raises(BatchError, match="did you mean 'source'"):
        shards.select(["sourc"])
    with pytest.raises(BatchError, match="'sample' cannot be dropped"):
        shards.drop(["sample"])


def test_concat_of_batches_grouped_differently(store):
    whole = prompts(range(4)).join(rewards(prompts(range(4))))
    one = BatchRef.from_blocks([store.put("whole", whole.slice(0, 2))])
    left = BatchRef.from_blocks([store.put("left", whole.slice(2, 2).select(["reward"]))])
    two = left.join(BatchRef.from_blocks([store.put("right", whole.slice(2, 2).select(["source", "prompt_ids"]))]))
    assert store.load(BatchRef.concat([two, one]), whole.names).equals(Batch.concat([whole.slice(2, 2), whole.slice(0, 2)]))
    assert store.load(BatchRef.concat([one, two]), ["reward"]).equals(whole.select(["reward"]))
    assert store.read == ["whole", "left"]
    with pytest.raises(BatchError, match="part 1 lacks prompt_ids, source"):
        BatchRef.concat([one, left])


def test_blocks_must_have_the_same_columns_and_kinds(store):
    batch = prompts(range(2))
    first = store.put("a", batch.with_columns({"extra/x": [1, 2]}))
    with pytest.raises(BatchError, match="part 1 lacks extra/x"):
        BatchRef.from_blocks([first, store.put("b", batch)])
    with pytest.raises(BatchError, match="'extra/x' is int64 in part 0 and double in part 1"):
        BatchRef.from_blocks([first, store.put("c", batch.with_columns({"extra/x": [1.0, 2.0]}))])
    with pytest.raises(BatchError, match="no blocks"):
        BatchRef.from_blocks([])


def test_empty_parts_need_no_object_and_keep_their_columns(store):
    batch = prompts(range(2)).with_columns({"extra/x": [1, 2]})
    empty = BatchRef.from_blocks([store.put("a", batch)]).split_rows(3)[2]
    loaded = store.load(empty, batch.names)
    assert store.read == []
    assert loaded.equals(batch.slice(0, 0))
    written = BatchRef.from_blocks([store.put("e", loaded), store.put("f", batch)])
    assert written.refs == ["f"]
    assert store.load(written, batch.names).equals(batch)


def test_runs_of_mixed_rows_have_their_own_objects_only(store, shards):
    mixed = shards.take([7, 1, 8, 2, 0, 9])
    parts = mixed.split_rows(3)
    assert [part.refs for part in parts] == [["p0", "p1"], ["p0", "p1"], ["p0", "p1"]]
    assert [store.load(part, ["source"]).scalars("source") for part in parts] == [["s7", "s1"], ["s8", "s2"], ["s0", "s9"]]
    assert [part.refs for part in shards.split_rows(5)] == [["p0"], ["p0"], ["p0"], ["p1"], ["p1"]]
    assert store.load(shards.slice(5, 2), ["source"]).scalars("source") == ["s5", "s6"]
    with pytest.raises(ValueError, match="read-only"):
        parts[0].layers[0].row_in_block[0] = 1


def test_an_object_that_comes_twice_is_one_block(store):
    block, other = store.put("p", prompts(range(2))), store.put("q", prompts(range(5, 7)))
    twice = BatchRef.from_blocks([block, other, block])
    assert twice.refs == ["p", "q"]
    assert store.load(twice, ["source"]).scalars("source") == ["s0", "s1", "s5", "s6", "s0", "s1"]


def test_what_several_workers_wrote_in_two_objects_each_is_one_batch(store):
    halves = [prompts(range(3)), prompts(range(3, 3)), prompts(range(3, 5))]
    written = [[store.put(f"n{rank}", rewards(half)), store.put(f"o{rank}", half.select(["source"]))] for rank, half in enumerate(halves)]
    batch = BatchRef.of_written(written)
    assert batch.names == ("draw", "sample", "reward", "source")
    assert batch.refs == ["n0", "n2", "o0", "o2"]
    loaded = store.load(batch.take([4, 0]), ["reward", "source"])
    assert (loaded.scalars("reward").tolist(), loaded.scalars("source")) == ([400.0, 0.0], ["s4", "s0"])


def test_objects_that_are_not_the_ones_asked_for_are_refused(store, shards):
    refs, assembly = shards.assembly(["source"])
    objects = [store[key] for key in refs]
    assert assemble(assembly, objects).scalars("source") == [f"s{draw}" for draw in range(10)]
    with pytest.raises(BatchError, match=r"the objects given have \[4, 6\] rows, .* \[6, 4\] rows"):
        assemble(assembly, objects[::-1])
    with pytest.raises(BatchError, match=r"not those of the assembly: row \(draw 6, sample 0\)"):
        assemble(assembly, [objects[0], prompts(range(60, 64))])


def test_an_assembly_holds_only_its_own_rows(store):
    ref = BatchRef.from_blocks([store.put("a", prompts(range(5000)))])
    _, assembly = ref.slice(10, 3).assembly(["prompt_ids"])
    assert len(pickle.dumps(assembly)) < 2000
    assert len(pickle.dumps(ref.assembly(["prompt_ids"])[1])) < 5000 * 40


def test_metadata_of_a_hundred_thousand_rows_is_quick():
    # the bound is loose: it fails for a Python loop over the rows, not for a busy machine
    rows = 100_000
    ids = np.column_stack((np.arange(rows), np.zeros(rows, np.int64)))
    lengths = np.random.default_rng(0).integers(1, 500, rows)

    def ref_of(key: str, name: str, order) -> BatchRef:
        meta = BlockMeta(ids=ids[order], tokens={name: lengths[order]}, columns={name: "tokens"}, nbytes=1)
        return BatchRef.from_blocks([(key, meta)])

    order = np.random.default_rng(1).permutation(rows)
    started = time.process_time()
    ref = ref_of("p", "prompt_ids", np.arange(rows)).join(ref_of("r", "response_ids", order)).sort_by_id()
    parts = BatchRef.concat(ref.split_rows(64)).take(order).split_tokens(8)
    parts[0].take(np.arange(100)).assembly(["response_ids"])
    assert time.process_time() - started < 4.0
    assert parts[3].token_counts.tolist() == (2 * lengths[parts[3].ids[:, 0]]).tolist()
