"""The reward: processes that score answers with verifiers and the user's own functions."""

from __future__ import annotations

from rolemesh.batch import Batch
from rolemesh.config.schema import Config
from rolemesh.rewards import RewardScorer
from rolemesh.runtime import Worker, WorkerContext, register

READS = ("source", "prompt", "response", "answer", "task", "finish_reason")
SAMPLE_COLUMNS = (*READS, "reward", "reward_status", "response_length", "weight_version", "engine")


class RewardWorker(Worker):
    """One scoring process."""

    def __init__(self, context: WorkerContext, *, config: Config) -> None:
        super().__init__(context)
        self.config = config

    def load(self) -> None:
        """Import the reward functions."""
        self.scorer = RewardScorer(self.config.reward)

    @register(dispatch="data_parallel", reads=READS, writes=("reward", "reward_status"))
    def score(self, batch: Batch) -> Batch:
        """Total reward and status of every row; a row that cannot be scored has no reward, and says why."""
        scored: Batch = self.scorer.score_batch(batch)
        for status in scored.scalars("reward_status"):
            self.metrics.sum(f"reward/status/{status}", 1)
        return scored

    @register(dispatch="rank_zero", reads=SAMPLE_COLUMNS)
    def save_samples(self, batch: Batch, path: str) -> None:
        """Write texts, rewards and provenance of the rows to a Parquet file."""
        batch.to_parquet(path)
