"""User code found by import path: whatever is wrong with it is a config error that names the option."""

import pytest

from rolemesh.errors import ConfigError
from rolemesh.registry import check_call, resolve


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(:\n", "SyntaxError: "),
        ("raise RuntimeError('no licence')\n", "RuntimeError: no licence"),
        ("import sys\nsys.exit(7)\n", "SystemExit: 7"),
        ("import not_there_at_all\n", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("", "AttributeError: module 'broken_module' has no attribute 'f'"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_by_the_option_that_names_it(tmp_path, monkeypatch, text, found):
    (tmp_path / "broken_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "broken_module", raising=False)
    with pytest.raises(ConfigError) as caught:
        resolve("broken_module:f", {}, subject="reward.0.name")
    (problem,) = caught.value.problems
    assert problem.subject == "reward.0.name"
    assert found in problem.free


class Takes:
    def __init__(self, model, *, slots):
        pass


def test_what_is_called_with_other_arguments_than_it_takes_is_refused_without_calling_it():
    told = {"subject": "rollout.engine", "name": "m:Takes", "called": "m:Takes(model, slots=...)"}
    check_call(Takes, [None], {"slots": 1}, **told)
    for args, kwargs, found in (
        ([], {"slots": 1}, "'model'"),
        ([None], {}, "'slots'"),
        ([None], {"slots": 1, "device": "cpu"}, "'device'"),
    ):
        with pytest.raises(ConfigError, match=f"rollout.engine: .*is called as .*{found}"):
            check_call(Takes, args, kwargs, **told)
    with pytest.raises(ConfigError, match="found a int"):
        check_call(3, [], {}, **told)
