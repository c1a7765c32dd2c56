"""A rollout engine that needs no model, for tests of everything above the engines. It keeps the whole contract of
`protocols/engine.py` (versions, refusals, one token a step, aborts, pauses, sleep) and passes the same contract suite as the real ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rolemesh.engines.rollout.checks import check_requests
from rolemesh.engines.rollout.lifecycle import Lifecycle
from rolemesh.engines.rollout.parameters import ParameterTable
from rolemesh.engines.rollout.sampling import uniforms
from rolemesh.protocols.engine import Completion, Request, Sampling, WeightSpan

Answer = Callable[[Request, Sampling], tuple[Sequence[int], Sequence[float]]]
"""The canned answer to a request: token ids, and a log-probability each."""


@dataclass(slots=True, kw_only=True)
class _Running:
    request: Request
    sampling: Sampling
    tokens: list[int]
    logprobs: list[float]
    spans: list[WeightSpan]
    shown: int = 0
    """Tokens that steps have produced so far."""

    def show(self, version: int) -> None:
        last = self.spans[-1] if self.spans else None
        start = last.start if last and last.version == version else self.shown
        if last and last.version == version:
            self.spans.pop()
        self.shown += 1
        self.spans.append(WeightSpan(version, start, self.shown))


class FakeEngine(Lifecycle):
    """Without `answer` it is a model that knows nothing: every token has the same probability (greedy takes token 0).

    With a `model`, weights are checked against its parameters and copied into it; without, any weights are taken and the vocabulary
    has `vocabulary` tokens. `deterministic` and `device` are those of other engines and change nothing here."""

    name = "fake"

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        slots: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        deterministic: bool = True,
        device: torch.device | str = "cpu",
        vocabulary: int = 64,
        answer: Answer | None = None,
    ) -> None:
        super().__init__()
        del deterministic, device
        self._parameters = ParameterTable(model) if model is not None else None
        self._vocabulary = int(model.config.vocab_size) if model is not None else vocabulary  # type: ignore[union-attr, arg-type]
        self._slots = slots
        self._max_prompt, self._max_response = max_prompt_tokens, max_response_tokens
        self._answer = answer or self._knows_nothing
        self._held: dict[tuple[int, int], _Running] = {}
        """Insertion order is the order of service: those that have begun run, the others wait."""

    def _knows_nothing(self, request: Request, sampling: Sampling) -> tuple[list[int], list[float]]:
        draw, sample = request.counter or request.id
        numbers = uniforms(sampling.seed, [draw], [sample], sampling.max_new_tokens, request.start)[0]
        tokens = [int(number * self._vocabulary) if sampling.temperature else 0 for number in numbers]
        return tokens, [-math.log(self._vocabulary)] * len(tokens)

    @property
    def unfinished(self) -> int:
        return len(self._held)

    def _running(self) -> list[tuple[int, int]]:
        return [id for id, running in self._held.items() if running.shown]

    def _take_over(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if self._parameters is not None:
            self._parameters.load(weights)
        else:
            deque(weights, maxlen=0)  # any will do, but they have to come

    def _release(self, *, keep_weights: bool) -> None:
        if self._parameters is not None and not keep_weights:
            self._parameters.drop()

    def _reclaim(self, *, kept: bool) -> None:
        if self._parameters is not None and not kept:
            self._parameters.restore(torch.device("cpu"))

    def reset_prefix_cache(self) -> None:
        pass  # nothing is computed for a prompt

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        check_requests(
            requests,
            sampling,
            held=self._held,
            vocabulary=self._vocabulary,
            max_prompt_tokens=self._max_prompt,
            max_response_tokens=self._max_response,
            context=self._max_prompt + self._max_response,
        )
        self._held.update({request.id: self._start(request, sampling) for request in requests})

    def _start(self, request: Request, sampling: Sampling) -> _Running:
        tokens, logprobs = self._answer(request, sampling)
        ends = [position for position, token in enumerate(tokens) if token in sampling.stop_token_ids]
        length = min([end + 1 for end in ends[:1]] + [sampling.max_new_tokens, self._max_response - request.start])
        if len(tokens) != len(logprobs) or len(tokens) < length:
            raise ValueError(
                f"canned answer to {request.id} has {len(tokens)} tokens and {len(logprobs)} log-probabilities; it needs a "
                f"log-probability each, and a stop token or {length} tokens"
            )
        return _Running(request=request, sampling=sampling, tokens=list(tokens[:length]), logprobs=list(logprobs[:length]), spans=[])

    def _advance(self, *, admit: bool) -> list[Completion]:
        active = [running for running in self._held.values() if admit or running.shown][: self._slots]
        for running in active:
            running.show(self._version)
        self._tokens += len(active)
        return [self._end(running) for running in active if running.shown == len(running.tokens)]

    def _end(self, running: _Running, reason: Literal["abort"] | None = None) -> Completion:
        del self._held[running.request.id]
        return self._completion(running, reason)

    def _completion(self, running: _Running, reason: Literal["abort"] | None) -> Completion:
        stopped = running.tokens[-1] in running.sampling.stop_token_ids
        return Completion(
            id=running.request.id,
            token_ids=running.tokens[: running.shown],
            logprobs=running.logprobs[: running.shown],
            finish_reason=reason or ("stop" if stopped else "length"),
            spans=tuple(running.spans) or (WeightSpan(self._version, 0, 0),),
        )

    def so_far(self, ids: Iterable[tuple[int, int]]) -> list[Completion]:
        return [self._completion(self._held[id], "abort") for id in ids if id in self._held and self._held[id].shown]

    def abort(self, ids: Iterable[tuple[int, int]] | None = None) -> list[Completion]:
        chosen = set(self._held if ids is None else ids)
        return [self._end(running, "abort") for id, running in list(self._held.items()) if id in chosen]
