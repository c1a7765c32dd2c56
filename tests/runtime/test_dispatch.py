"""Splitting and collecting as pure functions, also for groups with tensor-parallel ranks."""

import numpy as np
import pytest

from rolemesh.batch import Batch, BatchRef, block_meta
from rolemesh.errors import BatchError
from rolemesh.runtime import DISPATCHES, Answer, Request, Topology


def ref(rows: int) -> BatchRef:
    values = [[7] * (1 + index) for index in range(rows)]
    batch = Batch.from_columns({"draw": np.arange(rows), "sample": np.zeros(rows, np.int64), "prompt_ids": values})
    return BatchRef.from_blocks([("a", block_meta(batch))])


def lengths(rows: int) -> Batch:
    return Batch.from_columns({"draw": np.arange(rows), "sample": np.zeros(rows, np.int64), "response_length": np.arange(rows)})


def draws(batch: BatchRef | None) -> list[int]:
    assert batch is not None
    return batch.ids[:, 0].tolist()


def test_rows_are_cut_in_order_as_equal_as_can_be() -> None:
    request = Request(method="m", batch=ref(10))
    shares = DISPATCHES["data_parallel"].split(Topology(world_size=4), request)
    assert [draws(share.batch) for share in shares if share] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def test_tensor_parallel_ranks_get_the_same_rows_and_one_of_them_answers() -> None:
    topology, request = Topology(world_size=4, tensor_parallel=2), Request(method="m", batch=ref(4))
    dispatch = DISPATCHES["data_parallel"]
    shares = dispatch.split(topology, request)
    assert [draws(share.batch) for share in shares if share] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    answers = [Answer(rank=rank, value=rank * 10) for rank in range(4)]
    assert dispatch.collect(topology, request, answers) == [0, 20]


def test_balanced_parts_have_about_the_same_tokens_and_come_back_in_the_order_sent() -> None:
    topology, batch = Topology(world_size=2), ref(4)  # 1, 2, 3 and 4 tokens: 5 and 5
    dispatch = DISPATCHES["balanced"]
    shares = dispatch.split(topology, Request(method="m", batch=batch))
    assert [int(share.batch.token_counts.sum()) for share in shares if share and share.batch] == [5, 5]
    written = [
        Answer(rank=rank, value=None, written=[(f"w{rank}", block_meta(lengths(4).take(draws(share.batch))))])
        for rank, share in enumerate(shares)
        if share
    ]
    collected = dispatch.collect(topology, Request(method="m", batch=batch), written)
    assert draws(collected) == [0, 1, 2, 3]
    assert collected.names == ("draw", "sample", "response_length")


def test_sharding_without_a_batch_is_refused() -> None:
    with pytest.raises(BatchError, match="first argument must be a BatchRef"):
        DISPATCHES["data_parallel"].split(Topology(world_size=2), Request(method="m", batch=None))


def test_one_entry_each_takes_no_batch() -> None:
    with pytest.raises(BatchError, match="cannot take a BatchRef"):
        DISPATCHES["one_each"].split(Topology(world_size=2), Request(method="m", batch=ref(2), args=([1, 2],)))
