"""What an engine needs of a model: logits for the next token of many rows. Two runners exist, `fast.py` and `generic.py`.

Rows are numbered 0..n-1 without gaps. The engine appends rows with `prefill`, advances all of them with `decode`, and closes gaps
with `move`. It calls these in inference mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

_TRIES, _TRIED_TOKENS = 4, 8
Prompt = tuple[int, ...]
Rows = npt.NDArray[np.int64]


class Runner(Protocol):
    """Computes logits. Keys and values are kept per row until the row is overwritten or the weights change."""

    joins: bool
    """Whether `prefill` may add rows beside running ones, of any prompt length. If not: only to an empty batch, of equal lengths."""

    def refresh(self, *, keep_rows: bool = False) -> None:
        """The parameters changed: take them over and forget everything computed with the old ones, but for keys and values of rows that
        are to go on."""
        ...

    def forget(self) -> None:
        """Forget the remembered prompt."""
        ...

    def release(self) -> None:
        """Free all memory, also that of parameters taken over; `refresh` takes them over again."""
        ...

    def prefill(self, prompts: Sequence[Prompt], copies: Sequence[int], first: int, remember: Prompt) -> torch.Tensor:
        """Run each of different prompts once and give it `copies` rows, from row `first` on. Returns logits [sum(copies), vocabulary].
        `remember` is the prompt of which more copies are likely to be asked for next."""
        ...

    def decode(self, tokens: Rows) -> torch.Tensor:
        """Append one token to each of the rows 0..len(tokens)-1. Returns logits [len(tokens), vocabulary], valid until the next call."""
        ...

    def move(self, to: Rows, source: Rows) -> None:
        """Rows `to` become what rows `source` are."""
        ...


def context_limit(model: Any) -> int | None:
    """Most tokens, prompt and answer together, that the model can take; None when its config does not say."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def vocabulary_size(model: Any) -> int:
    """Number of logits."""
    head = model.get_output_embeddings()
    return int(model.config.vocab_size if head is None else head.weight.shape[0])


@torch.inference_mode()
def depends_on_neighbours(model: Any, device: torch.device) -> bool:
    """Whether the bits of a row can depend on the rows beside it, though shapes are the same. So it is with a mixture of experts, where the
    tokens that chose an expert are one product, whose shape is their number. Found by the names of parameters, and by trying."""
    if any("expert" in name or "moe" in name for name, _ in model.named_parameters()):
        return True
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, _TRIED_TOKENS):
        rows = torch.randint(vocabulary_size(model), (_TRIES, 2, tokens), generator=generator)
        rows[:, 0] = rows[0, 0]
        found = [model(row.to(device)).logits[0] for row in rows]
        if not all(torch.equal(one, found[0]) for one in found[1:]):
            return True
    return False


@torch.inference_mode()
def largest_gap(runner: Runner, model: Any, tokens: int, device: torch.device) -> tuple[float, float]:
    """Largest difference between the runner's logits and the model's own forward on two short random rows, and the largest logit.

    The rows share a prompt of half of `tokens` and then differ, so prefill, copying and decoding are all compared."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(vocabulary_size(model), (2, tokens), generator=generator)
    shared = (tokens + 1) // 2
    rows[1, :shared] = rows[0, :shared]
    expected = model(rows.to(device)).logits.float()
    prompt = tuple(rows[0, :shared].tolist())
    found = [runner.prefill([prompt], [2], 0, prompt).clone()]
    found += [runner.decode(rows[:, position].numpy()).clone() for position in range(shared, tokens)]
    runner.refresh()
    gap = (torch.stack(found, 1).float() - expected[:, shared - 1 :]).abs().max()
    return float(gap), float(expected.abs().max())
