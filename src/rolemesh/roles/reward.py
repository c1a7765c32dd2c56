"""The reward: workers that score answers with verifiers and the user's own functions."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

import pyarrow as pa

from rolemesh.batch import Batch
from rolemesh.config.schema import Config, RoleConfig
from rolemesh.names import REWARD
from rolemesh.observe import metric_part
from rolemesh.protocols.reward import Sample
from rolemesh.rewards import InProcess, Outcome, RewardScorer, ScoringPool, top_errors
from rolemesh.rewards.scorer import functions_of, samples_of
from rolemesh.rewards.work import Answer, Executor
from rolemesh.runtime import Worker, WorkerContext, register

logger = logging.getLogger(__name__)
READS = ("source", "prompt", "response", "answer", "task", "finish_reason", "turns", "environment_reward", "environment_error")
DETAILS = "extra/reward_details"
"""JSON of what the functions returned beside the score, and of errors: one column, so that every rank writes the same ones."""
WRITES = ("reward", "reward_status", DETAILS)
SAMPLE_COLUMNS = (*READS, *WRITES, "response_mask", "response_length", "weight_version", "weight_spans", "engine", "advantage")


class RewardWorker(Worker):
    """Scores answers in a pool of processes of its own; with `backend: local` where it is, for a debugger.

    The processes end with this one, however it ends, and with the worker.
    """

    def __init__(self, context: WorkerContext, *, config: Config) -> None:
        super().__init__(context)
        self.config = config
        self._executor: Executor | None = None

    def load(self) -> None:
        """Import the reward functions, in processes that are ready to score then."""
        self.close()
        self._executor = self._make_executor()
        self.scorer = RewardScorer(self.config.reward, self._executor)

    def _make_executor(self) -> Executor | None:
        functions = functions_of(self.config.reward)
        if not functions:
            return None
        if self.config.backend == "local":
            return InProcess(functions)
        role = self.config.roles.get(REWARD, RoleConfig())
        return ScoringPool(functions, processes=role.processes or max(1, int(role.cpus or 1)))

    def close(self) -> None:
        """End the processes. `load` starts new ones."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    @register(dispatch="data_parallel", reads=READS, writes=WRITES)
    def score(self, batch: Batch) -> Batch:
        """Total reward and status of every row; a row that cannot be scored has no reward, and says why."""
        outcomes = self._judge(batch)
        for outcome in outcomes:
            self.metrics.sum(f"reward/status/{outcome.status}", 1)
            for name in (name for name, score in outcome.parts.items() if score is None):
                self.metrics.sum(f"reward/unscored/{metric_part(name)}", 1)
            self._record_numbers(outcome.extras)
        self._record_usage()
        for error, count in top_errors([outcome.error for outcome in outcomes]):
            logger.warning("%d of %d samples not scored: %s", count, len(outcomes), error)
        return batch.select([]).with_columns(
            {
                "reward": pa.array([outcome.reward for outcome in outcomes], pa.float64()),
                "reward_status": pa.array([outcome.status for outcome in outcomes], pa.large_string()),
                DETAILS: pa.array([_details(outcome) for outcome in outcomes], pa.large_string()),
            }
        )

    def _judge(self, batch: Batch) -> list[Outcome]:
        """An outcome for each row. Rows whose environment failed are not scored: what they are worth is not known."""
        errors = batch.scalars("environment_error") if "environment_error" in batch.names else [None] * len(batch)
        sound = batch.take([row for row, error in enumerate(errors) if error is None])
        samples = samples_of(sound)
        scored = iter(self.scorer.outcomes(samples, self._answers(sound, samples)) if samples else ())
        return [next(scored) if error is None else Outcome(reward=None, status="environment", error=error) for error in errors]

    def _answers(self, batch: Batch, samples: list[Sample]) -> dict[int, list[Answer]]:
        """What every entry of the section says of its samples."""
        return self.scorer.answers(samples)

    def _record_usage(self) -> None:
        """Who did how much: all processes of all workers should have their share."""
        if self._executor is None:
            return
        usage = self._executor.take_usage()
        total = sum(usage.samples)
        self.metrics.max("reward/process/samples_max", max(usage.samples))
        self.metrics.min("reward/process/samples_min", min(usage.samples))
        self.metrics.sum("reward/process/replaced", usage.replaced)
        if total:
            self.metrics.mean("reward/seconds/mean", usage.seconds / total, total)
            self.metrics.max("reward/seconds/max", usage.slowest)

    def _record_numbers(self, extras: Mapping[str, object]) -> None:
        for name, value in extras.items():
            if isinstance(value, float):
                self.metrics.mean(f"reward/extra/{name}", value)

    @register(dispatch="rank_zero", reads=SAMPLE_COLUMNS)
    def save_samples(self, batch: Batch, path: str) -> None:
        """Write texts, rewards and provenance of the rows to a Parquet file."""
        batch.to_parquet(path)


def _details(outcome: Outcome) -> str | None:
    details = dict(outcome.extras) | ({"reward_error": outcome.error} if outcome.error else {})
    return json.dumps(details, sort_keys=True) if details else None
