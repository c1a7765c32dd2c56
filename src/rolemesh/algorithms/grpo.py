"""GRPO: group-relative advantages and the clipped surrogate. Also, by its options, Dr. GRPO (`normalize_std: false`) and the
clip-higher, token-mean loss of DAPO (`clip_high`, `aggregation: token_mean`).

Shao et al. 2024, arXiv:2402.03300. `prepare` runs on the controller once a step, `loss` in the actor once a micro-batch.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from rolemesh.algorithms.advantages import GroupStats, advantages_from, group_stats
from rolemesh.algorithms.aggregation import assign_minibatches, token_weights
from rolemesh.algorithms.losses import Surrogate, clipped_surrogate, kl_k3
from rolemesh.batch import Batch
from rolemesh.config.schema import AlgorithmConfig
from rolemesh.errors import BatchError
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import TokenBatch


class Grpo:
    """Group relative policy optimization (see `protocols.algorithm.Algorithm`)."""

    name: ClassVar[str] = "grpo"
    reads: ClassVar[tuple[str, ...]] = ("reward", "response_length")

    def __init__(self, config: AlgorithmConfig, *, minibatches: int) -> None:
        self.config = config
        self.minibatches = minibatches

    def prepare(self, batch: Batch, metrics: Metrics) -> Batch:
        """The rows of one step with `advantage`, `token_weight` and `minibatch` added, in the order in which they came.

        A row without reward or without tokens is masked: weight 0. The numbers of a row do not depend on the order of the rows, to
        the last bit. Raises BatchError when a prompt has more than `group_size` answers."""
        order = np.lexsort((batch.ids[:, 1], batch.ids[:, 0]))
        draws = batch.ids[order, 0]
        self._check_groups(draws)
        rewards = np.asarray(batch.scalars("reward"), dtype=np.float64)[order]
        lengths = np.asarray(batch.scalars("response_length"))[order]
        stats = group_stats(rewards, draws)
        advantages = advantages_from(stats, rewards, normalize_std=self.config.normalize_std)
        minibatches = assign_minibatches(draws, self.minibatches)
        weights = token_weights(lengths, stats.valid, minibatches, self.config.aggregation)
        _record_groups(stats, metrics)
        _record_samples(advantages, weights, metrics)
        back = np.argsort(order)
        return batch.with_columns({"advantage": advantages[back], "token_weight": weights[back], "minibatch": minibatches[back]})

    def has_signal(self, prepared: Batch) -> bool:
        """Whether any trained row of a prepared step has an advantage other than 0; without one the policy gradient is 0."""
        advantages, weights = (np.asarray(prepared.scalars(name)) for name in ("advantage", "token_weight"))
        return bool(np.any((advantages != 0) & (weights > 0)))

    def loss(self, tokens: TokenBatch, metrics: Metrics) -> torch.Tensor:
        """Sum over tokens of weight * clipped surrogate. Masked tokens enter neither the loss nor a metric."""
        kept = tokens.weights != 0
        logprobs, old_logprobs, weights = tokens.logprobs[kept], tokens.old_logprobs[kept], tokens.weights[kept]
        config = self.config
        surrogate = clipped_surrogate(
            logprobs,
            old_logprobs,
            tokens.advantages[kept],
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        loss = (weights * surrogate.loss).sum()
        if len(weights):
            _record_policy(surrogate, logprobs.detach(), old_logprobs, metrics)
            metrics.mean("policy/entropy", tokens.entropy[kept].mean(), len(weights))
            metrics.mean("policy/loss", loss.detach() / weights.sum(), weights.sum())
        return loss

    def _check_groups(self, draws: np.ndarray) -> None:
        prompts, counts = np.unique(draws, return_counts=True)
        if len(counts) and counts.max() > self.config.group_size:
            at = int(counts.argmax())
            raise BatchError(
                f"prompt {prompts[at]} has {counts[at]} answers, expected at most algorithm.group_size = {self.config.group_size}: "
                "the rollout must answer each request once and not repeat prompts by itself"
            )


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


def _record_samples(advantages: np.ndarray, weights: np.ndarray, metrics: Metrics) -> None:
    trained = weights > 0
    metrics.sum("samples/masked", (~trained).sum())
    if trained.any():
        metrics.max("advantage/max", advantages[trained].max())
        metrics.min("advantage/min", advantages[trained].min())
        metrics.mean("advantage/abs_mean", np.abs(advantages[trained]).mean(), trained.sum())


def _record_policy(surrogate: Surrogate, logprobs: torch.Tensor, old_logprobs: torch.Tensor, metrics: Metrics) -> None:
    count = len(logprobs)
    metrics.mean("policy/ratio_mean", surrogate.ratio.mean(), count)
    metrics.max("policy/ratio_max_deviation", (surrogate.ratio - 1).abs().max())
    metrics.mean("policy/clip_low_share", surrogate.clipped_low.float().mean(), count)
    metrics.mean("policy/clip_high_share", surrogate.clipped_high.float().mean(), count)
    metrics.mean("policy/clip_dual_share", surrogate.clipped_dual.float().mean(), count)
    metrics.mean("policy/kl_engine", kl_k3(logprobs, old_logprobs).mean(), count)
