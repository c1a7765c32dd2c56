"""`sglang.Engine` as `sglang.py` uses it, which calls it. Not run with SGLang yet: written against the source of 0.5.23.

SGLang's loop runs on a thread of its own. It lives as long as the engine, since the children are made to die with it; and it is not the
main one, so that SGLang leaves the process's signals alone. Engine's own methods wait for that loop, so what they call is called here.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import torch

from rolemesh.engines.rollout.borrowed import News
from rolemesh.errors import DeadlineExceeded
from rolemesh.protocols.engine import FinishReason

T = TypeVar("T")
START_SECONDS: Final = 1800.0
"""To start, compile kernels and capture graphs."""
CALL_SECONDS: Final = 600.0
"""To answer anything else."""
BUCKET_BYTES: Final = 256 * 1024**2
CACHE: Final = ["kv_cache", "cuda_graph"]
WEIGHTS: Final = ["weights"]


class SglangServer:
    """A `Server` (see `sglang.py`). `settings` are arguments of `sglang.Engine`; `needed` are tokens that its cache must hold."""

    def __init__(self, settings: dict[str, Any], *, needed: int) -> None:
        self._loop = asyncio.new_event_loop()
        over = asyncio.Event()
        threading.Thread(target=_serve, args=(self._loop, over), name="sglang", daemon=True).start()
        self._waiting: dict[str, tuple[list[int], dict[str, Any], str]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news: list[News] = []
        self._failures: list[BaseException] = []
        self._arrived = asyncio.Event()
        self._version = "default"
        self._cache_away = False
        self._engine = self._call(self._start(settings), "start", START_SECONDS)
        self._manager = self._engine.tokenizer_manager
        # Its own way to end would end every child of the process, and its watchdog the process when the children end.
        atexit.unregister(self._engine.shutdown)
        weakref.finalize(self, _end, self._loop, over, self._engine)
        found = self._engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
        if found < needed:
            raise ValueError(f"SGLang has room for {found} cached tokens, needs {needed}; lower rollout.slots or free memory of the GPU")

    async def _start(self, settings: dict[str, Any]) -> Any:
        policy, method = asyncio.get_event_loop_policy(), multiprocessing.get_start_method(allow_none=True)
        try:
            import sglang
            from sglang.srt.managers import io_struct
            from sglang.srt.utils import MultiprocessingSerializer
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            self._io, self._pack = io_struct, MultiprocessingSerializer.serialize
            monkey_patch_torch_reductions()  # names devices of shared tensors by their UUID
            return sglang.Engine(**settings)
        finally:
            asyncio.set_event_loop_policy(policy)
            multiprocessing.set_start_method(method, force=True)

    def _call(self, coroutine: Coroutine[Any, Any, T], what: str, seconds: float = CALL_SECONDS) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError as error:
            future.cancel()
            raise DeadlineExceeded(waiter="the rollout engine", subject=f"SGLang to {what}", seconds=seconds) from error

    def submit(self, key: str, prompt: Sequence[int], sampling: dict[str, Any], salt: str) -> None:
        self._waiting[key] = (list(prompt), sampling, salt)  # given to SGLang now, it would begin at once

    def _note(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)
            self._arrived.set()

    async def _follow(self, key: str, prompt: list[int], sampling: dict[str, Any], salt: str) -> None:
        """Lists in a part are of all tokens so far, and SGLang's own: they may grow behind it."""
        seen, reason = 0, None
        wanted = {"return_logprob": True, "stream": True, "rid": key, "cache_salt": salt}
        async for part in await self._engine.async_generate(input_ids=prompt, sampling_params=sampling, **wanted):
            meta, tokens = part["meta_info"], list(part["output_ids"][seen:])
            logprobs = [logprob for logprob, _, _ in meta["output_token_logprobs"][seen : seen + len(tokens)]]
            reason = _reason(key, meta["finish_reason"], sampling["stop_token_ids"])
            labels = [int(span["version"]) for span in meta.get("weight_versions", ()) for _ in range(span["start"], span["end"])]
            seen += len(tokens)
            if len(logprobs) != len(tokens) or len(labels) not in (0, seen):
                raise RuntimeError(f"request {key} has {seen} tokens, and {len(labels)} labels and other log-probabilities from SGLang")
            if reason is not None:
                del self._tasks[key]
            self._news.append(News(key, tokens, logprobs, reason, labels or None))
            self._arrived.set()
        if reason is None:
            raise RuntimeError(f"SGLang's answer to request {key} broke off after {seen} tokens")

    def advance(self) -> list[News]:
        return self._call(self._advance(), "sample a token")

    async def _advance(self) -> list[News]:
        if self._cache_away:
            await self._manager.resume_memory_occupation(self._io.ResumeMemoryOccupationReqInput(tags=CACHE))
            self._cache_away = False
        await self._go_on()
        for key, request in self._waiting.items():
            self._tasks[key] = task = self._loop.create_task(self._follow(key, *request))
            task.add_done_callback(self._note)
        self._waiting.clear()
        await self._arrived.wait()
        if self._tasks:
            await self._manager.pause_generation(self._io.PauseGenerationReqInput(mode="in_place"))
            await self._label(self._version)  # a pause is not answered, this is, behind what was sampled
        self._arrived.clear()
        if self._failures:
            raise self._failures.pop()
        news, self._news = self._news, []
        return news

    async def _go_on(self) -> None:
        await self._manager.continue_generation(self._io.ContinueGenerationReqInput(torch_empty_cache=False))

    async def _label(self, version: str) -> None:
        # Not by `update_weight_version`, which notes each call for good.
        request = self._io.UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        await self._manager.update_weight_version_communicator(request)
        self._version = version

    def abort(self, keys: Sequence[str]) -> None:
        self._call(self._abort(keys), "end requests")

    async def _abort(self, keys: Sequence[str]) -> None:
        """A cancelled task takes back a request that SGLang has not seen; one that it has ends with its next pass."""
        ending = [self._tasks.pop(key) for key in keys if self._waiting.pop(key, None) is None and key in self._tasks]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)
        self._news = [new for new in self._news if new.key not in keys]
        if not self._tasks:
            await self._go_on()

    def load(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        self._answer(self._manager.begin_weight_update(self._io.BeginWeightUpdateReqInput()), "take weights")
        try:
            for bucket in _buckets(weights):
                self._send(bucket)
        finally:  # an open one would keep the next from beginning
            self._answer(self._manager.end_weight_update(self._io.EndWeightUpdateReqInput()), "serve new weights")
        self._call(self._label(str(version)), "label new weights")

    def _send(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        if bucket[0][1].is_cuda:
            torch.cuda.synchronize(bucket[0][1].device)  # another process reads them
        request = self._io.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[self._pack(bucket)], flush_cache=False)
        self._answer(self._manager.update_weights_from_tensor(request), f"load {bucket[0][0]} and those behind it")

    def _answer(self, coroutine: Coroutine[Any, Any, tuple[bool, str]], what: str) -> None:
        done, message = self._call(coroutine, what)
        if not done:
            raise RuntimeError(f"SGLang did not {what}: {message}")

    def sleep(self) -> None:
        self._call(self._sleep(), "give memory back")

    async def _sleep(self) -> None:
        await self._go_on()
        flushed = await self._manager.flush_cache(timeout_s=CALL_SECONDS / 2)  # once it is idle, or what follows would end it
        if not flushed.success:
            raise RuntimeError(f"SGLang is not idle, so its memory stays: {flushed.message}")
        tags = WEIGHTS if self._cache_away else [*CACHE, *WEIGHTS]
        await self._manager.release_memory_occupation(self._io.ReleaseMemoryOccupationReqInput(tags=tags))
        self._cache_away = True

    def wake(self) -> None:
        self._call(self._manager.resume_memory_occupation(self._io.ResumeMemoryOccupationReqInput(tags=WEIGHTS)), "wake")


def _reason(key: str, found: dict[str, Any] | None, stops: Sequence[int]) -> FinishReason | None:
    if found is None or found["type"] == "length":
        return None if found is None else "length"
    if found["type"] == "stop" and found["matched"] in stops:
        return "stop"
    raise RuntimeError(f"SGLang ended request {key} neither at its length nor at a stop token: {found}")


def _buckets(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    for name, value in weights:
        bucket.append((name, value))
        if sum(each.nbytes for _, each in bucket) >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _serve(loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(over.wait())


def _end(loop: asyncio.AbstractEventLoop, over: asyncio.Event, engine: Any) -> None:
    engine.tokenizer_manager._subprocess_watchdog.stop()
    for pid in engine.get_all_child_pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    loop.call_soon_threadsafe(over.set)
