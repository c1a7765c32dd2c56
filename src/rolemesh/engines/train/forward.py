"""Log-probabilities of given tokens under a causal language model, computing the output layer only where it is needed.

Used by the engines. Of a padded batch the vocabulary-sized output is needed at the positions before response tokens alone: the
body runs on everything, the head on those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rolemesh.batch import Batch
from rolemesh.engines.train.microbatch import MicroBatch, by_row

HEAD_CHUNK_ELEMENTS: Final = 2**24
"""Logits held at a time (64 MiB in float32, and a few times that during backward). More tokens are done in chunks, each recomputed in
backward, so that memory does not grow with tokens * vocabulary."""


class TokenScorer:
    """Calls a model for the log-probability and entropy of the response tokens of micro-batches.

    The model is put into eval mode for good: dropout would make the trainer's probabilities differ from the engine's. No attention
    mask is passed, because right padding cannot reach earlier positions of a causal model; that the model is causal is checked once.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype, *, entropy_gradient: bool = False) -> None:
        self._model = model.eval()
        self._compute_dtype = compute_dtype
        self._entropy_gradient = entropy_gradient
        self._device = next(model.parameters()).device
        with torch.no_grad():
            probe = probe_tokens(model, self._device)
            logits = _logits(model, probe)
            self._vocabulary = logits.shape[-1]
            self._plain = _plain_head(model, probe, logits)
            check_causal(model, partial(_logits, model), probe, logits)

    @property
    def head_is_separate(self) -> bool:
        """Whether the head is a plain layer after the body, so that it can be computed for some positions only."""
        return self._plain is not None

    def __call__(self, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-probabilities [T], entropy [T]) of `micro.targets`, after temperature, in float32."""
        with torch.autocast(self._device.type, dtype=self._compute_dtype, enabled=self._compute_dtype != torch.float32):
            if self._plain is None:
                logits = _logits(self._model, micro.input_ids)
                return self._score(logits.flatten(0, 1)[micro.positions], micro.targets, temperature)
            body, head = self._plain
            hidden = last_hidden(body, micro.input_ids).flatten(0, 1)[micro.positions]
            return self._through_head(head, hidden, micro.targets, temperature)

    def logprobs(self, batch: Batch, temperature: float, max_tokens: int) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities of the response tokens of all rows, in passes of up to `max_tokens`; one array a row, in order."""
        check_temperature(temperature)
        return by_row(batch, max_tokens, self._device, lambda micro: self(micro, temperature)[0])

    def _through_head(self, head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return self._score(head(hidden), targets, temperature)

        size = max(1, HEAD_CHUNK_ELEMENTS // self._vocabulary)
        if len(targets) <= size:
            return score(hidden, targets)
        parts = [_recomputed(score, *part) for part in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)]
        logprobs, entropy = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropy)

    def _score(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return _logprobs_and_entropy(logits, targets, temperature, entropy_gradient=self._entropy_gradient)


def _recomputed(score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled():
        return score(hidden, targets)
    return cast(tuple[Tensor, Tensor], checkpoint(score, hidden, targets, use_reentrant=False, preserve_rng_state=False))


def _logprobs_and_entropy(logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
    """Of logits [T, V]: log softmax(logits / temperature) at the targets [T], and the entropy [T] of that distribution."""
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    logprobs = scaled.log_softmax(dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # a forbidden token has log-probability -inf and probability 0; its product must be 0, not nan
        entropy = -(logprobs.exp() * logprobs.clamp_min(torch.finfo(torch.float32).min)).sum(dim=-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def _logits(model: nn.Module, input_ids: Tensor) -> Tensor:
    return cast(Tensor, model(input_ids=input_ids, use_cache=False).logits)


def last_hidden(body: nn.Module, input_ids: Tensor) -> Tensor:
    return cast(Tensor, body(input_ids=input_ids, use_cache=False).last_hidden_state)


def probe_tokens(model: nn.Module, device: torch.device) -> Tensor:
    """A few tokens [1, 8] to try a model with."""
    return torch.arange(8, device=device)[None] % int(cast(Any, model).get_input_embeddings().num_embeddings)


def _plain_head(model: nn.Module, probe: Tensor, logits: Tensor) -> tuple[nn.Module, nn.Module] | None:
    """(body, head) when head(body(x)) is bit for bit what the model computes; None for a model that does more, such as scale its logits.

    Trying it is more reliable than a list of architectures.
    """
    body, head = getattr(model, "base_model", None), cast(Any, model).get_output_embeddings()
    if not isinstance(body, nn.Module) or body is model or not isinstance(head, nn.Module):
        return None
    return (body, head) if torch.equal(head(last_hidden(body, probe)), logits) else None


def check_causal(model: nn.Module, forward: Callable[[Tensor], Tensor], probe: Tensor, found: Tensor) -> None:
    """Raise ValueError when another last token changes what `forward` gives at earlier positions; `found` is forward(probe)."""
    other = probe.clone()
    other[0, -1] = probe[0, -2]
    if not torch.allclose(forward(other)[:, :-1], found[:, :-1], rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"{type(model).__name__} is not causal: a later token changed the prediction of an earlier one; use a causal model"
        )


def check_temperature(temperature: float) -> None:
    """Raise ValueError for a temperature that log-probabilities cannot be divided by."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"the temperature of training must be above 0, found {temperature}; 0 (greedy) is for evaluation only")
