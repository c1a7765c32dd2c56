"""Deterministic mode: an answer depends on its id, its prompt and the weights, bit for bit, and on nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from rollout_models import VOCABULARY, drain, make_model, make_requests, sampling

from rolemesh.engines.rollout.builtin import BuiltinEngine
from rolemesh.engines.rollout.runner import depends_on_neighbours

STOPS = tuple(range(0, VOCABULARY, 16))
SETTINGS = sampling(temperature=0.9, max_new_tokens=20, stop_token_ids=STOPS)


def make_engine(kind, slots, dtype=torch.float32):
    own = make_model(kind, seed=99).to(dtype)
    engine = BuiltinEngine(own, slots=slots, max_prompt_tokens=9, max_response_tokens=20, deterministic=True)
    engine.load_weights(make_model(kind).named_parameters(), 0)
    return engine


def answers(kind, shares, slots, dtype=torch.float32):
    """Ids, tokens and log-probabilities when each of several engines gets its share of the requests."""
    found = {}
    for share in shares:
        engine = make_engine(kind, slots, dtype)
        engine.add(share, SETTINGS)
        found |= {completion.id: (completion.token_ids, completion.logprobs, completion.finish_reason) for completion in drain(engine)}
    return found


def split(requests, engines):
    return [requests[index::engines] for index in range(engines)]


@pytest.mark.parametrize("kind", ["llama", "llama_odd", "qwen2", "qwen2_packed", "qwen3_tied", "gpt2"])
def test_answers_are_bit_equal_for_any_order_and_any_split(kind):
    requests = make_requests(10, samples=4) if kind != "gpt2" else make_requests(10, samples=2, longest=2)  # few lengths, few batches
    expected = answers(kind, [requests], 12)
    assert len(expected) == len(requests)
    assert {reason for _, _, reason in expected.values()} == {"stop", "length"}
    shuffler = random.Random(0)
    for engines in (1, 2, 4):
        shuffled = shuffler.sample(requests, len(requests))
        assert answers(kind, split(shuffled, engines), 12) == expected


@pytest.mark.slow
def test_answers_of_a_mixture_of_experts_are_bit_equal_since_it_runs_one_at_a_time(caplog):
    """Tokens that chose the same expert are one product, whatever rows they are of."""
    requests = make_requests(6, samples=2, longest=3)
    expected = answers("mixtral", [requests], 6)
    shuffled = random.Random(1).sample(requests, len(requests))
    assert answers("mixtral", split(shuffled, 2), 6) == expected
    assert "depends on the rows beside it" in caplog.text
    caplog.clear()
    answers("gpt2", [requests], 6)
    assert "depends on the rows beside it" not in caplog.text


def test_a_model_whose_rows_mix_is_found_out_by_trying():
    assert not depends_on_neighbours(make_model("gpt2"), torch.device("cpu"))
    mixed = make_model("gpt2")
    mixed.transformer.h[0].mlp.register_forward_hook(lambda module, inputs, output: output + 1e-6 * output.mean(0, keepdim=True))
    assert depends_on_neighbours(mixed, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_answers_are_bit_equal_in_bfloat16(kind):
    requests = make_requests(10, samples=4)
    expected = answers(kind, [requests], 12, torch.bfloat16)
    assert len(expected) == len(requests)
    for engines, slots in ((2, 12), (4, 5), (1, 40)):
        shuffled = random.Random(engines).sample(requests, len(requests))
        assert answers(kind, split(shuffled, engines), slots, torch.bfloat16) == expected


@pytest.mark.parametrize(("kind", "slots"), [*(("llama", slots) for slots in (1, 3, 16, 20, 40)), ("qwen2_packed", 40)])
def test_answers_are_bit_equal_for_any_number_of_slots(kind, slots):
    requests = make_requests(10, samples=4)
    assert answers(kind, [requests], slots) == answers(kind, [requests], 7)


@pytest.mark.parametrize("kind", ["llama", "qwen2_packed", "gpt2"])
def test_answers_are_bit_equal_beside_aborted_neighbours_and_late_arrivals(kind):
    requests = make_requests(8, samples=3, longest=2 if kind == "gpt2" else 9)
    expected = answers(kind, [requests], 6)
    engine = make_engine(kind, 6)
    done = []
    for number, request in enumerate(requests):
        engine.add([request], SETTINGS)
        done += engine.step()
        if number % 5 == 4:
            engine.abort([request.id])
    done += drain(engine)
    found = {completion.id: (completion.token_ids, completion.logprobs, completion.finish_reason) for completion in done}
    assert set(found) == {request.id for number, request in enumerate(requests) if number % 5 != 4 or request.id in found}
    assert len(found) >= len(requests) - len(requests) // 5
    assert all(found[id] == expected[id] for id in found)


def test_fast_mode_answers_the_same_ids_with_nearly_the_same_numbers():
    requests = make_requests(10, samples=4)
    expected = answers("llama", [requests], 12)
    engine = BuiltinEngine(make_model(seed=99), slots=12, max_prompt_tokens=9, max_response_tokens=20)
    engine.load_weights(make_model().named_parameters(), 0)
    engine.add(requests, SETTINGS)
    found = {completion.id: completion for completion in drain(engine)}
    assert set(found) == set(expected)
    same = [id for id in found if found[id].token_ids == expected[id][0]]
    assert len(same) >= 0.9 * len(requests)  # a rounding difference may turn a token once in a long while
    assert all(found[id].logprobs == pytest.approx(expected[id][1], abs=1e-4) for id in same)
