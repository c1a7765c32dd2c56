"""The critic: values of states, the advantages that follow from them, and the critic's own training (algorithms with a critic)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from rolemesh.algorithms import create_actor_critic
from rolemesh.batch import Batch
from rolemesh.config.schema import Config
from rolemesh.engines.train import OptimizerSettings, ValueEngine, load_value_model, open_value_model
from rolemesh.observe import Metrics
from rolemesh.roles.taker import WeightTaker
from rolemesh.roles.trained import BY_MINIBATCH, TrainedWorker, engine_options, passes, reads_parts
from rolemesh.runtime import WorkerContext, register
from rolemesh.weights import Weights


def estimate_reads(*, config: Config) -> tuple[str, ...]:
    return create_actor_critic(config).estimate_reads


def estimate_writes(*, config: Config) -> tuple[str, ...]:
    return create_actor_critic(config).estimate_writes


def critic_reads(*, config: Config) -> tuple[str, ...]:
    return create_actor_critic(config).critic_reads


class CriticWorker(TrainedWorker, WeightTaker):
    """One rank of the critic."""

    weights_file: ClassVar[str] = "critic.safetensors"
    optimizer_file: ClassVar[str] = "critic-optimizer.safetensors"
    engine: ValueEngine

    def __init__(self, context: WorkerContext, *, config: Config) -> None:
        super().__init__(context)
        self.config = config
        self.algorithm = create_actor_critic(config)

    def load(self) -> None:
        """Build the model: the same weights on every rank, from the folder and the seed."""
        torch.set_num_threads(1)
        config = self.config
        path, seed = config.algorithm.critic_path, config.seed
        opened = open_value_model(config.model, path=path, seed=seed) if reads_parts(config, self.context) else None
        model, weights = opened if opened is not None else (load_value_model(config.model, path=path, seed=seed), None)
        self.engine = ValueEngine(
            model,
            weights=weights,
            optimizer=OptimizerSettings.of_critic(config.algorithm, config.trainer),
            **engine_options(config, self.context.device),
        )

    # -- values and advantages ------------------------------------------------------------------------------------------------

    @register(dispatch="balanced", reads=("prompt_ids", "response_ids"), writes=("values",))
    def values(self, batch: Batch) -> Batch:
        """Value of the state before each response token, under the weights that the step begins with."""
        return batch.select([]).with_columns({"values": self.engine.values(batch)})

    @register(dispatch="balanced", reads=estimate_reads, writes=estimate_writes)
    def estimate(self, batch: Batch, *, kl_coefficient: float) -> Batch:
        """Advantages and returns of the response tokens from rewards and values, and their sums by row for the controller."""
        return self.algorithm.estimate(batch, kl_coefficient=kl_coefficient)

    # -- training -------------------------------------------------------------------------------------------------------------

    @register(dispatch=BY_MINIBATCH, reads=critic_reads, mutates=True)
    def update(self, batch: Batch, *, count: int) -> int:
        """All epochs and mini-batches of one step, as the actor does them. Returns the optimizer steps done so far."""
        for epoch, number, rows in passes(batch, epochs=self.config.trainer.epochs, count=count):
            with self.spans.span("minibatch", number=number, epoch=epoch, rows=len(rows)):
                self.engine.update(rows, self.algorithm.value_loss, metrics=self.metrics)
        self.record_memory()
        return self.engine.step

    @register(dispatch=BY_MINIBATCH, reads=critic_reads)
    def gradients(self, batch: Batch) -> dict[str, np.ndarray]:
        """Gradients of the rows as one mini-batch, summed over ranks, without a step: for checks of equality."""
        found = self.engine.compute_gradients(batch, self.algorithm.value_loss, metrics=Metrics())
        return {name: gradient.float().numpy() for name, gradient in found.items()}

    def take_weights(self, weights: Weights, version: int) -> int:
        """Take over the body of the policy with these weights; the head stays."""
        self.engine.load_backbone(weights)
        return version
