"""How mini-batches reach the ranks of a trained role: `BY_MINIBATCH`, shared by actor and critic."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rolemesh.batch import Batch, BatchRef
from rolemesh.runtime import Dispatch, Request, Share, Topology
from rolemesh.runtime.dispatch import collect_all


def split_minibatches(topology: Topology, request: Request) -> list[Share | None]:
    """Every mini-batch is balanced by tokens over the data-parallel ranks by itself, so that no rank waits inside a step.

    The call's keyword `minibatches` (int [N], the mini-batch of each row) says which rows belong together; workers do not get it.
    """
    batch = request.batch
    assert batch is not None
    kwargs = dict(request.kwargs)
    member = np.asarray(kwargs.pop("minibatches"))
    parts: list[list[BatchRef]] = [[] for _ in range(topology.data_parallel)]
    for number in np.unique(member):
        rows = batch.take(np.flatnonzero(member == number))
        for mine, share in zip(parts, rows.split_tokens(topology.data_parallel), strict=True):
            mine.append(share)
    shares = [BatchRef.concat(mine) for mine in parts]
    return [Share(batch=shares[rank // topology.tensor_parallel], args=request.args, kwargs=kwargs) for rank in range(topology.world_size)]


BY_MINIBATCH = Dispatch(name="by_minibatch", split=split_minibatches, collect=collect_all)


def passes(batch: Batch, *, epochs: int, count: int) -> Iterator[tuple[int, int, Batch]]:
    """(epoch, mini-batch, its rows) of every optimizer step of a step, in order: all `count` mini-batches, `epochs` times over.

    Rows come in id order, so that theirs in the batch changes nothing. A rank without rows of a mini-batch gets it empty: it has to take
    part in the others' step.
    """
    batch = batch.sort_by_id()
    member = np.asarray(batch.scalars("minibatch"))
    for epoch in range(epochs):
        for number in range(count):
            yield epoch, number, batch.take(np.flatnonzero(member == number))
