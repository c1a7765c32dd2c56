"""`ValueEngine`: values, gradients and optimizer steps of one worker's replica of the critic. Called by the critic role."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from rolemesh.batch import Batch
from rolemesh.engines.train.forward import check_causal, last_hidden, probe_tokens
from rolemesh.engines.train.microbatch import MicroBatch, by_row, on_device, weights
from rolemesh.engines.train.optimizer import OptimizerSettings
from rolemesh.engines.train.replica import Replica
from rolemesh.engines.train.value_model import ValueModel
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import ValueBatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ValueLossFunction = Callable[[ValueBatch, Metrics], torch.Tensor]


class ValueEngine(Replica):
    """One replica of the critic (see `Replica`), in eval mode for good."""

    def __init__(
        self,
        model: ValueModel,
        *,
        optimizer: OptimizerSettings,
        micro_batch_tokens: int,
        process_group: ProcessGroup | None = None,
        device: str | torch.device = "cpu",
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Arguments as those of `TrainEngine`. Raises ValueError for weights in another format than float32, none to train, or a body
        that is not causal."""
        super().__init__(model, optimizer=optimizer, micro_batch_tokens=micro_batch_tokens, process_group=process_group, device=device)
        self.value_model = model.eval()
        self._compute_dtype = compute_dtype
        with torch.no_grad():
            probe, body = probe_tokens(model.backbone, self._device), partial(last_hidden, model.backbone)
            check_causal(model.backbone, body, probe, body(probe))

    @torch.no_grad()
    def values(self, batch: Batch) -> list[npt.NDArray[np.float32]]:
        """Value of the state before each token of `response_ids` is sampled; one array a row, in order.

        The state before token t is the prompt and the t tokens of the response before it, so the number comes from the same position
        that predicts token t: the first from the last token of the prompt, none from the last token of the response."""
        return by_row(batch, self._micro_batch_tokens, self._device, self._forward)

    def update(self, batch: Batch, loss_fn: ValueLossFunction, *, metrics: Metrics) -> None:
        """One optimizer step on one mini-batch, of which `batch` holds this worker's rows (possibly none).

        Reads prompt_ids, response_ids, values (as the step began), returns and token_weight, and response_mask where there is one.
        Steps are left out and counted as those of `TrainEngine.update`, under `critic/...`."""
        self._accumulate(batch, partial(self._rows_loss, loss_fn=loss_fn, metrics=metrics))
        self._apply(metrics, "critic")

    def compute_gradients(self, batch: Batch, loss_fn: ValueLossFunction, *, metrics: Metrics) -> dict[str, torch.Tensor]:
        """Gradient of the mini-batch over all workers by parameter name, before clipping, as copies; nothing is changed."""
        self._accumulate(batch, partial(self._rows_loss, loss_fn=loss_fn, metrics=metrics))
        return self._gradient_copies()

    def _rows_loss(self, rows: Batch, *, loss_fn: ValueLossFunction, metrics: Metrics) -> tuple[torch.Tensor, torch.Tensor]:
        micro = MicroBatch.of(rows, self._device)
        tokens = ValueBatch(
            values=self._forward(micro),
            old_values=on_device(rows, "values", self._device),
            returns=on_device(rows, "returns", self._device),
            weights=weights(rows, self._device),
            row=micro.row,
        )
        return loss_fn(tokens, metrics), tokens.weights

    def _forward(self, micro: MicroBatch) -> torch.Tensor:
        with torch.autocast(self._device.type, dtype=self._compute_dtype, enabled=self._compute_dtype != torch.float32):
            found: torch.Tensor = self.value_model(micro.input_ids, micro.positions)
        return found
