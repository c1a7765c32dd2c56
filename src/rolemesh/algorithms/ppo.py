"""PPO with a critic: advantages of single tokens by GAE, the clipped policy surrogate, the clipped value loss, KL to a reference model.

Schulman et al. 2017, arXiv:1707.06347; for language models Ziegler et al. 2019, arXiv:1909.08593. In one step:

    ref worker      `reference_columns`: log-probabilities and the row's KL       (only with `kl_coefficient` above 0)
    critic worker   values of the states before each token
    any worker      `estimate`: reward, values (and KL) -> advantages, returns of each token, and their sums by row
    controller      `prepare`: token weights, mini-batches; `terms`: mean and spread of the advantages, from the sums by row
    actor           `loss` of each micro-batch, with these terms
    critic          `value_loss` of each micro-batch
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from rolemesh.algorithms.gae import gae, token_rewards
from rolemesh.algorithms.kl import token_kl
from rolemesh.algorithms.losses import clipped_value_loss
from rolemesh.algorithms.policy import ClippedPolicy, trained_rows
from rolemesh.algorithms.whitening import Moments, combined, row_moments
from rolemesh.batch import Batch
from rolemesh.batch.rows import describe
from rolemesh.batch.tokens import refuse_nonfinite, sampled_tokens
from rolemesh.errors import BatchError
from rolemesh.names import CRITIC
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import StepTerms, ValueBatch

if TYPE_CHECKING:
    from torch import Tensor

SUMS: Final = ("advantage", "advantage_spread", "return_mean", "return_spread")
"""What the controller needs of a row's tokens."""


class Ppo(ClippedPolicy):
    """Proximal policy optimization (see `protocols.algorithm.ActorCritic`)."""

    name: ClassVar[str] = "ppo"
    rewards_tokens: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[str, ...]:
        return (CRITIC, *super().needs)

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, *SUMS)

    @property
    def writes(self) -> tuple[str, ...]:
        return ("token_weight", "minibatch")

    @property
    def estimate_reads(self) -> tuple[str, ...]:
        kl = ("rollout_logprobs", "ref_logprobs") if self._penalises_in_reward else ()
        return ("reward", "response_length", "values", "response_mask", *kl)

    @property
    def estimate_writes(self) -> tuple[str, ...]:
        return ("advantages", "returns", *SUMS)

    @property
    def actor_reads(self) -> tuple[str, ...]:
        return (*super().actor_reads, "advantages")

    @property
    def critic_reads(self) -> tuple[str, ...]:
        return ("prompt_ids", "response_ids", "response_mask", "values", "returns", "token_weight", "minibatch")

    @property
    def _penalises_in_reward(self) -> bool:
        return self.uses_reference and self.config.kl_in == "reward"

    # -- in a worker ------------------------------------------------------------------------------------------------------------

    def estimate(self, batch: Batch, *, kl_coefficient: float) -> Batch:
        """Advantages and returns of the sampled tokens of each row with a reward (all others 0), and their sums by row.

        The score is the reward of the last sampled token; with `kl_in: reward` each token also costs `kl_coefficient` * KL. A row's
        numbers do not depend on the other rows, so the cut into shards changes nothing. Raises BatchError, naming the row, for values or
        log-probabilities that are not finite, and for a `response_length` that is not the number of sampled tokens."""
        rewards = np.asarray(batch.scalars("reward"), dtype=np.float64)
        values, offsets = batch.ragged("values")
        row = np.repeat(np.arange(len(batch)), np.diff(offsets))
        sampled = sampled_tokens(batch, "values")
        _check_lengths(batch, np.bincount(row[sampled], minlength=len(batch)))
        kept = sampled & np.isfinite(rewards)[row]
        refuse_nonfinite(batch, "values", values[kept], row[kept])
        kl = token_kl(batch, self.config.kl_kind, kept) if self._penalises_in_reward else None
        scored = token_rewards(rewards, offsets, kept, kl=kl, coefficient=kl_coefficient)
        found = gae(scored, values, offsets, kept, gamma=self.config.gamma, lam=self.config.lam)
        advantages, returns = (array.astype(np.float32) for array in found)
        columns = {"advantages": _rows(advantages, offsets), "returns": _rows(returns, offsets)}
        sums = [*row_moments(advantages[kept], row[kept], len(batch)), *row_moments(returns[kept], row[kept], len(batch))]
        return batch.select([]).with_columns(columns | dict(zip(SUMS, sums, strict=True)))

    # -- on the controller ------------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch, metrics: Metrics) -> Batch:
        """The rows of one step with `token_weight` and `minibatch` added, in the order in which they came.

        A row without reward or without tokens is masked: weight 0. Raises BatchError when a prompt has more than `group_size` answers."""
        rows = self.weighed(batch.sort_by_id())
        self.record(rows, metrics)
        return batch.join(rows.select(self.writes), replace=True)

    def record(self, prepared: Batch, metrics: Metrics) -> None:
        super().record(prepared, metrics)
        advantages, returns = (_moments(prepared, *names) for names in (SUMS[:2], SUMS[2:]))
        if advantages.count:
            metrics.mean("advantage/mean", advantages.mean, advantages.count)
            metrics.last("advantage/std", advantages.std)
            metrics.mean("critic/return_mean", returns.mean, returns.count)
        if returns.std > 0:
            # The advantage is what the critic did not foresee of the return.
            metrics.last("critic/explained_variance", 1.0 - (advantages.std / returns.std) ** 2)

    def terms(self, prepared: Batch, metrics: Metrics, *, kl_coefficient: float) -> StepTerms:
        """With `whiten_advantages` (on unless switched off), mean and spread over all trained tokens of the step."""
        plain = super().terms(prepared, metrics, kl_coefficient=kl_coefficient)
        if self.config.whiten_advantages is False:
            return plain
        found = _moments(prepared.sort_by_id(), *SUMS[:2])
        return StepTerms(kl_coefficient=plain.kl_coefficient, advantage_shift=found.mean, advantage_scale=found.scale)

    def has_signal(self, prepared: Batch) -> bool:
        """Whether any row is trained: the critic learns from every reward."""
        return bool(trained_rows(prepared).any())

    # -- in the critic ----------------------------------------------------------------------------------------------------------

    def value_loss(self, tokens: ValueBatch, metrics: Metrics) -> Tensor:
        """Sum over tokens of weight * clipped value loss. Masked tokens enter neither the loss nor a metric."""
        kept = tokens.weights != 0
        values, weights = tokens.values[kept], tokens.weights[kept]
        found = clipped_value_loss(values, tokens.old_values[kept], tokens.returns[kept], clip=self.config.value_clip)
        loss = (weights * found.loss).sum()
        if len(weights):
            metrics.mean("critic/value_mean", values.detach().mean(), len(weights))
            metrics.mean("critic/value_clip_share", found.clipped.float().mean(), len(weights))
            metrics.mean("critic/loss", loss.detach() / weights.sum(), weights.sum())
        return loss


def _rows(flat: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    return [flat[start:end] for start, end in pairwise(offsets.tolist())]


def _check_lengths(batch: Batch, sampled: np.ndarray) -> None:
    """Raise BatchError unless `response_length` counts the sampled tokens: everything that averages over tokens relies on it."""
    told = np.asarray(batch.scalars("response_length"))
    wrong = np.flatnonzero(told != sampled)
    if len(wrong):
        row = wrong[0]
        raise BatchError(
            f"row {describe(batch.ids[row])} has response_length {told[row]} and {sampled[row]} sampled tokens; response_length must "
            "count the tokens that response_mask marks as sampled, or all where there is no response_mask"
        )


def _moments(prepared: Batch, mean: str, spread: str) -> Moments:
    """Over the trained tokens of a step, from sums by row."""
    trained = trained_rows(prepared)
    counts, means, spreads = (np.asarray(prepared.scalars(name))[trained] for name in ("response_length", mean, spread))
    return combined(counts, means, spreads)
