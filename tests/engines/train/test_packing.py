"""Packed rows against padded ones and against rows one by one."""

import itertools
import logging

import numpy as np
import pytest
import torch
from train_support import (
    AGGREGATIONS,
    VOCABULARY,
    algorithm,
    batch,
    critic,
    critic_batch,
    engine,
    largest_gap,
    naive_logprobs,
    ppo,
    tiny_model,
)
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from rolemesh.batch import Batch, token_chunks
from rolemesh.engines.train import Scorer
from rolemesh.engines.train.microbatch import MicroBatch
from rolemesh.engines.train.packing import Packing
from rolemesh.observe import Metrics

CPU = torch.device("cpu")


def mistral() -> MistralForCausalLM:
    """A window of 3 tokens, shorter than the rows, and shared key heads."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.1, sliding_window=3,
    )  # fmt: skip
    return MistralForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    """Learned positions, which have to begin anew in each row."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2, initializer_range=0.1)).eval()


def bloom() -> BloomForCausalLM:
    """No attention that could be replaced."""
    torch.manual_seed(0)
    return BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.1)).eval()


def running() -> torch.nn.Module:
    """Each position sees the sum of those before it, by a way that no attention knows of."""
    model = tiny_model()
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: output.cumsum(1))
    return model


def gradients(data: Batch, mode: str = "token_mean", metrics: Metrics | None = None, **options) -> dict[str, torch.Tensor]:
    trainer = engine(**options)
    return trainer.compute_gradients(data, algorithm(mode).loss, temperature=1.0, metrics=metrics or Metrics())


@pytest.mark.parametrize("make", [tiny_model, mistral, gpt2])
def test_packed_rows_have_the_logprobs_and_gradients_of_padded_ones(make):
    data = batch()
    padded, packed = engine(make(), packing=False), engine(make())
    assert packed._packing
    assert not padded._packing
    for one, other, alone in zip(packed.logprobs(data, 0.7), padded.logprobs(data, 0.7), alone_logprobs(make(), data), strict=True):
        assert one == pytest.approx(other, abs=1e-6)
        assert one == pytest.approx(alone, abs=1e-5)
    assert largest_gap(gradients(data, model=make(), packing=False), gradients(data, model=make())) < 1e-6


def alone_logprobs(model, data: Batch) -> list[np.ndarray]:
    rows = zip(data.rows("prompt_ids"), data.rows("response_ids"), strict=True)
    return [naive_logprobs(model, prompt, response, 0.7).detach().numpy() for prompt, response in rows]


@pytest.mark.parametrize("make", [bloom, running])
def test_model_whose_rows_cannot_be_packed_is_padded_with_a_note(make, caplog: pytest.LogCaptureFixture):
    data = batch()
    with caplog.at_level(logging.WARNING):
        trainer = engine(make())
    assert not trainer._packing
    assert "padded" in caplog.text
    for mine, alone in zip(trainer.logprobs(data, 0.7), alone_logprobs(make(), data), strict=True):
        assert mine == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_D08_D09_gradient_and_metrics_are_the_same_for_every_cut_and_order(mode: str):
    data, expected = batch(mode=mode), Metrics()
    whole = gradients(data, mode, expected, rows=8, packing=False)
    for rows, packing, order in itertools.product((1, 2, 4, 8), (True, False), (range(8), [6, 3, 0, 7, 2, 5, 1, 4])):
        metrics = Metrics()
        assert largest_gap(whole, gradients(data.take(order), mode, metrics, rows=rows, packing=packing)) < 1e-6, (rows, packing)
        found = metrics.reduce()
        assert found.keys() == expected.reduce().keys()
        for name, value in expected.reduce().items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (rows, packing, name)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_D10_tokens_are_selected_over_the_whole_batch_before_it_is_cut(mode: str):
    """Here those below the batch's median; a median of each micro-batch would be another."""
    made = batch().select(["prompt_ids", "response_ids", "response_length", "reward", "rollout_logprobs"])
    rows = made.rows("rollout_logprobs")
    median = np.median(np.concatenate(rows))
    selected = [[int(value < median) for value in row] for row in rows]
    assert selected != [[int(value < np.median(row)) for value in row] for row in rows], "the test needs rows that differ"
    data = algorithm(mode).prepare(made.with_columns({"response_mask": selected}), Metrics())
    whole = gradients(data, mode, rows=8, packing=False)
    assert largest_gap(whole, gradients(batch(mode=mode), mode, rows=8, packing=False)) > 1e-3, "selecting changes it"
    for rows_of_one, packing in itertools.product((1, 2, 4), (True, False)):
        assert largest_gap(whole, gradients(data, mode, rows=rows_of_one, packing=packing)) < 1e-6


def test_critic_and_reference_pack_as_the_policy_does():
    data = critic_batch()
    for one, other in zip(critic().values(data), critic(packing=False).values(data), strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    first, second = (critic(packing=packing).compute_gradients(data, ppo().value_loss, metrics=Metrics()) for packing in (True, False))
    assert largest_gap(first, second) < 1e-6
    policy, reference = engine().logprobs(data, 1.0), Scorer(tiny_model(), micro_batch_tokens=96).logprobs(data, 1.0)
    assert all(np.array_equal(one, other) for one, other in zip(policy, reference, strict=True))


def test_recomputed_activations_change_no_bit():
    data = batch()
    first, second = gradients(data), gradients(data, activation_checkpointing=True)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_packed_micro_batch_by_hand():
    # Rows without their last token: [1, 5] and [2, 3, 6]. The longer one comes first.
    data = Batch.from_columns({"draw": [0, 1], "sample": [0, 0], "prompt_ids": [[1], [2, 3]], "response_ids": [[5, 7], [6, 8]]})
    micro = MicroBatch.of(data, CPU, packed=True)
    assert micro.input_ids.tolist() == [[2, 3, 6, 1, 5]]
    assert micro.packing is not None
    assert micro.packing.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert micro.packing.ends.tolist() == [0, 3, 5]
    assert micro.targets.tolist() == [5, 7, 6, 8]
    assert micro.positions.tolist() == [3, 4, 1, 2]  # of row 0 the tokens 1 and 5, of row 1 the tokens 3 and 6
    assert micro.row.tolist() == [0, 0, 1, 1]


def test_rows_of_similar_length_share_a_bucket():
    # 7 is more than three quarters of 8, 3 is not; 4, 4 need no padding.
    found = Packing.of(np.array([8, 7, 4, 4, 2]), CPU).buckets
    assert [(bucket.start, bucket.stop, bucket.rows, bucket.width) for bucket in found] == [(0, 15, 2, 8), (15, 23, 2, 4), (23, 25, 1, 2)]
    assert found[1].spread is None
    assert found[0].collect is not None
    assert found[0].collect.tolist() == [*range(8), *range(8, 15)]


def test_packed_micro_batches_are_cut_by_the_sum_of_their_tokens():
    assert token_chunks([5, 1, 3, 2, 9], 8, padded=False) == [[4], [0, 2], [1, 3]]
    assert token_chunks([5, 1, 3, 2, 9], 8) == [[4], [0], [2, 3], [1]]
    assert token_chunks([4, 4, 4], 8, padded=False) == [[0, 1], [2]]
