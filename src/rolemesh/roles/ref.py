"""The reference: the model that the policy is kept near. It never changes after the warm start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file

from rolemesh.algorithms import REFERENCE_READS, REFERENCE_WRITES, reference_columns
from rolemesh.batch import Batch
from rolemesh.config.schema import Config
from rolemesh.engines.train import Scorer
from rolemesh.engines.train.tensor_file import Copying, TensorFile
from rolemesh.models import load_model
from rolemesh.roles.saving import SavedWorker
from rolemesh.roles.taker import WeightTaker
from rolemesh.runtime import WorkerContext, register
from rolemesh.weights import Weights


class RefWorker(SavedWorker, WeightTaker):
    """One copy of the reference model."""

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
        config = self.config.model
        self.scorer = Scorer(
            load_model(config.model_copy(update={"dtype": "float32"}), seed=self.config.seed),
            micro_batch_tokens=self.config.trainer.micro_batch_tokens,
            compute_dtype=getattr(torch, config.dtype),
            packing=self.config.trainer.packing,
            device=self.context.device,
        )

    @register(dispatch="balanced", reads=REFERENCE_READS, writes=REFERENCE_WRITES)
    def logprobs(self, batch: Batch, *, temperature: float) -> Batch:
        """Log-probabilities of every row's response tokens under the reference, and the row's divergence from it."""
        return reference_columns(batch, self.scorer.logprobs(batch, temperature), self.config.algorithm.kl_kind)

    def take_weights(self, weights: Weights, version: int) -> int:
        """Be the policy with these weights from here on: what came out of the warm start."""
        self.scorer.load_weights((name, weight.clone()) for name, weight in weights)
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
        self.scorer.load_weights(load_file(Path(folder) / self.weights_file).items())
