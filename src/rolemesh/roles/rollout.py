"""The rollout: answers prompts with an inference engine that serves exactly one weight version."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from rolemesh.batch import Batch
from rolemesh.config.schema import Config
from rolemesh.engines.rollout import create_engine
from rolemesh.errors import StaleWeights
from rolemesh.models import load_model, load_tokenizer, stop_token_ids
from rolemesh.protocols.engine import Completion, Request, RolloutEngine, Sampling
from rolemesh.roles.taker import WeightTaker
from rolemesh.runtime import WorkerContext, register
from rolemesh.weights import Weights

WRITES = ("response_ids", "response", "rollout_logprobs", "response_length", "finish_reason", "weight_version", "engine")


class RolloutWorker(WeightTaker):
    """One engine with its own copy of the weights."""

    def __init__(self, context: WorkerContext, *, config: Config) -> None:
        super().__init__(context)
        self.config = config
        self.engine: RolloutEngine

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
        """Weights that do not fit, or do not come whole, are refused and leave the engine refusing."""
        self.engine.load_weights(weights, version)
        return self.engine.weight_version

    @register(dispatch="all", mutates=True)
    def serve_folder(self, version: int) -> int:
        """Serve the weights of the model folder itself, where there is no actor to publish any (evaluation, generation)."""
        model = load_model(self.config.model, seed=self.config.seed)
        self.engine.load_weights(model.named_parameters(), version)
        return self.engine.weight_version

    @register(dispatch="data_parallel", reads=("prompt_ids",), writes=WRITES)
    def generate(self, batch: Batch, *, version: int, temperature: float, seed: int) -> Batch:
        """Answer every row. Raises StaleWeights unless the engine holds exactly `version`."""
        if self.engine.weight_version != version:
            where = f"{self.context.group} rank {self.context.rank}"
            raise StaleWeights(where=where, holds=self.engine.weight_version, asked=version)
        ids = [(int(draw), int(sample)) for draw, sample in batch.ids]
        requests = [Request(id=row_id, prompt_ids=prompt) for row_id, prompt in zip(ids, batch.rows("prompt_ids"), strict=True)]
        done = self._run(requests, self._sampling(temperature, seed))
        return self._write(batch, [done[row_id] for row_id in ids])

    def _run(self, requests: list[Request], sampling: Sampling) -> dict[tuple[int, int], Completion]:
        """All answers by id. Leaves nothing behind in the engine, also when it fails."""
        done: dict[tuple[int, int], Completion] = {}
        self.engine.add(requests, sampling)
        try:
            while self.engine.unfinished:
                done |= {completion.id: completion for completion in self.engine.step()}
        finally:
            self.engine.abort()
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

    def _write(self, batch: Batch, completions: list[Completion]) -> Batch:
        lengths = [len(completion.token_ids) for completion in completions]
        for completion, length in zip(completions, lengths, strict=True):
            self.metrics.mean("response_length/cut_share", completion.finish_reason == "length")
            self.metrics.max("response_length/max", length)
            self.metrics.min("response_length/min", length)
        return batch.select([]).with_columns(
            {
                "response_ids": [completion.token_ids for completion in completions],
                "response": self._texts(completion.token_ids for completion in completions),
                "rollout_logprobs": [completion.logprobs for completion in completions],
                "response_length": np.array(lengths, dtype=np.int64),
                "finish_reason": [completion.finish_reason for completion in completions],
                "weight_version": np.array([completion.weight_version for completion in completions], dtype=np.int64),
                "engine": [self.engine.name] * len(completions),
            }
        )

    def _texts(self, token_ids: Iterable[list[int]]) -> list[str]:
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids]
