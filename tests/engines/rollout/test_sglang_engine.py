"""What the engine on SGLang promises beyond the contract, with `sglang_stub.py` in SGLang's place: SGLang itself has not been run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import sglang_stub
import torch
from rollout_models import drain, generate, largest_gap, make_model, make_requests, sampling

from rolemesh.engines.rollout import check_engine, create_engine
from rolemesh.engines.rollout.borrowed import config_folder
from rolemesh.engines.rollout.sglang import refuse, settings
from rolemesh.errors import ConfigError, DeadlineExceeded
from rolemesh.protocols.engine import Request


def loaded(name="sglang_stub:SglangOnStub", slots=4, longest=12, **changes):
    model = make_model(**changes)
    engine = create_engine(
        name, make_model(seed=99, **changes), slots=slots, max_prompt_tokens=9, max_response_tokens=longest,
        deterministic=False, device="cpu",
    )  # fmt: skip
    engine.load_weights(model.named_parameters(), 0)
    return engine, model


def test_D15_logprobs_are_after_temperature_over_all_tokens_also_where_few_may_be_sampled():
    engine, model = loaded()
    requests = make_requests(3, samples=2)
    for change in ({"temperature": 0.5}, {"temperature": 1.4}, {"top_k": 3, "temperature": 0.7}, {"top_p": 0.3, "temperature": 0.7}):
        done = generate(engine, requests, sampling(**change))
        assert largest_gap(model, requests, done, change.get("temperature", 1.0)) < 1e-4
    with torch.no_grad():
        likely = model(torch.tensor([requests[0].prompt_ids])).logits[0, -1].topk(3).indices.tolist()
    again = [Request(id=(draw, 9), prompt_ids=requests[0].prompt_ids) for draw in range(9)]
    first = {completion.token_ids[0] for completion in generate(engine, again, sampling(top_k=3)).values()}
    assert first <= set(likely)
    assert len(first) > 1


def test_top_k_0_is_all_tokens_and_stop_tokens_are_no_end_tokens_of_the_models_own():
    engine, _ = loaded(eos_token_id=5)
    engine.add(make_requests(1), sampling(stop_token_ids=(3, 4)))
    engine.step()
    (row,) = sglang_stub.Engine.made[0].scheduler.running
    assert row.sampling | {"sampling_seed": 0} == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 12, "stop_token_ids": [3, 4], "sampling_seed": 0,
    }  # fmt: skip
    assert 0 <= row.sampling["sampling_seed"] < 2**63
    assert sglang_stub.Engine.made[0].scheduler.eos is None
    engine.abort()


def test_the_folder_that_it_reads_has_no_end_token():
    model = make_model(eos_token_id=5)
    with config_folder(model, eos_token_id=None) as folder:
        read = json.loads((Path(folder) / "config.json").read_text())
    assert (read["eos_token_id"], read["architectures"]) == (None, ["LlamaForCausalLM"])
    assert model.config.eos_token_id == 5
    assert not Path(folder).exists()


def test_an_aborted_request_takes_no_other_with_it():
    engine, _ = loaded(slots=14)
    requests = make_requests(14)
    engine.add(requests, sampling())
    engine.step()
    ended = engine.abort([requests[1].id])  # its key begins as those of the eleventh and later ones
    assert len(ended) == 1
    assert {completion.finish_reason for completion in drain(engine)} == {"length"}


def test_nothing_is_sampled_between_two_steps():
    engine, _ = loaded()
    engine.add(make_requests(4), sampling())
    scheduler = sglang_stub.Engine.made[0].scheduler
    assert not scheduler.waiting, "nothing begins before the first step"
    for _ in range(3):
        engine.step()
        before = engine.health().tokens
        for _ in range(20):
            engine._server._call(engine._server._label(engine._server._version), "answer")
        assert sum(len(row.tokens) for row in scheduler.running) == before
    engine.abort()
    engine.sleep(keep_weights=True)  # refused by a scheduler that is not idle
    engine.wake()


class Overlapping(sglang_stub.SglangOnStub):
    changes = {"disable_overlap_schedule": False}


@pytest.mark.parametrize(("kind", "late"), [("sglang_stub:SglangOnStub", 0), (f"{__name__}:Overlapping", 1)])
def test_with_overlapping_passes_a_token_of_the_old_weights_comes_after_a_load(kind, late):
    """Why they are switched off."""
    engine, model = loaded(kind)
    engine.add(make_requests(1), sampling())
    for _ in range(4):
        engine.step()
    scheduler = sglang_stub.Engine.made[0].scheduler
    assert len(scheduler.unprocessed) == late
    tokens = engine.health().tokens
    engine.load_weights(model.named_parameters(), 1, in_flight="resume")
    (done,) = drain(engine)
    assert done.spans == ((0, 0, tokens), (1, tokens, 12))


def test_an_open_session_of_a_load_that_broke_off_is_closed():
    engine, model = loaded()

    def broken():
        yield next(iter(model.named_parameters()))
        raise ConnectionError("the publisher is gone")

    for _ in range(2):
        with pytest.raises(ConnectionError):
            engine.load_weights(broken(), 1)
    engine.load_weights(model.named_parameters(), 2)
    assert engine.weight_version == 2


def test_weights_go_in_buckets(monkeypatch):
    monkeypatch.setattr("rolemesh.engines.rollout.sglang_server.BUCKET_BYTES", 10_000)
    engine, model = loaded()
    sent = sglang_stub.Engine.made[0].tokenizer_manager.calls
    assert len(sent) > 3
    assert [name for bucket in sent for name in bucket] == [name for name, _ in model.named_parameters()]
    requests = make_requests(2)
    assert largest_gap(model, requests, generate(engine, requests, sampling())) < 1e-4


def test_numbers_that_are_not_finite_are_told_not_handed_out():
    engine, model = loaded()
    broken = make_model()
    with torch.no_grad():
        list(broken.parameters())[3].fill_(torch.nan)
    engine.load_weights(broken.named_parameters(), 1)
    requests = make_requests(3)
    engine.add(requests, sampling())
    with pytest.raises(FloatingPointError, match="weight version 1 gives logits that are not finite"):
        drain(engine)
    engine.abort()
    engine.load_weights(model.named_parameters(), 2)
    assert largest_gap(model, requests, generate(engine, requests, sampling())) < 1e-4


def test_a_request_that_sglang_gives_up_is_an_error():
    engine, _ = loaded()
    engine.add(make_requests(2), sampling())
    engine.step()
    scheduler = sglang_stub.Engine.made[0].scheduler
    engine._server._call(engine._server._manager.ask(lambda: scheduler.abort(scheduler.running[0].rid)), "end one")
    with pytest.raises(RuntimeError, match=r"neither at its length nor at a stop token.*Aborted"):
        drain(engine)
    engine.abort()


def test_a_scheduler_that_does_not_answer_is_named(monkeypatch):
    engine, _ = loaded()
    engine.add(make_requests(1), sampling())
    monkeypatch.setattr("rolemesh.engines.rollout.sglang_server.SglangServer._call", _short(type(engine._server)._call))
    monkeypatch.setattr(sglang_stub.Scheduler, "one_pass", lambda self: None)
    with pytest.raises(DeadlineExceeded, match=r"the rollout engine waited 0.3 s for SGLang to sample a token"):
        engine.step()


def _short(call):
    return lambda self, coroutine, what, seconds=0.3: call(self, coroutine, what, seconds)


def test_what_would_not_run_or_give_other_logprobs_is_refused(monkeypatch):
    gpu = torch.device("cuda:0")
    refuse(gpu, torch.bfloat16)
    with pytest.raises(ValueError, match="on GPUs only, the worker on cpu"):
        refuse(torch.device("cpu"), torch.bfloat16)
    with pytest.raises(ValueError, match=r"half precision only, got torch\.float32"):
        refuse(gpu, torch.float32)
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")
    with pytest.raises(ValueError, match=r"SGLANG_RETURN_ORIGINAL_LOGPROB makes.*unset it"):
        refuse(gpu, torch.bfloat16)
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "0")
    refuse(gpu, torch.bfloat16)


def test_without_sglang_the_engine_is_known_and_cannot_be_made():
    check_engine("sglang", filtered=True)
    with pytest.raises(ConfigError, match=r"^deterministic.*sglang samples seeded"):
        check_engine("sglang", deterministic=True)
    with pytest.raises(ValueError, match="on GPUs only"):
        create_engine("sglang", make_model(), slots=1, max_prompt_tokens=2, max_response_tokens=2, deterministic=False, device="cpu")


def test_its_settings():
    found = settings("folder", torch.bfloat16, slots=3, longest=20, gpu=1)
    assert found["enable_deterministic_inference"], "or seeds of requests are passed over"
    assert found["disable_overlap_schedule"], "or a token is labelled with weights that did not sample it"
    assert (found["context_length"], found["max_total_tokens"], found["max_running_requests"]) == (28, 84, 3)
    assert (found["dtype"], found["base_gpu_id"], found["load_format"]) == ("bfloat16", 1, "dummy")


def test_the_process_around_it_is_left_as_it_was():
    variables = dict(os.environ)
    loaded()
    assert {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")} == variables


def test_once_an_answer_has_ended_the_labels_are_those_of_sglang():
    engine, _ = loaded()
    engine.add(make_requests(1), sampling())
    for _ in range(4):
        engine.step()
    (row,) = sglang_stub.Engine.made[0].scheduler.running
    row.events.append(("7", 2))  # as if news of them had come after a load
    (seen,) = engine.so_far([(0, 0)])
    assert seen.spans == ((0, 0, len(seen.token_ids)),)
    (done,) = drain(engine)
    assert done.spans == ((7, 0, 2), (0, 2, 12))
