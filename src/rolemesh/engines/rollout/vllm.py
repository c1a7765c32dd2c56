"""vLLM behind the engine protocol, in this process. Called by the rollout role; docs/engines.md says how to install and test it.

vLLM schedules, computes and samples. What it is not asked for is kept here: requests wait in a queue of ours and begin when a slot is
free, so that a pause, a drain or other weights find nothing half-begun; each token is labelled with the version that sampled it; and what
was computed for prompts carries the number of the load (vLLM's cache salt), so that other weights never find it, also while sequences
of the old ones run.

Weights go through vLLM's layer-wise reload, since on CPUs it packs them away as soon as they are read. An answer's random numbers come
from its own seed, but its logits differ in their last bits with the company that it keeps: sampling is `seeded`, not `counter`.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import struct
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch

from rolemesh.config import read_model_facts
from rolemesh.engines.rollout.checks import check_requests, check_sizes
from rolemesh.engines.rollout.lifecycle import Lifecycle
from rolemesh.engines.rollout.parameters import checked
from rolemesh.engines.rollout.rows import Pending, spans_of
from rolemesh.engines.rollout.runner import context_limit, vocabulary_size
from rolemesh.models import check_positions
from rolemesh.plan import vllm as planned
from rolemesh.protocols.engine import Completion, FinishReason, Request, Sampling, WeightSpan

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights change between two steps, so engine and caller share a process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # a reload warns of each tied head, which is packed again here
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """A request that vLLM knows, under `key`; one entry a token sampled so far."""

    key: str
    pending: Pending
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class VllmEngine(Lifecycle):
    """A RolloutEngine (see `protocols/engine.py`). Of `model` it takes config, names and shapes alone, so that may lie on `meta`.

    Serves neither top-k nor top-p, for which vLLM gives no log-probabilities over all tokens. Raises ValueError for settings and models
    that it cannot run, and ImportError without vLLM."""

    name = "vllm"
    sampling_kind: Literal["counter", "seeded"] = "seeded"
    filters = False
    needs_contents = False

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
            raise ValueError("vLLM samples by seed: its answers are not bit-equal in other company; set deterministic=false")
        check_sizes(slots=slots, max_prompt_tokens=max_prompt_tokens, max_response_tokens=max_response_tokens)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if unpublished := sorted(model.state_dict().keys() - known):
            raise ValueError(
                f"{unpublished[0]} is no parameter, so it is never published and vLLM's would be random; set rollout.engine=builtin"
            )
        self._dtype = model.dtype
        self._slots, self._max_prompt, self._max_response = slots, max_prompt_tokens, max_response_tokens
        self._context = context_limit(model) or max_prompt_tokens + max_response_tokens
        self._vocabulary = vocabulary_size(model)
        self.sleeps = torch.device(device).type != "cpu"
        longest = min(max_prompt_tokens + max_response_tokens, self._context)
        check_positions(model.config, longest)
        self._vllm = _make_vllm(model, slots=slots, longest=longest, device=torch.device(device))
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._prompt = tokens_input
        self._parameters = partial(
            SamplingParams, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        self._queue: deque[Pending] = deque()
        self._sequences: dict[str, _Sequence] = {}
        self._keys = itertools.count()
        self._salt = 0
        """Prefixes computed under another number are not found."""
        self._poisoned = False
        """Numbers that are not finite may lie in the cache, where rows that never wrote them read and mask them, to no avail."""

    @property
    def _held(self) -> list[tuple[int, int]]:
        return [*self._running(), *(pending.id for pending in self._queue)]

    @property
    def unfinished(self) -> int:
        return len(self._queue) + len(self._sequences)

    def _running(self) -> list[tuple[int, int]]:
        return [sequence.pending.id for sequence in self._sequences.values()]

    def _take_over(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.reset_prefix_cache()
        # vLLM keeps tensors until it has all of a layer, and these are valid only until the next is asked for.
        own = ((name, value.detach().to(self._dtype, copy=True)) for name, value in checked(weights, self._shapes))
        self._vllm.collective_rpc(_reload, args=(own, self._poisoned))
        self._poisoned = False

    def _release(self, *, keep_weights: bool) -> None:
        if not self.sleeps:
            raise NotImplementedError("vLLM gives no memory back on CPUs; give the rollout a pool of its own")
        self._vllm.sleep(level=1 if keep_weights else 2)

    def _reclaim(self, *, kept: bool) -> None:
        self.reset_prefix_cache()
        self._vllm.wake_up()

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
        if sampling.top_p < 1 or sampling.top_k:
            raise ValueError(f"this engine serves no top_p below 1 ({sampling.top_p}) and no top_k ({sampling.top_k}): see `filters`")
        lowest, highest = planned.TEMPERATURES
        if sampling.temperature and not lowest <= sampling.temperature <= highest:
            raise ValueError(f"vLLM's temperature is 0 (greedy) or within {lowest} to {highest}, got {sampling.temperature}")
        for request in requests:
            prompt = tuple(int(token) for token in request.prompt_ids)
            limit = min(sampling.max_new_tokens, self._max_response - request.start, self._context - len(prompt))
            counter = request.counter or request.id
            pending = Pending(id=request.id, prompt=prompt, sampling=sampling, limit=limit, counter=counter, start=request.start)
            self._queue.append(pending)

    def _begin(self, pending: Pending) -> None:
        sequence = _Sequence(key=str(next(self._keys)), pending=pending)
        sampling = pending.sampling
        parameters = self._parameters(
            temperature=sampling.temperature,
            max_tokens=pending.limit,
            stop_token_ids=list(sampling.stop_token_ids),
            seed=_seed(sampling.seed, pending.counter, pending.start),
        )
        self._vllm.add_request(sequence.key, self._prompt(list(pending.prompt), cache_salt=str(self._salt)), parameters)
        self._sequences[sequence.key] = sequence

    def _advance(self, *, admit: bool) -> list[Completion]:
        """Raises FloatingPointError when the weights give logits that are not finite."""
        while admit and self._queue and len(self._sequences) < self._slots:
            self._begin(self._queue[0])
            self._queue.popleft()  # not before: what vLLM does not take is not lost
        if not self._sequences:
            return []
        news = [(self._sequences[output.request_id], output.outputs[0]) for output in self._vllm.step()]
        for sequence, new in news:
            if not np.isfinite(new.logprobs.logprobs).all():
                self._poisoned = True
                raise FloatingPointError(
                    f"weight version {self._version} gives logits that are not finite (request {sequence.pending.id}, token "
                    f"{len(sequence.tokens)}); abort the requests and load sound weights"
                )
        done = []
        for sequence, new in news:
            sequence.tokens.extend(new.token_ids)
            sequence.logprobs.extend(new.logprobs.logprobs)
            sequence.versions.extend([self._version] * len(new.token_ids))
            self._tokens += len(new.token_ids)
            if new.finish_reason is not None:
                done.append(self._end(sequence, new.finish_reason))
        return done

    def _end(self, sequence: _Sequence, reason: FinishReason) -> Completion:
        del self._sequences[sequence.key]
        return self._completion(sequence, reason)

    def _completion(self, sequence: _Sequence, reason: FinishReason) -> Completion:
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
        self._vllm.abort_request([sequence.key for sequence in running])
        waiting = [pending for pending in self._queue if pending.id in chosen]
        self._queue = deque(pending for pending in self._queue if pending.id not in chosen)
        none = (WeightSpan(self._version, 0, 0),)
        return [self._end(sequence, "abort") for sequence in running] + [
            Completion(id=pending.id, token_ids=[], logprobs=[], finish_reason="abort", spans=none) for pending in waiting
        ]


def _seed(seed: int, counter: tuple[int, int], start: int) -> int:
    """Random numbers of its own for each request, and each turn of an answer, 63 bits."""
    return int.from_bytes(hashlib.blake2b(struct.pack("<QQII", seed, *counter, start), digest_size=8).digest(), "little") >> 1


def _make_vllm(model: Any, *, slots: int, longest: int, device: torch.device) -> LLMEngine:
    """vLLM with any weights. All its settings are here. Raises ValueError when it cannot run the model on this device."""
    os.environ.update(_ENVIRONMENT)
    on_cpu = device.type == "cpu"
    config = copy.deepcopy(model.config)
    config.architectures = config.architectures or [type(model).__name__]
    with TemporaryDirectory(prefix="rolemesh-vllm-") as folder, _undisturbed():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        if current_platform.device_type != device.type:
            raise ValueError(f"this vLLM computes on {current_platform.device_type}, the worker on {device.type}; install the other build")
        if on_cpu:
            torch._dynamo.config.disable = True  # otherwise the first request with log-probabilities compiles for seconds
        config.save_pretrained(folder)
        facts = read_model_facts(folder)
        if on_cpu and facts.head_dim not in planned.CPU_HEADS:
            raise ValueError(f"vLLM on CPUs cannot compute with heads of size {facts.head_dim}; set rollout.engine=builtin")
        settings = EngineArgs(
            model=folder,
            load_format="dummy",  # weights are published
            skip_tokenizer_init=True,
            generation_config="vllm",  # no sampling settings from anywhere but the requests
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=longest,
            max_num_seqs=slots,
            max_num_batched_tokens=max(planned.PASS_TOKENS, longest, slots),
            block_size=planned.BLOCK_TOKENS,
            kv_cache_memory_bytes=planned.cache_bytes(facts, slots=slots, longest=longest, width=model.dtype.itemsize),
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",  # after temperature, as the trainer's
            enforce_eager=on_cpu,
            enable_sleep_mode=not on_cpu,
            async_scheduling=False,  # a step returns what it computed, so that tokens belong to the weights of that step
            disable_log_stats=True,
        )
        try:
            engine = LLMEngine.from_engine_args(settings)
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"vLLM cannot run {config.architectures[0]} here: {error}. Set rollout.engine=builtin") from error
    # When it is collected it would take down vLLM's process groups, which are the process's, from under an engine made meanwhile.
    engine.engine_core._finalizer.detach()
    return engine


@contextmanager
def _undisturbed() -> Iterator[None]:
    """vLLM seeds torch's generator, warns of what is its own and, on CPUs, makes `torch.set_num_threads` do nothing and sets variables that
    other code and child processes read (LOCAL_WORLD_SIZE, LD_PRELOAD)."""
    set_num_threads, variables = torch.set_num_threads, dict(os.environ)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_num_threads
        for name in [name for name in os.environ if os.environ[name] != variables.get(name) and not name.startswith("VLLM_")]:
            del os.environ[name]
        for name in variables.keys() - os.environ.keys():
            os.environ[name] = variables[name]


@torch.no_grad()
def _reload(worker: Any, weights: Iterator[tuple[str, torch.Tensor]], clear_cache: bool) -> None:
    """Run by vLLM's worker, on its model and, with `clear_cache`, its keys and values. When `weights` raises, its half-read layers are
    closed all the same: otherwise the next load would go on with them."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = worker.model_runner
    model = runner.get_model()
    with set_current_vllm_config(runner.vllm_config):
        initialize_layerwise_reload(model)
        try:
            model.load_weights(weights)
        finally:
            finalize_layerwise_reload(model, runner.model_config)
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):  # a tied head is not read, so on CPUs its packed copy would stay that of the old weights
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    for cache in runner.kv_caches if clear_cache else ():
        cache.zero_()
