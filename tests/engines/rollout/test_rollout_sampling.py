"""Random numbers and the choice of tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rolemesh.engines.rollout.sampling import RowSettings, choose, philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_the_random123_distribution(counter, key, expected):
    assert tuple(philox4x32(np.array(counter, np.uint64), key).tolist()) == expected


def test_uniforms_are_53_bits_of_the_block_named_by_seed_draw_sample_position():
    seed, draw, sample, position = 0x299F31D0A4093822, 0x85A308D3243F6A88, 0x13198A2E, 5
    words = philox4x32(np.array([0x243F6A88, 0x85A308D3, sample, position], np.uint64), (0xA4093822, 0x299F31D0)).tolist()
    expected = ((words[0] >> 5 << 26) + (words[1] >> 6)) / 2**53
    assert uniforms(seed, [draw], [sample], 8)[0, position] == expected


def test_uniforms_do_not_depend_on_company():
    together = uniforms(3, [0, 1, 2, 2], [0, 0, 0, 1], 16)
    assert (uniforms(3, [2], [1], 9)[0] == together[3, :9]).all()
    assert (uniforms(3, [2, 0], [1, 0], 16) == together[[3, 0]]).all()


def test_F10_numbers_differ_for_every_seed_draw_sample_and_position():
    draws, samples = np.divmod(np.arange(64), 8)
    numbers = np.concatenate([uniforms(seed, draws, samples, 32).ravel() for seed in (0, 1, 2**32)])
    assert len(np.unique(numbers)) == 3 * 64 * 32
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 4 / math.sqrt(12 * len(numbers))


PROBABILITIES = [0.1, 0.2, 0.3, 0.4]


def pick(numbers, probabilities=PROBABILITIES, **settings):
    """Token of each number, all rows with the same distribution."""
    logits = torch.tensor([probabilities], dtype=torch.float32).log().expand(len(numbers), -1)
    tensors = {
        name: torch.full((len(numbers), 1), value, dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in settings.items()
    }
    return choose(logits, torch.tensor(numbers, dtype=torch.float64), RowSettings(**tensors))


def test_tokens_invert_the_cumulative_distribution():
    tokens, logprobs = pick([0.0, 0.0999, 0.101, 0.299, 0.301, 0.599, 0.601, 0.999999])
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    expected = [math.log(PROBABILITIES[token]) for token in tokens.tolist()]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)
    assert logprobs.dtype == torch.float32


def test_tokens_of_probability_zero_are_never_taken():
    tokens, logprobs = pick([0.0, 0.4999, 0.5001, 1 - 2**-53], [0.0, 0.5, 0.0, 0.5])
    assert tokens.tolist() == [1, 1, 3, 3]
    assert logprobs.isfinite().all()


def test_temperature_divides_logits():
    # at T=0.5 probabilities are squared: 1, 4, 9, 16 of 30
    tokens, logprobs = pick([0.5 / 30, 4 / 30, 13 / 30, 20 / 30], temperature=0.5)
    assert tokens.tolist() == [0, 1, 2, 3]
    assert logprobs.exp().tolist() == pytest.approx([1 / 30, 4 / 30, 9 / 30, 16 / 30], abs=1e-6)


def test_D16_top_k_cuts_the_choice_and_not_the_logprob():
    tokens, logprobs = pick([0.0, 0.42, 0.44, 0.99], top_k=2, top_p=math.inf)  # 0.3 and 0.4 are left: 3/7 = 0.4286
    assert tokens.tolist() == [2, 2, 3, 3]
    assert logprobs.exp().tolist() == pytest.approx([0.3, 0.3, 0.4, 0.4], abs=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(1e-300, [3]), (0.39, [3]), (0.41, [2, 3]), (0.71, [1, 2, 3]), (0.91, [0, 1, 2, 3])])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    tokens, _ = pick(np.linspace(0, 0.999, 50).tolist(), top_p=top_p, top_k=4)
    assert sorted(set(tokens.tolist())) == kept


def test_greedy_rows_take_the_likeliest_token_beside_sampling_rows():
    logits = torch.tensor([PROBABILITIES, PROBABILITIES]).log()
    settings = RowSettings(greedy=torch.tensor([True, False]))
    tokens, logprobs = choose(logits, torch.zeros(2, dtype=torch.float64), settings)
    assert tokens.tolist() == [3, 0]
    assert logprobs.exp().tolist() == pytest.approx([0.4, 0.1], abs=1e-6)


def test_sampled_frequencies_follow_the_distribution():
    numbers = uniforms(0, np.arange(2000), np.zeros(2000), 1)[:, 0]
    tokens, _ = pick(numbers.tolist())
    counts = np.bincount(tokens.numpy(), minlength=4)
    expected = 2000 * np.array(PROBABILITIES)
    assert ((counts - expected) ** 2 / expected).sum() < 16.27  # chi-square, 3 degrees of freedom, p = 0.001
