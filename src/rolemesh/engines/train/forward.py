"""Log-probabilities of given tokens under a causal language model, computing the output layer only where it is needed.

Used by the engines. The vocabulary-sized output is needed at the positions before response tokens alone: the body runs on everything,
the head on those.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rolemesh.batch import Batch
from rolemesh.engines.train.fsdp import Root
from rolemesh.engines.train.microbatch import MicroBatch, Passes
from rolemesh.engines.train.probe import probe_tokens, try_rows

HEAD_CHUNK_ELEMENTS: Final = 2**24
"""Logits held at a time (64 MiB in float32, and a few times that during backward). More tokens are done in chunks, each recomputed in
backward, so that memory does not grow with tokens * vocabulary."""


class TokenScorer:
    """Calls a model for the log-probability and entropy of the response tokens of micro-batches.

    The model is in eval mode for good: dropout would make the trainer's probabilities differ from the engine's. No attention mask is
    passed, because right padding cannot reach earlier positions of a causal model; that the model is causal is checked once.
    """

    def __init__(self, root: Root, *, autocast: torch.dtype, device: torch.device, packing: bool, entropy_gradient: bool = False) -> None:
        """Raises ValueError for a model that is not causal. `packing` is for a model with packed attention; it is given up, with a
        note, when packed rows come out otherwise than alone."""
        self._root, self._model = root, root.model
        self._autocast, self._device = autocast, device
        self._entropy_gradient = entropy_gradient
        with torch.no_grad():
            probe = probe_tokens(self._model, device)
            self._vocabulary, self._plain = root(self._look, probe)
            self.packed = try_rows(self._model, lambda inputs: root(self._logits, inputs), probe, packing=packing)

    @property
    def head_is_separate(self) -> bool:
        """Whether the head is a plain layer after the body, so that it can be computed for some positions only."""
        return self._plain is not None

    def __call__(self, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-probabilities [T], entropy [T]) of `micro.targets`, after temperature, in float32."""
        with torch.autocast(self._device.type, dtype=self._autocast, enabled=self._autocast != torch.float32):
            return cast(tuple[Tensor, Tensor], self._root(self._forward, micro, temperature))

    def logprobs(self, batch: Batch, temperature: float, passes: Passes) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities of the response tokens of all rows; one array a row, in order."""
        check_temperature(temperature)
        return passes.by_row(batch, lambda micro: self(micro, temperature)[0])

    def _look(self, probe: Tensor) -> tuple[int, tuple[nn.Module, nn.Module] | None]:
        logits = self._logits({"input_ids": probe})
        return logits.shape[-1], _plain_head(self._model, probe, logits)

    def _logits(self, inputs: dict[str, Any]) -> Tensor:
        return cast(Tensor, self._model(**inputs, use_cache=False).logits)

    def _forward(self, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        if self._plain is None:
            logits = self._logits(micro.inputs).flatten(0, 1)[micro.positions]
            return _logprobs_and_entropy(logits, micro.targets, temperature, entropy_gradient=self._entropy_gradient)
        body, head = self._plain
        hidden = last_hidden(body, micro.inputs).flatten(0, 1)[micro.positions]
        return self._through_head(head, hidden, micro.targets, temperature)

    def _through_head(self, head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return _logprobs_and_entropy(head(hidden), targets, temperature, entropy_gradient=self._entropy_gradient)

        size = max(1, HEAD_CHUNK_ELEMENTS // self._vocabulary)
        if len(targets) <= size:
            return score(hidden, targets)
        if torch.is_grad_enabled():
            score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
        parts = [score(*part) for part in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)]
        logprobs, entropy = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropy)


def _logprobs_and_entropy(logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
    """Of logits [T, V]: log softmax(logits / temperature) at the targets [T], and the entropy [T] of that distribution."""
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    logprobs = scaled.log_softmax(dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # a forbidden token has log-probability -inf and probability 0; its product must be 0, not nan
        entropy = -(logprobs.exp() * logprobs.clamp_min(torch.finfo(torch.float32).min)).sum(dim=-1)
    return logprobs.gather(-1, targets[:, None]).sum(dim=-1), entropy  # the sum of one: sharded roots may not return views


def last_hidden(body: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return cast(Tensor, body(**inputs, use_cache=False).last_hidden_state)


def _plain_head(model: nn.Module, probe: Tensor, logits: Tensor) -> tuple[nn.Module, nn.Module] | None:
    """(body, head) when head(body(x)) is bit for bit what the model computes; None for a model that does more, such as scale its logits.

    Trying it is more reliable than a list of architectures.
    """
    body, head = getattr(model, "base_model", None), cast(Any, model).get_output_embeddings()
    if not isinstance(body, nn.Module) or body is model or not isinstance(head, nn.Module):
        return None
    return (body, head) if torch.equal(head(last_hidden(body, {"input_ids": probe})), logits) else None


def check_temperature(temperature: float) -> None:
    """Raise ValueError for a temperature that log-probabilities cannot be divided by."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"the temperature of training must be above 0, found {temperature}; 0 (greedy) is for evaluation only")
