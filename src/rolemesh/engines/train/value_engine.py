"""`ValueEngine`: values, gradients and optimizer steps of one rank of the critic. Called by the critic role."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rolemesh.batch import Batch
from rolemesh.engines.train.microbatch import MicroBatch, on_device, weights
from rolemesh.engines.train.placed import PlacedModel
from rolemesh.engines.train.probe import probe_tokens, try_rows
from rolemesh.engines.train.replica import Replica
from rolemesh.engines.train.value_model import ValueModel
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import ValueBatch

ValueLossFunction = Callable[[ValueBatch, Metrics], torch.Tensor]


class ValueEngine(Replica):
    """One rank of the critic (see `Replica`), a `ValueModel` in eval mode for good."""

    def _language_model(self, model: nn.Module) -> nn.Module:
        return cast(ValueModel, model).backbone

    def _try(self, placed: PlacedModel, *, packing: bool, autocast: torch.dtype) -> bool:
        self._root, self._autocast = placed.root, autocast
        model = cast(ValueModel, placed.model)
        with torch.no_grad():
            probe = probe_tokens(model.backbone, self._device)
            return try_rows(model.backbone, lambda inputs: placed.root(model.hidden, inputs), probe, packing=packing)

    def _let_go(self) -> None:
        super()._let_go()
        del self._root

    @torch.no_grad()
    def values(self, batch: Batch) -> list[npt.NDArray[np.float32]]:
        """Value of the state before each token of `response_ids` is sampled; one array a row, in order.

        The state before token t is the prompt and the t tokens of the response before it, so the number comes from the same position
        that predicts token t: the first from the last token of the prompt, none from the last token of the response."""
        self.wake()
        return self._passes.by_row(batch, self._forward)

    def update(self, batch: Batch, loss_fn: ValueLossFunction, *, metrics: Metrics) -> None:
        """One optimizer step on one mini-batch, of which `batch` holds this rank's rows (possibly none).

        Reads prompt_ids, response_ids, values (as the step began), returns and token_weight, and response_mask where there is one.
        Steps are left out and counted as those of `TrainEngine.update`, under `critic/...`."""
        self._accumulate(batch, partial(self._rows_loss, loss_fn), metrics)
        self._apply(metrics, "critic")

    def compute_gradients(self, batch: Batch, loss_fn: ValueLossFunction, *, metrics: Metrics) -> dict[str, torch.Tensor]:
        """Gradient of the mini-batch over all ranks by parameter name, before clipping, as whole copies; nothing is changed."""
        self._accumulate(batch, partial(self._rows_loss, loss_fn), metrics)
        return self._whole_gradients()

    def load_backbone(self, given: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the body of a language model with these weights (`TrainEngine.named_weights`), for instance after its supervised
        warm start, each of which is needed only until the next one comes; the head stays. Raises ValueError, and changes nothing, when
        names or shapes do not fit."""
        prefix = cast(ValueModel, self.model).prefix
        body = ((f"backbone.{name.removeprefix(prefix)}", weight) for name, weight in given if name.startswith(prefix))
        self._take(body, keep=lambda name: name.startswith("head."))

    def _rows_loss(self, loss_fn: ValueLossFunction, rows: Batch, micro: MicroBatch, metrics: Metrics) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = ValueBatch(
            values=self._forward(micro),
            old_values=on_device(rows, "values", self._device),
            returns=on_device(rows, "returns", self._device),
            weights=weights(rows, self._device),
            row=micro.row,
        )
        return loss_fn(tokens, metrics), tokens.weights

    def _forward(self, micro: MicroBatch) -> torch.Tensor:
        with torch.autocast(self._device.type, dtype=self._autocast, enabled=self._autocast != torch.float32):
            values = cast(ValueModel, self._root.model).float32_values
            return cast(Tensor, self._root(partial(values, micro.positions, **micro.inputs)))
