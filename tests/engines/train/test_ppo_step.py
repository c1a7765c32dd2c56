"""PPO as a whole in one process: what ref, critic, controller and actor do in a step, in their order."""

import numpy as np
import pytest
import torch
from train_support import engine, ppo, tiny_model

from rolemesh.algorithms import Ppo, reference_columns
from rolemesh.batch import Batch
from rolemesh.batch.columns import readable
from rolemesh.engines.train import OptimizerSettings, Scorer, TrainEngine, ValueEngine, ValueModel
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import StepTerms, TokenBatch

ROWS, TOKENS = 32, 3


class Run:
    """The models of a run and the numbers that the controller keeps."""

    def __init__(self, algorithm: Ppo) -> None:
        self.algorithm, self.coefficient = algorithm, algorithm.kl_coefficient
        self.actor: TrainEngine = engine(learning_rate=5e-3)
        self.ref = Scorer(tiny_model(), micro_batch_tokens=1000)
        critic = ValueModel.of_causal(tiny_model(), seed=0)
        self.critic = ValueEngine(critic, optimizer=OptimizerSettings(learning_rate=1e-2), micro_batch_tokens=1000)
        self.random = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def samples(self, step: int) -> Batch:
        """Answers to the prompt 1, and the share of even tokens in them as reward; one answer in each step has no reward."""
        ids = torch.ones(ROWS, 1, dtype=torch.int64)
        logprobs = []
        for _ in range(TOKENS):
            found = self.actor.model(input_ids=ids).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(found.exp(), 1, generator=self.random)
            ids, logprobs = torch.cat([ids, token], dim=1), [*logprobs, found.gather(1, token)]
        responses = ids[:, 1:].numpy()
        rewards = (responses % 2 == 0).mean(axis=1)
        rewards[step % ROWS] = np.nan
        return Batch.from_columns(
            {
                "draw": np.arange(ROWS) + step * ROWS,
                "sample": np.zeros(ROWS, dtype=np.int64),
                "prompt_ids": [[1]] * ROWS,
                "response_ids": responses.tolist(),
                "response_length": np.full(ROWS, TOKENS),
                "rollout_logprobs": torch.cat(logprobs, dim=1).numpy().tolist(),
                "reward": rewards,
            }
        )

    def step(self, number: int) -> dict[str, float]:
        metrics, algorithm, batch = Metrics(), self.algorithm, self.samples(number)
        if algorithm.uses_reference:
            batch = batch.join(reference_columns(batch, self.ref.logprobs(batch, 1.0), algorithm.config.kl_kind))
        batch = batch.with_columns({"values": self.critic.values(batch)})
        batch = batch.join(algorithm.estimate(batch, kl_coefficient=self.coefficient))
        prepared = algorithm.prepare(batch.select(algorithm.reads), metrics)
        terms = algorithm.terms(prepared, metrics, kl_coefficient=self.coefficient)
        self.coefficient = algorithm.next_kl_coefficient(prepared, self.coefficient)
        batch = batch.join(prepared.select(algorithm.writes))
        self.critic.update(batch.select(readable(algorithm.critic_reads, batch.names)), algorithm.value_loss, metrics=metrics)
        self.actor.update(
            batch.select(readable(algorithm.actor_reads, batch.names)), _loss(algorithm, terms), temperature=1.0, metrics=metrics
        )
        return metrics.reduce() | {"reward": float(np.nanmean(batch.scalars("reward")))}


def _loss(algorithm: Ppo, terms: StepTerms):
    def loss(tokens: TokenBatch, metrics: Metrics) -> torch.Tensor:
        return algorithm.loss(tokens, metrics, terms)

    return loss


def test_reward_rises_and_the_critic_learns_what_to_expect():
    run = Run(ppo(group_size=1, lam=0.95))
    found = [run.step(number) for number in range(25)]
    assert np.mean([row["reward"] for row in found[:3]]) < 0.65
    assert np.mean([row["reward"] for row in found[-3:]]) > 0.85
    assert found[-1]["critic/loss"] < found[0]["critic/loss"] / 2
    assert all(row["policy/ratio_max_deviation"] < 1e-4 for row in found)  # one mini-batch: trainer and sampler hold the same weights
    assert all(row["critic/tokens_trained"] == row["actor/tokens_trained"] == (ROWS - 1) * TOKENS for row in found)


@pytest.mark.parametrize(("place", "kind"), [("reward", "k1"), ("loss", "k2")])
def test_penalty_keeps_the_policy_near_the_reference(place: str, kind: str):
    free, held = Run(ppo(group_size=1, kl_coefficient=1e-9)), Run(ppo(group_size=1, kl_coefficient=5.0, kl_in=place, kl_kind=kind))
    for number in range(8):
        far, near = free.step(number), held.step(number)
    assert abs(near["policy/kl_ref"]) < far["policy/kl_ref"] / 2


def test_first_step_has_no_divergence_and_the_coefficient_adapts():
    run = Run(ppo(group_size=1, kl_coefficient=0.5, kl_target=0.01, kl_in="reward", kl_kind="k1"))
    first = run.step(0)
    assert first["policy/kl_ref"] == pytest.approx(0, abs=1e-6)
    assert first["policy/kl_coefficient"] == 0.5
    assert run.coefficient == pytest.approx(0.5 * 0.98)  # nothing measured: the largest step down
