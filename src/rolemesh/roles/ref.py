"""The reference: the model that the policy is kept near. It never changes after the warm start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from rolemesh.algorithms import REFERENCE_READS, REFERENCE_WRITES, reference_columns
from rolemesh.batch import Batch
from rolemesh.config.schema import Config
from rolemesh.engines.train import Groups, Scorer, TrainEngine
from rolemesh.engines.train.tensor_file import Copying, TensorFile, stored_tensors
from rolemesh.models import load_model, open_weights
from rolemesh.names import ACTOR
from rolemesh.roles.actor import ActorWorker
from rolemesh.roles.saving import SavedWorker
from rolemesh.roles.taker import WeightTaker
from rolemesh.runtime import WorkerContext, register
from rolemesh.weights import Weights


class RefWorker(SavedWorker, WeightTaker):
    """One copy of the reference model, whole."""

    weights_file: ClassVar[str] = "ref.safetensors"
    """Where its weights lie in a checkpoint; only after a warm start, else they are those of the model's folder."""

    def __init__(self, context: WorkerContext, *, config: Config) -> None:
        super().__init__(context)
        self.config = config
        self.scorer: Scorer

    def load(self) -> None:
        """The weights that the policy starts from. In float32 with products in `model.dtype`, as the actor holds them, so that equal
        weights have equal log-probabilities."""
        torch.set_num_threads(1)
        trainer, seed, chosen = self.config.trainer, self.config.seed, self.config.model.model_copy(update={"dtype": "float32"})
        opened = open_weights(chosen) if self.communicates and self.context.world_size > 1 else None
        model, weights = opened if opened is not None else (load_model(chosen, seed=seed), None)
        self.scorer = Scorer(
            model,
            weights=weights,
            micro_batch_tokens=trainer.micro_batch_tokens,
            compute_dtype=getattr(torch, self.config.model.dtype),
            packing=trainer.packing,
            sharding=trainer.sharding,
            device=self.context.device,
        )

    @register(dispatch="balanced", reads=REFERENCE_READS, writes=REFERENCE_WRITES)
    def logprobs(self, batch: Batch, *, temperature: float) -> Batch:
        """Log-probabilities of every row's response tokens under the reference, and the row's divergence from it."""
        self.metrics.max(f"memory/{self.context.group}/weights", self.scorer.memory())
        return reference_columns(batch, self.scorer.logprobs(batch, temperature), self.config.algorithm.kl_kind)

    def take_weights(self, weights: Weights, version: int) -> int:
        """Be the policy with these weights from here on: what came out of the warm start."""
        self.scorer.load_weights(weights)
        return version

    def files(self) -> dict[str, TensorFile]:
        """What it has in a checkpoint, by path in there. All copies are equal, and the first has a file of it."""
        return {self.weights_file: TensorFile.of_whole(dict(self.scorer.named_weights()))} if self.context.rank == 0 else {}

    @property
    def copying(self) -> Copying:
        return self.scorer.copying

    @register(dispatch="all", mutates=True)
    def restore(self, folder: str, saved: dict[str, Any]) -> None:
        """Take up the weights of a checkpoint. Raises what safetensors raises for a file that does not fit."""
        self.scorer.load_weights(stored_tensors(Path(folder) / self.weights_file).items())


class ShardedRefWorker(RefWorker):
    """One part of a reference that is sharded as actor and critic are."""

    communicates: ClassVar[bool] = True

    def joined(self) -> None:
        formed = self.communicator
        assert formed is not None
        self.scorer.join(Groups(world=formed.group, data=formed.data_group))

    def leave(self) -> None:
        if hasattr(self, "scorer"):
            self.scorer.leave()
        super().leave()

    def files(self) -> dict[str, TensorFile]:
        """What it has in a checkpoint, by path in there."""
        return {self.weights_file: self.scorer.file()}


class SharedRefWorker(RefWorker):
    """The reference as the actor in the same process without its adapter: one model for both. Where the actor is sharded, its ranks gather
    weights together, so each of them has one of these beside it."""

    def load(self) -> None:
        """Nothing: the model is the actor's."""

    @property
    def _engine(self) -> TrainEngine:
        return cast(ActorWorker, self.peers[ACTOR]).engine

    @register(dispatch="balanced", reads=REFERENCE_READS, writes=REFERENCE_WRITES)
    def logprobs(self, batch: Batch, *, temperature: float) -> Batch:
        """As those of a copy of its own, to the last bit."""
        self.metrics.max(f"memory/{self.context.group}/weights", 0)
        return reference_columns(batch, self._engine.reference_logprobs(batch, temperature), self.config.algorithm.kl_kind)

    def take_weights(self, weights: Weights, version: int) -> int:
        """Be the actor as it is now from here on, which these are the weights of: its adapter is kept, not they."""
        self._engine.keep_reference()
        return version

    def files(self) -> dict[str, TensorFile]:
        """The adapter of the reference."""
        return {self.weights_file: TensorFile.of_whole(self._engine.reference)} if self.context.rank == 0 else {}

    @property
    def copying(self) -> Copying:
        return self._engine.copying

    @register(dispatch="all", mutates=True)
    def restore(self, folder: str, saved: dict[str, Any]) -> None:
        """Take up the adapter of a checkpoint. Raises ValueError for one that does not fit."""
        self._engine.take_reference({name: tensor[...] for name, tensor in stored_tensors(Path(folder) / self.weights_file).items()})
