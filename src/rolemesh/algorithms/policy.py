"""What the algorithms with a clipped surrogate share: weights of rows, the policy loss, and the divergence from a reference model.

`Grpo` and `Ppo` differ in where advantages come from, and say only that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rolemesh.algorithms.aggregation import assign_minibatches, token_weights
from rolemesh.algorithms.kl import adapted_coefficient, kl_estimate
from rolemesh.algorithms.losses import Surrogate, clipped_surrogate
from rolemesh.batch import Batch
from rolemesh.config.schema import AlgorithmConfig
from rolemesh.errors import BatchError, ConfigError
from rolemesh.names import REF
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import StepTerms, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor


class ClippedPolicy:
    """Base of algorithms; see `protocols.algorithm.Algorithm` for what each member is for."""

    rewards_tokens: ClassVar[bool] = False
    """Tokens have rewards of their own, so that the divergence can count there."""

    def __init__(self, config: AlgorithmConfig, *, minibatches: int) -> None:
        """Raises ConfigError for `kl_in: reward` where only whole answers have rewards."""
        if config.kl_in == "reward" and config.kl_coefficient > 0 and not self.rewards_tokens:
            need = f"must be loss for {config.name}: an answer has one reward there, its tokens have none"
            raise ConfigError.one("algorithm.kl_in", need, "reward", "Set algorithm.kl_in=loss, or algorithm.name=ppo")
        self.config = config
        self.minibatches = minibatches

    @property
    def uses_reference(self) -> bool:
        """Whether there is a reference model to stay near."""
        return self.config.kl_coefficient > 0

    @property
    def kl_coefficient(self) -> float:
        return self.config.kl_coefficient

    @property
    def needs(self) -> tuple[str, ...]:
        return (REF,) if self.uses_reference else ()

    @property
    def reads(self) -> tuple[str, ...]:
        return ("reward", "response_length", *(("kl",) if self.uses_reference else ()))

    @property
    def actor_reads(self) -> tuple[str, ...]:
        shared = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "token_weight", "minibatch")
        return (*shared, *(("ref_logprobs",) if self._penalises_in_loss else ()))

    @property
    def _penalises_in_loss(self) -> bool:
        return self.uses_reference and self.config.kl_in == "loss"

    # -- on the controller ------------------------------------------------------------------------------------------------------

    def weighed(self, rows: Batch) -> Batch:
        """Rows of a step in id order with `token_weight` and `minibatch`. A row without reward or without tokens is masked: weight 0.

        Raises BatchError when a prompt has more than `group_size` answers."""
        draws = rows.ids[:, 0]
        self._check_groups(draws)
        valid = np.isfinite(np.asarray(rows.scalars("reward"), dtype=np.float64))
        minibatches = assign_minibatches(draws, self.minibatches)
        weights = token_weights(np.asarray(rows.scalars("response_length")), valid, minibatches, self.config.aggregation)
        return rows.with_columns({"token_weight": weights, "minibatch": minibatches})

    def _check_groups(self, draws: np.ndarray) -> None:
        prompts, counts = np.unique(draws, return_counts=True)
        if len(counts) and counts.max() > self.config.group_size:
            at = int(counts.argmax())
            raise BatchError(
                f"prompt {prompts[at]} has {counts[at]} answers, expected at most algorithm.group_size = {self.config.group_size}: "
                "the rollout must answer each request once and not repeat prompts by itself"
            )

    def record(self, prepared: Batch, metrics: Metrics) -> None:
        """Metrics of a prepared step that the algorithms share; `advantage` is there by now."""
        trained = trained_rows(prepared)
        if not trained.any():
            return
        advantages = np.asarray(prepared.scalars("advantage"))[trained]
        metrics.max("advantage/max", advantages.max())
        metrics.min("advantage/min", advantages.min())
        metrics.mean("advantage/abs_mean", np.abs(advantages).mean(), trained.sum())
        if "kl" in prepared.names:
            metrics.mean("policy/kl_ref", _mean_kl(prepared, trained), prepared.scalars("response_length")[trained].sum())

    def terms(self, prepared: Batch, metrics: Metrics, *, kl_coefficient: float) -> StepTerms:
        if self.uses_reference:
            metrics.last("policy/kl_coefficient", kl_coefficient)
        return StepTerms(kl_coefficient=kl_coefficient)

    def next_kl_coefficient(self, prepared: Batch, kl_coefficient: float) -> float:
        """Fixed without `kl_target`; with it, by the mean KL of a trained token of this step (unchanged when none is trained)."""
        target, trained = self.config.kl_target, trained_rows(prepared)
        if target is None or not self.uses_reference or not trained.any():
            return kl_coefficient
        return adapted_coefficient(kl_coefficient, _mean_kl(prepared, trained), target)

    # -- in the actor -----------------------------------------------------------------------------------------------------------

    def loss(self, tokens: TokenBatch, metrics: Metrics, terms: StepTerms | None = None) -> Tensor:
        """Sum over tokens of weight * (clipped surrogate + coefficient * KL - entropy coefficient * entropy).

        Masked tokens enter neither the loss nor a metric. Without `terms` the coefficient is the configured one and advantages are
        taken as they are. Raises BatchError without the log-probabilities of the reference model that the loss needs."""
        terms = terms or StepTerms(kl_coefficient=self.kl_coefficient)
        kept = tokens.weights != 0
        logprobs, old_logprobs, weights = tokens.logprobs[kept], tokens.old_logprobs[kept], tokens.weights[kept]
        config = self.config
        surrogate = clipped_surrogate(
            logprobs,
            old_logprobs,
            (tokens.advantages[kept] - terms.advantage_shift) * terms.advantage_scale,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        losses = surrogate.loss
        if self._penalises_in_loss:
            losses = losses + terms.kl_coefficient * self._penalty(tokens, kept, metrics)
        if config.entropy_coefficient:
            losses = losses - config.entropy_coefficient * _entropy(tokens)[kept]
        loss = (weights * losses).sum()
        if len(weights):
            _record_policy(surrogate, logprobs.detach(), old_logprobs, metrics)
            metrics.mean("policy/entropy", tokens.entropy.detach()[kept].mean(), len(weights))
            metrics.mean("policy/loss", loss.detach() / weights.sum(), weights.sum())
        return loss

    def _penalty(self, tokens: TokenBatch, kept: Tensor, metrics: Metrics) -> Tensor:
        if tokens.ref_logprobs is None:
            raise BatchError(
                "algorithm.kl_coefficient puts the divergence from the reference model into the loss, but there are no ref_logprobs; "
                "the ref role must write them before the update"
            )
        penalty = kl_estimate(self.config.kl_kind, tokens.logprobs[kept], tokens.ref_logprobs[kept])
        if len(penalty):
            metrics.mean("policy/kl_loss", penalty.detach().mean(), len(penalty))
        return penalty


def trained_rows(prepared: Batch) -> np.ndarray:
    """Mask [N] of the rows that have a weight in the loss."""
    return np.asarray(prepared.scalars("token_weight")) > 0


def _mean_kl(prepared: Batch, trained: np.ndarray) -> float:
    """Mean KL of a trained token."""
    lengths = np.asarray(prepared.scalars("response_length"), dtype=np.float64)[trained]
    return float(lengths @ np.asarray(prepared.scalars("kl"))[trained] / lengths.sum())


def _entropy(tokens: TokenBatch) -> Tensor:
    import torch

    if torch.is_grad_enabled() and tokens.logprobs.requires_grad and not tokens.entropy.requires_grad:
        raise ValueError(
            "algorithm.entropy_coefficient needs the gradient of the entropy; make the train engine with entropy_gradient=True"
        )
    return tokens.entropy


def _record_policy(surrogate: Surrogate, logprobs: Tensor, old_logprobs: Tensor, metrics: Metrics) -> None:
    count = len(logprobs)
    metrics.mean("policy/ratio_mean", surrogate.ratio.mean(), count)
    metrics.max("policy/ratio_max_deviation", (surrogate.ratio - 1).abs().max())
    metrics.mean("policy/clip_low_share", surrogate.clipped_low.float().mean(), count)
    metrics.mean("policy/clip_high_share", surrogate.clipped_high.float().mean(), count)
    metrics.mean("policy/clip_dual_share", surrogate.clipped_dual.float().mean(), count)
    metrics.mean("policy/kl_engine", kl_estimate("k3", old_logprobs, logprobs).mean(), count)
