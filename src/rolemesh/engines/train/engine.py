"""`TrainEngine`: log-probabilities, gradients and optimizer steps of one rank of the policy. Called by the actor role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rolemesh.batch import Batch
from rolemesh.engines.train.forward import TokenScorer, check_temperature
from rolemesh.engines.train.microbatch import MicroBatch, advantages, on_device, weights
from rolemesh.engines.train.placed import PlacedModel
from rolemesh.engines.train.replica import Replica
from rolemesh.engines.train.tensor_file import StoredTensor, TensorFile, stored_tensors
from rolemesh.engines.train.weights import check_fit, named_weights
from rolemesh.models.lora import adapter_off, is_adapter, merged_weights, other_weights, saved_name, without_adapter
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import TokenBatch

LossFunction = Callable[[TokenBatch, Metrics], torch.Tensor]


class TrainEngine(Replica):
    """One rank of the policy (see `Replica`). The model must be a causal language model in float32; it stays in eval mode, so there is
    no dropout. It may have an adapter, which alone is trained then."""

    _scorer: TokenScorer

    def __init__(self, model: nn.Module, *, entropy_gradient: bool = False, **options: Any) -> None:
        """With `entropy_gradient` the entropy that a loss gets can be trained on, which costs memory. `options` are those of `Replica`."""
        self._entropy_gradient = entropy_gradient
        self._reference: dict[str, torch.Tensor] = {}
        super().__init__(model, **options)
        self._plain = without_adapter(self._skeleton)

    def _try(self, placed: PlacedModel, *, packing: bool, autocast: torch.dtype) -> bool:
        self._scorer = TokenScorer(
            placed.root, autocast=autocast, device=self._device, packing=packing, entropy_gradient=self._entropy_gradient
        )
        return self._scorer.packed

    def _let_go(self) -> None:
        super()._let_go()
        del self._scorer

    def _forward(self, micro: MicroBatch) -> torch.Tensor:
        return self._scorer(micro, 1.0)[0]

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float) -> list[npt.NDArray[np.float32]]:
        """Log-probability of each token of `response_ids` given what stands before it, after temperature; one array a row, in order."""
        self.wake()
        return self._scorer.logprobs(batch, temperature, self._passes)

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch, temperature: float) -> list[npt.NDArray[np.float32]]:
        """The same of the reference: the model without its adapter, or with the adapter that `keep_reference` or `take_reference` gave."""
        self.wake()
        with self._adapter(self._reference) if self._reference else adapter_off(self.model):
            return self._scorer.logprobs(batch, temperature, self._passes)

    def update(self, batch: Batch, loss_fn: LossFunction, *, temperature: float, metrics: Metrics) -> None:
        """One optimizer step on one mini-batch, of which `batch` holds this rank's rows (possibly none).

        Reads prompt_ids, response_ids, rollout_logprobs, token_weight and `advantages` (of tokens) or else `advantage` (of rows); and
        response_mask and ref_logprobs where there are such columns. A step whose loss or gradient is not finite, or in which no rank
        has a token with a weight, is left out, counted and logged; all ranks decide alike. Records `actor/grad_norm` (before
        clipping), `actor/learning_rate`, `actor/tokens_trained` and the steps left out.
        """
        self._accumulate_policy(batch, loss_fn, temperature, metrics)
        self._apply(metrics, "actor")

    def compute_gradients(self, batch: Batch, loss_fn: LossFunction, *, temperature: float, metrics: Metrics) -> dict[str, torch.Tensor]:
        """Gradient of the mini-batch over all ranks by parameter name, before clipping, as whole copies; nothing is changed."""
        self._accumulate_policy(batch, loss_fn, temperature, metrics)
        return self._whole_gradients()

    def sft_update(self, batch: Batch, metrics: Metrics) -> None:
        """The same with the cross-entropy of the response tokens, each weighted by its row's `token_weight`; records `sft/...`, as
        `sft/loss` the mean over tokens with a weight.

        Reads prompt_ids, response_ids and token_weight, which must be normalised over the whole mini-batch (token mean: 1 / all its
        response tokens)."""

        def rows_loss(rows: Batch, micro: MicroBatch, metrics: Metrics) -> tuple[torch.Tensor, torch.Tensor]:
            logprobs, _ = self._scorer(micro, 1.0)
            weight = weights(rows, self._device)
            kept = weight != 0
            if kept.any():
                metrics.mean("sft/loss", -logprobs.detach()[kept].mean(), int(kept.sum()))
            return -(weight[kept] * logprobs[kept]).sum(), weight

        self._accumulate(batch, rows_loss, metrics)
        self._apply(metrics, "sft")

    # -- adapter --------------------------------------------------------------------------------------------------------------

    @property
    def empty_model(self) -> nn.Module:
        """The whole model as it is published, without adapter and contents."""
        return self._plain

    def empty_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names, shapes and formats of the weights that are published, without contents."""
        return named_weights(self._plain)

    def merged_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`named_weights` of a model without adapter that computes the same, as `empty_weights` names them. Collective where weights are
        split."""
        merged = merged_weights(self._skeleton, self._names, weight=self._whole, whole=self._whole)
        return ((name, merge()) for name, _, merge in merged)

    def empty_parts(self, *, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Names, shapes and formats of `parts`, without contents."""
        return ((name, form) for name, form in named_weights(self._skeleton) if not adapter_only or is_adapter(name))

    def parts(self, *, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """`named_weights`, the model's own and those of its adapter apart; or the latter alone. Collective where weights are split."""
        return ((name, self._whole(name)) for name, _ in self.empty_parts(adapter_only=adapter_only))

    @property
    def _names(self) -> list[str]:
        return [name for name, _ in self.empty_weights()]

    def _merged_parts(self) -> list[tuple[str, str, Callable[[], Tensor]]]:
        """The same of this rank's parts, each merged when it is asked for. Collective where weights are split."""
        placed = self._up

        def cut(inside: str, product: Tensor) -> Tensor:
            return product[placed.parts[inside].index]

        return list(merged_weights(self._skeleton, self._names, weight=placed.tensors.__getitem__, whole=self._whole, cut=cut))

    def file(self) -> TensorFile:
        """An adapter is merged into them."""
        merged = self._merged_parts()
        own = {name: (inside, self._up.tensors[inside]) for name, inside, _ in merged}
        return self._up.file(own, {name: merge for name, _, merge in merged})

    def check_below_adapter(self, merged: Path) -> None:
        """Raise ValueError when a file of merged weights is not what this adapter makes of the model below it: that is another one than it
        was trained on. Collective where weights are split."""
        parts, saved = self._up.parts, stored_tensors(merged)

        def stored(name: str, inside: str) -> Tensor | None:
            return saved[name][parts[inside].index] if name in saved else None

        if other := list(other_weights(self._merged_parts(), stored)):
            raise ValueError(
                f"the model below the adapter is not the one that it was trained on: {len(other)} of its weights, such as {other[0]}, "
                f"differ from what {merged} says. Bring that model back, or train on in a new run from {merged.parent}"
            )

    def adapter_file(self) -> TensorFile:
        """The adapter alone, as peft names its weights; see `files`."""
        return self._up.file({saved_name(name): (name, tensor) for name, tensor in self._up.tensors.items() if is_adapter(name)})

    def load_weights(self, given: Mapping[str, Tensor | StoredTensor]) -> None:
        """Where there is an adapter, its weights alone, as `adapter_file` names them."""
        adapter = {saved_name(name): name for name in self._up.tensors if is_adapter(name)}
        self._take(
            ((adapter.get(name, name), tensor) for name, tensor in given.items()), keep=lambda name: bool(adapter) and not is_adapter(name)
        )

    def adapter_weights(self) -> dict[str, torch.Tensor]:
        """Whole copies of the weights of the adapter, under its names in `named_weights`. Collective where weights are split."""
        return {name: self._whole(name).to("cpu", copy=True) for name in self._up.tensors if is_adapter(name)}

    @property
    def reference(self) -> Mapping[str, torch.Tensor]:
        """The adapter of the reference, whole; empty when that is the model without adapter."""
        return self._reference

    def keep_reference(self) -> None:
        """From here on the reference is the model with the adapter as it is now. Collective where weights are split."""
        self._reference = self.adapter_weights()

    def take_reference(self, given: Mapping[str, torch.Tensor]) -> None:
        """From here on the reference is the model with this adapter, which `reference` gave. Raises ValueError when it does not fit."""
        wholes = {name: torch.Size(part.whole) for name, part in self._up.parts.items() if is_adapter(name)}
        check_fit(wholes, {name: weight.shape for name, weight in given.items()})
        self._reference = dict(given)

    @contextmanager
    def _adapter(self, given: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Meanwhile the model has this adapter in place of its own."""
        placed = self._up
        own = {name: placed.tensors[name].clone() for name in given}
        self.copying.wait()
        try:
            for name, weight in given.items():
                placed.tensors[name].copy_(weight[placed.parts[name].index])
            yield
        finally:
            for name, weight in own.items():
                placed.tensors[name].copy_(weight)

    # -- gradients ------------------------------------------------------------------------------------------------------------

    def _accumulate_policy(self, batch: Batch, loss_fn: LossFunction, temperature: float, metrics: Metrics) -> None:
        check_temperature(temperature)

        def rows_loss(rows: Batch, micro: MicroBatch, metrics: Metrics) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = self._tokens(rows, micro, temperature)
            return loss_fn(tokens, metrics), tokens.weights

        self._accumulate(batch, rows_loss, metrics)

    def _tokens(self, rows: Batch, micro: MicroBatch, temperature: float) -> TokenBatch:
        logprobs, entropy = self._scorer(micro, temperature)
        return TokenBatch(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=on_device(rows, "rollout_logprobs", self._device),
            advantages=advantages(rows, self._device),
            weights=weights(rows, self._device),
            row=micro.row,
            ref_logprobs=on_device(rows, "ref_logprobs", self._device) if "ref_logprobs" in rows.names else None,
        )
