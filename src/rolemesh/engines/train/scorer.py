"""`Scorer`: log-probabilities under a model that is not trained. Called by the ref role."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from rolemesh.batch import Batch
from rolemesh.engines.train.forward import TokenScorer
from rolemesh.engines.train.fsdp import Root
from rolemesh.engines.train.microbatch import Passes
from rolemesh.engines.train.packing import use_packed_attention
from rolemesh.engines.train.tensor_file import Copying
from rolemesh.engines.train.weights import copy_weights, named_weights


class Scorer:
    """A causal language model, forward only: no gradients, no optimizer, weights in any number format."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        micro_batch_tokens: int,
        device: str | torch.device = "cpu",
        compute_dtype: torch.dtype = torch.float32,
        packing: bool = True,
    ) -> None:
        """Arguments as those of `TrainEngine`: equal ones give the policy's log-probabilities for the policy's weights, to the last bit.
        Raises ValueError for a model that is not causal."""
        self.copying = Copying()
        self.model = model.to(device).requires_grad_(False).eval()
        packing = packing and use_packed_attention(self.model)
        where = torch.device(device)
        self._scorer = TokenScorer(Root(self.model), autocast=compute_dtype, device=where, packing=packing)
        self._passes = Passes(micro_batch_tokens, where, self._scorer.packed)

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float) -> list[npt.NDArray[np.float32]]:
        """Log-probability of each token of `response_ids` given what stands before it, after temperature; one array a row, in order."""
        return self._scorer.logprobs(batch, temperature, self._passes)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights as they are (no copies), as `TrainEngine.named_weights` names them."""
        return named_weights(self.model)

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over the weights of a policy, for instance after its supervised warm start, by copying. Raises ValueError, and changes
        nothing, when names or shapes do not fit."""
        self.copying.wait()
        copy_weights(self.model, given)
