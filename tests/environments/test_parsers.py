"""What models write as tool calls, well and badly."""

import pytest

from rolemesh.environments.parsers import BadCall, ToolCall, hermes, llama3_json, pythonic


def call(name="f", *positional, **arguments):
    return ToolCall(name=name, arguments=arguments, positional=positional)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 4.", []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [call(a=1)]),
        ('I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>', [call(), call("g")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": [2]}"}</tool_call>', [call(a=[2])]),  # JSON in JSON
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', [call(a=1)]),  # the end of the turn closed it
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [call(a=1)]),
    ],
)
def test_hermes(text, calls):
    assert hermes(text) == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("4", []),
        ('{"answer": 4}', []),
        ('{"name": "f", "parameters": {"a": "x"}}', [call(a="x")]),
        ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [call(), call("g")]),
    ],
)
def test_llama3_json(text, calls):
    assert llama3_json(text) == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("93", []),
        ("[1, 2]", []),
        ("f(x) is what we need.", []),
        ("f(3, a='x')", [call("f", 3, a="x")]),
        (" [f(a=-1.5), g(b=[True, None])]\n", [call(a=-1.5), call("g", b=[True, None])]),
    ],
)
def test_pythonic(text, calls):
    assert pythonic(text) == calls


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        (hermes, '<think>\n<tool_call>{"name": "g"}</tool_call>? No.\n</think>\n\n<tool_call>{"name": "f"}</tool_call>', [call()]),
        (hermes, '<think>I could write <tool_call>{"name": "g"}</tool_call>.</think>4', []),
        (llama3_json, '<think>I need f.</think>\n{"name": "f", "parameters": {"a": 1}}', [call(a=1)]),
        (pythonic, "<think>g(1)?</think>f(a=1)", [call(a=1)]),
    ],
)
def test_thoughts_are_no_calls_and_hide_none(parser, text, calls):
    assert parser(text) == calls


@pytest.mark.parametrize(
    ("parser", "text", "why"),
    [
        (hermes, '<tool_call>{"name": "f", </tool_call>', "not JSON"),
        (hermes, '<tool_call>["f"]</tool_call>', 'the text "name"'),
        (hermes, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be a JSON object, got list"),
        (hermes, '<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "arguments are not JSON"),
        (hermes, "<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        (llama3_json, '{"name": "f", "parameters": ', "not JSON"),
        (llama3_json, '{"name": "f"} and that is all', "text behind a call"),
        (pythonic, "f(a=)", "not Python"),
        (pythonic, "f(a=g(1))", "must be literals"),
        (pythonic, "f(**{'a': 1})", "stars"),
        (pythonic, "[f(), 3]", "written name(argument=value)"),
        (pythonic, "f(" + "(" * 5000 + ")" * 5000 + ")", "not Python"),
        (pythonic, "f(a=1, a=2)", "given twice"),
    ],
)
def test_what_cannot_be_read_is_told_and_never_raised(parser, text, why):
    *_, bad = parser(text)
    assert isinstance(bad, BadCall)
    assert why in bad.why
