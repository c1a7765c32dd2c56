"""YAML as read and written: the 1.2 scalars, and agreement with PyYAML on what is written."""

from __future__ import annotations

from itertools import pairwise

import pytest
import yaml

from rolemesh.config.yaml_text import YamlProblem, dump_yaml, parse_yaml, show


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-2.", -2.0),
        ("+1E3", 1000.0),
        ("100_000", 100_000),
        ("-7", -7),
        ("0", 0),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        (".inf", ".inf"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("[1, a]", [1, "a"]),
        ("{a: }", {"a": None}),
        ("a: &x {b: 1}\nc: *x", {"a": {"b": 1}, "c": {"b": 1}}),
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    found = parse_yaml(text)
    assert found == value
    assert type(found) is type(value)


LAUGHS = ", ".join(["a: &a [x]", *(f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in pairwise("abcdefghi"))]).join("{}")
"""43 million values in a line."""


@pytest.mark.parametrize(
    "text",
    ["{1: a}", "{a: 1, a: 2}", "&x [*x]", "a: &x {b: *x}", "!!python/name:os.system", "a\x00b", "[", "{true: 1}", "? [a]\n: b",
     LAUGHS, "[" * 3000],
)  # fmt: skip
def test_what_is_refused(text):
    with pytest.raises(YamlProblem) as caught:
        parse_yaml(text)
    assert caught.value.line == 1
    assert caught.value.reason


TEXTS = ["no", "1e-5", "1.0", "on", "~", "", "2020-01-01", "010", "1:30", ".inf", "a: b", "<<", "=", "é"]
BREAKS = ["\x85", "\u2028a", "a\rb", " \n ", "a\t", "x\ny"]


@pytest.mark.parametrize("value", [*TEXTS, *BREAKS, 1e-6, 1e300, 5])
def test_dumps_read_equal_here_and_with_pyyaml(value):
    text = dump_yaml({"key": value, "list": [value]})
    assert parse_yaml(text) == yaml.safe_load(text) == {"key": value, "list": [value]}


def test_show_is_one_short_line():
    assert show("a") == "'a'"
    assert show({"a": [1, "b"]}) == "{a: [1, b]}"
    assert show(None) == "null"
    assert show(True) == "true"
    assert show(1e-6) == "1e-06"
    assert len(show(list(range(1000)))) == 80
