"""The contract of `protocols/engine.py`, on every engine."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from rollout_models import VOCABULARY, WIDE, drain, generate, make_model, make_requests, sampling

from rolemesh.engines.rollout import check_engine, create_engine
from rolemesh.engines.rollout.fake import FakeEngine
from rolemesh.errors import ConfigError, StaleWeights
from rolemesh.protocols.engine import EngineHealth, Request

ENGINES = {
    "fake": ("fake", "llama", False, {}),
    "fast": ("builtin", "llama", False, {}),
    "fast_deterministic": ("builtin", "qwen3_tied", True, {}),
    "generic": ("builtin", "gpt2", False, {}),
    "generic_deterministic": ("builtin", "gpt2", True, {}),
    "sglang": ("sglang_stub:SglangOnStub", "qwen3_tied", False, {}),
    "vllm": ("vllm", "llama", False, WIDE),
    "vllm_tied": ("vllm", "qwen3_tied", False, WIDE),
}


@pytest.fixture(params=ENGINES, scope="module")
def make(request):
    """A function that makes an engine without weights, and the model whose weights fit it."""
    name, kind, deterministic, changes = ENGINES[request.param]
    if name == "vllm" and find_spec("vllm") is None:
        pytest.skip("vllm is not installed")

    def make_engine(slots=4, max_prompt_tokens=9, max_response_tokens=12):
        model = make_model(kind, **changes)
        engine = create_engine(
            name,
            make_model(kind, seed=99, **changes),
            slots=slots,
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
            deterministic=deterministic,
            device="cpu",
        )
        return engine, model

    return make_engine


@pytest.fixture(scope="module")
def shared(make):
    engine, model = make()
    engine.load_weights(model.named_parameters(), 3)
    return engine


@pytest.fixture
def loaded(shared):
    """An idle engine with weights of version 3; tests that load others make their own."""
    shared.abort()
    shared.resume()
    return shared


def test_every_request_is_answered_once_and_completely(loaded):
    requests = make_requests(7, samples=3)
    loaded.add(requests[:10], sampling())
    loaded.add(requests[10:], sampling())
    assert loaded.unfinished == 21
    done = drain(loaded)
    assert sorted(completion.id for completion in done) == sorted(request.id for request in requests)
    for completion in done:
        assert len(completion.token_ids) == len(completion.logprobs) == 12
        assert all(0 <= token < VOCABULARY for token in completion.token_ids)
        assert all(logprob <= 0 for logprob in completion.logprobs)
        assert completion.finish_reason == "length"
        assert completion.weight_version == 3
    assert loaded.unfinished == 0
    assert loaded.step() == []


def test_F18_the_sampled_end_token_is_in_ids_and_logprobs(loaded):
    stops = tuple(range(0, VOCABULARY, 9))
    done = generate(loaded, make_requests(12, samples=2), sampling(stop_token_ids=stops))
    assert {completion.finish_reason for completion in done.values()} == {"stop", "length"}
    for completion in done.values():
        assert len(completion.token_ids) == len(completion.logprobs)
        assert not set(completion.token_ids[:-1]) & set(stops)
        assert (completion.token_ids[-1] in stops) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 12


def test_answers_end_at_their_own_limit(loaded):
    loaded.add([Request(id=(0, 0), prompt_ids=[1, 2])], sampling(max_new_tokens=1))
    loaded.add([Request(id=(1, 0), prompt_ids=[1, 2])], sampling(max_new_tokens=5))
    lengths = {completion.id[0]: len(completion.token_ids) for completion in drain(loaded)}
    assert lengths == {0: 1, 1: 5}


def test_an_answer_goes_on_where_an_earlier_turn_of_it_stopped(loaded):
    requests = make_requests(4, samples=2)
    whole = generate(loaded, requests, sampling())
    for start in (1, 7):
        later = [
            Request(id=request.id, prompt_ids=[*request.prompt_ids, *whole[request.id].token_ids[:start]], start=start)
            for request in requests
        ]
        for id, completion in generate(loaded, later, sampling()).items():
            assert len(completion.token_ids) == 12 - start
            if loaded.sampling_kind == "counter":
                assert completion.token_ids == whole[id].token_ids[start:]
                assert completion.logprobs == pytest.approx(whole[id].logprobs[start:], abs=1e-4)
            assert completion.finish_reason == "length"  # what came before counts against it
    with pytest.raises(ValueError, match="start must be within 0 to 11, got 12"):
        loaded.add([Request(id=(0, 0), prompt_ids=[1] * 13, start=12)], sampling())
    with pytest.raises(ValueError, match=r"1 to 9 tokens \(max_prompt_tokens\), got 10"):
        loaded.add([Request(id=(0, 0), prompt_ids=[1] * 13, start=3)], sampling())


def test_F11_answers_to_one_prompt_differ(loaded):
    done = generate(loaded, make_requests(1, samples=8), sampling())
    assert len({tuple(completion.token_ids) for completion in done.values()}) == 8


def test_the_seed_decides_the_answers(loaded):
    requests = make_requests(3)
    first, same, other = (generate(loaded, requests, sampling(seed=seed)) for seed in (1, 1, 2**63))
    assert {id: completion.token_ids for id, completion in first.items()} == {id: c.token_ids for id, c in same.items()}
    assert all(first[id].token_ids != other[id].token_ids for id in first)


def test_greedy_answers_do_not_depend_on_seed_or_sample(loaded):
    done = generate(loaded, make_requests(1, samples=3), sampling(temperature=0.0, seed=1))
    done |= generate(loaded, [Request(id=(5, 9), prompt_ids=make_requests(1)[0].prompt_ids)], sampling(temperature=0.0, seed=2))
    assert len({tuple(completion.token_ids) for completion in done.values()}) == 1


def test_nothing_is_generated_before_the_first_weights(make):
    engine, model = make()
    assert engine.weight_version == -1
    engine.add(make_requests(2), sampling())
    with pytest.raises(StaleWeights, match="holds weight version -1"):
        engine.step()
    engine.load_weights(model.named_parameters(), 0)  # waiting requests do not stand in the way of the first version
    assert len(drain(engine)) == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weights: weights[:-1], "lack"),
        (lambda weights: [*weights, ("model.extra.weight", torch.zeros(2))], "no parameter 'model.extra.weight'"),
        (lambda weights: [*weights, weights[0]], "twice"),
        (lambda weights: [(weights[0][0], weights[0][1][:-1]), *weights[1:]], "shape"),
    ],
)
def test_weights_that_do_not_fit_leave_the_engine_refusing(make, damage, message):
    engine, model = make()
    weights = list(model.named_parameters())
    engine.load_weights(weights, 0)
    with pytest.raises(ValueError, match=message):
        engine.load_weights(damage(weights), 1)
    assert engine.weight_version == -1
    engine.add(make_requests(1), sampling())
    with pytest.raises(StaleWeights):
        engine.step()
    engine.load_weights(weights, 2)
    assert [completion.weight_version for completion in drain(engine)] == [2]


def test_weights_that_stop_coming_leave_the_engine_refusing(make):
    engine, model = make()
    engine.load_weights(model.named_parameters(), 0)

    def broken():
        yield next(iter(model.named_parameters()))
        raise ConnectionError("the publisher is gone")

    with pytest.raises(ConnectionError):
        engine.load_weights(broken(), 1)
    assert engine.weight_version == -1


def test_F05_weights_do_not_change_under_running_requests(make):
    engine, model = make()
    engine.load_weights(model.named_parameters(), 0)
    engine.add(make_requests(6), sampling())
    engine.step()
    running = engine.health().running
    assert 1 <= running <= 4
    with pytest.raises(ValueError, match=f"{running} requests of weight version 0 are running"):
        engine.load_weights(model.named_parameters(), 1)
    with pytest.raises(ValueError, match=r"in_flight must be one of .*, got 'keep'"):
        engine.load_weights(model.named_parameters(), 1, in_flight="keep")
    assert engine.weight_version == 0
    assert {completion.weight_version for completion in drain(engine)} == {0}
    assert engine.load_weights(model.named_parameters(), 1) == []
    assert engine.weight_version == 1


def test_answers_that_go_on_over_a_change_of_weights_are_labelled_token_by_token(make):
    engine, model = make()
    requests = make_requests(3, samples=2, longest=2)
    engine.load_weights(model.named_parameters(), 0)
    expected = generate(engine, requests, sampling())
    engine.add(requests, sampling())
    for _ in range(4):
        engine.step()
    tokens = engine.health().tokens
    engine.load_weights(other(model), 5, in_flight="resume")
    done = {completion.id: completion for completion in drain(engine)}
    assert set(done) == set(expected)
    old = 0
    for id, completion in done.items():
        assert [(span.start, span.stop) for span in completion.spans] in ([(0, 12)], [(0, cut(completion)), (cut(completion), 12)])
        assert completion.weight_version == completion.spans[0].version
        assert [span.version for span in completion.spans] in ([5], [0, 5])
        before = cut(completion) if completion.weight_version == 0 else 0
        assert completion.token_ids[:before] == expected[id].token_ids[:before]
        old += before
    assert {completion.weight_version for completion in done.values()} == {0, 5}, "what had not begun is wholly of the new weights"
    assert old == tokens - 6 * 12
    if engine.name != "fake":  # which knows nothing, whatever its weights
        assert any(done[id].token_ids != expected[id].token_ids for id in done)


def test_sequences_that_go_on_keep_what_was_computed_for_them(make):
    engine, model = make()
    requests = make_requests(3, samples=2)
    engine.load_weights(model.named_parameters(), 0)
    expected = generate(engine, requests, sampling())
    engine.add(requests, sampling())
    for _ in range(4):
        engine.step()
    engine.load_weights(model.named_parameters(), 1, in_flight="resume")  # equal weights: nothing may change
    done = {completion.id: completion for completion in drain(engine)}
    assert {len(completion.spans) for completion in done.values()} == {1, 2}
    assert {id: completion.token_ids for id, completion in done.items()} == {id: before.token_ids for id, before in expected.items()}


def cut(completion):
    """Where the first span ends."""
    return completion.spans[0].stop


def other(model):
    return [(name, parameter + 0.3 * torch.sin(7 * parameter)) for name, parameter in model.named_parameters()]


def test_answers_can_end_at_a_change_of_weights(make):
    engine, model = make()
    engine.load_weights(model.named_parameters(), 0)
    engine.add(make_requests(6, longest=1), sampling())
    for _ in range(3):
        engine.step()
    running = engine.health().running
    ended = engine.load_weights(model.named_parameters(), 1, in_flight="abort")
    assert len(ended) == running
    assert {(completion.finish_reason, completion.weight_version) for completion in ended} == {("abort", 0)}
    assert all(completion.token_ids for completion in ended)
    rest = drain(engine)
    assert len(rest) == 6 - running
    assert {(completion.finish_reason, completion.weight_version) for completion in rest} == {("length", 1)}


def test_F04_nothing_computed_by_old_weights_is_used_for_a_new_request(make):
    engine, model = make()
    requests = make_requests(1, samples=2)
    engine.load_weights(model.named_parameters(), 0)
    engine.add(requests[:1], sampling())
    engine.step()  # the prompt may be remembered from here on
    engine.load_weights(other(model), 1, in_flight="resume")
    engine.add(requests[1:], sampling())
    found = {completion.id: completion for completion in drain(engine)}[requests[1].id]
    fresh, _ = make()
    fresh.load_weights(other(model), 1)
    expected = generate(fresh, requests[1:], sampling())[requests[1].id]
    assert found.token_ids == expected.token_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_reset_prefix_cache_changes_no_answer(loaded):
    requests = make_requests(2, samples=2)
    expected = generate(loaded, requests, sampling())
    loaded.add(requests[:3], sampling())
    loaded.step()
    loaded.reset_prefix_cache()
    loaded.add(requests[3:], sampling())
    assert {completion.id: completion.token_ids for completion in drain(loaded)} == {id: done.token_ids for id, done in expected.items()}


def test_a_paused_engine_takes_requests_and_does_nothing(loaded):
    requests = make_requests(5)
    expected = generate(loaded, requests, sampling())
    loaded.add(requests[:3], sampling())
    loaded.step()
    loaded.pause()
    loaded.add(requests[3:], sampling())
    before = loaded.health()
    assert (before.state, before.queued + before.running) == ("paused", 5)
    assert [loaded.step() for _ in range(20)] == [[]] * 20
    assert loaded.health() == before
    loaded.resume()
    assert {completion.id: completion.token_ids for completion in drain(loaded)} == {id: done.token_ids for id, done in expected.items()}


def test_a_drained_engine_has_nothing_in_flight_and_keeps_its_queue(make):
    engine, model = make()
    with pytest.raises(StaleWeights):
        engine.drain()
    engine.load_weights(model.named_parameters(), 0)
    engine.add(make_requests(7, longest=1), sampling())
    engine.step()
    begun = engine.health().running
    assert begun < 7
    done = engine.drain()
    assert {(completion.finish_reason, completion.weight_version) for completion in done} == {("length", 0)}
    health = engine.health()
    assert (len(done), health.state, health.queued, health.running) == (begun, "paused", 7 - begun, 0)
    engine.load_weights(model.named_parameters(), 1)  # the way to a new version without a mixed answer, and without an aborted one
    engine.resume()
    assert [completion.weight_version for completion in drain(engine)] == [1] * (7 - begun)


@pytest.mark.parametrize("keep_weights", [True, False])
def test_F01_a_sleeping_engine_serves_nothing_and_wakes_with_its_own_weights_or_none(make, keep_weights):
    engine, model = make()
    engine.load_weights(model.named_parameters(), 3)
    requests = make_requests(4, samples=2)
    expected = generate(engine, requests, sampling())
    engine.add(requests, sampling())
    engine.step()
    with pytest.raises(ValueError, match="are running; drain or abort them"):
        engine.sleep(keep_weights=keep_weights)
    engine.abort()
    if not engine.sleeps:
        with pytest.raises(NotImplementedError, match="no memory back"):
            engine.sleep(keep_weights=keep_weights)
        assert (engine.weight_version, engine.health().state) == (3, "serving")
        pytest.skip(f"{engine.name} cannot sleep here")
    engine.sleep(keep_weights=True)
    engine.wake()  # and sleeps again without having generated anything
    for _ in range(2):
        engine.sleep(keep_weights=keep_weights)
    engine.add(requests, sampling())
    assert (engine.weight_version, engine.health().state) == (-1, "asleep")
    with pytest.raises(StaleWeights, match="asleep"):
        engine.step()
    with pytest.raises(ValueError, match="asleep"):
        engine.load_weights(model.named_parameters(), 4)
    for _ in range(2):
        engine.wake()
    if not keep_weights:
        assert (engine.weight_version, engine.health().state) == (-1, "empty")
        with pytest.raises(StaleWeights, match="holds weight version -1"):
            engine.step()
        engine.load_weights(model.named_parameters(), 3)
    assert (engine.weight_version, engine.health().state) == (3, "serving")
    found = {completion.id: completion for completion in drain(engine)}
    assert {id: (done.token_ids, done.logprobs, done.spans) for id, done in found.items()} == {
        id: (done.token_ids, done.logprobs, done.spans) for id, done in expected.items()
    }


def test_health_counts_what_is_there(make):
    engine, model = make()
    assert engine.health() == EngineHealth(state="empty", weight_version=-1, queued=0, running=0, tokens=0)
    engine.add(make_requests(5, longest=1), sampling())
    assert engine.health() == EngineHealth(state="empty", weight_version=-1, queued=5, running=0, tokens=0)
    engine.load_weights(model.named_parameters(), 2)
    engine.step()
    health = engine.health()
    assert (health.state, health.weight_version, health.queued + health.running, health.tokens) == ("serving", 2, 5, health.running)
    tokens = sum(len(completion.token_ids) for completion in drain(engine))
    assert engine.health() == EngineHealth(state="serving", weight_version=2, queued=0, running=0, tokens=tokens)


def test_negative_versions_are_refused(loaded):
    with pytest.raises(ValueError, match="at least 0"):
        loaded.load_weights([], -1)
    assert loaded.weight_version == 3


def test_abort_returns_what_there_is(loaded):
    loaded.add(make_requests(6), sampling())
    for _ in range(4):
        assert loaded.step() == []
    ended = {completion.id: completion for completion in loaded.abort([(0, 0), (5, 0), (77, 0)])}
    assert set(ended) == {(0, 0), (5, 0)}  # an id that is not held is passed over
    assert {completion.finish_reason for completion in ended.values()} == {"abort"}
    assert all(len(completion.token_ids) == len(completion.logprobs) for completion in ended.values())
    rest = loaded.abort()
    assert sorted(completion.id[0] for completion in rest) == [1, 2, 3, 4]
    tokens = sorted(len(completion.token_ids) for completion in [*ended.values(), *rest])
    assert tokens[:2] == [0, 0]  # four slots: two of the six requests never ran or had only begun
    assert tokens[-1] >= 1
    assert loaded.unfinished == 0
    assert loaded.step() == []


def test_the_others_go_on_after_an_abort(loaded):
    requests = make_requests(4)
    expected = generate(loaded, requests, sampling())
    loaded.add(requests, sampling())
    for _ in range(3):
        loaded.step()
    loaded.abort([(0, 0), (2, 0)])
    rest = {completion.id: completion for completion in drain(loaded)}
    assert {id: completion.token_ids for id, completion in rest.items()} == {id: expected[id].token_ids for id in [(1, 0), (3, 0)]}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(id=(1, 0), prompt_ids=[]), "1 to 9 tokens"),
        (Request(id=(1, 0), prompt_ids=[1] * 10), "1 to 9 tokens.*got 10"),
        (Request(id=(1, 0), prompt_ids=[VOCABULARY]), "token ids"),
        (Request(id=(1, 0), prompt_ids=[-1]), "token ids"),
        (Request(id=(0, 0), prompt_ids=[1]), "already"),
        (Request(id=(-1, 0), prompt_ids=[1]), "draw"),
        (Request(id=(1, 2**32), prompt_ids=[1]), "sample"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_up_front(loaded, request_, message):
    good = Request(id=(0, 0), prompt_ids=[1, 2])
    with pytest.raises(ValueError, match=message):
        loaded.add([good, request_], sampling())
    assert loaded.unfinished == 0
    loaded.add([good], sampling())
    with pytest.raises(ValueError, match=r"\(0, 0\) is already in the engine"):
        loaded.add([good], sampling())
    assert len(drain(loaded)) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e-39}, "temperature.*1e-06 to 1e\\+06"),  # in float32 logits over it are infinite
        ({"temperature": 1e300}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 13}, "max_new_tokens.*12"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop_token_ids": (VOCABULARY,)}, "stop token ids"),
    ],
)
def test_settings_that_cannot_be_served_are_refused_up_front(loaded, settings, message):
    with pytest.raises(ValueError, match=message):
        loaded.add(make_requests(1), sampling(**settings))
    assert loaded.unfinished == 0


@pytest.mark.parametrize("settings", [{"temperature": 1e-6}, {"temperature": 1e6}, {"top_k": 10**30}, {"top_p": 1e-300}])
def test_settings_at_their_limits_are_served(loaded, settings):
    if loaded.name == "vllm" and settings != {"temperature": 1e6}:
        pytest.skip("it filters nothing, and its lowest temperature is its own")
    assert len(generate(loaded, make_requests(3), sampling(**settings))) == 3


def test_engines_are_found_by_name_or_import_path():
    settings = {"slots": 1, "max_prompt_tokens": 2, "max_response_tokens": 2}
    assert create_engine("rolemesh.engines.rollout.fake:FakeEngine", None, **settings).name == "fake"
    with pytest.raises(ConfigError, match=r"rollout.engine.*Did you mean 'builtin'"):
        create_engine("buildin", None, **settings)


class RawEngine(FakeEngine):
    """Its log-probabilities would be those of T=1."""

    logprobs_kind = "raw"


def test_D16_an_engine_with_other_logprobs_than_the_trainers_is_refused():
    for refused in (
        lambda: check_engine(f"{__name__}:RawEngine"),
        lambda: create_engine(f"{__name__}:RawEngine", None, slots=1, max_prompt_tokens=2, max_response_tokens=2),
    ):
        with pytest.raises(ConfigError, match=r"after temperature over all tokens.*RawEngine gives 'raw' ones"):
            refused()
    check_engine("builtin")


def test_an_engine_that_samples_by_seed_or_does_not_filter_is_refused_what_it_cannot_do():
    check_engine("vllm")  # which need not be installed: nothing is made
    with pytest.raises(ConfigError, match=r"^deterministic.*vllm samples seeded"):
        check_engine("vllm", deterministic=True)
    with pytest.raises(ConfigError, match=r"^rollout.top_p.*vllm gives"):
        check_engine("vllm", filtered=True)
    check_engine("builtin", deterministic=True, filtered=True)


def test_what_requests_have_so_far_is_seen_without_ending_them(loaded):
    requests = make_requests(6)
    expected = generate(loaded, requests, sampling())
    loaded.add(requests, sampling())
    seen = {}
    while loaded.unfinished:
        done = loaded.step()
        looked = loaded.so_far([request.id for request in requests[:5]])
        for completion in looked:
            whole = expected[completion.id]
            count = len(completion.token_ids)
            assert 0 < count < 12
            assert completion.token_ids == whole.token_ids[:count]
            assert completion.logprobs == pytest.approx(whole.logprobs[:count], abs=1e-4)
            assert completion.spans == ((3, 0, count),)
            seen[completion.id] = max(count, seen.get(completion.id, 0))
        assert not {completion.id for completion in looked} & {completion.id for completion in done}
    assert set(seen) == {request.id for request in requests[:5]}
    assert max(seen.values()) > 5
    assert loaded.so_far([request.id for request in requests]) == []


def test_a_counter_decides_the_random_numbers_in_place_of_the_id(loaded):
    prompt = make_requests(1)[0].prompt_ids
    ids = [(2**63 + number, 0) for number in range(4)]
    counters = [(7, 1), (7, 1), None, (2**63 + 2, 0)]
    requests = [Request(id=id, prompt_ids=prompt, counter=counter) for id, counter in zip(ids, counters, strict=True)]
    done = generate(loaded, requests, sampling())
    first, second, third, fourth = (done[id].token_ids for id in ids)
    assert first == second
    assert third == fourth
    assert first != third


def test_a_drain_ends_in_time_and_what_still_runs_goes_on_later(loaded):
    requests = make_requests(3)
    expected = generate(loaded, requests, sampling())
    loaded.add(requests, sampling())
    loaded.step()
    assert loaded.drain(0.0) == []
    assert loaded.health().state == "paused"
    assert loaded.unfinished == 3
    loaded.resume()
    assert {completion.id: completion.token_ids for completion in drain(loaded)} == {id: one.token_ids for id, one in expected.items()}
