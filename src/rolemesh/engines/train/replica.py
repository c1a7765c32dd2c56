"""`Replica`: a model under training on the ranks of a group - gradients, optimizer steps, state. Base of the engines of actor and critic.

Every rank gets its own rows of each mini-batch, or with tensor parallelism every row of ranks. Because loss weights are normalised over
the whole mini-batch beforehand, a rank adds up the gradients of its micro-batches, the ranks add up theirs, and the sum is the gradient
of the mini-batch whatever the cut.
"""

from __future__ import annotations

import logging
import math
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rolemesh.batch import Batch
from rolemesh.engines.train.groups import Groups, agree
from rolemesh.engines.train.layout import Part
from rolemesh.engines.train.microbatch import MicroBatch
from rolemesh.engines.train.optimizer import OptimizerSettings
from rolemesh.engines.train.rank import RankEngine
from rolemesh.engines.train.tensor_file import StoredTensor, TensorFile, stored_tensors
from rolemesh.engines.train.weights import check_fit
from rolemesh.observe import Metrics

logger = logging.getLogger(__name__)

RowsLoss = Callable[[Batch, MicroBatch, Metrics], tuple[Tensor, Tensor]]
"""Rows of a micro-batch, and their inputs -> (scalar loss, weight [T] of each response token)."""
Moments = dict[str, dict[str, Tensor]]
"""State of the optimizer by parameter name."""


class Replica(RankEngine):
    """A float32 model under training. `sleep` takes it down with its moments; `memory` is not collective either."""

    def __init__(self, model: nn.Module, *, optimizer: OptimizerSettings, **options: Any) -> None:
        """`options` are those of `RankEngine`. Raises ValueError too for weights in another format, or none to train."""
        _check_parameters(model)
        self.settings, self.step = optimizer, 0
        self._held_moments: Moments = {}
        super().__init__(model, **options)

    @abstractmethod
    def _forward(self, micro: MicroBatch) -> Tensor:
        """A number for each response token, with a gradient."""

    # -- set up and taken down ------------------------------------------------------------------------------------------------

    def join(self, groups: Groups) -> None:
        """Be set up on these groups from here on. Raises ValueError when the ranks hold other weights or steps than one another, or this
        one parts of another layout."""
        super().join(groups)
        self.check_replicas()

    def sleep(self) -> int:
        """Take the model down: weights and moments go to host memory, gradients and what can be computed again are dropped. Returns the
        bytes that this freed on the device. Idempotent; whatever needs the model wakes it. Raises DeadlineExceeded as `Copying.wait`."""
        if self._placed is None:
            return 0
        before = sum(self.memory().values())
        self._take_down()
        return before - (self.memory()["asleep"] if self._device.type == "cpu" else 0)

    def _let_go(self) -> None:
        self._held_moments = {name: {key: value.to("cpu") for key, value in entry.items()} for name, entry in self._moments().items()}
        del self._optimizer

    def wake(self) -> None:
        if self._placed is None:
            super().wake()
            self._optimizer = self.settings.build(self._up.parameters.values())
            self._take_moments(self._held_moments, self._held.parts)
            self._held_moments = {}

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's tensors: `weights`, `gradients` and `optimizer` on its device, `asleep` in host memory."""
        held = [block for block in self._held.blocks.values() if isinstance(block, Tensor)]
        asleep = _bytes(held) + _bytes_of(self._held_moments)
        if (placed := self._placed) is None:
            return {"weights": 0, "gradients": 0, "optimizer": 0, "asleep": asleep}
        weights, gradients = _bytes(placed.tensors.values()), _bytes(placed.gradients.named().values())
        return {"weights": weights, "gradients": gradients, "optimizer": _bytes_of(self._moments()), "asleep": asleep}

    # -- training -----------------------------------------------------------------------------------------------------------

    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """Start again at step 0 with other settings and without moments; the weights stay."""
        self.settings, self.step = settings, 0
        self._optimizer = settings.build(self._up.parameters.values())

    def _accumulate(self, batch: Batch, rows_loss: RowsLoss, metrics: Metrics) -> None:
        """Gradients of this rank's rows that have a weight, then the sum over the ranks."""
        gradients = self._up.gradients
        gradients.zero()
        metrics = metrics if self.groups.leads else Metrics()  # ranks of a row have the same rows
        rows = batch.sort_by_id()  # so that the order of the rows changes nothing, to the last bit
        rows = rows.take(np.flatnonzero(rows.scalars("token_weight")))
        for chunk in self._passes.chunks(rows):
            mine = rows.take(chunk)
            micro = self._passes.micro_batch(mine)
            if chunk:
                loss, weights = rows_loss(mine, micro, metrics)
                gradients.backward(loss, int(weights.count_nonzero()))
            else:
                gradients.backward(self._forward(micro).clamp(-1, 1).sum() * 0, 0)
        gradients.reduce()

    def _whole_gradients(self) -> dict[str, Tensor]:
        return {name: self._up.gathered(name, gradient).clone() for name, gradient in self._up.gradients.named().items()}

    def _apply(self, metrics: Metrics, prefix: str) -> None:
        """Clip and step, or leave the step out. Numbers that are equal on all ranks are recorded by the first alone."""
        gradients = self._up.gradients
        norm, loss, trained = gradients.norm(), gradients.loss, gradients.trained_tokens
        # the loss too: a clamp stops the gradient of a nan, which would leave the norm finite and the fault unseen
        finite, empty = math.isfinite(norm) and math.isfinite(loss), trained == 0
        learning_rate = self.settings.learning_rate_at(self.step)
        if not finite:
            logger.warning("%s step %d left out: gradient norm %s, loss %s over %d tokens", prefix, self.step, norm, loss, trained)
        elif empty:
            logger.warning("%s step %d left out: no token of the mini-batch has a weight", prefix, self.step)
        else:
            self._step(norm, learning_rate)
        if self.groups.rank == 0:
            metrics.sum(f"{prefix}/steps_skipped_nonfinite", not finite)
            metrics.sum(f"{prefix}/steps_skipped_empty", finite and empty)
            metrics.sum(f"{prefix}/tokens_trained", trained)
            metrics.last(f"{prefix}/learning_rate", learning_rate)
            if finite:
                metrics.mean(f"{prefix}/grad_norm", norm)

    def _step(self, norm: float, learning_rate: float) -> None:
        limit = self.settings.max_grad_norm
        if limit is not None and norm > limit:
            self._up.gradients.scale(limit / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self.copying.wait()
        self._optimizer.step()
        self.step += 1

    # -- state --------------------------------------------------------------------------------------------------------------

    def files(self) -> tuple[TensorFile, TensorFile]:
        """Weights and optimizer state as files that all ranks write together, this rank with the tensors as they are: who reads them while
        the engine is used holds `copying`. With `step` they are everything that the next update depends on: nothing here draws random
        numbers, and the learning rate is a function of the step."""
        moments = {f"{key}.{name}": (name, value) for name, entry in self._moments().items() for key, value in entry.items()}
        return self.file(), self._up.file(moments)

    def load_files(self, weights: Path, optimizer: Path, step: int) -> None:
        """Take over what ranks of any layout have written. Optimizer settings stay those of this engine. Raises ValueError, and changes
        nothing, when names or shapes do not fit the model; OSError and SafetensorError for files that cannot be read."""
        placed, given, moments = self._up, stored_tensors(weights), dict[str, dict[str, Any]]()
        for label, tensor in stored_tensors(optimizer).items():
            key, _, name = label.partition(".")
            moments.setdefault(name, {})[key] = tensor if tensor.shape else tensor[...]
        wholes = {name: torch.Size(placed.parts[name].whole) for name in placed.parameters}
        if moments:
            check_fit(wholes, {name: entry["exp_avg"].shape for name, entry in moments.items()})
        self.load_weights(given)
        self._optimizer.state.clear()
        self._take_moments(moments, {name: Part.all_of(tuple(whole)) for name, whole in wholes.items()})
        self.step = step

    def load_weights(self, given: Mapping[str, Tensor | StoredTensor]) -> None:
        """Copy whole weights, by the names that `named_weights` gives. Raises ValueError, and changes nothing, when they do not fit."""
        self._take(given.items())

    def _moments(self) -> Moments:
        parameters, state = self._up.parameters, self._optimizer.state
        return {name: dict(state[parameter]) for name, parameter in parameters.items() if parameter in state}

    def _take_moments(self, moments: Mapping[str, Mapping[str, Any]], parts: Mapping[str, Part]) -> None:
        """`parts` says which blocks are given."""
        placed = self._up
        for name, entry in moments.items():
            mine = {key: placed.parts[name].read(value, parts[name]) if value.shape else value for key, value in entry.items()}
            self._optimizer.state[placed.parameters[name]] = {key: value.to(self._device, copy=True) for key, value in mine.items()}

    def check_replicas(self) -> None:
        """Raise ValueError unless ranks that must hold the same weights and step do. Call it after loading: different replicas would
        train on without a sign."""
        placed, layout = self._up, self._up.layout
        split = {name for name in placed.tensors if name in layout.tensor_dims}
        self._check_equal(self.groups.world, self.step)
        self._check_equal(self.groups.tensor, _checksum(tensor for name, tensor in placed.tensors.items() if name not in split))
        if layout.shards is None:
            self._check_equal(self.groups.data, _checksum(placed.tensors.values()))

    def _check_equal(self, group: Any, checksum: int) -> None:
        low, high = -agree(group, -checksum, self._device), agree(group, checksum, self._device)
        if low != high:
            raise ValueError(
                f"the workers hold different weights (checksums from {low:#010x} to {high:#010x}, here {checksum:#010x}); "
                "load the same model folder, seed or state in all of them"
            )


def _checksum(tensors: Iterable[Tensor]) -> int:
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data, found)
    return found


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _bytes_of(moments: Moments) -> int:
    return sum(_bytes(entry.values()) for entry in moments.values())


def _check_parameters(model: nn.Module) -> None:
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ValueError("the model has no parameter that requires a gradient; there is nothing to train")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameters must be float32, found {parameter.dtype} in {name}: small updates would be rounded away. "
                "Load the model in float32 and set compute_dtype"
            )
