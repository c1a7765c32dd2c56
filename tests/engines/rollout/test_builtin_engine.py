"""What the built-in engine promises beyond the contract: the trainer's log-probabilities, sharing, fallback, refusals."""

from __future__ import annotations

import logging

import pytest
import torch
from rollout_models import FAST, GENERIC, VOCABULARY, drain, forward_logprobs, generate, largest_gap, make_model, make_requests, sampling

from rolemesh.engines.rollout import fast
from rolemesh.engines.rollout.builtin import BuiltinEngine
from rolemesh.engines.rollout.fast import FastRunner, why_not_fast
from rolemesh.errors import ConfigError
from rolemesh.protocols.engine import Request

LIMITS = {"max_prompt_tokens": 9, "max_response_tokens": 24}


def engine_with(model, kind="llama", slots=5, version=0, **settings):
    engine = BuiltinEngine(make_model(kind, seed=99), slots=slots, **{**LIMITS, **settings})
    engine.load_weights(model.named_parameters(), version)
    return engine


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_D15_logprobs_are_the_trainers_fast_path(kind, temperature, caplog):
    model = make_model(kind)
    with caplog.at_level(logging.WARNING):
        engine = engine_with(model, kind)
    assert not caplog.records
    requests = make_requests(6, samples=3)
    done = generate(engine, requests, sampling(temperature=temperature, max_new_tokens=24, stop_token_ids=(1, 2, 3)))
    assert largest_gap(model, requests, done, temperature) < 2e-5


@pytest.mark.parametrize("kind", GENERIC)
@pytest.mark.parametrize("deterministic", [False, True])
def test_D15_logprobs_are_the_trainers_generic_path(kind, deterministic, caplog):
    model = make_model(kind)
    with caplog.at_level(logging.WARNING):
        engine = engine_with(model, kind, deterministic=deterministic)
    assert "the fast path cannot run this model" in caplog.text
    requests = make_requests(6, samples=3)
    done = generate(engine, requests, sampling(temperature=0.6, max_new_tokens=24, stop_token_ids=(1, 2, 3)))
    assert len(done) == 18
    assert largest_gap(model, requests, done, 0.6) < 2e-5


@pytest.mark.parametrize("instructions", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_tied"])
def test_bfloat16_stays_near_its_own_forward(kind, instructions, monkeypatch):
    if not instructions:  # of the CPU, for bfloat16
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    model = make_model(kind).bfloat16()
    engine = BuiltinEngine(make_model(kind, seed=99).bfloat16(), slots=4, **LIMITS)
    assert isinstance(engine._runner, FastRunner)
    engine.load_weights(model.named_parameters(), 0)
    requests = make_requests(4)
    done = generate(engine, requests, sampling(temperature=2.0))
    prompts = {request.id: request.prompt_ids for request in requests}
    gaps = [
        (forward_logprobs(model, prompts[id], completion.token_ids, 2.0) - torch.tensor(completion.logprobs)).abs()
        for id, completion in done.items()
    ]
    assert torch.cat(gaps).mean() < 0.1


def test_greedy_takes_the_argmax_and_reports_temperature_one():
    model = make_model()
    request = Request(id=(0, 0), prompt_ids=[5, 6, 7])
    done = generate(engine_with(model), [request], sampling(temperature=0.0))[0, 0]
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, *done.token_ids]])).logits[0, 2:-1]
    assert done.token_ids == logits.argmax(-1).tolist()
    assert largest_gap(model, [request], {(0, 0): done}) < 2e-5


def test_D16_logprobs_with_top_k_and_top_p_are_those_of_the_whole_distribution():
    model = make_model()
    requests = make_requests(3, samples=2)
    done = generate(engine_with(model), requests, sampling(temperature=0.6, top_k=3, top_p=0.9))
    assert largest_gap(model, requests, done, 0.6) < 2e-5


def test_rows_with_different_settings_run_side_by_side():
    model = make_model()
    engine = engine_with(model)
    requests = make_requests(4)
    engine.add(requests[:1], sampling(temperature=0.0))
    engine.add(requests[1:2], sampling(temperature=0.6, max_new_tokens=3))
    engine.add(requests[2:3], sampling(seed=5, stop_token_ids=tuple(range(0, VOCABULARY, 2))))
    engine.add(requests[3:], sampling(top_k=1))
    done = {completion.id: completion for completion in drain(engine)}
    alone = [
        generate(engine, requests[:1], sampling(temperature=0.0)),
        generate(engine, requests[1:2], sampling(temperature=0.6, max_new_tokens=3)),
        generate(engine, requests[2:3], sampling(seed=5, stop_token_ids=tuple(range(0, VOCABULARY, 2)))),
        generate(engine, requests[3:], sampling(temperature=0.0)),  # the likeliest token alone is the greedy one
    ]
    for answers in alone:
        for id, completion in answers.items():
            assert completion.token_ids == done[id].token_ids
            assert completion.finish_reason == done[id].finish_reason


def test_F14_the_context_limit_cuts_with_finish_reason_length():
    model = make_model(max_position_embeddings=8)
    engine = BuiltinEngine(make_model(seed=99, max_position_embeddings=8), slots=2, max_prompt_tokens=8, max_response_tokens=6)
    engine.load_weights(model.named_parameters(), 0)
    requests = [Request(id=(length, 0), prompt_ids=[1] * length) for length in (2, 3, 4)]
    done = generate(engine, requests, sampling(max_new_tokens=6))
    assert {id[0]: len(completion.token_ids) for id, completion in done.items()} == {2: 6, 3: 5, 4: 4}
    assert {completion.finish_reason for completion in done.values()} == {"length"}
    with pytest.raises(ValueError, match="no room in the model's context of 8"):
        engine.add([Request(id=(0, 0), prompt_ids=[1] * 8)], sampling(max_new_tokens=6))


@pytest.mark.parametrize("deterministic", [False, True])
def test_equal_prompts_are_prefilled_once(deterministic, monkeypatch):
    model = make_model()
    engine = engine_with(model, slots=4, deterministic=deterministic)
    seen = []
    plain = FastRunner._prefill_pass

    def counting(self, prompts, copies, first):
        seen.extend(prompts)
        return plain(self, prompts, copies, first)

    monkeypatch.setattr(FastRunner, "_prefill_pass", counting)
    requests = make_requests(3, samples=6)  # more answers a prompt than slots: admitted in several rounds
    done = generate(engine, requests, sampling())
    assert len(seen) == 3
    assert largest_gap(model, requests, done) < 2e-5


def test_equal_prompts_apart_from_each_other_are_served_whatever_else_is_prefilled(monkeypatch):
    monkeypatch.setattr(fast, "_PREFILL_TOKENS", 6)  # passes of two prompts
    model = make_model()
    a, b, c = [5, 6, 7], [8, 9, 10], [11, 12, 13]
    requests = [Request(id=(draw, 0), prompt_ids=prompt) for draw, prompt in enumerate([a, b, a, c, a])]
    done = generate(engine_with(model), requests, sampling())
    assert len(done) == 5
    assert largest_gap(model, requests, done) < 2e-5


def test_F04_a_remembered_prompt_is_forgotten_with_its_weights():
    old, new = make_model(seed=1), make_model(seed=2)
    engine = engine_with(old)
    request = [Request(id=(0, 0), prompt_ids=[5, 6, 7])]
    generate(engine, request, sampling())
    engine.load_weights(new.named_parameters(), 1)
    done = generate(engine, request, sampling())
    assert done[0, 0].weight_version == 1
    assert largest_gap(new, request, done) < 2e-5


def test_D15_positions_that_change_in_the_middle_of_an_answer_are_refused():
    """HF computes all positions anew once a sequence is over 16 tokens; keys in the cache would stay what they were."""
    model = make_model("phi3_longrope")
    with pytest.raises(ConfigError, match=r"at most 16 tokens.*longrope.*found 17 together"):
        BuiltinEngine(make_model("phi3_longrope", seed=99), slots=4, max_prompt_tokens=9, max_response_tokens=8)
    engine = engine_with(model, "phi3_longrope", max_prompt_tokens=9, max_response_tokens=7)
    requests = make_requests(6)
    assert largest_gap(model, requests, generate(engine, requests, sampling(max_new_tokens=7))) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_tied"])
def test_D15_logprobs_are_the_trainers_after_each_of_100_publications(kind):
    model = make_model(kind)
    engine = engine_with(model, kind)
    requests, generator = make_requests(4, samples=3), torch.Generator().manual_seed(0)
    for version in range(1, 101):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.98).add_(torch.randn(parameter.shape, generator=generator), alpha=0.03)
        engine.load_weights(model.named_parameters(), version)
        temperature = (0.7, 1.0, 1.3)[version % 3]
        done = generate(engine, requests, sampling(temperature=temperature, max_new_tokens=24, seed=version))
        assert {completion.weight_version for completion in done.values()} == {version}
        assert largest_gap(model, requests, done, temperature) < 2e-5, f"publication {version}"


def test_the_engine_keeps_its_own_copy_of_the_weights():
    model, same = make_model(), make_model()
    engine = engine_with(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    requests = make_requests(2)
    assert largest_gap(same, requests, generate(engine, requests, sampling())) < 2e-5


def test_a_tied_head_may_come_or_not_but_never_differ():
    model = make_model("qwen3_tied")
    engine = engine_with(model, "qwen3_tied")
    weights = dict(model.named_parameters())
    assert "lm_head.weight" not in weights
    head = weights["model.embed_tokens.weight"].detach()
    engine.load_weights([("lm_head.weight", head), *weights.items()], 1)
    with pytest.raises(ValueError, match="tied"):
        engine.load_weights([("lm_head.weight", head + 1), *weights.items()], 2)
    assert engine.weight_version == -1


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_weights_that_are_not_finite_are_named_and_leave_nothing_behind(kind):
    broken, sound = make_model(kind), make_model(kind)
    engine = engine_with(sound, kind)

    def answers():
        """A short row that a long neighbour then makes attend to columns which it never wrote."""
        engine.add([Request(id=(0, 0), prompt_ids=[5])], sampling(max_new_tokens=24))
        first = engine.step()
        engine.add([Request(id=(1, 0), prompt_ids=[5] * 9)], sampling(max_new_tokens=24))
        return {completion.id: completion.token_ids for completion in first + drain(engine)}

    expected = answers()
    with torch.no_grad():
        list(broken.parameters())[3].fill_(torch.nan)
    engine.load_weights(broken.named_parameters(), 1)
    engine.add([Request(id=(draw, 0), prompt_ids=[draw] * 9) for draw in range(4)], sampling())
    with pytest.raises(FloatingPointError, match="weight version 1 gives logits that are not finite"):
        drain(engine)
    engine.abort()
    engine.load_weights(sound.named_parameters(), 2)
    assert answers() == expected


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_step_that_fails_loses_no_request(kind, at, monkeypatch):
    engine = engine_with(make_model(kind), kind, slots=4)
    requests = make_requests(6, longest=1)
    expected = generate(engine, requests, sampling())

    def out_of_memory(*args):
        raise torch.OutOfMemoryError("no memory left")

    for ends in (False, True):
        engine.add(requests, sampling())
        if at == "decode":
            engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, at, out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                engine.step()
        health = engine.health()
        assert (health.queued, health.running) == ((6, 0) if at == "prefill" else (2, 4))
        if ends:
            assert {completion.id for completion in engine.abort()} == {request.id for request in requests}
            assert engine.unfinished == 0
        else:
            done = {completion.id: completion for completion in drain(engine)}
            assert {id: one.token_ids for id, one in done.items()} == {id: one.token_ids for id, one in expected.items()}
    done = generate(engine, requests, sampling())
    assert {id: one.token_ids for id, one in done.items()} == {id: one.token_ids for id, one in expected.items()}


def test_thousands_of_stop_sets_do_not_pile_up():
    """Each is a row of a table over the vocabulary."""
    engine = engine_with(make_model(), slots=1)
    for number in range(100):
        request = Request(id=(number, 0), prompt_ids=[5, 6])
        stops = (number % VOCABULARY, number // VOCABULARY)
        done = generate(engine, [request], sampling(stop_token_ids=stops))[number, 0]
        assert (done.finish_reason == "stop") == (done.token_ids[-1] in stops)
        assert not set(stops) & set(done.token_ids[:-1])
    assert len(engine._rows._stops) == len(engine._rows._stop_sets) < 30


def test_F19_the_cache_takes_memory_only_when_it_is_used_after_waking():
    engine = engine_with(make_model())
    requests = make_requests(2)
    expected = generate(engine, requests, sampling())
    cache = engine._runner._cache.nbytes
    assert cache > 0
    ledger = [cache]
    engine.sleep(keep_weights=False)
    for wakes in (lambda: None, engine.wake, lambda: engine.load_weights(make_model().named_parameters(), 1)):
        wakes()
        ledger.append(engine._runner._cache.nbytes)
    assert ledger == [cache, 0, 0, 0], "weights, then publication, then the cache"
    done = generate(engine, requests, sampling())
    assert engine._runner._cache.nbytes == cache
    assert {id: one.token_ids for id, one in done.items()} == {id: one.token_ids for id, one in expected.items()}


def test_a_model_that_computes_something_else_falls_back_with_a_warning(caplog):
    model = make_model(seed=99)
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 1.5)
    assert why_not_fast(model) is None
    with caplog.at_level(logging.WARNING):
        engine = BuiltinEngine(model, slots=4, **LIMITS)
    assert "its logits differ by" in caplog.text
    weights = make_model()
    engine.load_weights(weights.named_parameters(), 0)
    weights.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 1.5)
    requests = make_requests(3)
    assert largest_gap(weights, requests, generate(engine, requests, sampling())) < 2e-5


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gpt2", "architecture 'gpt2'"),
        ("qwen2_sliding", "sliding"),
        ("mistral_sliding", "architecture 'mistral'"),
        ("llama_dynamic_rope", "depends on the length"),
    ],
)
def test_the_fast_path_says_why_it_does_not_fit(kind, reason):
    assert reason in str(why_not_fast(make_model(kind)))


def test_the_fast_path_refuses_parameters_that_it_would_ignore():
    model = make_model()
    model.model.layers[0].mlp.gate_proj.register_parameter("lora_A", torch.nn.Parameter(torch.zeros(2)))
    assert "lora_A" in str(why_not_fast(model))


def test_the_fast_path_refuses_mixed_number_formats():
    model = make_model()
    model.lm_head.bfloat16()
    assert "several number formats" in str(why_not_fast(model))


def test_deterministic_mode_needs_one_thread():
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="one torch thread, found 2"):
            BuiltinEngine(make_model(), slots=4, deterministic=True, **LIMITS)
    finally:
        torch.set_num_threads(1)
