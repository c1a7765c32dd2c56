"""Rows of a batch as the tensors of one forward pass: padded inputs, and the flat list of response tokens. Used by the train engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from rolemesh.batch import Batch, token_chunks
from rolemesh.batch.tokens import sampled_tokens, token_column
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


def micro_batches(batch: Batch, max_tokens: int) -> list[list[int]]:
    """Positions of rows with response tokens, cut so that rows * longest row <= `max_tokens`."""
    rows = np.flatnonzero(batch.lengths("response_ids"))
    return [rows[chunk].tolist() for chunk in token_chunks(batch.token_counts[rows], max_tokens)]


def by_row(
    batch: Batch, max_tokens: int, device: torch.device, forward: Callable[[MicroBatch], torch.Tensor]
) -> list[npt.NDArray[np.float32]]:
    """`forward` (one number for each response token of a micro-batch) over all rows: one array a row, in order."""
    found = [np.empty(0, dtype=np.float32)] * batch.num_rows
    for chunk in micro_batches(batch, max_tokens):
        rows = batch.take(chunk)
        numbers = forward(MicroBatch.of(rows, device)).cpu().numpy()
        ends = np.cumsum(rows.lengths("response_ids"))[:-1]
        for index, row in zip(chunk, np.split(numbers, ends), strict=True):
            found[index] = row
    return found


def on_device(batch: Batch, column: str, device: torch.device) -> torch.Tensor:
    """A column with one number for each response token: float32 [T]. Raises BatchError when it does not fit the tokens of a row."""
    return torch.from_numpy(token_column(batch, column)).to(device)


def weights(batch: Batch, device: torch.device) -> torch.Tensor:
    """Weight of each response token in the loss, float32 [T]: the row's `token_weight`, and 0 for tokens that the policy did not sample.

    The only mask of a loss, for the policy and the critic alike."""
    of_row = np.repeat(np.asarray(batch.scalars("token_weight"), dtype=np.float32), batch.lengths("response_ids"))
    return torch.from_numpy(np.where(sampled_tokens(batch), of_row, np.float32(0))).to(device)


def advantages(batch: Batch, device: torch.device) -> torch.Tensor:
    """Advantage of each response token, float32 [T]: of tokens where the batch has them, else the row's for all its tokens."""
    if "advantages" in batch.names:
        return on_device(batch, "advantages", device)
    of_row = np.asarray(batch.scalars("advantage"), dtype=np.float32)
    return torch.from_numpy(np.repeat(of_row, batch.lengths("response_ids"))).to(device)
