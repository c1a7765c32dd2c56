"""`Scorer`: log-probabilities under a model that is not trained. Called by the ref role."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rolemesh.batch import Batch
from rolemesh.engines.train.forward import TokenScorer
from rolemesh.engines.train.placed import PlacedModel
from rolemesh.engines.train.rank import RankEngine
from rolemesh.engines.train.tensor_file import StoredTensor


class Scorer(RankEngine):
    """A causal language model, forward only: no gradients, no optimizer, weights in any number format."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        """`options` are those of `RankEngine`: with those of a `TrainEngine` it gives the policy's log-probabilities for the policy's
        weights, to the last bit."""
        super().__init__(model.requires_grad_(False), **options)

    def _try(self, placed: PlacedModel, *, packing: bool, autocast: torch.dtype) -> bool:
        self._scorer = TokenScorer(placed.root, autocast=autocast, device=self._device, packing=packing)
        return self._scorer.packed

    def _let_go(self) -> None:
        del self._scorer

    def memory(self) -> int:
        """Bytes of this rank's weights."""
        return sum(tensor.nbytes for tensor in self._up.tensors.values())

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float) -> list[npt.NDArray[np.float32]]:
        """Log-probability of each token of `response_ids` given what stands before it, after temperature; one array a row, in order."""
        self.wake()
        return self._scorer.logprobs(batch, temperature, self._passes)

    def load_weights(self, given: Iterable[tuple[str, Tensor | StoredTensor]]) -> None:
        """Take over the weights of a policy, for instance after its supervised warm start, by copying: each of them is needed only until
        the next one comes. Raises ValueError, and changes nothing, when names or shapes do not fit."""
        self._take(given)
