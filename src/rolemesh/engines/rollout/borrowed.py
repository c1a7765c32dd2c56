"""What engines of other projects (`vllm.py`, `sglang.py`) have in common: they schedule, compute and sample, and we keep the queue.

Requests wait here and begin when a slot is free, so that a pause, a drain or other weights find nothing half-begun; each token is labelled
with the version that sampled it; and what was computed for prompts carries the number of the load (their cache salt), so that other weights
never find it, also while sequences of the old ones run. An answer's random numbers come from its own seed, but its logits differ in their
last bits with the company that it keeps: sampling is `seeded`, not `counter`.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import struct
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from rolemesh.config.rollout_schema import COOLEST, HOTTEST
from rolemesh.engines.rollout.checks import check_requests, check_sizes
from rolemesh.engines.rollout.lifecycle import Lifecycle
from rolemesh.engines.rollout.parameters import checked
from rolemesh.engines.rollout.rows import Pending, spans_of
from rolemesh.engines.rollout.runner import context_limit, vocabulary_size
from rolemesh.models import check_positions
from rolemesh.protocols.engine import Completion, FinishReason, Request, Sampling, WeightSpan


class News(NamedTuple):
    """What an engine has sampled of one request since it was last asked."""

    key: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason | None
    """None while it goes on."""
    versions: Sequence[int] | None = None
    """Of the weights of all its tokens, once it has ended, where the engine keeps account of them itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A request that the other engine knows, under `key`; one entry a token sampled so far."""

    key: str
    pending: Pending
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class BorrowedEngine(Lifecycle):
    """A RolloutEngine (see `protocols/engine.py`), but for what subclasses say. Of `model` it takes config, names and shapes alone."""

    sampling_kind: Literal["counter", "seeded"] = "seeded"
    filters = False
    needs_contents = False
    project: ClassVar[str]
    """Who is behind it, as people write it."""
    temperatures: ClassVar[tuple[float, float]] = (COOLEST, HOTTEST)
    """Lowest above 0 and highest that it takes for what they are."""

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
        if deterministic:
            raise ValueError(f"{self.project} samples by seed: its answers are not bit-equal in other company; set deterministic=false")
        check_sizes(slots=slots, max_prompt_tokens=max_prompt_tokens, max_response_tokens=max_response_tokens)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._dtype = model.dtype
        self._device = torch.device(device)
        self._slots, self._max_prompt, self._max_response = slots, max_prompt_tokens, max_response_tokens
        self._context = context_limit(model) or max_prompt_tokens + max_response_tokens
        self._longest = min(max_prompt_tokens + max_response_tokens, self._context)
        check_positions(model.config, self._longest)
        self._vocabulary = vocabulary_size(model)
        self._queue: deque[Pending] = deque()
        self._sequences: dict[str, Running] = {}
        self._keys = itertools.count()
        self._salt = 0
        """Prefixes computed under another number are not found."""
        self._poisoned = False
        """Numbers that are not finite may lie in the cache, where rows that never wrote them read and mask them, to no avail."""

    @abstractmethod
    def _submit(self, sequence: Running, seed: int) -> None:
        """Begin it, with random numbers of this seed."""

    @abstractmethod
    def _news(self) -> list[News]:
        """Sample one or a few tokens of the sequences that run. What is sampled by the time it returns is in what it returns."""

    @abstractmethod
    def _stop(self, keys: list[str]) -> None:
        """End these; nothing is heard of them any more."""

    @property
    def _held(self) -> list[tuple[int, int]]:
        return [*self._running(), *(pending.id for pending in self._queue)]

    @property
    def unfinished(self) -> int:
        return len(self._queue) + len(self._sequences)

    def _running(self) -> list[tuple[int, int]]:
        return [sequence.pending.id for sequence in self._sequences.values()]

    def _own(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies on the device: those that come are valid only until the next is asked for. Raises as `checked`."""
        return ((name, value.detach().to(self._device, self._dtype, copy=True)) for name, value in checked(weights, self._shapes))

    def reset_prefix_cache(self) -> None:
        self._salt += 1

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See the protocol. Raises ValueError, and queues nothing, if any request or setting can't be served."""
        check_requests(
            requests,
            sampling,
            held=set(self._held),
            vocabulary=self._vocabulary,
            max_prompt_tokens=self._max_prompt,
            max_response_tokens=self._max_response,
            context=self._context,
        )
        if not self.filters and (sampling.top_p < 1 or sampling.top_k):
            raise ValueError(f"this engine serves no top_p below 1 ({sampling.top_p}) and no top_k ({sampling.top_k}): see `filters`")
        lowest, highest = self.temperatures
        if sampling.temperature and not lowest <= sampling.temperature <= highest:
            raise ValueError(f"{self.project}'s temperature is 0 (greedy) or within {lowest} to {highest}, got {sampling.temperature}")
        for request in requests:
            prompt = tuple(int(token) for token in request.prompt_ids)
            limit = min(sampling.max_new_tokens, self._max_response - request.start, self._context - len(prompt))
            counter = request.counter or request.id
            pending = Pending(id=request.id, prompt=prompt, sampling=sampling, limit=limit, counter=counter, start=request.start)
            self._queue.append(pending)

    def _begin(self, pending: Pending) -> None:
        # The dot: SGLang ends all requests whose key begins with a given one.
        sequence = Running(key=f"{next(self._keys)}.", pending=pending)
        self._submit(sequence, _seed(pending.sampling.seed, pending.counter, pending.start))
        self._sequences[sequence.key] = sequence

    def _advance(self, *, admit: bool) -> list[Completion]:
        """Raises FloatingPointError when the weights give logits that are not finite."""
        while admit and self._queue and len(self._sequences) < self._slots:
            self._begin(self._queue[0])
            self._queue.popleft()  # not before: what the other engine does not take is not lost
        if not self._sequences:
            return []
        news = self._news()
        for new in news:
            if not np.isfinite(new.logprobs).all():
                self._poisoned = True
                sequence = self._sequences[new.key]
                raise FloatingPointError(
                    f"weight version {self._version} gives logits that are not finite (request {sequence.pending.id}, token "
                    f"{len(sequence.tokens)}); abort the requests and load sound weights"
                )
        done = []
        for new in news:
            sequence = self._sequences[new.key]
            sequence.tokens.extend(new.token_ids)
            sequence.logprobs.extend(new.logprobs)
            sequence.versions.extend([self._version] * len(new.token_ids))
            if new.versions is not None:
                sequence.versions[:] = new.versions
            self._tokens += len(new.token_ids)
            if new.finish_reason is not None:
                done.append(self._end(sequence, new.finish_reason))
        return done

    def _end(self, sequence: Running, reason: FinishReason) -> Completion:
        del self._sequences[sequence.key]
        return self._completion(sequence, reason)

    def _completion(self, sequence: Running, reason: FinishReason) -> Completion:
        return Completion(
            id=sequence.pending.id,
            token_ids=list(sequence.tokens),
            logprobs=list(sequence.logprobs),
            finish_reason=reason,
            spans=spans_of(np.array(sequence.versions)) if sequence.tokens else (WeightSpan(self._version, 0, 0),),
        )

    def so_far(self, ids: Iterable[tuple[int, int]]) -> list[Completion]:
        chosen = set(ids)
        return [self._completion(sequence, "abort") for sequence in self._sequences.values() if sequence.pending.id in chosen]

    def abort(self, ids: Iterable[tuple[int, int]] | None = None) -> list[Completion]:
        """See the protocol. Ids that are not held are passed over: they may have finished a moment ago."""
        chosen = set(self._held if ids is None else ids)
        running = [sequence for sequence in self._sequences.values() if sequence.pending.id in chosen]
        self._stop([sequence.key for sequence in running])
        waiting = [pending for pending in self._queue if pending.id in chosen]
        self._queue = deque(pending for pending in self._queue if pending.id not in chosen)
        none = (WeightSpan(self._version, 0, 0),)
        return [self._end(sequence, "abort") for sequence in running] + [
            Completion(id=pending.id, token_ids=[], logprobs=[], finish_reason="abort", spans=none) for pending in waiting
        ]


def _seed(seed: int, counter: tuple[int, int], start: int) -> int:
    """Random numbers of its own for each request, and each turn of an answer, 63 bits."""
    return int.from_bytes(hashlib.blake2b(struct.pack("<QQII", seed, *counter, start), digest_size=8).digest(), "little") >> 1


@contextmanager
def config_folder(model: Any, **changes: Any) -> Iterator[str]:
    """A folder for a while with the model's config alone, these entries of it changed. Weights are published."""
    config = copy.deepcopy(model.config)
    config.architectures = config.architectures or [type(model).__name__]
    for name, value in changes.items():
        setattr(config, name, value)
    with TemporaryDirectory(prefix="rolemesh-engine-") as folder:
        config.save_pretrained(folder)
        yield folder


@contextmanager
def undisturbed(prefix: str) -> Iterator[None]:
    """Other engines seed torch's generator, warn of what is their own, make `torch.set_num_threads` do nothing and set variables that other
    code and child processes read (vLLM LOCAL_WORLD_SIZE and LD_PRELOAD, SGLang those of NCCL). Their own begin with `prefix` and stay."""
    set_num_threads, variables = torch.set_num_threads, dict(os.environ)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_num_threads
        for name in [name for name in os.environ if os.environ[name] != variables.get(name) and not name.startswith(prefix)]:
            del os.environ[name]
        for name in variables.keys() - os.environ.keys():
            os.environ[name] = variables[name]
