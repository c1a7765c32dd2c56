import math

import numpy as np
import pytest
import torch
from train_support import VOCABULARY, algorithm, batch, engine, naive_logprobs, tiny_model
from transformers import BertConfig, BertLMHeadModel, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from rolemesh.batch import Batch
from rolemesh.engines.train import forward
from rolemesh.errors import BatchError
from rolemesh.observe import Metrics
from rolemesh.protocols.algorithm import TokenBatch


def rows_of(data: Batch) -> list[tuple[list[int], list[int]]]:
    return list(zip(data.rows("prompt_ids"), data.rows("response_ids"), strict=True))


def collect(trainer, data: Batch, temperature: float = 1.0) -> TokenBatch:
    """The token batches that a loss function gets, put together."""
    seen: list[TokenBatch] = []

    def loss(tokens: TokenBatch, metrics: Metrics) -> torch.Tensor:
        seen.append(tokens)
        return tokens.logprobs.sum() * 0

    trainer.compute_gradients(data, loss, temperature=temperature, metrics=Metrics())
    names = ("logprobs", "entropy", "old_logprobs", "advantages", "weights", "row")
    return TokenBatch(**{name: torch.cat([getattr(tokens, name).detach() for tokens in seen]) for name in names})


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_D15_logprobs_are_those_of_the_model_at_the_temperature(temperature: float):
    data, model = batch(), tiny_model()
    found = engine(model).logprobs(data, temperature)
    for mine, (prompt, response) in zip(found, rows_of(data), strict=True):
        assert mine.dtype == np.float32
        assert mine == pytest.approx(naive_logprobs(model, prompt, response, temperature).detach().numpy(), abs=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_D25_logprobs_do_not_depend_on_the_micro_batch(rows: int):
    data = batch()
    whole, cut = engine(rows=8).logprobs(data, 1.0), engine(rows=rows).logprobs(data, 1.0)
    assert np.concatenate(cut) == pytest.approx(np.concatenate(whole), abs=1e-5)


def test_logprobs_keep_the_order_of_the_rows():
    data, trainer = batch(), engine(rows=2)
    order = [5, 0, 7, 3, 1, 6, 2, 4]
    found, turned = trainer.logprobs(data, 1.0), trainer.logprobs(data.take(order), 1.0)
    for place, row in enumerate(order):
        assert turned[place] == pytest.approx(found[row], abs=1e-5)


def test_row_without_response_has_no_logprobs():
    data = Batch.from_columns({"draw": [0, 1], "sample": [0, 0], "prompt_ids": [[1, 2], [3]], "response_ids": [[], [4, 5]]})
    first, second = engine().logprobs(data, 1.0)
    assert len(first) == 0
    assert len(second) == 2


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_D24_ratio_is_exactly_one_when_the_trainers_own_logprobs_are_the_old_ones(temperature: float):
    trainer, data = engine(rows=3), batch()
    data = data.take(range(7))  # without the masked row, so that both calls cut the rows alike
    own = [row.tolist() for row in trainer.logprobs(data, temperature)]
    metrics = Metrics()
    trainer.compute_gradients(data.with_columns({"rollout_logprobs": own}), algorithm().loss, temperature=temperature, metrics=metrics)
    found = metrics.reduce()
    assert found["policy/ratio_max_deviation"] == 0
    assert found["policy/ratio_mean"] == 1
    assert found["policy/kl_engine"] == 0


def test_D15_other_temperature_than_the_engines_shows_in_the_ratio():
    trainer, data, metrics = engine(), batch(), Metrics()
    own = [row.tolist() for row in trainer.logprobs(data, 1.0)]
    trainer.compute_gradients(data.with_columns({"rollout_logprobs": own}), algorithm().loss, temperature=0.6, metrics=metrics)
    assert metrics.reduce()["policy/ratio_max_deviation"] > 0.1


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_D17_temperature_that_cannot_be_trained_with_is_refused(temperature: float):
    trainer, data = engine(), batch()
    with pytest.raises(ValueError, match="must be above 0"):
        trainer.logprobs(data, temperature)
    with pytest.raises(ValueError, match="must be above 0"):
        trainer.update(data, algorithm().loss, temperature=temperature, metrics=Metrics())


def test_D19_entropy_counts_no_padding():
    # One row of 1 + 9 tokens and one of 1 + 1 in one pass: 8 of 18 places are padding. Entropy of the naive model, token by token.
    model = tiny_model()
    data = Batch.from_columns(
        {
            "draw": [0, 1],
            "sample": [0, 0],
            "prompt_ids": [[1], [2]],
            "response_ids": [[3, 4, 5, 6, 7, 8, 9, 10, 11], [12]],
            "rollout_logprobs": [[-1.0] * 9, [-1.0]],
            "advantage": [1.0, -1.0],
            "token_weight": [0.1, 0.1],
        }
    )
    expected = []
    for prompt, response in rows_of(data):
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected.append(torch.distributions.Categorical(logits=logits).entropy().detach())
    metrics = Metrics()
    engine(model).compute_gradients(data, algorithm().loss, temperature=1.0, metrics=metrics)
    found = collect(engine(model), data)
    assert found.entropy.numpy() == pytest.approx(torch.cat(expected).numpy(), abs=1e-5)
    assert (found.entropy >= 0).all()
    assert metrics.reduce()["policy/entropy"] == pytest.approx(float(torch.cat(expected).mean()), abs=1e-5)


def test_entropy_of_a_forbidden_token_is_not_nan():
    # Two equally likely tokens and one with logit -inf: entropy ln 2.
    _, entropy = forward._logprobs_and_entropy(torch.tensor([[1.0, 1.0, -math.inf]]), torch.tensor([0]), 1.0)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-6)


def test_token_batch_holds_each_rows_numbers_on_its_tokens():
    data = Batch.from_columns(
        {
            "draw": [3, 1],
            "sample": [0, 0],
            "prompt_ids": [[1, 2], [3]],
            "response_ids": [[4, 5], [6, 7, 8]],
            "rollout_logprobs": [[-1.0, -2.0], [-3.0, -4.0, -5.0]],
            "advantage": [0.5, -0.5],
            "token_weight": [0.25, 0.125],
        }
    )
    found = collect(engine(), data)  # draw 1 comes first
    assert found.old_logprobs.tolist() == [-3, -4, -5, -1, -2]
    assert found.advantages.tolist() == [-0.5, -0.5, -0.5, 0.5, 0.5]
    assert found.weights.tolist() == [0.125, 0.125, 0.125, 0.25, 0.25]
    assert found.row.tolist() == [0, 0, 0, 1, 1]


def test_chunked_output_layer_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    data = batch()
    whole = engine().compute_gradients(data, algorithm().loss, temperature=0.8, metrics=Metrics())
    logprobs = engine().logprobs(data, 0.8)
    monkeypatch.setattr(forward, "HEAD_CHUNK_ELEMENTS", VOCABULARY * 5)  # 5 tokens at a time
    assert np.concatenate(engine().logprobs(data, 0.8)) == pytest.approx(np.concatenate(logprobs), abs=1e-6)
    cut = engine().compute_gradients(data, algorithm().loss, temperature=0.8, metrics=Metrics())
    for name, gradient in whole.items():
        assert torch.allclose(gradient, cut[name], rtol=0, atol=2e-7), name


def gemma() -> torch.nn.Module:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.3,
        final_logit_softcapping=2.0,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config)


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


@pytest.mark.parametrize(("make", "separate"), [(tiny_model, True), (gpt2, True), (gemma, False)])
def test_output_layer_is_taken_apart_only_where_it_is_plain(make, separate: bool):
    # Gemma 2 caps its logits after the head: body and head alone would give other probabilities.
    model, data = make(), batch()
    trainer = engine(model)
    assert trainer._scorer.head_is_separate is separate
    for mine, (prompt, response) in zip(trainer.logprobs(data, 1.0), rows_of(data), strict=True):
        assert mine == pytest.approx(naive_logprobs(model, prompt, response).detach().numpy(), abs=1e-5)


def test_model_that_looks_ahead_is_refused():
    model = BertLMHeadModel(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, initializer_range=0.5
        )
    )
    with pytest.raises(ValueError, match="BertLMHeadModel is not causal"):
        engine(model)


def test_row_without_prompt_is_refused_by_its_id():
    data = Batch.from_columns({"draw": [0, 7], "sample": [0, 2], "prompt_ids": [[1], []], "response_ids": [[1], [2]]})
    with pytest.raises(BatchError, match=r"\(7, 2\) has no prompt token"):
        engine().logprobs(data, 1.0)


def test_logprobs_that_do_not_fit_the_tokens_are_refused_by_id():
    data = batch()
    logprobs = data.rows("rollout_logprobs")
    logprobs[2] = [*logprobs[2], -1.0]
    with pytest.raises(BatchError, match=r"\(draw 41, sample 0\) has 2 rollout_logprobs for 1 response_ids"):
        engine().update(data.with_columns({"rollout_logprobs": logprobs}), algorithm().loss, temperature=1.0, metrics=Metrics())


def test_bfloat16_products_on_float32_weights_come_near():
    data, model = batch(), tiny_model()
    trainer = engine(model, compute_dtype=torch.bfloat16)
    exact = np.concatenate(engine(model).logprobs(data, 1.0))
    rough = np.concatenate(trainer.logprobs(data, 1.0))
    assert not np.array_equal(rough, exact)
    assert np.abs(rough - exact).mean() < 0.1
    trainer.update(data, algorithm().loss, temperature=1.0, metrics=Metrics())
    assert trainer.step == 1


def test_bfloat16_weights_are_refused():
    with pytest.raises(ValueError, match=r"must be float32, found torch.bfloat16 in model.embed_tokens.weight"):
        engine(tiny_model().to(torch.bfloat16))


def test_model_without_anything_to_train_is_refused():
    with pytest.raises(ValueError, match="nothing to train"):
        engine(tiny_model().requires_grad_(False))
