"""One rollout worker in this process: what it refuses to serve, and what it does when its engine fails."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rollout_manager import END, SETTINGS, Letters, answer, config, context

from rolemesh.batch import Batch
from rolemesh.config.schema import Config, ModelConfig
from rolemesh.engines.rollout.fake import FakeEngine
from rolemesh.errors import StaleWeights
from rolemesh.models import load_model
from rolemesh.protocols.engine import Completion, Request, Sampling
from rolemesh.protocols.requests import FIRST_DRAW, Ask
from rolemesh.roles.actor import ActorWorker
from rolemesh.roles.rollout import RolloutWorker
from rolemesh.weights import Outlet

ROWS = {"draw": [1, 2], "sample": [0, 0], "prompt_ids": [[1], [2]]}
LIMITS: dict[str, Any] = {"slots": 4, "max_prompt_tokens": 8, "max_response_tokens": 12}


class Worker(RolloutWorker):
    def load(self) -> None:
        self.engine = FakeEngine(load_model(ModelConfig(), seed=1), answer=answer, **LIMITS)
        self.tokenizer, self.stop = Letters(), (END,)  # type: ignore[assignment]


def loaded(settings: Config | None = None) -> Worker:
    worker = Worker(context(), config=settings or config())
    worker.load()
    return worker


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in load_model(ModelConfig(), seed=0).named_parameters()}


@pytest.fixture
def outlet() -> Iterator[Outlet]:
    path = f"/dev/shm/rolemesh-test-{secrets.token_hex(6)}"
    made = Outlet(bucket_bytes=2**20, path=path, leads=True)
    yield made
    made.close()
    assert not Path(path).exists()


def publish(outlet: Outlet, worker: Worker, version: int, weights: dict[str, torch.Tensor]) -> int | None:
    manifest = outlet.begin(version, weights.items(), iter(weights.items()), shared=True)
    outlet.fill(version)
    return worker.load_weights(version, manifest=manifest)


def answers(worker: Worker, version: int) -> int:
    return len(worker.generate(Batch.from_columns(ROWS), **{**SETTINGS, "version": version}))


def test_F01_a_refused_publication_does_not_make_overwritten_weights_good_again(outlet: Outlet, weights: dict[str, torch.Tensor]) -> None:
    worker = loaded()
    assert publish(outlet, worker, 3, weights) == 3
    assert answers(worker, 3) == 2
    worker.sleep(keep_weights=True)
    with pytest.raises(ValueError, match="wake it before loading version 4"):
        publish(outlet, worker, 4, weights)  # the engine stays as it is, over memory in which there is version 4 now
    assert worker.wake() == 3
    assert worker.overwritten
    with pytest.raises(StaleWeights, match="holds weight version -1, asked for 3"):
        answers(worker, 3)
    assert publish(outlet, worker, 5, weights) == 5
    assert answers(worker, 5) == 2


def test_a_version_that_is_used_again_with_other_contents_is_not_served_until_it_is_taken_anew(
    outlet: Outlet, weights: dict[str, torch.Tensor]
) -> None:
    worker = loaded()
    assert publish(outlet, worker, 3, weights) == 3
    other = {name: weight + 1 for name, weight in weights.items()}
    manifest = outlet.begin(3, other.items(), iter(other.items()), shared=True)
    outlet.fill(3)
    assert worker.overwritten
    with pytest.raises(StaleWeights, match="holds weight version -1, asked for 3"):
        answers(worker, 3)
    assert worker.load_weights(3, manifest=manifest) == 3
    assert answers(worker, 3) == 2


def test_an_actor_says_of_each_publication_whether_its_contents_are_those_of_one_before() -> None:
    actor = ActorWorker(replace(context(), group="actor"), config=config())
    actor.load()

    def nonce(version: int, dtype: str = "float32") -> int:
        return actor.publish(version, content="merged", dtype=dtype, shared=False).nonce

    first = nonce(1)
    assert nonce(1) == first, "for those that come later"
    assert len({first, nonce(1, "bfloat16"), nonce(2)}) == 3
    assert nonce(1) == first
    rows = {"draw": [1], "sample": [0], "prompt_ids": [[1]], "response_ids": [[2, 3]], "token_weight": [1.0]}
    actor.sft_update(Batch.from_columns(rows))
    assert nonce(1) != first


def test_weights_that_came_by_another_route_do_not_depend_on_shared_memory(outlet: Outlet, weights: dict[str, torch.Tensor]) -> None:
    worker, stream = loaded(), Outlet(bucket_bytes=2**20, path="", leads=True)
    publish(outlet, worker, 3, weights)
    manifest = stream.begin(4, weights.items(), iter(weights.items()), shared=False)
    for number in range(len(manifest.buckets)):
        assert not worker.overwritten
        held = worker.load_weights(4, number, None if number else manifest, stream.pack(4, number))
        if number < len(manifest.buckets) - 1:
            with pytest.raises(StaleWeights, match="holds weight version -1"):
                answers(worker, 3)
    assert held == 4
    outlet.begin(9, weights.items(), iter(()), shared=True)  # wipes what version 3 was read from
    assert not worker.overwritten
    assert answers(worker, 4) == 2


def test_F14_the_share_of_answers_that_were_cut_is_the_engines_finish_reason() -> None:
    worker = loaded()
    worker.engine = FakeEngine(None, answer=lambda request, sampling: ([0] * 12, [-1.0] * 12), **LIMITS)
    worker.engine.load_weights([], 3)
    assert answers(worker, 3) == 2
    assert worker.metrics.reduce()["response_length/cut_share"] == 1.0
    worker = loaded()
    worker.engine.load_weights(load_model(ModelConfig(), seed=0).named_parameters(), 3)
    assert answers(worker, 3) == 2  # both end with the end token
    assert worker.metrics.reduce()["response_length/cut_share"] == 0.0


class Forgetful(FakeEngine):
    """Loses the second request."""

    def _advance(self, *, admit: bool) -> list[Completion]:
        self._held.pop((2, 0), None)
        return super()._advance(admit=admit)


def test_an_engine_that_loses_a_request_is_told_and_not_waited_for() -> None:
    worker = loaded()
    worker.engine = Forgetful(None, answer=answer, **LIMITS)
    worker.engine.load_weights([], 3)
    with pytest.raises(RuntimeError, match=r"'fake' has nothing left to do and never answered 1 rows, the first \(2, 0\)"):
        answers(worker, 3)
    assert worker.health().running + worker.health().queued == 0


class Failing(FakeEngine):
    fails = False

    def _advance(self, *, admit: bool) -> list[Completion]:
        if self.fails:
            raise FloatingPointError("logits that are not finite")
        return super()._advance(admit=admit)


def test_a_drain_that_fails_leaves_an_engine_that_takes_the_next_weights() -> None:
    made = config()
    rollout = type(made.rollout).model_validate(made.rollout.model_dump() | {"serve": {"in_flight": "wait"}})
    worker = loaded(made.model_copy(update={"rollout": rollout}))

    def long(request: Request, sampling: Sampling) -> tuple[list[int], list[float]]:
        return [0] * 12, [-1.0] * 12

    worker.engine = engine = Failing(None, answer=long, **LIMITS)
    worker.take_weights(iter(()), 3)
    request = Request(id=(FIRST_DRAW, 0), prompt_ids=[1])
    worker.talk(("me", [Ask((request,), Sampling(temperature=0.0, max_new_tokens=12, stop_token_ids=(), seed=0))], set()))
    worker.go_on(0.0)
    worker._step()
    assert worker.health().running == 1
    engine.fails = True
    with pytest.raises(FloatingPointError):
        worker.take_weights(iter(()), 4)
    health = worker.health()
    assert (health.state, health.weight_version, health.running, health.queued) == ("serving", 3, 0, 0)
    assert worker.take_weights(iter(()), 5) == 5


@pytest.mark.parametrize("row", [False, True])
def test_an_engine_that_raises_without_requests_from_outside_too_fails_its_call(row: bool) -> None:
    worker = loaded()
    worker.engine = engine = Failing(None, answer=lambda request, sampling: ([0] * 12, [-1.0] * 12), **LIMITS)
    worker.take_weights(iter(()), 3)
    if row:
        worker.take_on(Batch.from_columns(ROWS), round="one", **SETTINGS)
    sampling = Sampling(temperature=0.0, max_new_tokens=12, stop_token_ids=(), seed=0)
    worker.talk(("me", [Ask((Request(id=(FIRST_DRAW, 0), prompt_ids=[1]),), sampling)], set()))
    worker._step()
    engine.fails = True
    if row:
        with pytest.raises(FloatingPointError):
            worker._step()
        return
    worker.go_on(1.0)
    assert worker.health().running == 0
    (*_, last) = worker.talk(("me", [], set()))
    assert (last.id, last.raised) == ((FIRST_DRAW, 0), ("FloatingPointError", "logits that are not finite"))
