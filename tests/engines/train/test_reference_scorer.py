import numpy as np
import pytest
import torch
from train_support import VOCABULARY, algorithm, batch, engine, naive_logprobs, ppo, tiny_model

from rolemesh.algorithms import reference_columns
from rolemesh.batch import Batch
from rolemesh.engines.train import Scorer, forward
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import StepTerms, TokenBatch


def scorer(seed: int = 0, **options) -> Scorer:
    return Scorer(tiny_model(seed), micro_batch_tokens=12 * 8, **options)


def with_own_logprobs(data: Batch, temperature: float) -> Batch:
    return data.with_columns({"rollout_logprobs": engine().logprobs(data, temperature)})


def test_logprobs_are_those_of_the_train_engine_to_the_last_bit():
    data = batch()
    for mine, theirs in zip(scorer().logprobs(data, 0.7), engine().logprobs(data, 0.7), strict=True):
        assert mine.tolist() == theirs.tolist()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_D15_kl_to_an_identical_reference_is_exactly_zero(kind: str, temperature: float):
    data = with_own_logprobs(batch().take(range(7)), temperature)  # without the masked row, so that all passes are cut alike
    found = reference_columns(data, scorer().logprobs(data, temperature), kind)
    assert found.scalars("kl").tolist() == [0] * 7
    metrics = Metrics()
    penalised = algorithm(kl_coefficient=1.0, kl_kind=kind)
    engine().compute_gradients(data.join(found), penalised.loss, temperature=temperature, metrics=metrics)
    assert metrics.reduce()["policy/kl_loss"] == 0


def test_kl_in_the_loss_pulls_the_policy_back_to_the_reference():
    # Advantages 0: only the penalty acts, and lowers the divergence from another model.
    data = batch().with_columns({"advantage": np.zeros(8)})
    data = data.join(reference_columns(data, scorer(seed=1).logprobs(data, 1.0), "k2"))
    trainer, penalised, found = engine(learning_rate=3e-3), ppo(kl_coefficient=1.0, kl_kind="k2"), []
    for _ in range(5):
        metrics = Metrics()
        trainer.update(
            data, lambda tokens, into: penalised.loss(tokens, into, StepTerms(kl_coefficient=1.0)), temperature=1.0, metrics=metrics
        )
        found.append(metrics.reduce()["policy/kl_loss"])
    assert found[-1] < found[0]


def test_weights_of_the_policy_can_be_taken_over():
    data, policy, reference = batch(), engine(tiny_model(seed=4)), scorer(seed=0)
    reference.load_weights(policy.named_weights())
    policy.update(data, algorithm().loss, temperature=1.0, metrics=Metrics())  # must not reach the copy
    assert np.concatenate(reference.logprobs(data, 1.0)).tolist() == np.concatenate(scorer(seed=4).logprobs(data, 1.0)).tolist()
    with pytest.raises(ValueError, match=r"lm_head.weight is missing"):
        reference.load_weights([(name, weight) for name, weight in policy.named_weights() if name != "lm_head.weight"])


def test_weights_may_have_any_number_format():
    data = batch()
    rough = Scorer(tiny_model().to(torch.bfloat16), micro_batch_tokens=100).logprobs(data, 1.0)
    assert np.concatenate(rough).dtype == np.float32
    assert np.abs(np.concatenate(rough) - np.concatenate(scorer().logprobs(data, 1.0))).mean() < 0.1


def test_nothing_of_it_can_be_trained():
    assert not any(parameter.requires_grad for parameter in scorer().model.parameters())


@pytest.mark.parametrize("chunk", [2**24, VOCABULARY * 5])
def test_gradient_of_the_entropy_is_that_of_its_definition(chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forward, "HEAD_CHUNK_ELEMENTS", chunk)
    data, model = batch().take(range(7)), tiny_model()
    entropies = []
    for prompt, response in zip(data.rows("prompt_ids"), data.rows("response_ids"), strict=True):
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.8
        entropies.append(torch.distributions.Categorical(logits=logits).entropy())
    torch.cat(entropies).sum().backward()

    def loss(tokens: TokenBatch, metrics: Metrics) -> torch.Tensor:
        return tokens.entropy.sum()

    found = engine(entropy_gradient=True).compute_gradients(data, loss, temperature=0.8, metrics=Metrics())
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, found[name], rtol=1e-4, atol=1e-5), name


def test_entropy_bonus_raises_the_entropy_and_needs_its_gradient():
    data = batch().with_columns({"advantage": np.zeros(8)})
    bonus = algorithm(entropy_coefficient=1.0)
    trainer, found = engine(learning_rate=3e-3, entropy_gradient=True), []
    for _ in range(4):
        metrics = Metrics()
        trainer.update(data, bonus.loss, temperature=1.0, metrics=metrics)
        found.append(metrics.reduce()["policy/entropy"])
    assert found[-1] > found[0]
    with pytest.raises(ValueError, match="entropy_gradient=True"):
        engine().update(data, bonus.loss, temperature=1.0, metrics=Metrics())


def test_advantages_of_tokens_come_before_that_of_the_row():
    data = batch().take([0, 1]).with_columns({"advantages": [[float(k) for k in range(8)], [0.5, 0.25, -1.0]]})
    seen: list[torch.Tensor] = []

    def loss(tokens: TokenBatch, metrics: Metrics) -> torch.Tensor:
        seen.append(tokens.advantages)
        return tokens.logprobs.sum() * 0

    engine().compute_gradients(data, loss, temperature=1.0, metrics=Metrics())
    assert torch.cat(seen).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0.5, 0.25, -1]


def test_logprobs_of_the_scorer_are_those_of_the_model():
    data, model = batch(), tiny_model()
    for mine, prompt, response in zip(scorer().logprobs(data, 0.6), data.rows("prompt_ids"), data.rows("response_ids"), strict=True):
        assert mine == pytest.approx(naive_logprobs(model, prompt, response, 0.6).detach().numpy(), abs=1e-5)
