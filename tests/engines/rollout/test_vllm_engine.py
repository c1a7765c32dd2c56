"""What the engine on vLLM promises beyond the contract. Runs where vLLM is installed (docs/engines.md)."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import psutil
import pytest
import torch
from rollout_models import VOCABULARY, WIDE, drain, forward_logprobs, generate, largest_gap, make_model, make_requests, sampling

from rolemesh.config.model_files import ModelFacts
from rolemesh.engines.rollout import create_engine
from rolemesh.errors import ConfigError, StaleWeights
from rolemesh.plan import vllm as planned
from rolemesh.protocols.engine import Request
from rolemesh.weights import Intake, Outlet

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

UNTIED_AND_TIED = [(kind, tied) for kind in ("llama", "qwen2", "qwen3_tied") for tied in (False, True)]


def engine_for(model, slots=4, max_prompt_tokens=80, max_response_tokens=12, **settings):
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty = empty.to(model.dtype)
    limits = {"slots": slots, "max_prompt_tokens": max_prompt_tokens, "max_response_tokens": max_response_tokens}
    return create_engine("vllm", empty, **limits, deterministic=False, device="cpu", **settings)


def loaded(kind="llama", version=0, **settings):
    model = make_model(kind, **WIDE)
    engine = engine_for(model, **settings)
    engine.load_weights(model.named_parameters(), version)
    return engine, model


def publish(engine, outlet, model, version, damage=None):
    """Bucket by bucket, as a rollout worker gets them: the memory of a bucket is that of the one before the last."""
    weights = list(model.named_parameters())
    manifest = outlet.begin(version, weights, iter([(name, weight.detach()) for name, weight in weights]), shared=False)
    intake = Intake(manifest, lambda stream: (engine.load_weights(stream, version), engine.weight_version)[1], waiter="test", deadline=60)
    held = None
    for number in range(len(manifest.buckets)):
        bucket = outlet.pack(version, number)
        if damage is not None and number == damage:
            bucket[-1] ^= 1
        held = intake.take(number, bucket)
    return held, len(manifest.buckets)


@torch.no_grad()
def shake(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(("kind", "tied"), UNTIED_AND_TIED)
@pytest.mark.parametrize("publications", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_D15_logprobs_are_the_trainers_after_every_publication(kind, tied, publications):
    model = make_model(kind, **WIDE, tie_word_embeddings=tied)
    assert ("lm_head.weight" in dict(model.named_parameters())) != tied
    engine, outlet = engine_for(model), Outlet(bucket_bytes=20_000, path="", leads=True)
    requests = make_requests(3, samples=2, longest=40)
    before, memory = None, []
    for version in range(publications):
        held, buckets = publish(engine, outlet, model, version)
        assert (held, buckets > 10) == (version, True)
        for temperature in (0.7, 1.3):
            done = generate(engine, requests, sampling(temperature=temperature))
            assert {completion.weight_version for completion in done.values()} == {version}
            assert largest_gap(model, requests, done, temperature) < 1e-4
            if before is not None:
                assert largest_gap(before, requests, done, temperature) > 1e-3, "the weights of before would be found out"
        memory.append(psutil.Process().memory_info().rss)
        before = make_model(kind, **WIDE, tie_word_embeddings=tied)
        before.load_state_dict(model.state_dict())
        shake(model, version)
    assert memory[-1] - memory[publications // 3] < 32 * 2**20, "no weights of before are kept"


def test_a_publication_that_breaks_anywhere_is_refused_and_a_whole_one_heals():
    engine, model = loaded(version=4)
    outlet = Outlet(bucket_bytes=20_000, path="", leads=True, full=True)
    requests = make_requests(2)
    _, buckets = publish(engine, outlet, model, 5)
    for damage in range(buckets):  # some are in the midst of a layer
        shake(model, damage)
        with pytest.raises(ValueError, match="does not have the checksum"):
            publish(engine, outlet, model, 6, damage=damage)
        assert engine.weight_version == -1
        engine.add(requests, sampling())
        with pytest.raises(StaleWeights):
            engine.step()
        engine.abort()
        shake(model, damage + 100)  # nothing of the damaged version may be left
        publish(engine, outlet, model, 7 + damage)
        assert largest_gap(model, requests, generate(engine, requests, sampling())) < 1e-4


def test_F04_a_cached_prefix_of_old_weights_is_never_found_not_even_while_old_sequences_run():
    engine, model = loaded(slots=6)
    prompt = make_requests(1, longest=1)[0].prompt_ids * 70  # two full blocks
    first, second, third = (Request(id=(draw, 0), prompt_ids=prompt) for draw in range(3))
    engine.add([first], sampling())
    for _ in range(4):
        engine.step()
    shake(model, 1)
    engine.load_weights(model.named_parameters(), 1, in_flight="resume")
    done = generate(engine, [second, third], sampling())
    assert [span.version for span in done[first.id].spans] == [0, 1]
    new = {id: done[id] for id in (second.id, third.id)}
    assert largest_gap(model, [second, third], new) < 1e-4


def test_equal_prompts_share_their_prefill():
    engine, model = loaded(slots=6)
    scheduler = engine._vllm.engine_core.engine_core.scheduler
    prompt = list(range(60)) + [1] * 11
    requests = [Request(id=(0, sample), prompt_ids=prompt) for sample in range(6)]
    engine.add(requests, sampling())
    engine.step()
    tables = [scheduler.kv_cache_manager.get_block_ids(request.request_id)[0] for request in scheduler.running]
    assert len({tuple(table[:2]) for table in tables}) == 1, "two whole blocks of the prompt are there once"
    assert len({table[2] for table in tables}) == 6
    assert largest_gap(model, requests, {completion.id: completion for completion in drain(engine)}) < 1e-4


def test_the_cache_holds_the_longest_sequences_of_all_slots_and_is_what_the_plan_counts():
    engine, model = loaded(slots=5, max_prompt_tokens=70, max_response_tokens=20)
    pool = engine._vllm.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    assert pool.num_gpu_blocks == 5 * 3 + 1
    held = sum(cache.nbytes for cache in engine._vllm.model_executor.driver_worker.model_runner.kv_caches)
    facts = ModelFacts(
        family="llama", layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=48, vocab=61, tied=False, parameters=1
    )
    assert held == planned.cache_bytes(facts, slots=5, longest=90, width=4)
    requests = [Request(id=(draw, 0), prompt_ids=[draw] * 70) for draw in range(9)]
    engine.add(requests, sampling(max_new_tokens=20))
    steps, done = 0, []
    while engine.unfinished:
        done += engine.step()
        steps += 1
    assert steps == 2 * 20, "nobody waits for room or is put off"
    assert largest_gap(model, requests, {completion.id: completion for completion in done}) < 1e-4


def test_F14_the_context_limit_cuts_with_finish_reason_length():
    model = make_model(**WIDE, max_position_embeddings=8)
    engine = engine_for(model, max_prompt_tokens=8, max_response_tokens=6)
    engine.load_weights(model.named_parameters(), 0)
    done = generate(engine, [Request(id=(length, 0), prompt_ids=[1] * length) for length in (2, 3, 4)], sampling(max_new_tokens=6))
    assert {id[0]: len(completion.token_ids) for id, completion in done.items()} == {2: 6, 3: 5, 4: 4}
    assert {completion.finish_reason for completion in done.values()} == {"length"}


def test_greedy_rows_beside_sampling_ones_report_temperature_one():
    engine, model = loaded()
    request, other = Request(id=(0, 0), prompt_ids=[5, 6, 7]), Request(id=(1, 0), prompt_ids=[5, 6, 7])
    engine.add([request], sampling(temperature=0.0))
    engine.add([other], sampling(temperature=0.5))
    done = {completion.id: completion for completion in drain(engine)}
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, *done[0, 0].token_ids]])).logits[0, 2:-1]
    assert done[0, 0].token_ids == logits.argmax(-1).tolist()
    assert largest_gap(model, [request], {(0, 0): done[0, 0]}) < 1e-4
    assert largest_gap(model, [other], {(1, 0): done[1, 0]}, 0.5) < 1e-4


def test_F10_sampled_frequencies_follow_the_distribution():
    engine, model = loaded(slots=256, max_prompt_tokens=9)
    requests = [Request(id=(draw, sample), prompt_ids=[5, 6]) for draw in range(500) for sample in range(8)]
    done = generate(engine, requests, sampling(max_new_tokens=1, temperature=1.3))
    with torch.no_grad():
        expected = 4000 * torch.softmax(model(torch.tensor([[5, 6]])).logits[0, -1] / 1.3, -1).double().numpy()
    counts = np.bincount([completion.token_ids[0] for completion in done.values()], minlength=VOCABULARY)
    often = expected >= 5
    chi_square = ((counts - expected) ** 2 / expected)[often].sum()
    degrees = int(often.sum()) - 1
    assert degrees > 20
    assert chi_square < degrees + 3.3 * (2 * degrees) ** 0.5  # p = 0.001


def test_what_it_cannot_do_is_refused():
    engine, model = loaded()
    warm = {"temperature": 2.5}  # vLLM itself would refuse it in the middle of a step
    unable = [
        ({"top_p": 0.9}, "no top_p below 1"),
        ({"top_k": 3}, "no top_k"),
        ({"temperature": 0.001}, "within 0.01"),
        (warm, "to 2.0, got"),
    ]
    for settings, message in unable:
        with pytest.raises(ValueError, match=message):
            engine.add(make_requests(1), sampling(**settings))
    assert engine.unfinished == 0
    limits = {"slots": 1, "max_prompt_tokens": 4, "max_response_tokens": 4}
    with pytest.raises(ValueError, match="set deterministic=false"):
        create_engine("vllm", model, **limits, deterministic=True)
    with pytest.raises(ValueError, match="this vLLM computes on cpu, the worker on cuda"):
        create_engine("vllm", model, **limits, device="cuda:0")
    with pytest.raises(ValueError, match=r"cannot compute with heads of size 8; set rollout.engine=builtin"):
        create_engine("vllm", make_model(), **limits)
    buffered = make_model(**WIDE)
    buffered.model.layers[0].mlp.register_buffer("score_bias", torch.zeros(4))
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.score_bias is no parameter, so it is never published"):
        create_engine("vllm", buffered, **limits)
    with pytest.raises(ConfigError, match=r"longrope.*found 17 together"):
        create_engine("vllm", make_model("phi3_longrope"), slots=1, max_prompt_tokens=9, max_response_tokens=8)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(planned.CPU_HEADS) == CPUAttentionBackend.get_supported_head_sizes()


def test_weights_that_are_not_finite_are_named_and_leave_nothing_behind():
    engine, sound = loaded()
    requests = make_requests(4)
    expected = generate(engine, requests, sampling())
    broken = make_model(**WIDE)
    with torch.no_grad():
        list(broken.parameters())[3].fill_(torch.nan)
    engine.load_weights(broken.named_parameters(), 1)
    engine.add(requests, sampling())
    with pytest.raises(FloatingPointError, match="weight version 1 gives logits that are not finite"):
        drain(engine)
    engine.abort()
    engine.load_weights(sound.named_parameters(), 2)
    done = generate(engine, requests, sampling())
    assert {id: completion.token_ids for id, completion in done.items()} == {id: before.token_ids for id, before in expected.items()}


def test_a_request_that_vllm_does_not_take_is_not_lost(monkeypatch):
    engine, _ = loaded()
    requests = make_requests(3)
    expected = generate(engine, requests, sampling())

    def refuses(*args):
        raise ValueError("not that one")

    engine.add(requests, sampling())
    with monkeypatch.context() as patch:
        patch.setattr(engine._vllm, "add_request", refuses)
        with pytest.raises(ValueError, match="not that one"):
            engine.step()
    assert engine.health().queued == 3
    done = {completion.id: completion for completion in drain(engine)}
    assert {id: one.token_ids for id, one in done.items()} == {id: one.token_ids for id, one in expected.items()}


def test_a_step_that_fails_leaves_an_engine_that_can_be_emptied_and_goes_on(monkeypatch):
    engine, _ = loaded()
    requests = make_requests(6)
    expected = generate(engine, requests, sampling())

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory left")

    for steps in (0, 3):
        engine.add(requests, sampling())
        for _ in range(steps):
            engine.step()
        runner = engine._vllm.model_executor.driver_worker.worker.model_runner
        with monkeypatch.context() as patch:
            patch.setattr(runner, "execute_model", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                engine.step()
        assert {completion.id for completion in engine.abort()} == {request.id for request in requests}
        assert engine.unfinished == 0
        done = generate(engine, requests, sampling())
        assert {id: one.token_ids for id, one in done.items()} == {id: one.token_ids for id, one in expected.items()}


def test_the_process_around_it_is_left_as_it_was(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    set_num_threads = torch.set_num_threads
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    engine_for(make_model(**WIDE))
    assert torch.equal(torch.rand(3), expected)
    assert torch.set_num_threads is set_num_threads
    assert (os.environ["LOCAL_WORLD_SIZE"], os.environ.get("LD_PRELOAD")) == ("7", None)


def test_bfloat16_stays_near_its_own_forward():
    model = make_model("qwen3_tied", **WIDE).bfloat16()
    engine = engine_for(model)
    engine.load_weights(make_model("qwen3_tied", **WIDE).named_parameters(), 0)  # float32 comes, bfloat16 is served
    requests = make_requests(6)
    done = generate(engine, requests, sampling())
    prompts = {request.id: request.prompt_ids for request in requests}
    gaps = torch.cat(
        [
            (forward_logprobs(model, prompts[id], completion.token_ids) - torch.tensor(completion.logprobs)).abs()
            for id, completion in done.items()
        ]
    )
    assert gaps.mean() < 0.05
    assert gaps.max() < 0.3
