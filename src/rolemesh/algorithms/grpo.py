"""GRPO: group-relative advantages and the clipped surrogate. By its options also Dr. GRPO (`normalize_std: false`), the clip-higher,
token-mean loss of DAPO (`clip_high`, `aggregation: token_mean`), and the batch-normalised advantages of REINFORCE++-baseline
(`normalize_std: false`, `whiten_advantages: true`; Hu et al. 2025, arXiv:2501.03262).

Shao et al. 2024, arXiv:2402.03300. `prepare` runs on the controller once a step, `loss` in the actor once a micro-batch.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rolemesh.algorithms.advantages import GroupStats, advantages_from, group_stats
from rolemesh.algorithms.policy import ClippedPolicy, trained_rows
from rolemesh.algorithms.whitening import combined
from rolemesh.batch import Batch
from rolemesh.observe import Metrics


class Grpo(ClippedPolicy):
    """Group relative policy optimization (see `protocols.algorithm.Algorithm`)."""

    name: ClassVar[str] = "grpo"

    @property
    def writes(self) -> tuple[str, ...]:
        return ("advantage", "token_weight", "minibatch")

    @property
    def actor_reads(self) -> tuple[str, ...]:
        return (*super().actor_reads, "advantage")

    def prepare(self, batch: Batch, metrics: Metrics) -> Batch:
        """The rows of one step with `advantage`, `token_weight` and `minibatch` added, in the order in which they came.

        A row without reward or without tokens is masked: weight 0. The numbers of a row do not depend on the order of the rows, to
        the last bit. Raises BatchError when a prompt has more than `group_size` answers."""
        rows = self.weighed(batch.sort_by_id())
        rewards = np.asarray(rows.scalars("reward"), dtype=np.float64)
        stats = group_stats(rewards, rows.ids[:, 0])
        advantages = advantages_from(stats, rewards, normalize_std=self.config.normalize_std)
        if self.config.whiten_advantages:
            _whiten(advantages, trained_rows(rows))
        rows = rows.with_columns({"advantage": advantages})
        _record_groups(stats, metrics)
        self.record(rows, metrics)
        return batch.join(rows.select(self.writes), replace=True)

    def has_signal(self, prepared: Batch) -> bool:
        """Whether any trained row of a prepared step has an advantage other than 0; without one the policy gradient is 0."""
        return bool(np.any(np.asarray(prepared.scalars("advantage"))[trained_rows(prepared)] != 0))


def _whiten(advantages: np.ndarray, trained: np.ndarray) -> None:
    """Mean 0 and spread 1 over the answers that are trained, in place: each counts once, however long it is."""
    found = combined(trained.astype(np.int64), advantages, np.zeros(len(advantages)))
    advantages[trained] = (advantages[trained] - found.mean) * found.scale


def _record_groups(stats: GroupStats, metrics: Metrics) -> None:
    """Shares of groups without spread. Of these, all right are those at the highest reward of the step, if that is above 0, and all
    wrong those at or below 0. Groups without a single reward are left out: `samples/masked` has them."""
    scored = int((stats.count > 0).sum())
    if not scored:
        return
    flat = (stats.count > 0) & ~stats.has_spread
    right = flat & (stats.high > 0) & (stats.high == stats.high.max())
    wrong = flat & (stats.high <= 0)
    metrics.mean("reward/zero_spread_groups", flat.sum() / scored, scored)
    metrics.mean("reward/all_right_groups", right.sum() / scored, scored)
    metrics.mean("reward/all_wrong_groups", wrong.sum() / scored, scored)
