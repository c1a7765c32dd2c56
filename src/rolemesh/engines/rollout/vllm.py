"""vLLM behind the engine protocol, in this process. Called by the rollout role; docs/engines.md says how to install and test it.

Weights go through vLLM's layer-wise reload, since on CPUs it packs them away as soon as they are read. The queue and the labels of tokens
are ours: see `borrowed.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from rolemesh.config import read_model_facts
from rolemesh.engines.rollout.borrowed import BorrowedEngine, News, Running, config_folder, undisturbed
from rolemesh.plan import vllm as planned

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights change between two steps, so engine and caller share a process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # a reload warns of each tied head, which is packed again here
    "HF_HUB_OFFLINE": "1",
}


class VllmEngine(BorrowedEngine):
    """A RolloutEngine (see `protocols/engine.py`). Of `model` it takes config, names and shapes alone, so that may lie on `meta`.

    Serves neither top-k nor top-p, for which vLLM gives no log-probabilities over all tokens. Raises ValueError for settings and models
    that it cannot run, and ImportError without vLLM."""

    name = "vllm"
    project = "vLLM"
    coolest = 0.01

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.sleeps = self._device.type != "cpu"
        self._vllm = _make_vllm(model, slots=self._slots, longest=self._longest, device=self._device)
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._prompt = tokens_input
        self._parameters = partial(
            SamplingParams, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )

    def _take_over(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.reset_prefix_cache()
        # Copies, since vLLM keeps tensors until it has all of a layer.
        self._vllm.collective_rpc(_reload, args=(self._own(weights), self._poisoned))
        self._poisoned = False

    def _release(self, *, keep_weights: bool) -> None:
        if not self.sleeps:
            raise NotImplementedError("vLLM gives no memory back on CPUs; give the rollout a pool of its own")
        self._vllm.sleep(level=1 if keep_weights else 2)

    def _reclaim(self, *, kept: bool) -> None:
        self.reset_prefix_cache()
        self._vllm.wake_up()

    def _submit(self, sequence: Running, seed: int) -> None:
        pending = sequence.pending
        parameters = self._parameters(
            temperature=pending.sampling.temperature,
            max_tokens=pending.limit,
            stop_token_ids=list(pending.sampling.stop_token_ids),
            seed=seed,
        )
        self._vllm.add_request(sequence.key, self._prompt(list(pending.prompt), cache_salt=str(self._salt)), parameters)

    def _news(self) -> list[News]:
        found = [(output.request_id, output.outputs[0]) for output in self._vllm.step()]
        return [News(key, new.token_ids, new.logprobs.logprobs, new.finish_reason) for key, new in found]

    def _stop(self, keys: list[str]) -> None:
        self._vllm.abort_request(keys)


def _make_vllm(model: Any, *, slots: int, longest: int, device: torch.device) -> LLMEngine:
    """vLLM with any weights. All its settings are here. Raises ValueError when it cannot run the model on this device."""
    os.environ.update(_ENVIRONMENT)
    on_cpu = device.type == "cpu"
    with config_folder(model) as folder, undisturbed("VLLM_"):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        if current_platform.device_type != device.type:
            raise ValueError(f"this vLLM computes on {current_platform.device_type}, the worker on {device.type}; install the other build")
        if on_cpu:
            torch._dynamo.config.disable = True  # otherwise the first request with log-probabilities compiles for seconds
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
            raise ValueError(f"vLLM cannot run {type(model).__name__} here: {error}. Set rollout.engine=builtin") from error
    # When it is collected it would take down vLLM's process groups, which are the process's, from under an engine made meanwhile.
    engine.engine_core._finalizer.detach()
    return engine


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
