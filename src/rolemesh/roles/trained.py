"""What actor and critic share: how mini-batches reach their ranks, their communicator, and the state of their training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from rolemesh.batch import Batch, BatchRef
from rolemesh.config.schema import Config
from rolemesh.engines.train import Groups
from rolemesh.engines.train.replica import Replica
from rolemesh.engines.train.tensor_file import Copying, TensorFile
from rolemesh.roles.saving import SavedWorker
from rolemesh.runtime import Dispatch, Request, Share, Topology, WorkerContext, register
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


def engine_options(config: Config, device: str) -> dict[str, Any]:
    """How the `trainer` section has models trained."""
    trainer = config.trainer
    return {
        "micro_batch_tokens": trainer.micro_batch_tokens,
        "packing": trainer.packing,
        "sharding": trainer.sharding,
        "activation_checkpointing": trainer.activation_checkpointing,
        "compute_dtype": getattr(torch, config.model.dtype),
        "device": device,
    }


def reads_parts(config: Config, context: WorkerContext) -> bool:
    """Whether a rank holds a part of its model, and so reads that alone where the files allow it."""
    return context.world_size > 1 and (config.trainer.sharding != "none" or context.tensor_parallel > 1)


class TrainedWorker(SavedWorker):
    """One rank of a model under training. A subclass makes `engine` in `load` and names its files."""

    communicates: ClassVar[bool] = True
    weights_file: ClassVar[str]
    """Where its weights lie in a checkpoint."""
    optimizer_file: ClassVar[str]
    engine: Replica

    def joined(self) -> None:
        formed = self.communicator
        assert formed is not None
        self.engine.join(Groups(world=formed.group, data=formed.data_group, tensor=formed.tensor_group))

    def leave(self) -> None:
        if hasattr(self, "engine"):
            self.engine.leave()
        super().leave()

    def record_memory(self) -> None:
        """Bytes that this rank's tensors take now, as `memory/<role>/<what>`; the most of a step are reported."""
        for what, count in self.engine.memory().items():
            self.metrics.max(f"memory/{self.context.group}/{what}", count)

    @register(dispatch="all", mutates=True)
    def sleep(self) -> int:
        """Take the model off the device until a call needs it again; returns the bytes freed. See `Replica.sleep`."""
        freed = self.engine.sleep()
        self.record_memory()
        return freed

    @register(dispatch="all", mutates=True)
    def wake(self) -> None:
        """Be as before `sleep`."""
        self.record_memory()
        self.engine.wake()
        self.record_memory()

    def files(self) -> dict[str, TensorFile]:
        """What it has in a checkpoint, by path in there."""
        return dict(zip((self.weights_file, self.optimizer_file), self.engine.files(), strict=True))

    @property
    def restored_file(self) -> str:
        """The file with the weights that are trained."""
        return self.weights_file

    def scalars(self) -> dict[str, Any]:
        return {"optimizer_step": self.engine.step}

    @property
    def copying(self) -> Copying:
        return self.engine.copying

    @register(dispatch="all", mutates=True)
    def restore(self, folder: str, saved: dict[str, Any]) -> None:
        """Take up the training state of a checkpoint, also one of other ranks; `saved` is what `save` returned. Raises what `load_files`
        raises for files that do not fit."""
        self.engine.load_files(Path(folder) / self.restored_file, Path(folder) / self.optimizer_file, int(saved["optimizer_step"]))
        self.engine.check_replicas()
