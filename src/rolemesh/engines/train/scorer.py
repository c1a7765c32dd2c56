"""`Scorer`: log-probabilities under a model that is not trained. Called by the ref role."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rolemesh.batch import Batch
from rolemesh.engines.train.forward import TokenScorer
from rolemesh.engines.train.groups import Groups
from rolemesh.engines.train.layout import Sliceable
from rolemesh.engines.train.microbatch import Passes
from rolemesh.engines.train.packing import use_packed_attention
from rolemesh.engines.train.placed import PlacedModel, Weights, without_weights
from rolemesh.engines.train.tensor_file import Copying, StoredTensor, TensorFile
from rolemesh.engines.train.weights import named_weights


class Scorer:
    """A causal language model, forward only: no gradients, no optimizer, weights in any number format.

    Where it is sharded, all methods are collective: every rank calls them, also one that has no rows.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        micro_batch_tokens: int,
        device: str | torch.device = "cpu",
        compute_dtype: torch.dtype = torch.float32,
        packing: bool = True,
        sharding: Literal["none", "fsdp"] = "none",
        weights: Mapping[str, Sliceable] | None = None,
    ) -> None:
        """Arguments as those of `TrainEngine`: equal ones give the policy's log-probabilities for the policy's weights, to the last bit.
        Raises ValueError for a model that is not causal."""
        self.copying = Copying()
        self._skeleton = without_weights(model.requires_grad_(False).eval())
        self._packing = packing and use_packed_attention(self._skeleton)
        self._max_tokens, self._device, self._dtype = micro_batch_tokens, torch.device(device), compute_dtype
        self._sharding: Literal["none", "fsdp"] = sharding
        self._held = Weights.whole(dict(named_weights(model)) if weights is None else weights, model)
        self._placed: PlacedModel | None = None
        if weights is None:
            self.join(Groups())

    @property
    def _up(self) -> PlacedModel:
        assert self._placed is not None, "join() comes first"
        return self._placed

    @property
    def model(self) -> nn.Module:
        """As it is set up: with this rank's parts of the weights."""
        return self._up.model

    def join(self, groups: Groups) -> None:
        """Be set up on these groups from here on. Raises ValueError when this rank holds parts of another layout."""
        self.leave()
        placed = PlacedModel(
            self._skeleton,
            self._held,
            groups,
            device=self._device,
            dtype=self._dtype,
            sharding=self._sharding,
            activation_checkpointing=False,
        )
        shards = placed.layout.shards
        autocast = torch.float32 if shards is not None else self._dtype  # sharded weights are gathered in the format of the products
        self._scorer = TokenScorer(placed.root, autocast=autocast, device=self._device, packing=self._packing)
        placed.settle()
        self._passes = Passes(self._max_tokens, self._device, self._scorer.packed, shards)
        self._placed, self._held = placed, Weights({}, placed.parts)

    def leave(self) -> None:
        """Let go of the groups, also after a collective that failed; `join` goes on from what this rank holds."""
        if self._placed is not None:
            placed, self._placed = self._placed, None
            self._held = Weights({name: tensor.to("cpu") for name, tensor in placed.tensors.items()}, placed.parts)
            placed.close()
            del self._scorer

    def memory(self) -> int:
        """Bytes of this rank's weights."""
        return sum(tensor.nbytes for tensor in self._up.tensors.values())

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float) -> list[npt.NDArray[np.float32]]:
        """Log-probability of each token of `response_ids` given what stands before it, after temperature; one array a row, in order."""
        return self._scorer.logprobs(batch, temperature, self._passes)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights, whole, as `TrainEngine.named_weights` gives them."""
        return ((name, self._up.gathered(name, tensor)) for name, tensor in self._up.tensors.items())

    def file(self) -> TensorFile:
        """The weights as a file that all ranks write together, with the tensors as they are: see `Replica.files`."""
        return self._up.file({name: (name, tensor) for name, tensor in self._up.tensors.items()})

    @torch.no_grad()
    def load_weights(self, given: Iterable[tuple[str, Tensor | StoredTensor]]) -> None:
        """Take over the weights of a policy, for instance after its supervised warm start, by copying: each of them is needed only until
        the next one comes. Raises ValueError, and changes nothing, when names or shapes do not fit."""
        placed = self._up
        parts = placed.cut(given)
        self.copying.wait()
        for name, part in parts.items():
            placed.tensors[name].copy_(part)
