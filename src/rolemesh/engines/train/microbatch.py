"""Rows of a batch as the tensors of one forward pass: padded inputs, and the flat list of response tokens. Used by the train engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from rolemesh.batch import Batch
from rolemesh.errors import BatchError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Inputs of a forward pass over B rows, and where in its flattened output each of T response tokens is predicted."""

    input_ids: torch.Tensor
    """[B, W] int64: prompt and response without the last token, which predicts nothing; padded on the right with 0."""
    positions: torch.Tensor
    """[T] int64 into [B * W]: the position before each response token."""
    targets: torch.Tensor
    """[T] int64: the response tokens, row after row."""
    row: torch.Tensor
    """[T] int64: row of each."""

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Self:
        """Build from `prompt_ids` and `response_ids`. Raises BatchError for a row without prompt: nothing predicts its first token."""
        prompts, prompt_offsets = batch.ragged("prompt_ids")
        responses, response_offsets = batch.ragged("response_ids")
        prompt_lengths, response_lengths = np.diff(prompt_offsets), np.diff(response_offsets)
        if (prompt_lengths == 0).any():
            raise BatchError(
                f"row (draw, sample) = {tuple(batch.ids[prompt_lengths.argmin()].tolist())} has no prompt token; give it a BOS token"
            )
        lengths = prompt_lengths + response_lengths
        width = int(lengths.max(initial=1))
        tokens = np.zeros((len(lengths), width), dtype=np.int64)
        prompt_row, prompt_at = _places(prompt_lengths, prompt_offsets)
        tokens[prompt_row, prompt_at] = prompts
        row, response_at = _places(response_lengths, response_offsets)
        at = prompt_lengths[row] + response_at
        tokens[row, at] = responses
        arrays = (tokens[:, : width - 1], row * (width - 1) + at - 1, responses.astype(np.int64), row)
        input_ids, positions, targets, rows = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays)
        return cls(input_ids=input_ids, positions=positions, targets=targets, row=rows)


def _places(lengths: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    """(row, position within the row) of every element of a ragged column."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - offsets[row]


def policy_columns(batch: Batch, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(old_logprobs [T], advantages [T]) of the response tokens. Raises BatchError when a row's log-probabilities do not fit its tokens."""
    old, offsets = batch.ragged("rollout_logprobs")
    lengths, expected = np.diff(offsets), batch.lengths("response_ids")
    wrong = np.flatnonzero(lengths != expected)
    if len(wrong):
        raise BatchError(
            f"row (draw, sample) = {tuple(batch.ids[wrong[0]].tolist())} has {lengths[wrong[0]]} rollout_logprobs for "
            f"{expected[wrong[0]]} response_ids; the engine must return one for each sampled token"
        )
    return torch.from_numpy(old).to(row.device), per_token(batch, "advantage", row)


def per_token(batch: Batch, column: str, row: torch.Tensor) -> torch.Tensor:
    """A scalar column repeated for every token: float32 [T]."""
    return torch.from_numpy(np.asarray(batch.scalars(column), dtype=np.float32)).to(row.device)[row]
