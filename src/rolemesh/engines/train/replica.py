"""`Replica`: one worker's copy of a model under training - gradients, optimizer steps, state. Base of the engines of actor and critic.

Data-parallel: every worker holds the whole model and gets its own rows of each mini-batch. Because loss weights are normalised over
the whole mini-batch beforehand, a worker adds up the gradients of its micro-batches, the workers add up theirs, and the sum is the
gradient of the mini-batch whatever the cut.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rolemesh.batch import Batch
from rolemesh.engines.train.collective import all_reduce
from rolemesh.engines.train.gradients import FlatGradients
from rolemesh.engines.train.microbatch import micro_batches
from rolemesh.engines.train.optimizer import OptimizerSettings
from rolemesh.engines.train.weights import check_fit, copy_weights, named_weights, shapes
from rolemesh.observe import Metrics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

RowsLoss = Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]
"""Rows of a micro-batch -> (scalar loss, weight [T] of each response token)."""


class Replica:
    """One replica of a float32 model.

    With a `process_group` (may be set later, and to None), updates and `check_replicas` are collective: every worker calls them, also
    one that has no rows. After an exception inside a collective call the engine and its model must not be used again.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        optimizer: OptimizerSettings,
        micro_batch_tokens: int,
        process_group: ProcessGroup | None,
        device: str | torch.device,
    ) -> None:
        """Raises ValueError for weights in another format, or none to train."""
        self.model = model.to(device)
        self.settings = optimizer
        self.step = 0
        self.process_group = process_group
        self._device = torch.device(device)
        self._micro_batch_tokens = micro_batch_tokens
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        _check_parameters(self._parameters)
        self._gradients = FlatGradients(list(self._parameters.values()))
        self._optimizer = optimizer.build(self._parameters.values())

    # -- training -----------------------------------------------------------------------------------------------------------

    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """Start again at step 0 with other settings and without moments; the weights stay."""
        self.settings, self.step = settings, 0
        self._optimizer = settings.build(self._parameters.values())

    def _accumulate(self, batch: Batch, rows_loss: RowsLoss) -> None:
        """Gradients of this worker's rows that have a weight, then the sum over the workers."""
        self._gradients.zero()
        rows = batch.sort_by_id()  # so that the order of the rows changes nothing, to the last bit
        rows = rows.take(np.flatnonzero(rows.scalars("token_weight")))
        for chunk in micro_batches(rows, self._micro_batch_tokens):
            loss, weights = rows_loss(rows.take(chunk))
            self._gradients.backward(loss, int(weights.count_nonzero()))
        self._gradients.all_reduce(self.process_group)

    def _gradient_copies(self) -> dict[str, torch.Tensor]:
        return {name: parameter.grad.clone() for name, parameter in self._parameters.items() if parameter.grad is not None}

    def _apply(self, metrics: Metrics, prefix: str) -> None:
        """Clip and step, or leave the step out. Numbers that are equal on all workers are recorded by the first alone."""
        norm, loss, trained = self._gradients.norm(), self._gradients.loss, self._gradients.trained_tokens
        # the loss too: a clamp stops the gradient of a nan, which would leave the norm finite and the fault unseen
        finite, empty = math.isfinite(norm) and math.isfinite(loss), trained == 0
        learning_rate = self.settings.learning_rate_at(self.step)
        if not finite:
            logger.warning("%s step %d left out: gradient norm %s, loss %s over %d tokens", prefix, self.step, norm, loss, trained)
        elif empty:
            logger.warning("%s step %d left out: no token of the mini-batch has a weight", prefix, self.step)
        else:
            self._step(norm, learning_rate)
        if self.process_group is None or self.process_group.rank() == 0:
            metrics.sum(f"{prefix}/steps_skipped_nonfinite", not finite)
            metrics.sum(f"{prefix}/steps_skipped_empty", finite and empty)
            metrics.sum(f"{prefix}/tokens_trained", trained)
            metrics.last(f"{prefix}/learning_rate", learning_rate)
            if finite:
                metrics.mean(f"{prefix}/grad_norm", norm)

    def _step(self, norm: float, learning_rate: float) -> None:
        limit = self.settings.max_grad_norm
        if limit is not None and norm > limit:
            self._gradients.scale(limit / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self.step += 1

    # -- state --------------------------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and persistent buffers, as they are (no copies), tensors that are tied once under their first name."""
        return named_weights(self.model)

    def state(self) -> dict[str, Any]:
        """Everything that the next update depends on, as copies: {"step", "model", "optimizer"}, loadable with `weights_only`.

        Nothing here draws random numbers, and the learning rate is a function of the step."""
        parameters = zip(self._parameters, self._optimizer.param_groups[0]["params"], strict=True)
        moments = {name: dict(self._optimizer.state[parameter]) for name, parameter in parameters if parameter in self._optimizer.state}
        return {
            "step": self.step,
            "model": {name: tensor.clone() for name, tensor in self.named_weights()},
            "optimizer": {name: {key: value.clone() for key, value in entry.items()} for name, entry in moments.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave, by copying. Optimizer settings stay those of this engine. Raises ValueError, and changes nothing,
        when names or shapes do not fit the model."""
        if state["optimizer"]:
            check_fit(shapes(self._parameters), {name: entry["exp_avg"].shape for name, entry in state["optimizer"].items()})
        copy_weights(self.model, state["model"].items())
        self._optimizer.state.clear()
        for name, entry in state["optimizer"].items():
            self._optimizer.state[self._parameters[name]] = {key: value.to(self._device, copy=True) for key, value in entry.items()}
        self.step = int(state["step"])

    def check_replicas(self) -> None:
        """Raise ValueError unless all workers hold the same weights and step. Call it after loading: different replicas would train on
        without a sign."""
        if self.process_group is None:
            return
        checksum = self.step
        for _, tensor in self.named_weights():
            checksum = zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data, checksum)
        low, high = (torch.tensor([checksum], device=self._device) for _ in range(2))
        all_reduce(self.process_group, low, "min")
        all_reduce(self.process_group, high, "max")
        if not torch.equal(low, high):
            raise ValueError(
                f"the workers hold different weights (checksums from {int(low):#010x} to {int(high):#010x}, here {checksum:#010x}); "
                "load the same model folder, seed or state in all of them"
            )


def _check_parameters(parameters: dict[str, torch.nn.Parameter]) -> None:
    if not parameters:
        raise ValueError("the model has no parameter that requires a gradient; there is nothing to train")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameters must be float32, found {parameter.dtype} in {name}: small updates would be rounded away. "
                "Load the model in float32 and set compute_dtype"
            )
