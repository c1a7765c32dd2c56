"""The rollout with an environment: answers of several turns, each turn a request to the engine beside those of other episodes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rolemesh.batch import Batch
from rolemesh.config.schema import Config
from rolemesh.data import derive_seed
from rolemesh.environments import Episode, EpisodeLoop, TurnEncoder, environment_maker
from rolemesh.errors import RolemeshError
from rolemesh.models import load_config
from rolemesh.protocols.engine import Completion, Sampling
from rolemesh.protocols.environment import Start
from rolemesh.protocols.task import load_task
from rolemesh.roles.rollout import ONE_REPLICA, RolloutWorker, digests
from rolemesh.roles.rollout import WRITES as COMMON
from rolemesh.runtime import WorkerContext, register

READS = ("prompt_ids", "source", "prompt", "answer", "task")
WRITES = (*COMMON, "response_mask", "turns", "environment_reward", "environment_error")
LISTEN_SECONDS = 0.05
"""That an engine without work waits for environments before it looks whether anything else is to be done."""


class EnvironmentFailed(RolemeshError):
    """An environment failed in every episode of a call. Says how."""

    @classmethod
    def message(cls, **fields: Any) -> str:
        return (
            "environment {name} failed in all of {episodes} episodes, the first with: {error}\n"
            "Repair it, or the service that it asks; what an answer is worth is not known then, and never taken for 0"
        ).format(**fields)


class EpisodeWorker(RolloutWorker):
    """One engine, and the episodes that it answers in. See `environments.episodes` for who waits for whom."""

    def __init__(self, context: WorkerContext, *, config: Config) -> None:
        super().__init__(context, config=config)
        self._episodes: EpisodeLoop | None = None
        self._settings: Sampling
        self._played: list[Episode] = []
        """Of the round, not handed in."""
        self._failing: set[int] = set()
        """Prompts in whose episodes the environment failed since one last went well; more than two are not remembered."""

    def load(self) -> None:
        """Build the engine and start the event loop."""
        super().load()
        self.close()
        config = self.config
        assert config.environment is not None
        self._episodes = EpisodeLoop(
            environment_maker(config.environment),
            TurnEncoder(self.tokenizer, chat=config.data.chat),
            config.environment,
            max_response_tokens=config.data.max_response_tokens,
            context=_context(config),
        )

    def close(self) -> None:
        """End the event loop. `load` starts a new one."""
        if self._episodes is not None:
            self._episodes.close()
            self._episodes = None

    @register(dispatch="data_parallel", reads=READS, writes=WRITES)
    def generate(self, batch: Batch, *, version: int, temperature: float, seed: int) -> Batch:
        """Play an episode for every row. Raises StaleWeights unless the engine holds exactly `version`, and EnvironmentFailed."""
        self._abort()
        self._add(batch, version, temperature, seed)
        played = {episode.id: episode for episode in self._play(len(batch))}
        return self._write_episodes([played[draw, sample] for draw, sample in batch.ids.tolist()])

    @register(dispatch="data_parallel", reads=READS)
    def take_on(self, batch: Batch, *, round: str, version: int, temperature: float, seed: int) -> None:
        """Begin episodes for rows of a round; see the base."""
        super().take_on(batch, round=round, version=version, temperature=temperature, seed=seed)

    @register(dispatch=ONE_REPLICA, writes=WRITES)
    def hand_in(self, *, round: str, at_least: int) -> Batch:
        """Go on until so many episodes have ended; see the base. Raises EnvironmentFailed."""
        self._require_round(round)
        return self._write_episodes(self._play(at_least))

    # -- what the base asks for -----------------------------------------------------------------------------------------------

    @property
    def _loop(self) -> EpisodeLoop:
        if self._episodes is None:
            raise RuntimeError("the worker is closed; load it again")
        return self._episodes

    @property
    def _unfinished(self) -> int:
        return self._loop.unfinished + len(self._played)

    def _abort(self) -> None:
        super()._abort()
        self._played.clear()
        if self._loop.unfinished:
            self._loop.cancel()

    def _add(self, batch: Batch, version: int, temperature: float, seed: int) -> None:
        self._require(version)
        self._settings = self._sampling(temperature, seed)
        columns = [batch.scalars(name) for name in ("source", "prompt", "answer", "task")]
        rows = [
            (self._start(draw, sample, seed, texts), prompt)
            for (draw, sample), prompt, *texts in zip(batch.ids.tolist(), batch.rows("prompt_ids"), *columns, strict=True)
        ]
        self._loop.begin(rows)

    def _start(self, draw: int, sample: int, seed: int, texts: Sequence[Any]) -> Start:
        source, prompt, answer, task = texts
        own = derive_seed(seed, f"environment {draw}")
        return Start(draw=draw, sample=sample, seed=own, source=source, prompt=prompt, answer=answer, task=load_task(task))

    def _play(self, at_least: int) -> list[Episode]:
        """Episodes, in the order in which they ended."""
        idle = 0.0
        with self._nothing_left_behind():
            while self._loop.unfinished and len(self._played) < at_least:
                if self._rows or self._desk.busy:
                    self._step()
                else:
                    began = time.monotonic()
                    self._hear(wait=LISTEN_SECONDS)
                    idle += time.monotonic() - began
        self.metrics.max("environment/engine_idle_seconds", idle)
        played, self._played = self._played, []
        self._refuse_broken(played)
        return played

    def _step(self) -> None:
        self._hear()
        super()._step()

    def _hear(self, wait: float = 0.0) -> None:
        """Take over what episodes want next."""
        requests, ended = self._loop.news(wait=wait)
        self._played += ended
        if requests:
            self._begin(requests, self._settings)

    def _collect(self, completions: Sequence[Completion]) -> None:
        if completions:
            self._loop.give(completions)

    def _refuse_broken(self, episodes: Sequence[Episode]) -> None:
        """One prompt alone may be at fault; an environment that fails on several, and on nothing else, is broken."""
        errors = [episode.error for episode in episodes if episode.error is not None]
        if len(errors) < len(episodes):
            self._failing = set()
        elif errors:
            self._failing = set(sorted(self._failing | {episode.start.draw for episode in episodes})[:2])
            if len(self._failing) > 1:
                self._abort()
                assert self.config.environment is not None
                raise EnvironmentFailed(name=self.config.environment.name, episodes=len(errors), error=errors[0])

    # -- what is told ---------------------------------------------------------------------------------------------------------

    def _write_episodes(self, episodes: Sequence[Episode]) -> Batch:
        sampled = [sum(episode.mask) for episode in episodes]
        for episode, length in zip(episodes, sampled, strict=True):
            self._record(episode, length)
        numbers = np.array
        return Batch.from_columns(
            {
                "draw": numbers([episode.start.draw for episode in episodes], dtype=np.int64),
                "sample": numbers([episode.start.sample for episode in episodes], dtype=np.int64),
                "response_ids": [episode.token_ids for episode in episodes],
                "response_mask": [episode.mask for episode in episodes],
                "response": self._texts(episode.token_ids for episode in episodes),
                "rollout_logprobs": [episode.logprobs for episode in episodes],
                "response_length": numbers(sampled, dtype=np.int64),
                "response_digest": digests(episode.token_ids for episode in episodes),
                "finish_reason": [episode.finish_reason for episode in episodes],
                "weight_version": numbers([self._version(episode) for episode in episodes], dtype=np.int64),
                "weight_spans": _texts_or_null([episode.spans if len(episode.spans) > 1 else None for episode in episodes]),
                "engine": [self.engine.name] * len(episodes),
                "turns": [json.dumps(episode.turns, ensure_ascii=False) for episode in episodes],
                "environment_reward": pa.array([episode.reward for episode in episodes], pa.float64()),
                "environment_error": pa.array([episode.error for episode in episodes], pa.large_string()),
            }
        )

    def _version(self, episode: Episode) -> int:
        return min((span.version for span in episode.spans), default=self.engine.weight_version)

    def _record(self, episode: Episode, sampled: int) -> None:
        metrics, turns = self.metrics, sum(turn["role"] == "assistant" for turn in episode.turns)
        metrics.mean("response_length/cut_share", episode.finish_reason == "length")
        metrics.max("response_length/max", sampled)
        metrics.min("response_length/min", sampled)
        metrics.mean("environment/turns/mean", turns)
        metrics.max("environment/turns/max", turns)
        metrics.mean("environment/observation_tokens", len(episode.token_ids) - sampled)
        metrics.mean("environment/seconds/mean", episode.seconds)
        metrics.max("environment/seconds/max", episode.seconds)
        metrics.sum("environment/failed", episode.error is not None)
        for name, count in episode.counts.items():
            metrics.sum(f"environment/{name}", count)


def _context(config: Config) -> int | None:
    """Most tokens that the model takes."""
    limit = getattr(load_config(config.model).get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _texts_or_null(values: Sequence[Any]) -> pa.Array:
    return pa.array([None if value is None else json.dumps(value) for value in values], pa.large_string())
