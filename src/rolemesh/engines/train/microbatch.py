"""Rows of a batch as the tensors of one forward pass: packed or padded inputs, and the flat list of response tokens. Used by the train
engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch

from rolemesh.batch import Batch, token_chunks
from rolemesh.batch.tokens import sampled_tokens, token_column
from rolemesh.engines.train.groups import agree
from rolemesh.engines.train.packing import Ints, Packing
from rolemesh.errors import BatchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Inputs of a forward pass over B rows, and where in its flattened output each of T response tokens is predicted.

    A row is its prompt and response without the last token, which predicts nothing.
    """

    input_ids: torch.Tensor
    """Int64: [1, N] packed, the longest row first; or [B, W], padded on the right with 0."""
    positions: torch.Tensor
    """[T] int64 into the flattened inputs: the position before each response token."""
    targets: torch.Tensor
    """[T] int64: the response tokens, row after row."""
    row: torch.Tensor
    """[T] int64: row of each."""
    packing: Packing | None
    """Where packed rows lie; None when they are padded."""

    @classmethod
    def of(cls, batch: Batch, device: torch.device, *, packed: bool) -> Self:
        """Build from `prompt_ids` and `response_ids`. Raises BatchError for a row without prompt: nothing predicts its first token."""
        prompts, prompt_offsets = batch.ragged("prompt_ids")
        responses, response_offsets = batch.ragged("response_ids")
        prompt_lengths, response_lengths = np.diff(prompt_offsets), np.diff(response_offsets)
        if (prompt_lengths == 0).any():
            raise BatchError(
                f"row (draw, sample) = {tuple(batch.ids[prompt_lengths.argmin()].tolist())} has no prompt token; give it a BOS token"
            )
        lengths = prompt_lengths + response_lengths - 1
        starts, shape, packing = _lay_out(lengths, device, packed=packed)
        tokens = np.zeros(math.prod(shape), dtype=np.int64)
        prompt_row, prompt_at = _places(prompt_lengths, prompt_offsets)
        row, response_at = _places(response_lengths, response_offsets)
        at = prompt_lengths[row] + response_at
        for values, of_row, place in ((prompts, prompt_row, prompt_at), (responses, row, at)):
            kept = place < lengths[of_row]
            tokens[starts[of_row[kept]] + place[kept]] = values[kept]
        arrays = (tokens.reshape(shape), starts[row] + at - 1, responses.astype(np.int64), row)
        input_ids, positions, targets, rows = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays)
        return cls(input_ids=input_ids, positions=positions, targets=targets, row=rows, packing=packing)

    @classmethod
    def smallest(cls, device: torch.device, *, packed: bool) -> Self:
        """One row of two tokens: for a pass that only has to take part in those of others."""
        row = Batch.from_columns({"draw": [0], "sample": [0], "prompt_ids": [[0]], "response_ids": [[0]]})
        return cls.of(row, device, packed=packed)

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's body."""
        found: dict[str, Any] = {"input_ids": self.input_ids}
        if self.packing is not None:
            found |= {"position_ids": self.packing.position_ids, "packing": self.packing}
        return found


def _lay_out(lengths: Ints, device: torch.device, *, packed: bool) -> tuple[Ints, tuple[int, int], Packing | None]:
    """(where each row begins in the flattened inputs, their shape, packing)."""
    if not packed:
        width = int(lengths.max(initial=0))
        return np.arange(len(lengths)) * width, (len(lengths), width), None
    order = np.argsort(-lengths, kind="stable")
    starts = np.empty_like(lengths)
    starts[order] = np.cumsum(lengths[order]) - lengths[order]
    return starts, (1, int(lengths.sum())), Packing.of(lengths[order], device)


def _places(lengths: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    """(row, position within the row) of every element of a ragged column."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - offsets[row]


def micro_batches(batch: Batch, max_tokens: int, *, packed: bool) -> list[list[int]]:
    """Positions of rows with response tokens, cut so that their tokens (padded: rows * longest row) are at most `max_tokens`."""
    rows = np.flatnonzero(batch.lengths("response_ids"))
    return [rows[chunk].tolist() for chunk in token_chunks(batch.token_counts[rows], max_tokens, padded=not packed)]


@dataclass(frozen=True, slots=True)
class Passes:
    """How the rows of a batch go through a model: in micro-batches of `max_tokens`, packed or padded.

    Ranks of the group `shards` gather weights for each pass together, and so all do as many passes as the one with most.
    """

    max_tokens: int
    device: torch.device
    packed: bool
    shards: ProcessGroup | None = None

    def chunks(self, batch: Batch) -> list[list[int]]:
        """Positions of the rows of each pass; none for a pass that only others need."""
        found = micro_batches(batch, self.max_tokens, packed=self.packed)
        return found + [[]] * (agree(self.shards, len(found), self.device) - len(found))

    def micro_batch(self, rows: Batch) -> MicroBatch:
        if not rows.num_rows:
            return MicroBatch.smallest(self.device, packed=self.packed)
        return MicroBatch.of(rows, self.device, packed=self.packed)

    def by_row(self, batch: Batch, forward: Callable[[MicroBatch], torch.Tensor]) -> list[npt.NDArray[np.float32]]:
        """`forward` (one number for each response token of a micro-batch) over all rows: one array a row, in order."""
        found = [np.empty(0, dtype=np.float32)] * batch.num_rows
        for chunk in self.chunks(batch):
            rows = batch.take(chunk)
            numbers = forward(self.micro_batch(rows)).cpu().numpy()
            ends = np.cumsum(rows.lengths("response_ids"))[:-1]
            for index, row in zip(chunk, np.split(numbers, ends), strict=True) if chunk else ():
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
