"""Runner for any other causal model of transformers, with the model's own cache. Called by `builtin.py`.

Slower than `fast.py`, and never silently wrong: a batch holds prompts of one length only, so there is no padding that an architecture
might not mask (recurrent states, learned or relative positions). A batch runs until its last row ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rolemesh.engines.rollout.runner import Prompt, Rows


class GenericRunner:
    """`rows` is the most rows at once. In deterministic mode every forward has exactly that many, whatever is asked for."""

    joins = False

    def __init__(self, model: Any, *, rows: int, deterministic: bool, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._deterministic = deterministic
        self._rows = rows
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        self._cache: Any = None
        self._place = np.zeros(0, np.int64)
        """Row of the model's batch in which each row of the engine lives; rows that ended stay in the batch."""
        self._batch = 0

    def refresh(self, *, keep_rows: bool = False) -> None:
        if not keep_rows:
            self._cache = None

    def forget(self) -> None:
        pass  # no prompt is remembered

    def release(self) -> None:
        self._cache = None

    def prefill(self, prompts: Sequence[Prompt], copies: Sequence[int], first: int, remember: Prompt) -> torch.Tensor:
        if first or len(set(map(len, prompts))) != 1:
            raise ValueError(f"a batch of this runner starts empty and with prompts of one length; found {first} rows running")
        rows = [prompt for prompt, count in zip(prompts, copies, strict=True) for _ in range(count)]
        self._batch = self._rows if self._deterministic else len(rows)
        self._place = np.arange(len(rows))
        ids = torch.tensor(rows + rows[:1] * (self._batch - len(rows)), device=self._device)
        self._cache = None
        return self._forward(ids)

    def decode(self, tokens: Rows) -> torch.Tensor:
        ids = np.zeros((self._batch, 1), np.int64)
        ids[self._place[: len(tokens)], 0] = tokens
        return self._forward(torch.from_numpy(ids).to(self._device), len(tokens))

    def _forward(self, ids: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, **self._last_only)
        self._cache = getattr(output, "past_key_values", None)
        if self._cache is None:
            raise ValueError(f"model of type {self._model.config.model_type!r} returns no cache; the built-in engine cannot run it")
        place = torch.from_numpy(self._place[:rows]).to(self._device)
        logits: torch.Tensor = output.logits[:, -1].index_select(0, place)
        return logits

    def move(self, to: Rows, source: Rows) -> None:
        self._place[to] = self._place[source]
