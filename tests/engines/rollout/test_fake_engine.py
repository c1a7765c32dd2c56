"""Canned answers."""

from __future__ import annotations

import math

import pytest
from rollout_models import drain, generate, sampling

from rolemesh.engines.rollout.fake import FakeEngine
from rolemesh.protocols.engine import Request


def make(**settings):
    engine = FakeEngine(None, slots=2, max_prompt_tokens=9, max_response_tokens=12, **settings)
    engine.load_weights([], 0)
    return engine


def test_without_an_answer_every_token_is_equally_likely():
    done = generate(make(vocabulary=10), [Request(id=(draw, 0), prompt_ids=[1]) for draw in range(30)], sampling())
    tokens = [token for completion in done.values() for token in completion.token_ids]
    assert set(tokens) == set(range(10))
    assert {logprob for completion in done.values() for logprob in completion.logprobs} == {-math.log(10)}


def test_canned_answers_end_at_their_stop_token_or_limit():
    engine = make(answer=lambda request, settings: ([request.id[0], 9, 4, 9], [-1.0, -2.0, -3.0, -4.0]))
    done = generate(engine, [Request(id=(3, 0), prompt_ids=[1])], sampling(stop_token_ids=(9,)))[3, 0]
    assert (done.token_ids, done.logprobs, done.finish_reason) == ([3, 9], [-1.0, -2.0], "stop")
    done = generate(engine, [Request(id=(3, 0), prompt_ids=[1])], sampling(max_new_tokens=3))[3, 0]
    assert (done.token_ids, done.finish_reason) == ([3, 9, 4], "length")


def test_an_answer_without_an_end_is_refused():
    with pytest.raises(ValueError, match="canned answer"):
        make(answer=lambda request, settings: ([1, 2], [-1.0, -1.0])).add([Request(id=(0, 0), prompt_ids=[1])], sampling())


def test_slots_limit_how_many_run_at_once():
    engine = make(answer=lambda request, settings: ([1, 9], [-1.0, -1.0]))
    engine.add([Request(id=(draw, 0), prompt_ids=[1]) for draw in range(3)], sampling(stop_token_ids=(9,)))
    assert [len(engine.step()) for _ in range(4)] == [0, 2, 0, 1]
    assert drain(engine) == []
