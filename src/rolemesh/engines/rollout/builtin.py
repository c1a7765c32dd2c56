"""The built-in rollout engine: continuous batching over a transformers model that it owns. Called by the rollout role.

A step either admits queued requests (one prefill for equal prompts) or decodes one token for every running
row. Rows stay gapless: when sequences end, rows from the tail take their places, so a step costs what is running and no more.

Fast mode batches as it likes; logits then differ in their last bits with the company a row keeps. Deterministic mode gives every
operation a shape that depends on the request alone (one-by-one prefill, decoding blocks of a fixed number of rows over all columns),
so that with counter-based sampling an answer is the same, bit for bit, in any order, beside any neighbours, on any number of engines,
and on the fast path with any number of slots.

Sequences can go on over a change of weights: they keep the keys and values that the old ones made, as if the prompt and the tokens so
far had been read by the old weights. In deterministic mode such an answer depends only on its request, the weights, and the number of
tokens that it had when they changed; that number depends on when the weights came.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from rolemesh.engines.rollout.checks import check_requests
from rolemesh.engines.rollout.fast import FastRunner, why_not_fast
from rolemesh.engines.rollout.generic import GenericRunner
from rolemesh.engines.rollout.lifecycle import Lifecycle
from rolemesh.engines.rollout.parameters import ParameterTable
from rolemesh.engines.rollout.rows import Pending, RowTable
from rolemesh.engines.rollout.runner import Runner, context_limit, largest_gap, vocabulary_size
from rolemesh.engines.rollout.sampling import choose
from rolemesh.protocols.engine import Completion, Request, Sampling, WeightSpan

_log = logging.getLogger(__name__)
_ADMIT_SHARE = 4
"""New requests wait until a quarter of the slots is free: small prefills cost nearly as much as larger ones."""
_LARGEST_GAP = 1e-3
_VERIFIED_TOKENS = 12


class BuiltinEngine(Lifecycle):
    """A RolloutEngine (see `protocols/engine.py`) over `model`, a causal language model of transformers whose parameters it overwrites.

    `slots` is the number of sequences decoded side by side. Requests longer than `max_prompt_tokens` or asking for more than
    `max_response_tokens` are refused. Where the model's context ends first, the answer ends with finish_reason `length`.
    Raises ValueError for a model that it can't run correctly and for settings that don't fit."""

    name = "builtin"

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        deterministic: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        for setting, value in (("slots", slots), ("max_prompt_tokens", max_prompt_tokens), ("max_response_tokens", max_response_tokens)):
            if value < 1:
                raise ValueError(f"{setting} must be at least 1, got {value}")
        self._device = torch.device(device)
        if deterministic and self._device.type == "cpu" and torch.get_num_threads() != 1:
            raise ValueError(
                f"deterministic mode needs one torch thread, found {torch.get_num_threads()}: call torch.set_num_threads(1) "
                "or set OMP_NUM_THREADS=1"
            )
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._parameters = ParameterTable(self._model)
        self._max_prompt, self._max_response = max_prompt_tokens, max_response_tokens
        self._context = context_limit(model) or max_prompt_tokens + max_response_tokens
        self._vocabulary = vocabulary_size(model)
        self._slots = slots
        columns = min(max_prompt_tokens + max_response_tokens, self._context)
        self._runner = self._make_runner(columns, deterministic)
        self._queue: deque[Pending] = deque()
        self._rows = RowTable(slots, max_response_tokens, self._vocabulary, self._device)
        self._held: set[tuple[int, int]] = set()

    def _make_runner(self, columns: int, deterministic: bool) -> Runner:
        """The fast runner if it knows the architecture and agrees with the model's own forward, else the generic one, which must."""
        tokens = min(_VERIFIED_TOKENS, columns)
        reason = why_not_fast(self._model)
        if reason is None:
            fast = FastRunner(self._model, rows=max(self._slots, 2), columns=columns, deterministic=deterministic, device=self._device)
            gap, largest = largest_gap(fast, self._model, tokens, self._device)
            if gap < self._tolerance(largest):
                return fast
            reason = f"its logits differ by {gap:.2g} from those of the model's own forward"
        _log.warning("rollout engine: the fast path cannot run this model (%s); using the slower generic path", reason)
        generic = GenericRunner(self._model, rows=max(self._slots, 2), deterministic=deterministic, device=self._device)
        gap, largest = largest_gap(generic, self._model, tokens, self._device)
        if not gap < self._tolerance(largest):
            raise ValueError(
                f"the model's logits with its cache differ by {gap:.2g} from those without; the built-in engine cannot run "
                f"{self._model.config.model_type!r}"
            )
        return generic

    def _tolerance(self, largest: float) -> float:
        """Of the logit gap: absolute in float32; formats of 8 to 11 bits are compared relative to the largest logit."""
        return _LARGEST_GAP if self._model.dtype == torch.float32 else 0.05 * largest

    @property
    def unfinished(self) -> int:
        return len(self._held)

    def _running(self) -> list[tuple[int, int]]:
        return self._rows.ids

    def _take_over(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._parameters.load(weights)
        self._runner.refresh(keep_rows=self._rows.count > 0)

    def _release(self, *, keep_weights: bool) -> None:
        self._runner.release()
        if keep_weights:
            self._model.to("cpu")
        else:
            self._parameters.drop()

    def _reclaim(self, *, kept: bool) -> None:
        if kept:
            self._model.to(self._device)
        else:
            self._parameters.restore(self._device)
        self._runner.refresh()

    def reset_prefix_cache(self) -> None:
        self._runner.forget()

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See the protocol. Raises ValueError, and queues nothing, if any request or setting can't be served."""
        check_requests(
            requests,
            sampling,
            held=self._held,
            vocabulary=self._vocabulary,
            max_prompt_tokens=self._max_prompt,
            max_response_tokens=self._max_response,
            context=self._context,
        )
        for request in requests:
            prompt = tuple(int(token) for token in request.prompt_ids)
            limit = min(sampling.max_new_tokens, self._max_response - request.start, self._context - len(prompt))
            counter = request.counter or request.id
            pending = Pending(id=request.id, prompt=prompt, sampling=sampling, limit=limit, counter=counter, start=request.start)
            self._queue.append(pending)
            self._held.add(request.id)

    @torch.inference_mode()
    def _advance(self, *, admit: bool) -> list[Completion]:
        """Raises FloatingPointError when the weights give logits that are not finite."""
        taken = self._take() if admit else []
        if taken:
            return self._admit(taken)
        if self._rows.count:
            return self._accept(self._runner.decode(self._rows.last_tokens()), 0)
        return []

    def _take(self) -> list[Pending]:
        """Requests to admit now, out of the queue; none while it pays to wait for more free slots."""
        running, queue = self._rows.count, self._queue
        free = self._slots - running
        if not queue or (running and (not self._runner.joins or free < min(len(queue), -(-self._slots // _ADMIT_SHARE)))):
            return []
        if self._runner.joins:
            return [queue.popleft() for _ in range(min(free, len(queue)))]
        length = len(queue[0].prompt)
        taken = list(itertools.islice((pending for pending in queue if len(pending.prompt) == length), free))
        chosen = {pending.id for pending in taken}
        self._queue = deque(pending for pending in queue if pending.id not in chosen)
        return taken

    def _admit(self, taken: list[Pending]) -> list[Completion]:
        equal: dict[tuple[int, ...], list[Pending]] = {}
        for pending in taken:
            equal.setdefault(pending.prompt, []).append(pending)
        groups = sorted(equal.values(), key=lambda group: len(group[0].prompt))  # prompts of like length share a pass
        first = self._rows.count
        logits = self._runner.prefill([group[0].prompt for group in groups], [len(group) for group in groups], first, taken[-1].prompt)
        self._rows.append([pending for group in groups for pending in group])
        return self._accept(logits, first)

    def _accept(self, logits: torch.Tensor, first: int) -> list[Completion]:
        """Sample a token for each row from `first` on, and take out the rows that end with it."""
        tokens, logprobs = choose(logits, self._rows.numbers(first), self._rows.settings(first))
        done = self._rows.record(first, tokens.cpu().numpy(), logprobs.cpu().numpy(), self._version)
        self._tokens += len(tokens)
        return self._remove(done) if len(done) else []

    @torch.inference_mode()
    def _remove(self, rows: np.ndarray[Any, np.dtype[np.int64]], reason: Literal["abort"] | None = None) -> list[Completion]:
        completions = [self._rows.completion(row, self._version, reason) for row in rows.tolist()]
        self._held.difference_update(completion.id for completion in completions)
        to, source = self._rows.remove(rows)
        if len(to):
            self._runner.move(to, source)
        return completions

    def so_far(self, ids: Iterable[tuple[int, int]]) -> list[Completion]:
        return [self._rows.completion(row, self._version, "abort") for row in self._rows.find(set(ids)).tolist()]

    def abort(self, ids: Iterable[tuple[int, int]] | None = None) -> list[Completion]:
        """See the protocol. Ids that are not held are passed over: they may have finished a moment ago."""
        chosen = set(self._held) if ids is None else self._held.intersection(ids)
        running = self._rows.find(chosen)
        ended = self._remove(running, "abort") if len(running) else []
        waiting = [pending.id for pending in self._queue if pending.id in chosen]
        self._queue = deque(pending for pending in self._queue if pending.id not in chosen)
        self._held.difference_update(waiting)
        none = (WeightSpan(self._version, 0, 0),)
        return ended + [Completion(id=id, token_ids=[], logprobs=[], finish_reason="abort", spans=none) for id in waiting]
