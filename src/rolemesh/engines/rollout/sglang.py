"""SGLang behind the engine protocol. Called by the rollout role. Not run with SGLang yet: docs/engines.md says what was read and tested.

SGLang generates in processes of its own, at its own pace; we step. So it stands still but for `Server.advance`: between two of our steps
nothing is sampled, and whatever weights, pauses and ends then find is what the last step returned. The queue and the labels of tokens are
ours: see `borrowed.py`. `sglang_server.py` is all that knows SGLang; tests put another `Server` in its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch

from rolemesh.engines.rollout.borrowed import BorrowedEngine, News, Running, config_folder, undisturbed
from rolemesh.plan import sglang as planned

_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # the spare tokens are never used, so positions stay within the model's
    "SGLANG_SANITIZE_NAN_LOGITS": "0",  # or weights that are not finite would give answers, with likelihoods
}
_FALSE: Final = ("", "0", "false", "no", "n", "off")


class Server(Protocol):
    """SGLang as it is used here. Where a wait is too long it raises DeadlineExceeded."""

    def submit(self, key: str, prompt: Sequence[int], sampling: dict[str, Any], salt: str) -> None:
        """Begin a request with the next `advance`. `sampling` has the names of SGLang's sampling_params. No key begins with another one;
        prompts of different salts share nothing."""
        ...

    def advance(self) -> list[News]:
        """Go on until there are new tokens, and stand still again. The order of news is that of sampling. Raises RuntimeError for a request
        that SGLang gave up."""
        ...

    def abort(self, keys: Sequence[str]) -> None:
        """End requests; nothing is heard of them any more."""
        ...

    def load(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights by these, which lie on the server's device; sequences keep their keys and values. What is sampled from now on
        is of this version. Raises what `weights` raises, and RuntimeError when SGLang refuses; half of them may be replaced then."""
        ...

    def sleep(self) -> None:
        """Give back the memory of weights, which are kept on the host, and of the cache, with nothing running."""
        ...

    def wake(self) -> None:
        """Bring the weights back; the cache comes with the next `advance`."""
        ...


class SglangEngine(BorrowedEngine):
    """A RolloutEngine (see `protocols/engine.py`). Of `model` it takes config, names and shapes alone, so that may lie on `meta`.

    Raises ValueError for settings and models that it cannot run, and ImportError without SGLang."""

    name = "sglang"
    project = "SGLang"
    filters = True
    coolest = 1e-6

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._server = self._start(model)

    def _start(self, model: Any) -> Server:
        refuse(self._device, self._dtype)
        from rolemesh.engines.rollout.sglang_server import SglangServer

        os.environ.update(_ENVIRONMENT)
        # An end token of the model's own would end answers beside the stop tokens of requests.
        with config_folder(model, eos_token_id=None) as folder, undisturbed("SGLANG_"):
            changes = settings(folder, self._dtype, slots=self._slots, longest=self._longest, gpu=self._device.index or 0)
            return SglangServer(changes, needed=changes["max_total_tokens"])

    def _take_over(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.reset_prefix_cache()
        self._server.load(self._own(weights), version)

    def _release(self, *, keep_weights: bool) -> None:
        self._server.sleep()

    def _reclaim(self, *, kept: bool) -> None:
        self.reset_prefix_cache()
        self._server.wake()

    def _submit(self, sequence: Running, seed: int) -> None:
        pending, sampling = sequence.pending, sequence.pending.sampling
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": pending.limit,
            "stop_token_ids": list(sampling.stop_token_ids),  # not with `ignore_eos`, which ignores them too
            "sampling_seed": seed,
        }
        self._server.submit(sequence.key, pending.prompt, parameters, str(self._salt))

    def _news(self) -> list[News]:
        return self._server.advance()

    def _stop(self, keys: list[str]) -> None:
        self._server.abort(keys)


def refuse(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError for what would not run, or would give other log-probabilities than those after temperature over all tokens."""
    if device.type != "cuda":
        raise ValueError(f"SGLang computes on GPUs only, the worker on {device.type}; set rollout.engine=builtin")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"SGLang is deterministic in half precision only, got {dtype}; set model.dtype=bfloat16")
    switch = "SGLANG_RETURN_ORIGINAL_LOGPROB"
    if os.environ.get(switch, "").lower() not in _FALSE:
        raise ValueError(f"{switch} makes SGLang's log-probabilities those before temperature, which training cannot use; unset it")


def settings(folder: str, dtype: torch.dtype, *, slots: int, longest: int, gpu: int) -> dict[str, Any]:
    """Arguments of `sglang.Engine`. All are here."""
    return {
        "model_path": folder,
        "load_format": "dummy",  # weights are published
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "base_gpu_id": gpu,
        "context_length": longest + planned.SPARE_TOKENS,
        "max_running_requests": slots,
        "max_total_tokens": planned.cache_tokens(slots=slots, longest=longest),
        "chunked_prefill_size": planned.PASS_TOKENS,
        "enable_deterministic_inference": True,  # otherwise it passes over the seeds of requests
        "disable_overlap_schedule": True,  # or a token sampled by old weights would be handed out, and labelled, after a load
        "enable_memory_saver": True,
        "enable_weights_cpu_backup": True,
        "sleep_on_idle": True,
        "watchdog_timeout": 1e9,  # or it ends the process when sequences stand still for long
        "log_level": "error",
    }
