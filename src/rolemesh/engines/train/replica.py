"""`Replica`: a model under training on the ranks of a group - gradients, optimizer steps, state. Base of the engines of actor and critic.

Every rank gets its own rows of each mini-batch, or with tensor parallelism every row of ranks. Because loss weights are normalised over
the whole mini-batch beforehand, a rank adds up the gradients of its micro-batches, the ranks add up theirs, and the sum is the gradient
of the mini-batch whatever the cut.

A replica is either set up on some groups or taken down: then it holds its parts of weights and moments in host memory, and a model
without weights from which it is built anew. That is what `sleep` does, and what `join` begins with, because a module that an exception
passed through, or whose groups are gone, is never used again.
"""

from __future__ import annotations

import gc
import logging
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rolemesh.batch import Batch
from rolemesh.engines.train.groups import Groups, all_reduce
from rolemesh.engines.train.layout import Part, Sliceable
from rolemesh.engines.train.microbatch import MicroBatch, Passes
from rolemesh.engines.train.optimizer import OptimizerSettings
from rolemesh.engines.train.packing import use_packed_attention
from rolemesh.engines.train.placed import PlacedModel, Weights, without_weights
from rolemesh.engines.train.tensor_file import Copying, StoredTensor, TensorFile, stored_tensors
from rolemesh.engines.train.weights import check_fit, named_weights, shapes
from rolemesh.observe import Metrics

logger = logging.getLogger(__name__)

RowsLoss = Callable[[Batch, MicroBatch, Metrics], tuple[Tensor, Tensor]]
"""Rows of a micro-batch, and their inputs -> (scalar loss, weight [T] of each response token)."""
Moments = dict[str, dict[str, Tensor]]
"""State of the optimizer by parameter name."""


class Replica(ABC):
    """A float32 model: whole on each rank, or sharded, or split over rows of ranks.

    Where several ranks share a model or its training, all methods but `sleep` and `memory` are collective: every rank calls them, also
    one that has no rows.
    """

    _passes: Passes

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerSettings,
        micro_batch_tokens: int,
        groups: Groups | None = None,
        device: str | torch.device = "cpu",
        compute_dtype: torch.dtype = torch.float32,
        packing: bool = True,
        sharding: Literal["none", "fsdp"] = "none",
        activation_checkpointing: bool = False,
        weights: Mapping[str, Sliceable] | None = None,
    ) -> None:
        """`micro_batch_tokens` bounds the tokens of one forward pass; a longer row is a pass of its own. `compute_dtype` bfloat16 runs
        matrix products in it, on float32 weights. With `packing` rows lie one behind the other instead of padded side by side, where
        the model can do so. `sharding` fsdp spreads weights, gradients and moments over the ranks of a column.
        `activation_checkpointing` keeps the inputs of each block alone and computes the rest again in backward.

        The model's own weights are taken over without a copy, unless `weights` gives them, in float32, to be read in parts by name:
        then the model's need no contents, and it is set up by `join`. Raises ValueError for weights in another format, or none to train.
        """
        _check_parameters(model)
        self.settings, self.step, self.groups = optimizer, 0, groups or Groups()
        self.copying = Copying()
        self._device, self._max_tokens = torch.device(device), micro_batch_tokens
        self._options: dict[str, Any] = {"sharding": sharding, "activation_checkpointing": activation_checkpointing}
        self._compute_dtype = compute_dtype
        self._skeleton = without_weights(model.eval())
        self._packing = packing and use_packed_attention(self._language_model(self._skeleton))
        if packing and not self._packing:
            logger.warning("the attention of %s cannot be replaced, so its rows are padded", type(model).__name__)
        self._held = Weights.whole(dict(named_weights(model)) if weights is None else weights, model)
        self._held_moments: Moments = {}
        self._placed: PlacedModel | None = None
        if weights is None:
            self.wake()

    # -- set up and taken down ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _language_model(self, model: nn.Module) -> nn.Module:
        """The model of transformers inside `model`."""

    @abstractmethod
    def _try(self, placed: PlacedModel, *, packing: bool, autocast: torch.dtype) -> bool:
        """Take up a model that was just set up, with a first pass. Returns whether its rows are packed; raises ValueError when it cannot
        be trained."""

    @abstractmethod
    def _let_go(self) -> None:
        """Drop what `_try` took up."""

    @abstractmethod
    def _forward(self, micro: MicroBatch) -> Tensor:
        """A number for each response token, with a gradient."""

    @property
    def _up(self) -> PlacedModel:
        self.wake()
        assert self._placed is not None
        return self._placed

    @property
    def skeleton(self) -> nn.Module:
        """The whole model as it is trained, without contents; also asleep."""
        return self._skeleton

    @property
    def model(self) -> nn.Module:
        """As it is set up: with this rank's parts of the weights."""
        return self._up.model

    def join(self, groups: Groups) -> None:
        """Be set up on these groups from here on. Raises ValueError when the ranks hold other weights or steps than one another, or this
        one parts of another layout."""
        self.leave()
        self.groups = groups
        self.wake()
        self.check_replicas()

    def leave(self) -> None:
        """Let go of the groups, also after a collective that failed."""
        self.sleep()
        self.groups = Groups()

    def sleep(self) -> int:
        """Take the model down: weights and moments go to host memory, gradients and what can be computed again are dropped. Returns the
        bytes that this freed on the device. Idempotent; whatever needs the model wakes it. A copy for a checkpoint is waited for, as it
        holds what is to be freed; raises DeadlineExceeded as `Copying.wait`."""
        placed, before = self._placed, sum(self.memory().values())
        if placed is None:
            return 0
        self.copying.wait()
        self._held = Weights({name: tensor.to("cpu") for name, tensor in placed.tensors.items()}, placed.parts)
        self._held_moments = {name: {key: value.to("cpu") for key, value in entry.items()} for name, entry in self._moments().items()}
        placed.close()
        self._placed = placed = None
        del self._optimizer
        self._let_go()
        if self._device.type == "cuda":
            gc.collect()  # modules lie in cycles
            torch.cuda.empty_cache()  # other processes of the device have no use for what this one's allocator keeps
        return before - (self.memory()["asleep"] if self._device.type == "cpu" else 0)

    def wake(self) -> None:
        """Be set up again as before `sleep`. Idempotent."""
        if self._placed is not None:
            return
        options: dict[str, Any] = {"device": self._device, "dtype": self._compute_dtype, **self._options}
        placed = PlacedModel(self._skeleton, self._held, self.groups, **options)
        # Sharded weights are gathered in the format of the products, so there is nothing to cast.
        autocast = torch.float32 if placed.layout.shards is not None else self._compute_dtype
        self._packing = self._try(placed, packing=self._packing, autocast=autocast)
        placed.settle()
        self._passes = Passes(self._max_tokens, self._device, self._packing, placed.layout.shards)
        before = self._held.parts
        self._placed, self._held = placed, Weights({}, before)
        self._optimizer = self.settings.build(placed.parameters.values())
        self._take_moments(self._held_moments, before)
        self._held_moments = {}

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's tensors: `weights`, `gradients` and `optimizer` on its device, `asleep` in host memory."""
        placed, moments = self._placed, self._held_moments
        weights = [block for block in self._held.blocks.values() if isinstance(block, Tensor)]
        found = {
            "weights": 0,
            "gradients": 0,
            "optimizer": 0,
            "asleep": _bytes(weights) + sum(_bytes(m.values()) for m in moments.values()),
        }
        if placed is not None:
            found |= {"weights": _bytes(placed.tensors.values()), "gradients": _bytes(placed.gradients.named().values())}
            found["optimizer"] = sum(_bytes(entry.values()) for entry in self._moments().values())
        return found

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

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers, whole, one after the other; tensors that are tied once under their first name. Weights that
        this rank has the whole of come as they are, without a copy."""
        return ((name, self._whole(name)) for name in self._up.tensors)

    def _whole(self, name: str) -> Tensor:
        return self._up.gathered(name, self._up.tensors[name])

    def files(self) -> tuple[TensorFile, TensorFile]:
        """Weights and optimizer state as files that all ranks write together, this rank with the tensors as they are: who reads them while
        the engine is used holds `copying`. With `step` they are everything that the next update depends on: nothing here draws random
        numbers, and the learning rate is a function of the step."""
        moments = {f"{key}.{name}": (name, value) for name, entry in self._moments().items() for key, value in entry.items()}
        return self._weights_file(), self._up.file(moments)

    def _weights_file(self) -> TensorFile:
        return self._up.file({name: (name, tensor) for name, tensor in self._up.tensors.items()})

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
        self._take_stored(given)
        self._optimizer.state.clear()
        self._take_moments(moments, {name: Part.all_of(tuple(whole)) for name, whole in wholes.items()})
        self.step = step

    def _take_stored(self, given: Mapping[str, StoredTensor]) -> None:
        self.load_weights(given)

    @torch.no_grad()
    def load_weights(self, given: Mapping[str, Tensor | StoredTensor], *, keep: Callable[[str], bool] = lambda name: False) -> None:
        """Copy whole weights, by the names that `named_weights` gives; those of which `keep` is true stay as they are. Raises ValueError,
        and changes nothing, when they do not fit."""
        parts = {name: part for name, part in self._up.parts.items() if not keep(name)}
        check_fit({name: torch.Size(part.whole) for name, part in parts.items()}, shapes(given))
        self.copying.wait()
        for name, part in parts.items():
            self._up.tensors[name].copy_(given[name][part.index])

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
        low, high = (torch.tensor([checksum], device=self._device) for _ in range(2))
        all_reduce(group, low, "min")
        all_reduce(group, high, "max")
        if not torch.equal(low, high):
            raise ValueError(
                f"the workers hold different weights (checksums from {int(low):#010x} to {int(high):#010x}, here {checksum:#010x}); "
                "load the same model folder, seed or state in all of them"
            )


def _checksum(tensors: Iterator[Tensor] | Any) -> int:
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data, found)
    return found


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


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
