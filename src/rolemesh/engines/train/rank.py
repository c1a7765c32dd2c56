"""`RankEngine`: one rank's part of a model, set up on some groups or taken down. Base of the engines of actor, critic and reference.

A model that is taken down has this rank's parts of its weights in host memory, and a copy without weights from which it is built anew.
That is what `join` begins with, because a module that an exception passed through, or whose groups are gone, is never used again.
"""

from __future__ import annotations

import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from rolemesh.engines.train.groups import Groups
from rolemesh.engines.train.layout import Sliceable
from rolemesh.engines.train.microbatch import Passes
from rolemesh.engines.train.packing import use_packed_attention
from rolemesh.engines.train.placed import PlacedModel, Weights, without_weights
from rolemesh.engines.train.tensor_file import Copying, StoredTensor, TensorFile
from rolemesh.engines.train.weights import named_weights

logger = logging.getLogger(__name__)


class RankEngine(ABC):
    """A model in eval mode for good: whole on each rank, or sharded, or split over rows of ranks.

    Where several ranks share a model, all methods but `leave` are collective: every rank calls them, also one that has no rows.
    """

    _passes: Passes

    def __init__(
        self,
        model: nn.Module,
        *,
        micro_batch_tokens: int,
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
        then the model's need no contents, and it is set up by `join`. Raises ValueError for a model that is not causal.
        """
        self.groups, self.copying = Groups(), Copying()
        self._device, self._max_tokens, self._compute_dtype = torch.device(device), micro_batch_tokens, compute_dtype
        self._sharding: Literal["none", "fsdp"] = sharding
        self._activation_checkpointing = activation_checkpointing
        self._skeleton = without_weights(model.eval())
        self._packing = packing and use_packed_attention(self._language_model(self._skeleton))
        if packing and not self._packing:
            logger.warning("the attention of %s cannot be replaced, so its rows are padded", type(model).__name__)
        self._held = Weights.whole(dict(named_weights(model)) if weights is None else weights, model)
        self._placed: PlacedModel | None = None
        if weights is None:
            self.wake()

    # -- for subclasses -------------------------------------------------------------------------------------------------------

    def _language_model(self, model: nn.Module) -> nn.Module:
        """The model of transformers inside `model`."""
        return model

    @abstractmethod
    def _try(self, placed: PlacedModel, *, packing: bool, autocast: torch.dtype) -> bool:
        """Take up a model that was just set up, with a first pass. Returns whether its rows are packed; raises ValueError when it cannot
        be used."""

    @abstractmethod
    def _let_go(self) -> None:
        """Drop what came with `_try`; the model is about to be taken down."""

    # -- set up and taken down ------------------------------------------------------------------------------------------------

    @property
    def _up(self) -> PlacedModel:
        self.wake()
        assert self._placed is not None
        return self._placed

    @property
    def skeleton(self) -> nn.Module:
        """The whole model without contents; also when it is taken down."""
        return self._skeleton

    @property
    def model(self) -> nn.Module:
        """As it is set up: with this rank's parts of the weights."""
        return self._up.model

    def join(self, groups: Groups) -> None:
        """Be set up on these groups from here on. Raises ValueError when this rank holds parts of another layout."""
        self.leave()
        self.groups = groups
        self.wake()

    def leave(self) -> None:
        """Let go of the groups, also after a collective that failed; `join` goes on from what this rank holds."""
        self._take_down()
        self.groups = Groups()

    def _take_down(self) -> None:
        """Idempotent. A copy for a checkpoint is waited for, as it holds what is to be freed; raises DeadlineExceeded as `Copying.wait`."""
        if self._placed is None:
            return
        self.copying.wait()
        self._let_go()
        self._held = Weights({name: tensor.to("cpu") for name, tensor in self._placed.tensors.items()}, self._placed.parts)
        self._placed.close()
        self._placed = None
        if self._device.type == "cuda":
            gc.collect()  # modules lie in cycles
            torch.cuda.empty_cache()  # other processes of the device have no use for what this one's allocator keeps

    def wake(self) -> None:
        """Be set up again as before. Idempotent; whatever needs the model does so."""
        if self._placed is not None:
            return
        placed = PlacedModel(
            self._skeleton,
            self._held,
            self.groups,
            device=self._device,
            dtype=self._compute_dtype,
            sharding=self._sharding,
            activation_checkpointing=self._activation_checkpointing,
        )
        # Sharded weights are gathered in the format of the products, so there is nothing to cast.
        autocast = torch.float32 if placed.layout.shards is not None else self._compute_dtype
        self._packing = self._try(placed, packing=self._packing, autocast=autocast)
        placed.settle()
        self._passes = Passes(self._max_tokens, self._device, self._packing, placed.layout.shards)
        self._placed, self._held = placed, Weights({}, self._held.parts)

    # -- weights --------------------------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers, whole, one after the other; tensors that are tied once under their first name. Weights that
        this rank has the whole of come as they are, without a copy."""
        return ((name, self._whole(name)) for name in self._up.tensors)

    def _whole(self, name: str) -> Tensor:
        return self._up.gathered(name, self._up.tensors[name])

    def file(self) -> TensorFile:
        """The weights as a file that all ranks write together, this rank with the tensors as they are: who reads them while the engine is
        used holds `copying`."""
        return self._up.file({name: (name, tensor) for name, tensor in self._up.tensors.items()})

    @torch.no_grad()
    def _take(self, given: Iterable[tuple[str, Tensor | StoredTensor]], *, keep: Callable[[str], bool] = lambda name: False) -> None:
        """Copy whole weights, by the names that `named_weights` gives, each of which is needed only until the next one comes. Those of
        which `keep` is true must not come, and stay. Raises ValueError, and changes nothing, when names or shapes do not fit."""
        parts = self._up.cut(given, keep=keep)
        self.copying.wait()
        for name, part in parts.items():
            self._up.tensors[name].copy_(part)
