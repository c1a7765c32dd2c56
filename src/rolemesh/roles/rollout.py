"""The rollout: answers prompts with an inference engine that serves exactly one weight version. `rollout_manager.py` calls several."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rolemesh.batch import Batch
from rolemesh.config.schema import Config
from rolemesh.engines.rollout import create_engine, needs_contents
from rolemesh.errors import ConfigError, StaleWeights
from rolemesh.models import load_model, load_tokenizer, stop_token_ids
from rolemesh.protocols.engine import Completion, EngineHealth, InFlight, Request, RolloutEngine, Sampling
from rolemesh.protocols.requests import News
from rolemesh.roles.desk import Desk
from rolemesh.roles.taker import WeightTaker
from rolemesh.runtime import Dispatch, WorkerContext, register
from rolemesh.runtime.dispatch import collect_first, split_all
from rolemesh.weights import Weights

logger = logging.getLogger(__name__)
WRITES = (
    *("response_ids", "response", "rollout_logprobs", "response_length", "response_digest", "finish_reason"),
    *("weight_version", "weight_spans", "engine"),
)
ONE_REPLICA = Dispatch(name="one_replica", split=split_all, collect=collect_first)
"""The same to all ranks of a replica, of which the first answers."""


class RolloutWorker(WeightTaker):
    """One engine with its own copy of the weights."""

    def __init__(self, context: WorkerContext, *, config: Config) -> None:
        super().__init__(context)
        self.config = config
        self.engine: RolloutEngine
        self._round = ""
        """Whose rows the engine has between two calls."""
        self._rows: set[tuple[int, int]] = set()
        """Of the round, in the engine."""
        self._ended: list[Completion] = []
        """Of the round, not handed in."""
        self._desk = Desk()

    def load(self) -> None:
        """Build the engine. It generates only after weights were published to it."""
        torch.set_num_threads(1)
        config = self.config
        self.tokenizer = load_tokenizer(config.model)
        self.stop = stop_token_ids(self.tokenizer, config.model)
        name = config.rollout.engine
        self.engine = create_engine(
            name,
            load_model(config.model, seed=config.seed, device=self.context.device if needs_contents(name) else "meta"),
            slots=config.rollout.slots,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.data.max_response_tokens,
            deterministic=config.deterministic,
            device=self.context.device,
        )
        if config.rollout.serve is not None and self._in_flight not in self.engine.in_flight:
            able = ", ".join(sorted(self.engine.in_flight))
            raise ConfigError.one("rollout.serve.in_flight", f"engine {self.engine.name!r} can {able}", self._in_flight)

    @property
    def _in_flight(self) -> InFlight:
        """What becomes of requests from outside when weights change, unless they have ended before."""
        serve = self.config.rollout.serve
        return "refuse" if serve is None or serve.in_flight == "wait" else serve.in_flight

    def take_weights(self, weights: Weights, version: int) -> int:
        """Weights that do not fit, or do not come whole, are refused and leave the engine refusing. Rows of a round that was given up
        end; requests from outside do as `rollout.serve.in_flight` says, and end where it says nothing."""
        self._abort()
        serve = self.config.rollout.serve
        if serve is None:
            self._desk.take(self.engine.abort())
        else:
            # Copied, never kept in shared memory: requests go on while the actor writes the next version there.
            weights = ((name, weight) for name, weight in weights)
            if serve.in_flight == "wait":
                self._finish_requests(serve.patience)
        self._desk.take(self.engine.load_weights(weights, version, in_flight=self._in_flight))
        return self.engine.weight_version

    def _finish_requests(self, seconds: float) -> None:
        """Let requests from outside that have begun run to their end, for so long at most; then end them. The others wait."""
        if self.engine.weight_version < 0:
            return
        self._desk.admit(self.engine)
        try:
            with self._nothing_left_behind():
                self._desk.take(self.engine.drain(seconds))
                self._desk.take(self.engine.abort(self._desk.running(self.engine)))
        finally:
            self.engine.resume()

    @register(dispatch="all", mutates=True)
    def serve_folder(self, version: int) -> int:
        """Serve the weights of the model folder itself, where there is no actor to publish any (evaluation, generation)."""
        model = load_model(self.config.model, seed=self.config.seed)
        return self.take_weights(iter(model.named_parameters()), version)

    @register(dispatch="data_parallel", reads=("prompt_ids",), writes=WRITES)
    def generate(self, batch: Batch, *, version: int, temperature: float, seed: int) -> Batch:
        """Answer every row. Raises StaleWeights unless the engine holds exactly `version`."""
        self._abort()
        self._add(batch, version, temperature, seed)
        done = {completion.id: completion for completion in self._run(len(batch))}
        return self._write([done[draw, sample] for draw, sample in batch.ids.tolist()])

    @register(dispatch="data_parallel", reads=("prompt_ids",))
    def take_on(self, batch: Batch, *, round: str, version: int, temperature: float, seed: int) -> None:
        """Queue rows of a round, beside those that the engine has of it. What is left of another round ends. Raises StaleWeights unless
        the engine holds exactly `version`."""
        if round != self._round:
            self._abort()
            self._round = round
        self._add(batch, version, temperature, seed)

    @register(dispatch=ONE_REPLICA, writes=WRITES)
    def hand_in(self, *, round: str, at_least: int) -> Batch:
        """Go on until so many of the rows taken on are answered, or all; returns these, in the order in which they ended. The others
        stay in the engine."""
        self._require_round(round)
        return self._write(self._run(at_least))

    @register(dispatch=ONE_REPLICA)
    def go_on(self, seconds: float) -> bool:
        """Work on requests from outside for so long, or until none is left; rows of a round that are in the engine go on with them.
        False when there are no weights to do so."""
        if self._intake is not None or self.overwritten or self.engine.weight_version < 0:
            return False
        ends = time.monotonic() + seconds
        with self._nothing_left_behind():
            while self._desk.busy and time.monotonic() < ends:
                self._step()
            self._desk.show(self.engine, now=True)
        return True

    def talk(self, message: Any) -> list[News]:
        """Control thread: the arguments of `Desk.exchange`."""
        return self._desk.exchange(*message)

    @register(dispatch="all")
    def health(self) -> EngineHealth:
        """What the engine says of itself; see there."""
        return self.engine.health()

    @register(dispatch="all", mutates=True)
    def sleep(self, keep_weights: bool) -> None:
        """Give memory back until `wake`; rows that are not handed in end. Nothing is generated meanwhile."""
        self._abort()
        self._desk.take(self.engine.abort())
        self.engine.sleep(keep_weights=keep_weights)

    @register(dispatch="all", mutates=True)
    def wake(self) -> int:
        """Bring the weights back; returns the version held, -1 if they have to be published."""
        self.engine.wake()
        return self.engine.weight_version

    def _require_round(self, round: str) -> None:
        if round != self._round or not self._unfinished:
            raise RuntimeError(f"round {round} has no request here; there are {self._unfinished} of round {self._round or 'none'}")

    @property
    def _unfinished(self) -> int:
        """Rows taken on that are not handed in."""
        return len(self._rows) + len(self._ended)

    def _abort(self) -> None:
        """Rows that are not handed in end."""
        self.engine.abort(self._rows)
        self._rows.clear()
        self._ended.clear()

    def _add(self, batch: Batch, version: int, temperature: float, seed: int) -> None:
        self._require(version)
        rows = zip(batch.ids.tolist(), batch.rows("prompt_ids"), strict=True)
        requests = [Request(id=(draw, sample), prompt_ids=prompt) for (draw, sample), prompt in rows]
        self._begin(requests, self._sampling(temperature, seed))

    def _require(self, version: int) -> None:
        held = -1 if self.overwritten or self._intake is not None else self.engine.weight_version
        if held != version:
            raise StaleWeights(where=f"{self.context.group} rank {self.context.rank}", holds=held, asked=version)

    def _begin(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Give requests of the round to the engine."""
        self.engine.add(requests, sampling)
        self._rows.update(request.id for request in requests)

    def _run(self, at_least: int) -> list[Completion]:
        """Answers to rows of the round, in the order in which they ended."""
        with self._nothing_left_behind():
            while self._rows and len(self._ended) < at_least:
                self._step()
        done, self._ended = self._ended, []
        return done

    def _step(self) -> None:
        """One of the engine. Requests from outside join and are told of; what ends of the round goes to `_collect`. When it raises, those
        from outside that it has are told so and end, and rows of the round go on. When it raises without any it is its own error."""
        try:
            self._desk.admit(self.engine)
            done = self.engine.step()
        except Exception as error:
            if not (suspects := self._desk.blame(error)):
                raise
            logger.warning("engine %s raised with %d requests from outside", self.engine.name, len(suspects), exc_info=error)
            self.engine.abort(suspects)
            done = self.engine.step() if self.engine.unfinished else []
        done = self._desk.take(done)
        self._desk.show(self.engine)
        self._rows.difference_update(completion.id for completion in done)
        if self._rows and not self.engine.unfinished:
            lost = f"{len(self._rows)} rows, the first {min(self._rows)}"
            raise RuntimeError(f"engine {self.engine.name!r} has nothing left to do and never answered {lost}; its `step` must return each")
        self._collect(done)

    def _collect(self, completions: Sequence[Completion]) -> None:
        """These requests of the round have ended."""
        self._ended += completions

    @contextmanager
    def _nothing_left_behind(self) -> Iterator[None]:
        """The engine is empty when it has failed."""
        try:
            yield
        except BaseException:
            self._abort()
            self.engine.abort()
            self._desk.forget()
            raise

    def _sampling(self, temperature: float, seed: int) -> Sampling:
        rollout = self.config.rollout
        return Sampling(
            temperature=temperature,
            max_new_tokens=self.config.data.max_response_tokens,
            stop_token_ids=self.stop,
            seed=seed,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )

    def _write(self, completions: Sequence[Completion]) -> Batch:
        lengths = [len(completion.token_ids) for completion in completions]
        for completion, length in zip(completions, lengths, strict=True):
            self.metrics.mean("response_length/cut_share", completion.finish_reason == "length")
            self.metrics.max("response_length/max", length)
            self.metrics.min("response_length/min", length)
        return Batch.from_columns(
            {
                "draw": np.array([completion.id[0] for completion in completions], dtype=np.int64),
                "sample": np.array([completion.id[1] for completion in completions], dtype=np.int64),
                "response_ids": [completion.token_ids for completion in completions],
                "response": self._texts(completion.token_ids for completion in completions),
                "rollout_logprobs": [completion.logprobs for completion in completions],
                "response_length": np.array(lengths, dtype=np.int64),
                "response_digest": digests(completion.token_ids for completion in completions),
                "finish_reason": [completion.finish_reason for completion in completions],
                "weight_version": np.array([completion.weight_version for completion in completions], dtype=np.int64),
                "weight_spans": pa.array([_spans(completion) for completion in completions], pa.large_string()),
                "engine": [self.engine.name] * len(completions),
            }
        )

    def _texts(self, token_ids: Iterable[list[int]]) -> list[str]:
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids]


def digests(answers: Iterable[Sequence[int]]) -> np.ndarray:
    """A hash [N] of the ids of each answer, the same in every process."""
    return np.array([hash(tuple(token_ids)) for token_ids in answers], dtype=np.int64)


def _spans(completion: Completion) -> str | None:
    return json.dumps(completion.spans) if len(completion.spans) > 1 else None
