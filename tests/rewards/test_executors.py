"""What every executor must do: the same tests for the pool and for `InProcess`."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from rolemesh.config.schema import RewardConfig
from rolemesh.rewards import InProcess, ScoringPool
from rolemesh.rewards.work import Work

OPTIONS = {"extra": {"a": [1, 2.5, None], 3: "three"}}
NAMES = (
    *("reward_functions:by_response", "reward_functions:mixed_extras", "reward_functions:as_mapping", "reward_functions:slowly"),
    *("hostile_functions:act", "hostile_functions:awaitable", "hostile_functions:echo", "exact"),
)


@pytest.fixture(scope="module", params=["pool", "in process"])
def executor(request):
    configs = [RewardConfig(name=name, options=OPTIONS if "echo" in name else {}) for name in NAMES]
    made = ScoringPool(configs, processes=2) if request.param == "pool" else InProcess(configs)
    yield made
    made.close()


@pytest.fixture
def run(executor, sample):
    def of(function, *responses, **fields):
        part = next(part for part, name in enumerate(NAMES) if name.endswith(function))
        return executor.run([Work(part=part, sample=sample(text, number=row, **fields)) for row, text in enumerate(responses)])

    return of


def test_answers_keep_the_order_of_the_works(run):
    texts = [str(number) for number in range(300)]
    assert [answer.value for answer in run("by_response", *texts)] == [float(text) for text in texts]


def test_no_works(run):
    assert run("by_response") == []


def test_numbers_that_are_none(run):
    abstained, nan, infinite = run("by_response", "none", "nan", "-inf")
    assert (abstained.value, abstained.fault) == (None, None)
    assert math.isnan(nan.value)
    assert infinite.value == -math.inf


def test_extras_are_plain(run):
    answers = run("mixed_extras", "n", "s", "l", "b", "x")
    assert [answer.extras["value"] for answer in answers] == [1.0, "text", "[1, 2]", 1.0, None]
    (mapping,) = run("as_mapping", "a")
    assert (mapping.value, mapping.extras) == (1.5, {"note": "fine"})


def test_E10_what_a_function_raises_is_the_fault_of_its_sample_alone(run):
    answers = run("by_response", *["1", "raise", "2", "text", "3"] * 4)
    assert [answer.value for answer in answers] == [1.0, None, 2.0, None, 3.0] * 4
    fault = answers[1].fault
    assert (fault.type, fault.message, fault.timed_out) == ("ConnectionError", "sandbox is down", False)
    assert "in by_response" in fault.traceback
    assert answers[3].fault.type == "TypeError"
    assert "returned str, expected a number" in answers[3].fault.message


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        ("sysexit:3", "SystemExit", "3"),
        ("raise:odd", "OddError", "x" * 500),
        ("raise:long", "ValueError", "x" * 500),
        ("raise:unspeakable", "UnspeakableError", "(its message cannot be shown: RuntimeError)"),
    ],
)
def test_unusual_exceptions(run, response, kind, message):
    bad, good = run("act", response, "7")
    assert (bad.fault.type, bad.fault.message) == (kind, message)
    assert good.value == 7.0


def test_asynchronous_functions(run):
    answers = run("slowly", *["a"] * 3, "raise", *["a"] * 30)
    assert [answer.value for answer in answers] == [None if row == 3 else float(row) for row in range(34)]
    assert answers[3].fault.message == "sandbox is down"
    assert [answer.value for answer in run("awaitable", "a", "bb")] == [1.0, 2.0]


def test_it_can_be_called_where_an_event_loop_runs(run):
    async def within():
        return run("slowly", "a", "b") + run("awaitable", "abc")

    assert [answer.value for answer in asyncio.run(within())] == [0.0, 1.0, 3.0]


def test_samples_and_options_arrive_unchanged(run, sample):
    task = {"tuple": (1, ("a", 2.5)), "keys": {1: "one", (2, 3): None}, "$dict": True}
    response = "\ud800 \x00 \N{SNOWMAN} " + "long" * 500_000
    (answer,) = run("echo", response, answer="5", task=task, draw=2**40)
    assert answer.extras["sample"] == repr(sample(response, "5", task=task, draw=2**40))
    assert answer.extras["extra"] == repr(OPTIONS["extra"])


def test_works_of_several_functions_in_one_call(executor, sample):
    works = [Work(part=number % 4 and NAMES.index("exact"), sample=sample(str(number), "5")) for number in range(40)]
    values = [answer.value for answer in executor.run(works)]
    assert values == [float(number) if number % 4 == 0 else float(number == 5) for number in range(40)]


def test_usage_counts_every_answer_once(executor, run):
    executor.take_usage()
    run("by_response", *["1"] * 50, "raise")
    usage = executor.take_usage()
    assert sum(usage.samples) == 51
    assert 0 < usage.slowest <= usage.seconds
    assert sum(executor.take_usage().samples) == 0


def test_calls_from_several_threads(run):
    results = {}
    threads = [threading.Thread(target=lambda key=key: results.update({key: run("by_response", *[str(key)] * 30)})) for key in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert {key: {answer.value for answer in answers} for key, answers in results.items()} == {0: {0.0}, 1: {1.0}, 2: {2.0}}
