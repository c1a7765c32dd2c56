"""The rollout: answers prompts with an inference engine that serves exactly one weight version. `rollout_manager.py` calls several."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import torch

from rolemesh.batch import Batch
from rolemesh.config.schema import Config
from rolemesh.engines.rollout import create_engine
from rolemesh.errors import StaleWeights
from rolemesh.models import load_model, load_tokenizer, stop_token_ids
from rolemesh.protocols.engine import Completion, EngineHealth, Request, RolloutEngine, Sampling
from rolemesh.roles.taker import WeightTaker
from rolemesh.runtime import Dispatch, WorkerContext, register
from rolemesh.runtime.dispatch import collect_first, split_all
from rolemesh.weights import Weights

WRITES = (
    *("response_ids", "response", "rollout_logprobs", "response_length", "finish_reason"),
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
        """Whose requests the engine has between two calls."""

    def load(self) -> None:
        """Build the engine. It generates only after weights were published to it."""
        torch.set_num_threads(1)
        config = self.config
        self.tokenizer = load_tokenizer(config.model)
        self.stop = stop_token_ids(self.tokenizer, config.model)
        self.engine = create_engine(
            config.rollout.engine,
            load_model(config.model, seed=config.seed, device=self.context.device),
            slots=config.rollout.slots,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.data.max_response_tokens,
            deterministic=config.deterministic,
            device=self.context.device,
        )

    def take_weights(self, weights: Weights, version: int) -> int:
        """Weights that do not fit, or do not come whole, are refused and leave the engine refusing. Requests of a round that was given up
        end."""
        self._abort()
        self.engine.load_weights(weights, version)
        return self.engine.weight_version

    @register(dispatch="all", mutates=True)
    def serve_folder(self, version: int) -> int:
        """Serve the weights of the model folder itself, where there is no actor to publish any (evaluation, generation)."""
        self._abort()
        model = load_model(self.config.model, seed=self.config.seed)
        self.engine.load_weights(model.named_parameters(), version)
        return self.engine.weight_version

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

    @register(dispatch="all")
    def health(self) -> EngineHealth:
        """What the engine says of itself; see there."""
        return self.engine.health()

    @register(dispatch="all", mutates=True)
    def sleep(self, keep_weights: bool) -> None:
        """Give memory back until `wake`; rows that are not handed in end. Nothing is generated meanwhile."""
        self._abort()
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
        return self.engine.unfinished

    def _abort(self) -> None:
        """Rows that are not handed in end."""
        self.engine.abort()

    def _add(self, batch: Batch, version: int, temperature: float, seed: int) -> None:
        self._require(version)
        rows = zip(batch.ids.tolist(), batch.rows("prompt_ids"), strict=True)
        requests = [Request(id=(draw, sample), prompt_ids=prompt) for (draw, sample), prompt in rows]
        self.engine.add(requests, self._sampling(temperature, seed))

    def _require(self, version: int) -> None:
        if self.engine.weight_version != version:
            where = f"{self.context.group} rank {self.context.rank}"
            raise StaleWeights(where=where, holds=self.engine.weight_version, asked=version)

    def _run(self, at_least: int) -> list[Completion]:
        """Answers, in the order in which they ended. Leaves nothing behind in the engine when it fails."""
        done: list[Completion] = []
        try:
            while self.engine.unfinished and len(done) < at_least:
                done += self.engine.step()
        except BaseException:
            self.engine.abort()
            raise
        return done

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
                "finish_reason": [completion.finish_reason for completion in completions],
                "weight_version": np.array([completion.weight_version for completion in completions], dtype=np.int64),
                "weight_spans": pa.array([_spans(completion) for completion in completions], pa.large_string()),
                "engine": [self.engine.name] * len(completions),
            }
        )

    def _texts(self, token_ids: Iterable[list[int]]) -> list[str]:
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids]


def _spans(completion: Completion) -> str | None:
    return json.dumps(completion.spans) if len(completion.spans) > 1 else None
