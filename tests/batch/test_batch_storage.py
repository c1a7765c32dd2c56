"""Batch on disk and between processes: what travels is the rows of the batch and no more."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pyarrow as pa
import pytest

from rolemesh.batch import Batch, tensors
from rolemesh.errors import BatchError


@pytest.fixture(scope="module")
def large() -> Batch:
    """1000 rows of 300 tokens: 1.2 MB of token ids, and strings and nulls to be sliced too."""
    tokens = np.arange(300_000).reshape(1000, 300)
    return Batch.from_columns(
        {
            "draw": np.arange(1000),
            "sample": np.zeros(1000, np.int64),
            "prompt_ids": tokens,
            "response": [f"answer {row}" for row in range(1000)],
            "reward": [None if row % 3 == 0 else float(row) for row in range(1000)],
            "extra/flag": [row % 2 == 0 for row in range(1000)],
        }
    )


def pickled(batch: Batch) -> bytes:
    return pickle.dumps(batch, protocol=5)


def test_a_pickled_slice_is_about_its_own_size(large):
    part = large.slice(501, 10)
    assert len(pickle.dumps(part.table, protocol=5)) > 1_000_000  # the trap: Arrow ships the parent
    assert len(pickled(part)) < part.nbytes + 4000
    assert pickle.loads(pickled(part)).equals(part)


def test_pickled_parts_together_are_about_the_size_of_the_whole(large):
    interleaved = Batch.concat([large.slice(row, 1) for row in range(0, 1000, 10)])
    assert len(pickled(interleaved)) < interleaved.nbytes + 4000
    parts = large.split_tokens(4)
    assert sum(len(pickled(part)) for part in parts) < large.nbytes + 16000
    assert Batch.concat([pickle.loads(pickled(part)) for part in parts]).sort_by_id().equals(large)


def test_data_travels_out_of_band(large):
    buffers: list[pickle.PickleBuffer] = []
    inline = pickle.dumps(large, protocol=5, buffer_callback=buffers.append)
    assert len(inline) < 1000
    assert pickle.loads(inline, buffers=buffers).equals(large)


def test_the_buffers_of_what_arrives_are_those_that_travelled(large):
    buffers: list[pickle.PickleBuffer] = []
    arrived = pickle.loads(
        pickle.dumps(large, protocol=5, buffer_callback=buffers.append), buffers=(sent := [bytearray(b) for b in buffers])
    )
    tokens = arrived.table.column("prompt_ids").chunk(0).buffers()[-1]
    assert tokens.address in {pa.py_buffer(buffer).address for buffer in sent}


@pytest.mark.parametrize("protocol", [2, 4])
def test_protocols_without_buffers_of_their_own_carry_a_copy(large, protocol):
    part = large.slice(7, 100)
    assert pickle.loads(pickle.dumps(part, protocol=protocol)).equals(part)


def test_empty_batches_travel_with_their_columns(large):
    empty = pickle.loads(pickled(large.slice(5, 0)))
    assert (empty.num_rows, empty.names) == (0, large.names)
    assert Batch.concat([empty, large]).equals(large)


def test_copies_are_batches(large):
    assert copy.copy(large).equals(large)
    assert copy.deepcopy(large.slice(0, 2)).equals(large.slice(0, 2))


def test_compact_owns_its_memory(large):
    part = large.slice(10, 2)
    assert part.table.get_total_buffer_size() > 1_000_000
    assert part.compact().table.get_total_buffer_size() < 10_000
    assert part.compact().equals(part)


def test_compact_copies_only_what_shares_memory_or_lies_in_pieces(large):
    assert large.compact() is large
    pieces = Batch.concat([large, large])
    assert pieces.compact().table.column("prompt_ids").num_chunks == 1
    assert pieces.compact().equals(pieces)


def test_reading_an_unpickled_batch_cannot_write_into_the_received_memory(large):
    received = pickle.loads(pickled(large.slice(0, 3)))
    tensors(received, ["prompt_ids"], layout="packed")["prompt_ids"].fill_(-1)
    received.ragged("prompt_ids")[0][:] = -1
    assert received.equals(large.slice(0, 3))


def test_parquet_round_trip(tmp_path, large):
    path = tmp_path / "step=3" / "samples.parquet"
    path.parent.mkdir()
    large.slice(3, 50).to_parquet(path)
    assert Batch.from_parquet(path).equals(large.slice(3, 50))
    assert Batch.from_parquet(str(path)).names == large.names
    assert [file.name for file in path.parent.iterdir()] == ["samples.parquet"]


def test_a_foreign_parquet_file_is_refused(tmp_path):
    pa.parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "other.parquet")
    with pytest.raises(BatchError, match="needs the id columns"):
        Batch.from_parquet(tmp_path / "other.parquet")
