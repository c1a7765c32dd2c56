"""Single requests beside rounds: who gets them, what becomes of them over deaths, changes of weights and deadlines. On virtual time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

import numpy as np
import pytest
from test_rollout_manager import END, SETTINGS, Rollout, Told, check, config, prompts, read

from rolemesh.config.schema import Config
from rolemesh.engines.rollout.fake import FakeEngine
from rolemesh.errors import DeadlineExceeded, Overloaded, RequestFailed, RequestRefused, Unavailable, WorkerDied
from rolemesh.protocols.engine import Completion, Request, Sampling
from rolemesh.protocols.requests import FIRST_DRAW, Answer, Ask
from rolemesh.roles.desk import Desk
from rolemesh.roles.rollout_manager import REPLACEMENTS, RolloutManager
from rolemesh.runtime import Deadlines, Pool, SimulatedBackend, register

POISON = 63
GREEDY = Sampling(temperature=0.0, max_new_tokens=12, stop_token_ids=(END,), seed=1)


def canned(request: Request, sampling: Sampling) -> tuple[list[int], list[float]]:
    """As many tokens as the prompt's last one says, then the end; the first token is the number of the answer."""
    tokens = [request.counter[1] if request.counter else 0, *[request.prompt_ids[0] % 8] * request.prompt_ids[-1]]
    return [*tokens, END], [-0.5] * (len(tokens) + 1)


class Breakable(FakeEngine):
    """Raises when it has run a request from outside for three tokens, if the prompt begins with `POISON` or the engine is `broken`."""

    broken = False

    def _advance(self, *, admit: bool) -> list[Completion]:
        for one in self._held.values():
            if one.request.id[0] >= FIRST_DRAW and one.shown == 3 and (self.broken or one.request.prompt_ids[0] == POISON):
                raise KeyError("no such block")
        return super()._advance(admit=admit)


class Serving(Rollout):
    """One token a call of `go_on`, so that what happens in between can be seen."""

    seen: ClassVar[list[tuple[int, tuple[int, ...]]]] = []
    breaking: ClassVar[set[int]] = set()
    """Ranks whose engines are broken."""

    def load(self) -> None:
        super().load()
        self.engine = Breakable(None, slots=4, answer=answer, max_prompt_tokens=40, max_response_tokens=12)
        self.engine.broken = self.context.rank in self.breaking

    @register(dispatch="all", mutates=True)
    def load_weights(self, version: int) -> int:  # type: ignore[override]
        return self.take_weights(iter(()), version)

    def talk(self, message: Any) -> Any:
        self.seen.extend((self.context.rank, tuple(one.prompt_ids)) for ask in message[1] for one in ask.requests)
        return super().talk(message)

    def go_on(self, seconds: float) -> bool:
        if self._desk.busy and self.engine.weight_version >= 0:
            self._step()
        return super().go_on(0.0)


def answer(request: Request, sampling: Sampling) -> tuple[list[int], list[float]]:
    from test_rollout_manager import answer as of_a_round

    return canned(request, sampling) if request.id[0] >= FIRST_DRAW else of_a_round(request, sampling)


@pytest.fixture(autouse=True)
def forgetful() -> None:
    Serving.seen, Serving.breaking, Rollout.taken, Rollout.most, Rollout.broken = [], set(), defaultdict(list), 0, None


def serving(**serve: Any) -> Config:
    made = config()
    return made.model_copy(update={"rollout": type(made.rollout).model_validate(made.rollout.model_dump() | {"serve": serve})})


async def started(backend: SimulatedBackend, replicas: int, told: Told, settings: Config | None = None) -> RolloutManager:
    pool = await Pool.of_slots(backend, "pool", [replicas])
    await pool.create(deadline=60)
    manager = RolloutManager(
        "rollout", Serving, pool, range(replicas), worker_kwargs={"config": settings or serving()}, observer=told.records.append,
        tell=told.texts.append, deadlines=Deadlines(call=1000.0),
    )  # fmt: skip
    await manager.create(deadline=60)
    await manager.init()
    return manager


async def ask(manager: RolloutManager, prompt: Sequence[int], count: int = 1, deadline: float = 100.0) -> list[Answer]:
    async with aclosing(manager.answer(prompt, GREEDY, count=count, deadline=deadline)) as growing:
        async for answers in growing:
            last = answers
    return list(last)


def run(main: Callable[[SimulatedBackend, Told], Any], **durations: float) -> Told:
    backend, told = SimulatedBackend(durations={"go_on": 0.05, **durations}), Told()

    async def whole() -> None:
        try:
            await main(backend, told)
        finally:
            await backend.close()

    backend.run(whole())
    return told


def test_a_request_is_answered_with_ids_logprobs_and_the_version_of_each_token() -> None:
    async def main(backend: SimulatedBackend, told: Told) -> None:
        manager = await started(backend, 2, told)
        asking = asyncio.ensure_future(ask(manager, [3, 4], count=2))
        await backend.sleep(5)
        assert not asking.done()  # nobody has weights yet
        await manager.load_weights(7)
        answers = await asking
        assert [one.token_ids for one in answers] == [[0, 3, 3, 3, 3, END], [1, 3, 3, 3, 3, END]]
        assert [one.logprobs for one in answers] == [[-0.5] * 6] * 2
        assert [(one.spans, one.finish_reason) for one in answers] == [(((7, 0, 6),), "stop")] * 2
        assert manager.requests.counts == {"serve/requests/0": 2, "serve/tokens/0": 12}
        assert manager.requests.metrics().reduce() == {"serve/requests/0": 2, "serve/tokens/0": 12}
        assert not any(manager.requests.metrics().reduce().values())  # told once
        await backend.sleep(5)
        assert manager.requests.under_way == 0

    told = run(main)
    assert told.of("go_on")


def test_the_least_loaded_replica_is_asked_but_the_same_beginning_goes_where_it_was() -> None:
    async def main(backend: SimulatedBackend, told: Told) -> None:
        manager = await started(backend, 2, told)
        await manager.load_weights(1)
        head = list(range(1, 9))
        await ask(manager, [*head, 5, 2])  # on 0, where there is nothing to do
        long = [asyncio.ensure_future(ask(manager, [number, 11])) for number in (20, 21, 22, 23)]
        await backend.sleep(0.01)
        assert dict(map(reversed, Serving.seen[1:])) == {(20, 11): 0, (21, 11): 1, (22, 11): 0, (23, 11): 1}
        third = asyncio.ensure_future(ask(manager, [30, 11]))
        await backend.sleep(0.01)
        assert Serving.seen[-1][0] == 0
        fourth = asyncio.ensure_future(ask(manager, [*head, 7, 7, 2]))  # 0 has more to do, but had this beginning
        await backend.sleep(0.01)
        assert Serving.seen[-1] == (0, (*head, 7, 7, 2))
        many = [asyncio.ensure_future(ask(manager, [*head, number, 11])) for number in range(6)]
        await backend.sleep(0.01)
        assert {rank for rank, prompt in Serving.seen[-6:]} == {0, 1}  # not when it is much busier
        await asyncio.gather(*long, third, fourth, *many)

    run(main)


def test_C22_F13_a_round_is_the_same_with_requests_beside_it() -> None:
    async def main(backend: SimulatedBackend, told: Told) -> None:
        for replicas in (1, 2):
            manager = await started(backend, replicas, told)
            await manager.load_weights(3)
            sent = prompts(backend)
            asking = [asyncio.ensure_future(ask(manager, [number % 7, number % 5], count=3)) for number in range(40)]
            round_ = asyncio.ensure_future(manager.generate(sent, **SETTINGS))
            found = await read(backend, await round_)
            assert manager.requests.counts.total() > 0
            check(found, sent)
            for number, answers in enumerate(await asyncio.gather(*asking)):
                assert [one.token_ids[:-1] for one in answers] == [[n, *[number % 7] * (number % 5)] for n in range(3)]
            await manager.pool.close()

    run(main, take_on=0.1, hand_in=1.0)


@pytest.mark.parametrize("when", ["alone", "in a round"])
def test_requests_of_a_replica_that_dies_go_to_another(when: str) -> None:
    async def main(backend: SimulatedBackend, told: Told) -> None:
        manager = await started(backend, 2, told)
        await manager.load_weights(1)
        asking = [asyncio.ensure_future(ask(manager, [number, 8], count=2)) for number in range(4)]
        sent = prompts(backend)
        round_ = asyncio.ensure_future(manager.generate(sent, **SETTINGS | {"version": 1})) if when == "in a round" else None
        await backend.sleep(0.2)
        await backend.kill(manager.processes[1])
        answers = await asyncio.gather(*asking)
        assert [[one.token_ids for one in two] for two in answers] == [[[n, *[number] * 8, END] for n in range(2)] for number in range(4)]
        assert manager.requests.counts["serve/moved"] == 4
        if round_ is not None:
            check(await read(backend, await round_), sent, version=1)
        assert manager.replicas[1].out is not None
        # It serves again only with what the others have.
        await manager.load_weights(2)
        assert manager.replicas[1].out is None
        assert {(await ask(manager, [number, 1]))[0].spans for number in range(4)} == {((2, 0, 3),)}

    told = run(main, hand_in=1.0)
    assert any("serves no more" in text for text in told.texts)


def test_a_round_goes_on_without_a_replica_that_a_single_request_has_found_late() -> None:
    async def main(backend: SimulatedBackend, told: Told) -> None:
        manager = await started(backend, 2, told)
        await manager.load_weights(3)
        sent = prompts(backend)
        round_ = asyncio.ensure_future(manager.generate(sent, **SETTINGS))
        await backend.sleep(0.5)
        manager._put_out(manager.replicas[1], DeadlineExceeded(waiter="the controller", subject="rank 1 to talk", seconds=10.0))
        check(await read(backend, await round_), sent)

    run(main, hand_in=1.0)


def test_when_no_replica_is_left_requests_wait_for_one_or_their_deadline() -> None:
    async def main(backend: SimulatedBackend, told: Told) -> None:
        manager = await started(backend, 2, told)
        await manager.load_weights(1)
        short, long = (asyncio.ensure_future(ask(manager, [1, 8], deadline=deadline)) for deadline in (3.0, 50.0))
        await backend.sleep(0.1)
        for process in manager.processes:
            await backend.kill(process)
        with pytest.raises(DeadlineExceeded, match="no replica serves"):
            await short
        await manager.bring_back()
        assert (await long)[0].token_ids[-1] == END

    run(main)


def test_whoever_only_serves_hears_when_no_replica_can_come_back() -> None:
    async def main(backend: SimulatedBackend, told: Told) -> None:
        manager = await started(backend, 2, told)
        await manager.load_weights(1)
        for _ in range(REPLACEMENTS):
            for process in manager.processes:
                await backend.kill(process)
            waiting = asyncio.ensure_future(ask(manager, [1, 1]))
            await backend.sleep(1)
            await manager.bring_back()
            assert (await waiting)[0].token_ids[-1] == END
        await backend.kill(manager.processes[0])
        assert len(await ask(manager, [1, 1])) == 1
        await manager.bring_back()  # one is left
        await backend.kill(manager.processes[1])
        last = asyncio.ensure_future(ask(manager, [1, 1]))
        await backend.sleep(1)
        with pytest.raises(WorkerDied):
            await manager.bring_back()
        last.cancel()

    run(main)


def test_a_request_that_fails_everywhere_fails_and_one_that_cannot_be_served_is_refused() -> None:
    async def main(backend: SimulatedBackend, told: Told) -> None:
        manager = await started(backend, 4, told)
        await manager.load_weights(1)
        with pytest.raises(RequestRefused, match=r"^token ids must be within \[0, 64\)"):
            await ask(manager, [64, 1])
        doomed = asyncio.ensure_future(ask(manager, [1, 8]))
        for _ in range(3):
            await backend.sleep(0.1)
            (at,) = {request.replica for request in manager.requests._open.values()}
            await backend.kill(manager.processes[at or 0])
        with pytest.raises(WorkerDied):
            await doomed
        assert len(await ask(manager, [1, 1])) == 1  # the fourth is there for others

    run(main)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("when", ["alone", "in a round"])
def test_a_request_that_engines_raise_with_fails_alone_on_the_second_and_costs_no_replica(replicas: int, when: str) -> None:
    async def main(backend: SimulatedBackend, told: Told) -> None:
        manager = await started(backend, replicas, told)
        await manager.load_weights(3)
        sent = prompts(backend)
        round_ = asyncio.ensure_future(manager.generate(sent, **SETTINGS)) if when == "in a round" else None
        others = [asyncio.ensure_future(ask(manager, [number, 8], count=2)) for number in range(6)]
        poison = [asyncio.ensure_future(ask(manager, [POISON, 8])) for _ in range(2)]
        more = [asyncio.ensure_future(ask(manager, [number, 8], count=2)) for number in range(6)]
        for one in poison:
            with pytest.raises(RequestFailed, match=r"replica \d, and then replica \d with this request alone raised KeyError: 'no such"):
                await one
        for number, answers in enumerate(await asyncio.gather(*others, *more)):
            assert [one.token_ids for one in answers] == [[n, *[number % 6] * 8, END] for n in range(2)]
        if round_ is not None:
            check(await read(backend, await round_), sent)
        assert [(one.out, one.replaced) for one in manager.replicas] == [(None, 0)] * replicas
        tries = [rank for rank, prompt in Serving.seen if prompt[0] == POISON]
        assert len(tries) == 4, "two for each"
        assert not [text for text in told.texts if "serves no more" in text]
        assert manager.requests.under_way == 0

    run(main, take_on=0.1, hand_in=1.0)


def test_an_engine_that_raises_with_requests_that_others_can_answer_is_to_blame() -> None:
    Serving.breaking = {0}

    async def main(backend: SimulatedBackend, told: Told) -> None:
        manager = await started(backend, 2, told)
        await manager.load_weights(1)
        asking = [asyncio.ensure_future(ask(manager, [number, 8])) for number in range(4)]
        for number, (one,) in enumerate(await asyncio.gather(*asking)):
            assert one.token_ids == [0, *[number] * 8, END]
        assert [one.out is None for one in manager.replicas] == [False, True]
        assert {rank for rank, _ in Serving.seen} == {0, 1}

    told = run(main)
    (text,) = [text for text in told.texts if "serves no more" in text]
    assert "rank 0 serves no more, 1 of 2 do: its engine has raised, and others have answered all requests that it had then" in text


def test_a_request_that_is_to_be_alone_waits_and_those_behind_it_wait() -> None:
    engine = FakeEngine(None, slots=4, answer=canned, max_prompt_tokens=8, max_response_tokens=12)
    engine.load_weights([], 0)
    desk, held = Desk(), []
    desk.exchange("me", [Ask((Request(id=(FIRST_DRAW + n, 0), prompt_ids=(3, 1)),), GREEDY, alone=n in (2, 3)) for n in range(6)], [])
    desk.exchange("me", [], [(FIRST_DRAW + 3, 0)])
    while desk.busy:
        desk.admit(engine)
        held.append(sorted(id[0] - FIRST_DRAW for id in engine._held))
        desk.take(engine.step())
    assert [one for place, one in enumerate(held) if one != held[place - 1]] == [[0, 1], [2], [4, 5]]
    assert [news.finish_reason for news in desk.exchange("me", [], [])] == ["stop"] * 5


def test_back_pressure_deadlines_and_clients_that_go_away() -> None:
    async def main(backend: SimulatedBackend, told: Told) -> None:
        manager = await started(backend, 1, told, serving(requests=5))
        await manager.load_weights(1)
        asking = [asyncio.ensure_future(ask(manager, [number, 9])) for number in range(4)]
        await backend.sleep(0.1)
        with pytest.raises(Overloaded, match="4 answers are under way and 2 more are asked for; at most 5") as error:
            await ask(manager, [1, 1], count=2)
        assert error.value.retry_after >= 1
        fifth = asyncio.ensure_future(ask(manager, [9, 9], deadline=0.2))
        await backend.sleep(0.05)
        asking[0].cancel()
        with pytest.raises(DeadlineExceeded):
            await fifth
        await backend.sleep(0.1)
        assert manager.requests.under_way == 3
        (health,) = await manager.health()
        assert health.running + health.queued == 3  # the engine does not work for those that have gone
        await asyncio.gather(*asking[1:])
        assert {name: manager.requests.counts[f"serve/{name}"] for name in ("refused", "given_up")} == {"refused": 2, "given_up": 2}

    run(main)


@pytest.mark.parametrize("policy", ["resume", "wait", "abort"])
def test_what_is_under_way_when_weights_change_does_as_declared(policy: str) -> None:
    async def main(backend: SimulatedBackend, told: Told) -> None:
        manager = await started(backend, 1, told, serving(in_flight=policy))
        await manager.load_weights(1)
        running = [asyncio.ensure_future(ask(manager, [number, 9])) for number in range(4)]
        await backend.sleep(0.33)
        waiting = asyncio.ensure_future(ask(manager, [5, 1]))  # all four slots are taken
        await backend.sleep(0.05)
        await manager.load_weights(2)
        for number, (one,) in enumerate(await asyncio.gather(*running)):
            expected = [0, *[number] * 9, END]
            if policy == "resume":
                (first, _, change), second = one.spans
                assert (first, second) == (1, (2, change, 11))
                assert 0 < change < 11
                assert one.token_ids == expected
            elif policy == "wait":
                assert (one.spans, one.token_ids) == (((1, 0, 11),), expected)
            else:
                assert one.finish_reason == "abort"
                assert one.spans == ((1, 0, len(one.token_ids)),)
                assert one.token_ids == expected[: len(one.token_ids)]
        assert (await waiting)[0].spans == ((2, 0, 3),)

    run(main)


def test_training_waits_no_longer_than_it_is_patient() -> None:
    settings = serving(in_flight="wait", patience=1e-9)

    async def main(backend: SimulatedBackend, told: Told) -> None:
        manager = await started(backend, 1, told, settings)
        await manager.load_weights(1)
        running = asyncio.ensure_future(ask(manager, [3, 9]))
        await backend.sleep(0.2)
        await manager.load_weights(2)
        (one,) = await running
        assert (one.finish_reason, one.spans) == ("abort", ((1, 0, len(one.token_ids)),))

    run(main)


def test_nobody_is_answered_after_the_end() -> None:
    async def main(backend: SimulatedBackend, told: Told) -> None:
        manager = await started(backend, 1, told)
        running = asyncio.ensure_future(ask(manager, [3, 9]))
        await backend.sleep(0.1)
        manager.requests.close("the run has ended")
        for late in (running, ask(manager, [3, 9])):
            with pytest.raises(Unavailable, match="the run has ended"):
                await late
        await manager.requests.stop()

    run(main)


def test_what_another_controller_has_asked_for_ends() -> None:
    engine = FakeEngine(None, slots=4, answer=canned, max_prompt_tokens=8, max_response_tokens=12)
    engine.load_weights([], 0)
    desk = Desk()

    def asked(draw: int) -> list[Ask]:
        return [Ask((Request(id=(FIRST_DRAW + draw, 0), prompt_ids=(3, 9)),), GREEDY)]

    desk.exchange("one", asked(0), [])
    desk.admit(engine)
    engine.step()
    assert desk.exchange("two", asked(1), []) == []
    desk.admit(engine)
    assert engine.unfinished == 1
    desk.take(engine.step())
    desk.show(engine, now=True)
    (news,) = desk.exchange("two", [], [])
    assert (news.id, news.token_ids) == ((FIRST_DRAW + 1, 0), [0])


def test_equal_seeds_give_equal_random_numbers_whatever_the_id() -> None:
    engine = FakeEngine(None, slots=4, max_prompt_tokens=8, max_response_tokens=12)
    engine.load_weights([], 0)
    sampling = Sampling(temperature=1.0, max_new_tokens=12, stop_token_ids=(), seed=5)
    engine.add([Request(id=(FIRST_DRAW + draw, 0), prompt_ids=(1,), counter=(FIRST_DRAW, draw // 2)) for draw in range(4)], sampling)
    done = []
    while engine.unfinished:
        done += engine.step()
    first, second, third, fourth = (np.array(completion.token_ids) for completion in done)
    assert np.array_equal(first, second)
    assert np.array_equal(third, fourth)
    assert not np.array_equal(first, third)
