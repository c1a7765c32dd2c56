"""Episodes on one event loop, with a scripted engine: whose tokens are whose, every way to end, and thousands side by side."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rolemesh.config.model_files import BUILTIN_MODELS
from rolemesh.config.schema import EnvironmentConfig
from rolemesh.environments import Episode, EpisodeLoop, ToolEnvironment, TurnEncoder, episodes, in_thread, threads
from rolemesh.environments.parsers import pythonic
from rolemesh.environments.tools import load_tools
from rolemesh.errors import DeadlineExceeded
from rolemesh.protocols.engine import Completion, Request, WeightSpan
from rolemesh.protocols.environment import Message, Start, Step, Turn

TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN_MODELS["tiny"], local_files_only=True)
ENCODER = TurnEncoder(TOKENIZER, chat=False)
END = TOKENIZER.eos_token_id
PROMPT = [1, 40, 41]
ODD = [*TOKENIZER.convert_tokens_to_ids(["t", "h"]), END]
"""Ids of a text that the tokenizer would write with another id."""


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


class Script:
    """Tells `told` after each turn but the last of `turns`, and earns 1, 2, ..."""

    def __init__(self, *, turns: int = 3, told: str = "ok", seconds: float = 0.0, opening: str = "") -> None:
        self.turns, self.told, self.seconds, self.opening = turns, told, seconds, opening
        self.seen: list[Turn] = []
        self.closed = False

    async def reset(self, start: Start) -> Sequence[Message]:
        self.start = start
        return [Message(content=self.opening)] if self.opening else []

    async def step(self, turn: Turn) -> Step:
        self.seen.append(turn)
        await asyncio.sleep(self.seconds)
        if turn.number == self.turns:
            return Step(done=True, reward=float(turn.number), counts={"ends": 1})
        return Step(messages=[Message(content=self.told)], reward=float(turn.number))

    async def close(self) -> None:
        self.closed = True


def start(draw: int) -> Start:
    return Start(draw=draw, sample=0, seed=7, source="s", prompt="p", answer=None, task={})


def answer(request: Request, tokens: Sequence[int] = tuple(ODD), *, reason: str = "stop", version: int = 0) -> Completion:
    logprobs = [-0.5 - request.start - place for place in range(len(tokens))]
    spans = (WeightSpan(version, 0, len(tokens)),)
    return Completion(id=request.id, token_ids=list(tokens), logprobs=logprobs, finish_reason=reason, spans=spans)


@contextmanager
def playing(make: Callable[[], Any], *, room: int = 64, context: int | None = None, **limits: Any):
    config = EnvironmentConfig(**({"max_turns": 8, "deadline": 20.0} | limits))
    loop = EpisodeLoop(make, ENCODER, config, max_response_tokens=room, context=context)
    try:
        yield loop
    finally:
        loop.close()


def drive(loop: EpisodeLoop, answering: Callable[[Request], Completion] = answer) -> tuple[list[Episode], list[Request]]:
    """Play to the end, as an engine would."""
    done: list[Episode] = []
    asked: list[Request] = []
    while loop.unfinished:
        requests, ended = loop.news(wait=1.0)
        asked += requests
        done += ended
        loop.give(map(answering, requests))
    return done, asked


def play(make: Callable[[], Any], answering: Callable[[Request], Completion] = answer, **settings: Any) -> tuple[Episode, list[Request]]:
    with playing(make, **settings) as loop:
        loop.begin([(start(5), PROMPT)])
        (episode,), asked = drive(loop, answering)
    return episode, asked


def test_C20_sampled_ids_are_kept_and_messages_lie_between_them():
    made: list[Script] = []

    def make() -> Script:
        made.append(Script())
        return made[-1]

    episode, asked = play(make)
    told = ids("\nok\n")
    assert ids(TOKENIZER.decode(ODD[:-1])) != ODD[:-1]  # made from text, they would be others
    assert episode.token_ids == [*ODD, *told, *ODD, *told, *ODD]
    assert episode.mask == [1] * 3 + [0] * len(told) + [1] * 3 + [0] * len(told) + [1] * 3
    second = len(ODD) + len(told)
    assert episode.logprobs[:3] == [-0.5, -1.5, -2.5]
    assert episode.logprobs[3:second] == [0.0] * len(told)
    assert episode.logprobs[second : second + 3] == [-0.5 - second, -1.5 - second, -2.5 - second]
    assert [(request.id, request.prompt_ids, request.start) for request in asked] == [
        ((5, 0), [*PROMPT, *episode.token_ids[:cut]], cut) for cut in (0, second, 2 * second)
    ]
    assert (episode.finish_reason, episode.reward, episode.error) == ("stop", 6.0, None)
    assert episode.counts["ends"] == 1
    assert [(turn["role"], turn["text"], turn["tokens"]) for turn in episode.turns] == [
        ("assistant", "th", 3), ("tool", "ok", len(told)), ("assistant", "th", 3), ("tool", "ok", len(told)), ("assistant", "th", 3),
    ]  # fmt: skip
    assert [(turn.number, turn.text, list(turn.token_ids)) for turn in made[0].seen] == [(number, "th", ODD) for number in (1, 2, 3)]
    assert made[0].closed
    assert made[0].start.seed == 7


def test_what_reset_says_comes_before_the_first_turn():
    episode, asked = play(lambda: Script(turns=1, opening="hi"))
    told = ids("\nhi\n")
    assert episode.token_ids == [*told, *ODD]
    assert episode.mask == [0] * len(told) + [1] * 3
    assert asked[0].start == len(told)


@pytest.mark.parametrize(
    ("settings", "turns"),
    [
        ({"max_turns": 2}, 2),
        ({"room": 3 + len(ids("\nok\n"))}, 1),  # room for the message, and for nothing behind it
        ({"room": 4 + len(ids("\nok\n"))}, 2),
        ({"context": len(PROMPT) + 3 + len(ids("\nok\n"))}, 1),
    ],
)
def test_limits_of_turns_and_tokens(settings, turns):
    episode, asked = play(Script, **settings)
    assert len(asked) == turns
    assert episode.finish_reason == "length"
    assert episode.token_ids[-3:] == ODD  # no message that nobody answers
    assert episode.reward == sum(range(1, turns + 1))


def test_a_turn_that_is_cut_ends_the_answer_and_is_not_stepped():
    episode, _ = play(Script, lambda request: answer(request, ODD[:2], reason="length"))
    assert (episode.finish_reason, episode.token_ids, episode.reward) == ("length", ODD[:2], None)


def test_long_messages_are_cut_and_counted():
    episode, _ = play(lambda: Script(turns=2, told="123456"), max_observation_tokens=4)
    assert episode.turns[1]["text"] == "1234"
    assert episode.counts["observations_cut"] == 1


def test_spans_of_weights_cover_messages():
    episode, _ = play(Script, lambda request: answer(request, version=int(request.start > 0)))
    length = len(episode.token_ids)
    assert episode.spans == [(0, 0, 3), (1, 3, length)]


WRONG: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "text": lambda: Step(messages=["ok"]),
    "one": lambda: Step(messages="ok"),
    "mapping": lambda: Step(messages=[{"role": "user", "content": "ok"}]),
    "no text": lambda: Step(messages=[Message(content=7)]),
    "role": lambda: Step(messages=[Message(content="I give up", role="assistant")]),
    "reward": lambda: Step(reward="1", done=True),
    "rewards": lambda: Step(reward=[1.0, 2.0], done=True),
    "complex": lambda: Step(reward=1j, done=True),
    "count": lambda: Step(counts={"x": "many"}, done=True),
    "taken": lambda: Step(counts={"turns/mean": 1}, done=True),
    "failed": lambda: Step(counts={"failed": 1}, done=True),
}


class Failing(Script):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    async def reset(self, start: Start) -> Sequence[Message]:
        if self.where == "reset":
            raise ConnectionResetError("the server left")
        return await super().reset(start)

    async def step(self, turn: Turn) -> Step:
        if self.where == "late":
            await asyncio.sleep(60)
        if self.where == "silent":
            return Step()
        if self.where == "exit":
            raise SystemExit("usage: me")
        if self.where == "step":
            raise KeyError("x")
        if self.where == "cancelled":
            raise asyncio.CancelledError("by a library")
        if self.where == "child":
            await asyncio.gather(self.leave())
        if self.where == "surrogate":
            raise ValueError("a\ud800")
        if self.where in WRONG:
            return WRONG[self.where]()
        return await super().step(turn)

    async def leave(self) -> None:
        raise SystemExit("usage: me")

    async def close(self) -> None:
        if self.where == "close":
            raise OSError("disk")


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("reset", "ConnectionResetError: the server left"),
        ("step", "KeyError: 'x'"),
        ("exit", "SystemExit: usage: me"),
        ("close", "OSError: disk"),
        ("silent", "ValueError: step 1 has neither messages nor done=True"),
        ("late", "TimeoutError: step took longer than environment.deadline (0.2 s)"),
        ("cancelled", "CancelledError: by a library"),
        ("child", "SystemExit: usage: me"),
        ("surrogate", "ValueError: a\\ud800"),
        ("none", "TypeError: step returned NoneType, expected a Step"),
        ("text", "TypeError: step returned messages with str, expected Message objects"),
        ("one", "TypeError: step returned messages with str, expected Message objects"),
        ("mapping", "TypeError: step returned messages with dict, expected Message objects"),
        ("no text", "TypeError: step returned a message with content of int, expected str"),
        ("role", "ValueError: step returned a message with the role 'assistant', expected 'tool' or 'user'"),
        ("reward", "TypeError: step returned the reward '1', expected a number or None"),
        ("rewards", "TypeError: step returned the reward [1.0, 2.0], expected a number or None"),
        ("complex", "TypeError: step returned the reward 1j, expected a number or None"),
        ("count", "TypeError: step returned the count x='many', expected a number"),
        ("taken", "ValueError: step returned the count 'turns/mean', which is a metric of rolemesh's own"),
        ("failed", "ValueError: step returned the count 'failed', which is a metric of rolemesh's own"),
    ],
)
def test_B16_what_an_environment_fails_with_is_told_and_earns_nothing(where, error):
    episode, _ = play(lambda: Failing(where), deadline=0.2)
    assert (episode.error, episode.reward, episode.finish_reason) == (error, None, "abort")


def test_rewards_of_any_kind_of_number_become_floats():
    for number in (np.float32(0.5), torch.tensor(0.5), Fraction(1, 2), np.array(0.5)):
        episode, _ = play(lambda number=number: Answering(Step(reward=number, done=True)))
        assert (type(episode.reward), episode.reward) == (float, 0.5)


class Answering(Script):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.answer = step

    async def step(self, turn: Turn) -> Step:
        return self.answer


def test_time_in_line_does_not_count_for_the_deadline_of_a_step(monkeypatch):
    """Twelve calls of 0.2 s through two threads: the last one has to wait for a second."""
    monkeypatch.setattr(threads, "THREADS", 2)

    class Blocking(Script):
        async def step(self, turn: Turn) -> Step:
            await in_thread(lambda: time.sleep(0.2))
            return Step(done=True, reward=1.0)

    with playing(Blocking, deadline=0.6) as loop:
        loop.begin([(start(draw), PROMPT) for draw in range(12)])
        done, _ = drive(loop)
    assert [episode.error for episode in done] == [None] * 12


def test_threads_that_never_come_back_are_named(monkeypatch):
    monkeypatch.setattr(threads, "THREADS", 1)
    monkeypatch.setattr(episodes, "GRACE", 0.3)
    end = threading.Event()

    class Hanging(Script):
        async def step(self, turn: Turn) -> Step:
            await in_thread(end.wait)
            return Step(done=True)

    with playing(Hanging, deadline=0.3) as loop:
        loop.begin([(start(draw), PROMPT) for draw in range(2)])
        loop.give(map(answer, take(loop, 2)))
        with pytest.raises(DeadlineExceeded, match=r"all 1 threads are held by functions that have not returned"):
            take(loop, 1)
        end.set()


def take(loop: EpisodeLoop, count: int) -> list[Request]:
    requests: list[Request] = []
    while len(requests) < count:
        requests += loop.news(wait=0.1)[0]
    return requests


def test_the_tool_that_is_late_is_named():
    tools = load_tools(["tool_functions:slow", "tool_functions:add"])
    two = [*ids("[add(1), slow(2)]"), END]
    make = lambda: ToolEnvironment(tools=tools, parser=pythonic)  # noqa: E731
    episode, _ = play(make, lambda request: answer(request, two), deadline=0.3, room=200)
    assert episode.error == "TimeoutError: step took longer than environment.deadline (0.3 s), in tool slow"


def test_one_that_fails_disturbs_no_other():
    count = iter(range(10))
    with playing(lambda: Failing("step") if next(count) == 3 else Script()) as loop:
        loop.begin([(start(draw), PROMPT) for draw in range(10)])
        done, _ = drive(loop)
    assert sorted(episode.start.draw for episode in done if episode.error) == [3]
    assert {episode.reward for episode in done if not episode.error} == {6.0}


def test_two_thousand_episodes_wait_side_by_side():
    """Each waits 3 * 0.2 s; one after the other they would take 20 minutes."""
    with playing(lambda: Script(seconds=0.2)) as loop:
        loop.begin([(start(draw), PROMPT) for draw in range(2000)])
        began = time.monotonic()
        done, asked = drive(loop)
        seconds = time.monotonic() - began
    assert len(asked) == 3 * 2000
    assert sorted(episode.start.draw for episode in done) == list(range(2000))
    assert {(episode.finish_reason, episode.reward, len(episode.token_ids)) for episode in done} == {("stop", 6.0, len(done[0].token_ids))}
    assert seconds < 60  # a loaded machine


def test_cancelled_episodes_are_closed_and_leave_nothing_behind():
    made: list[Script] = []

    def make() -> Script:
        made.append(Script(seconds=30.0))
        return made[-1]

    with playing(make) as loop:
        loop.begin([(start(draw), PROMPT) for draw in range(3)])
        requests, _ = loop.news(wait=1.0)
        loop.give([answer(requests[0])])
        loop.cancel()
        assert [script.closed for script in made] == [True] * 3
        assert loop.unfinished == 0
        assert loop.news() == ([], [])
        loop.give([answer(request) for request in requests])  # too late, for nobody
        loop.begin([(start(0), PROMPT)])
        assert [request.id for request in loop.news(wait=1.0)[0]] == [(0, 0)]


def test_an_environment_that_blocks_the_event_loop_is_named(monkeypatch):
    monkeypatch.setattr(episodes, "GRACE", 0.3)
    script = Script(turns=1)

    async def blocking(turn: Turn) -> Step:
        time.sleep(1.5)  # what it must not do
        return Step(done=True)

    script.step = blocking
    with playing(lambda: script, deadline=0.2) as loop:
        loop.begin([(start(0), PROMPT)])
        requests, _ = loop.news(wait=1.0)
        loop.give(map(answer, requests))
        with pytest.raises(DeadlineExceeded, match=r"rollout waited .*environment tools for the next turn \(does it block the event loop"):
            loop.news(wait=1.0)
        time.sleep(1.5)
