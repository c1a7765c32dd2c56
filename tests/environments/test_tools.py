"""Tools: what the model is told of them, how its calls are answered, and what is not its fault."""

import asyncio
import threading
import time

import pytest

from rolemesh.config.schema import EnvironmentConfig
from rolemesh.environments import ToolEnvironment, check_environment_section, environment_maker, tool_schemas
from rolemesh.environments.calculator import calculator
from rolemesh.environments.parsers import pythonic
from rolemesh.environments.tools import load_tools
from rolemesh.errors import ConfigError
from rolemesh.protocols.environment import Turn

NAMES = [f"tool_functions:{name}" for name in ("add", "later", "gone", "wrong", "slow", "leaves", "maybe", "placed", "hidden_wait", "raw")]


@pytest.fixture
def tools():
    return load_tools([*NAMES, "calculator"])


def step(tools, text):
    return asyncio.run(ToolEnvironment(tools=tools, parser=pythonic).step(Turn(number=1, token_ids=[], text=text)))


@pytest.mark.parametrize(
    ("text", "answers", "malformed", "errors"),
    [
        ("add(1, b=2)", ["3"], 0, 0),
        ("[add(1), later('x'), calculator('2*(3+4)')]", ["2", '{"text": "x"}', "14"], 0, 0),
        ("ad(1)", ["error: no tool 'ad'; did you mean add?"], 1, 0),
        ("add()", ["error: add: missing a required argument: 'a'"], 1, 0),
        ("add(1, c=3)", ["error: add: got an unexpected keyword argument 'c'"], 1, 0),
        ("add('1')", ['error: add: a must be of the type integer, got "1"'], 1, 0),
        ("add(True)", ["error: add: a must be of the type integer, got true"], 1, 0),
        ("add(", [], 0, 0),
        ("[add(1), add(]", ["error: not Python: "], 1, 0),
        ("wrong(1)", ["error: KeyError: 1"], 0, 1),
        ("[add(1), leaves(2)]", ["2", "error: SystemExit: 2"], 0, 1),
        ("[maybe(None), maybe(count=None), maybe(3)]", ["got None", "got None", "got 3"], 0, 0),
        ("maybe('x')", ['error: maybe: count must be of the type integer, got "x"'], 1, 0),
        ("placed(1, more=4)", ["5"], 0, 0),
        ("hidden_wait('x')", ['{"text": "x"}'], 0, 0),
        ("raw(2)", ["\"b'\\\\x00\\\\x01'\""], 0, 0),
    ],
)
def test_calls_are_answered(tools, text, answers, malformed, errors):
    found = step(tools, text)
    assert found.done == (not answers)
    assert found.reward is None
    assert [message.name in tools for message in found.messages] == [
        not message.content.startswith("error: no") for message in found.messages
    ]
    assert len(found.messages) == len(answers)
    for message, answer in zip(found.messages, answers, strict=True):
        assert message.role == "tool"
        assert message.content.startswith(answer) if answer.endswith(" ") else message.content == answer
    if answers:
        assert dict(found.counts) == {"tool_calls": len(answers), "malformed_calls": malformed, "tool_errors": errors}


def test_a_service_that_is_gone_is_not_the_models_fault(tools):
    with pytest.raises(RuntimeError, match=r"tool gone: ConnectionRefusedError: no route to the index"):
        step(tools, "gone(1)")


def test_tools_in_threads_run_side_by_side_and_one_that_is_left_behind_holds_up_nobody(tools):
    async def main():
        environment = ToolEnvironment(tools=tools, parser=pythonic)
        turns = [Turn(number=1, token_ids=[], text="slow(0.3)")] * 20
        began = time.monotonic()
        steps = await asyncio.gather(*(environment.step(turn) for turn in turns))
        assert [one.messages[0].content for one in steps] == ["awake"] * 20
        assert time.monotonic() - began < 20 * 0.3
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await environment.step(Turn(number=1, token_ids=[], text="slow(1.5)"))
        return (await environment.step(Turn(number=1, token_ids=[], text="add(1)"))).messages[0].content

    assert asyncio.run(main()) == "2"
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tool")


def test_schemas_are_those_of_the_functions():
    (schema,) = tool_schemas(EnvironmentConfig(tools=(NAMES[0],)))
    assert schema["function"]["name"] == "add"
    assert schema["function"]["description"] == "Adds."
    assert schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "A number"}
    assert schema["function"]["parameters"]["required"] == ["a"]
    assert tool_schemas(None) == []


def test_all_that_is_wrong_with_tools_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load_tools([NAMES[0], NAMES[0], "calculater", "tool_functions:undocumented", "tool_functions:number", "tool_functions:none"])
    found = {problem.subject: str(problem) for problem in caught.value.problems}
    assert list(found) == [f"environment.tools.{number}" for number in range(1, 6)]
    texts = ["two called 'add'", "Did you mean 'calculator'", "docstring", "must be a function", "importable"]
    for number, text in enumerate(texts, start=1):
        assert text in found[f"environment.tools.{number}"]


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"name": "tools"}, "must name a tool or more"),
        ({"tools": ["calculator"], "parser": "herms"}, "Did you mean 'hermes'"),
        ({"name": "reasoning_gym", "options": {"attempt": 3}}, "options attempts, .*found 'attempt'. Did you mean 'attempts'?"),
        ({"tools": ["calculator"], "options": {"foo": 1}}, "tools takes no options; found 'foo'. Leave it out"),
        ({"name": "reasonning_gym"}, "Did you mean 'reasoning_gym'"),
    ],
)
def test_environments_that_cannot_be_made_are_refused(section, text):
    with pytest.raises(ConfigError, match=text):
        environment_maker(EnvironmentConfig(**section))


class Forgetful:
    async def reset(self, start):
        return []

    def step(self, turn):
        return None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Forgetful", r"test_tools:Forgetful must have the methods of an environment.*found step that is not asynchronous, no close"),
        ("NAMES", "test_tools:NAMES must be something to call"),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused_before_the_run(name, text):
    with pytest.raises(ConfigError, match=text):
        check_environment_section(EnvironmentConfig(name=f"test_tools:{name}"), None, chat=False)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("52+41", "93"), (" (3 + 4) * 2 ", "14"), ("1/4", "0.25"), ("7 // 2 % 2", "1"), ("-0.1 + 0.3", "0.2")],
)
def test_calculator(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize("expression", ["__import__('os')", "2 ** 9", "a + 1", "1 +", "9" * 40, "1+" * 150 + "1", "True + 1", "'a'"])
def test_the_calculator_calculates_and_does_nothing_else(expression):
    with pytest.raises(ValueError, match=r"."):
        calculator(expression)
