"""The reward: processes that score answers with verifiers and the user's own functions."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

import pyarrow as pa

from rolemesh.batch import Batch
from rolemesh.config.schema import Config
from rolemesh.rewards import Outcome, RewardScorer, top_errors
from rolemesh.rewards.scorer import samples_of
from rolemesh.runtime import Worker, WorkerContext, register

logger = logging.getLogger(__name__)
READS = ("source", "prompt", "response", "answer", "task", "finish_reason")
DETAILS = "extra/reward_details"
"""JSON of what the functions returned beside the score, and of errors: one column, so that every rank writes the same ones."""
WRITES = ("reward", "reward_status", DETAILS)
SAMPLE_COLUMNS = (*READS, *WRITES, "response_length", "weight_version", "engine", "advantage")


class RewardWorker(Worker):
    """One scoring process."""

    def __init__(self, context: WorkerContext, *, config: Config) -> None:
        super().__init__(context)
        self.config = config

    def load(self) -> None:
        """Import the reward functions."""
        self.scorer = RewardScorer(self.config.reward)

    @register(dispatch="data_parallel", reads=READS, writes=WRITES)
    def score(self, batch: Batch) -> Batch:
        """Total reward and status of every row; a row that cannot be scored has no reward, and says why."""
        outcomes = self.scorer.score(samples_of(batch))
        for outcome in outcomes:
            self.metrics.sum(f"reward/status/{outcome.status}", 1)
            self._record_numbers(outcome.extras)
        for error, count in top_errors([outcome.error for outcome in outcomes]):
            logger.warning("%d of %d samples not scored: %s", count, len(outcomes), error)
        return batch.select([]).with_columns(
            {
                "reward": pa.array([outcome.reward for outcome in outcomes], pa.float64()),
                "reward_status": pa.array([outcome.status for outcome in outcomes], pa.large_string()),
                DETAILS: pa.array([_details(outcome) for outcome in outcomes], pa.large_string()),
            }
        )

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
