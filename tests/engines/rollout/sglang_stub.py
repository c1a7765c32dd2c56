"""A stand-in for the package `sglang`: what the engine uses of it, with the behaviour that the source of 0.5.23 shows, traps included.

One scheduler at its own pace on the loop of its caller: it reads its mail, then makes a pass, unless it is paused. Its model is a real one.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rolemesh.engines.rollout.borrowed import config_folder
from rolemesh.engines.rollout.sglang import Server, SglangEngine, settings
from rolemesh.engines.rollout.sglang_server import SglangServer


class SglangOnStub(SglangEngine):
    """The engine with its server, on CPUs and this module in place of SGLang."""

    changes: dict[str, Any] = {}

    def _start(self, model: Any) -> Server:
        with config_folder(model, eos_token_id=None) as folder, installed():
            chosen = settings(folder, self._dtype, slots=self._slots, longest=self._longest, gpu=0)
            return SglangServer(chosen | self.changes, needed=chosen["max_total_tokens"])


@contextmanager
def installed() -> Iterator[None]:
    """`import sglang` finds the stand-in meanwhile."""
    names = (
        "sglang",
        "sglang.srt",
        "sglang.srt.managers",
        "sglang.srt.managers.io_struct",
        "sglang.srt.utils",
        "sglang.srt.utils.patch_torch",
    )
    modules = {name: ModuleType(name) for name in names}
    before = {name: sys.modules.get(name) for name in names}
    modules["sglang"].Engine = Engine
    modules["sglang.srt.managers"].io_struct = modules["sglang.srt.managers.io_struct"]
    for request in REQUESTS:
        setattr(modules["sglang.srt.managers.io_struct"], request, type(request, (_Request,), {}))
    modules["sglang.srt.utils.patch_torch"].monkey_patch_torch_reductions = lambda: None
    modules["sglang.srt.utils"].MultiprocessingSerializer = SimpleNamespace(serialize=lambda named: [(n, t.clone()) for n, t in named])
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


REQUESTS = {
    "BeginWeightUpdateReqInput": {"selector"},
    "EndWeightUpdateReqInput": set(),
    "UpdateWeightsFromTensorReqInput": {"serialized_named_tensors", "load_format", "flush_cache", "weight_version"},
    "UpdateWeightVersionReqInput": {"new_version", "abort_all_requests"},
    "PauseGenerationReqInput": {"mode"},
    "ContinueGenerationReqInput": {"torch_empty_cache"},
    "ReleaseMemoryOccupationReqInput": {"tags"},
    "ResumeMemoryOccupationReqInput": {"tags"},
}
"""Those of `io_struct` that are used, and what they take."""


class _Request(SimpleNamespace):
    def __init__(self, **entries: Any) -> None:
        assert entries.keys() <= REQUESTS[type(self).__name__], entries
        super().__init__(**entries)


@dataclass(eq=False)
class Row:
    """A request."""

    rid: str
    prompt: list[int]
    sampling: dict[str, Any]
    salt: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, int, None]] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    cache: Any = None
    sampled: list[int] = field(default_factory=list)
    reason: dict[str, Any] | None = None
    to_finish: bool = False


class Scheduler:
    """Its mail is read between two passes. `paused` stops passes, and nothing else."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        self.chosen, self.mail = chosen, asyncio.Queue[Any]()
        config = AutoConfig.from_pretrained(chosen["model_path"])
        self.eos = config.eos_token_id
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.parameters = dict(self.model.named_parameters())
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self.known: dict[tuple[str, tuple[int, ...]], tuple[Any, torch.Tensor]] = {}
        self.unprocessed: list[tuple[Row, int, float]] = []
        self.session = self.paused = False
        self.version, self.away = "default", set[str]()

    async def run(self) -> None:
        while True:
            while not self.mail.empty():
                self.read(*self.mail.get_nowait())
            if not self.paused and (self.running or self.waiting or self.unprocessed):
                self.one_pass()
            elif self.mail.empty():
                self.read(*await self.mail.get())
            for _ in range(8):  # what is sent travels while the next pass begins
                await asyncio.sleep(0)

    def read(self, act: Any, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled():
            answer.set_result(act())

    def one_pass(self) -> None:
        """With overlap, what a pass samples is handed out after the next has begun."""
        assert not self.away, "memory is given back"
        late, self.unprocessed = self.unprocessed, []
        while self.waiting and len(self.running) < self.chosen["max_running_requests"]:
            self.running.append(self.waiting.pop(0))
        ahead = [(row, *self.sample(row)) for row in self.running if row.reason is None]
        if self.chosen["disable_overlap_schedule"]:
            late, ahead = ahead, []
        self.unprocessed = ahead
        for row, token, logprob in late:
            self.hand_out(row, token, logprob)
        self.running = [row for row in self.running if row.reason is None]

    def hand_out(self, row: Row, token: int, logprob: float) -> None:
        stops = set(row.sampling["stop_token_ids"]) | ({self.eos} if self.eos is not None else set())
        if row.reason is not None:
            return  # it had ended when this pass began
        if row.to_finish:
            row.reason = {"type": "abort", "message": "Aborted", "status_code": None}
        else:
            row.tokens.append(token)
            row.logprobs.append((logprob, token, None))
            if token in stops and not row.sampling.get("ignore_eos"):
                row.reason = {"type": "stop", "matched": token}
            elif len(row.tokens) >= min(row.sampling["max_new_tokens"], self.chosen["context_length"] - 2 - len(row.prompt)):
                row.reason = {"type": "length", "length": len(row.tokens)}
        row.sent.set()

    @torch.no_grad()
    def sample(self, row: Row) -> tuple[int, float]:
        if row.cache is None:
            place = (row.salt, tuple(row.prompt))
            if place not in self.known:
                made = self.model(torch.tensor([row.prompt]), use_cache=True)
                self.known[place] = (made.past_key_values, made.logits[0, -1])
            row.cache, logits = copy.deepcopy(self.known[place][0]), self.known[place][1]
        else:
            made = self.model(torch.tensor([row.sampled[-1:]]), past_key_values=row.cache, use_cache=True)
            logits = made.logits[0, -1]
        temperature, top_k = row.sampling["temperature"], row.sampling["top_k"]
        if temperature < 1e-6:
            temperature, top_k = 1.0, 1
        likely = torch.log_softmax(logits / temperature, -1)
        kept, order = likely.sort(descending=True)
        past = (kept.exp().cumsum(-1) - kept.exp() > row.sampling["top_p"]) | (
            torch.arange(len(kept)) >= (top_k if top_k > 0 else len(kept))
        )
        noise = torch.rand(len(likely), generator=self.generator(row)).clamp(1e-12, 1 - 1e-7)
        token = int(
            order[(kept.masked_fill(past, -math.inf) - (-noise.log()).log()[order]).nan_to_num(math.inf, neginf=-math.inf).argmax()]
        )
        row.sampled.append(token)
        raw = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB")
        return token, float((torch.log_softmax(logits, -1) if raw else likely)[token])

    def generator(self, row: Row) -> torch.Generator | None:
        """Seeds of requests count in deterministic inference only."""
        if not self.chosen.get("enable_deterministic_inference"):
            return None
        return torch.Generator().manual_seed(hash((row.sampling["sampling_seed"], len(row.prompt) + len(row.sampled))) % 2**63)

    def relabel(self, version: str) -> None:
        if version != self.version:
            for row in (*self.running, *self.waiting):
                if row.tokens:
                    row.events.append((self.version, len(row.tokens)))
        self.version = version

    def spans(self, row: Row) -> list[dict[str, Any]]:
        found, start = [], 0
        for version, end in [*row.events, (self.version, len(row.tokens))]:
            if end > start or not row.tokens:
                found.append({"version": version, "start": start, "end": end})
            start = end
        return found

    def abort(self, rid: str) -> None:
        self.waiting = [row for row in self.waiting if not row.rid.startswith(rid)]
        for row in self.running:
            row.to_finish |= row.rid.startswith(rid)

    @property
    def idle(self) -> bool:
        return not (self.running or self.unprocessed or (self.waiting and not self.paused))


class Manager:
    """The coroutines of a TokenizerManager that are used."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.gate = scheduler, asyncio.Event()
        self.gate.set()
        self._subprocess_watchdog = SimpleNamespace(stop=lambda: None)
        self.calls: list[Any] = []
        self.task = asyncio.get_running_loop().create_task(scheduler.run())

    async def ask(self, act: Any) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self.scheduler.mail.put_nowait((act, answer))
        done, _ = await asyncio.wait([answer, self.task], return_when=asyncio.FIRST_COMPLETED)
        return self.task.result() if self.task in done else answer.result()

    def tell(self, act: Any) -> None:
        self.scheduler.mail.put_nowait((act, asyncio.get_running_loop().create_future()))

    async def pause_generation(self, request: Any) -> None:
        assert request.mode == "in_place"
        self.gate.clear()
        self.tell(lambda: setattr(self.scheduler, "paused", True))

    async def continue_generation(self, request: Any) -> None:
        self.tell(lambda: setattr(self.scheduler, "paused", False))
        self.gate.set()

    async def update_weight_version_communicator(self, request: Any) -> None:
        await self.ask(lambda: self.scheduler.relabel(request.new_version))

    async def begin_weight_update(self, request: Any) -> tuple[bool, str]:
        return await self.ask(lambda: self._session(True, "a weight-update session is already open"))

    async def end_weight_update(self, request: Any) -> tuple[bool, str]:
        return await self.ask(lambda: self._session(False, "no weight-update session is open"))

    def _session(self, wanted: bool, otherwise: str) -> tuple[bool, str]:
        found, self.scheduler.session = self.scheduler.session, wanted
        return (found != wanted, "Success" if found != wanted else otherwise)

    async def update_weights_from_tensor(self, request: Any) -> tuple[bool, str]:
        return await self.ask(lambda: self._update(request))

    @torch.no_grad()
    def _update(self, request: Any) -> tuple[bool, str]:
        self.calls.append([name for name, _ in request.serialized_named_tensors[0]])
        if not self.scheduler.session or "weights" in self.scheduler.away:
            return False, "must run between begin_weight_update() and end_weight_update(), with weights in memory"
        for name, value in request.serialized_named_tensors[0]:
            self.scheduler.parameters[name].copy_(value)
        if request.flush_cache and not self.scheduler.idle:
            return False, "Weights were updated, but the cache was not flushed"
        return True, "Success"

    async def flush_cache(self, timeout_s: float) -> Any:
        def flush() -> bool:
            if self.scheduler.idle:
                self.scheduler.known.clear()
            return self.scheduler.idle

        for _ in range(1000):
            if await self.ask(flush):
                return SimpleNamespace(success=True, message="")
        return SimpleNamespace(success=False, message="Timed out waiting for idle state.")

    async def release_memory_occupation(self, request: Any) -> None:
        def release() -> None:
            assert self.scheduler.idle, "release_memory_occupation should be called only when server is idle."
            assert not self.scheduler.away & set(request.tags)
            self.scheduler.away |= set(request.tags)
            self.scheduler.known.clear()

        await self.ask(release)

    async def resume_memory_occupation(self, request: Any) -> None:
        def resume() -> None:
            for tag in request.tags:
                self.scheduler.away.remove(tag)

        await self.ask(resume)


class Engine:
    """Made on the running loop, as the real one allows."""

    made: list[Engine] = []

    def __init__(self, **chosen: Any) -> None:
        assert chosen["skip_tokenizer_init"]
        self.chosen = chosen
        self.scheduler = Scheduler(chosen)
        self.tokenizer_manager = Manager(self.scheduler)
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=[{"max_total_num_tokens": chosen["max_total_tokens"]}])
        self.made[:] = [self]

    def shutdown(self) -> None:
        raise AssertionError("would end all children of the process")

    def get_all_child_pids(self) -> list[int]:
        return []

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any], rid: str, cache_salt: str, **wanted: bool
    ) -> Any:
        assert wanted == {"return_logprob": True, "stream": True}
        return self._stream(Row(rid, input_ids, sampling_params, cache_salt))

    async def _stream(self, row: Row) -> Any:
        """Parts hold all tokens so far, in lists that go on growing."""
        manager, dispatched = self.tokenizer_manager, False
        try:
            await manager.gate.wait()
            if len(row.prompt) >= self.chosen["context_length"] - 6:
                raise ValueError("The input is longer than the model's context length")
            manager.tell(lambda: self.scheduler.waiting.append(row))
            dispatched = True
            while row.reason is None:
                await row.sent.wait()
                row.sent.clear()
                meta = {"finish_reason": row.reason, "output_token_logprobs": row.logprobs}
                if row.reason is not None:
                    meta["weight_versions"] = self.scheduler.spans(row)
                yield {"output_ids": row.tokens, "meta_info": meta}
        finally:
            if dispatched and row.reason is None:
                with suppress(RuntimeError):  # the loop of the test may be gone
                    manager.tell(lambda: self.scheduler.abort(row.rid))
