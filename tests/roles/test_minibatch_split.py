"""The actor's dispatch: each mini-batch is spread over the ranks by itself."""

import numpy as np

from rolemesh.batch import Batch, BatchRef, block_meta
from rolemesh.roles.trained import split_minibatches
from rolemesh.runtime import Request, Topology


def test_every_minibatch_is_balanced_over_the_ranks_by_itself() -> None:
    tokens = [8, 8, 2, 2, 6, 6, 4, 4]
    batch = Batch.from_columns({"draw": np.arange(8), "sample": np.zeros(8, np.int64), "prompt_ids": [[1] * count for count in tokens]})
    ref = BatchRef.from_blocks([("block", block_meta(batch))])
    minibatches = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    request = Request(method="update", batch=ref, kwargs={"minibatches": minibatches, "count": 2})
    shares = split_minibatches(Topology(world_size=2), request)
    for share in shares:
        assert share is not None
        assert share.batch is not None
        assert set(share.kwargs) == {"count"}
        mine = minibatches[share.batch.ids[:, 0]]
        assert [int(share.batch.token_counts[mine == number].sum()) for number in (0, 1)] == [10, 10]
    assert sorted(row for share in shares for row in share.batch.ids[:, 0]) == list(range(8))


def test_a_minibatch_with_fewer_rows_than_ranks_leaves_ranks_without_rows() -> None:
    batch = Batch.from_columns({"draw": [0, 1], "sample": [0, 0], "prompt_ids": [[1], [1, 1]]})
    ref = BatchRef.from_blocks([("block", block_meta(batch))])
    request = Request(method="update", batch=ref, kwargs={"minibatches": [0, 0]})
    sizes = sorted(len(share.batch) for share in split_minibatches(Topology(world_size=4), request))
    assert sizes == [0, 0, 1, 1]
