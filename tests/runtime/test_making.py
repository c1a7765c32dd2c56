"""Whether a worker that is found is the one that would be made."""

import importlib
import sys
import threading
from pathlib import Path

import pytest
from runtime_workers import Adder, Flaky

from rolemesh.config import dump_config, load_config
from rolemesh.runtime import WorkerContext
from rolemesh.runtime.making import UNKNOWN, make_of

CONTEXT = WorkerContext(group="adders", rank=0, world_size=2, local_rank=0, local_world_size=2, node="a", address="10.0.0.1")


@pytest.mark.parametrize("recipe", ["demo", "demo-split"])
def test_a_config_is_the_same_when_it_was_written_and_read_again(tmp_path: Path, recipe: str) -> None:
    config = load_config(recipe, ["trainer.steps=7"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    again = load_config(str(tmp_path / "config.yaml"))
    assert make_of(Adder, CONTEXT, {"config": config}) == make_of(Adder, CONTEXT, {"config": again})
    other = load_config(recipe, ["trainer.steps=8"])
    assert make_of(Adder, CONTEXT, {"config": config}) != make_of(Adder, CONTEXT, {"config": other})


def test_it_depends_on_values_and_not_on_objects() -> None:
    one, other = ("".join(["a", "b"]) for _ in range(2))
    assert make_of(Adder, CONTEXT, {"x": [one, one]}) == make_of(Adder, CONTEXT, {"x": [one, other]}) != UNKNOWN


def test_class_rank_and_size_of_the_group_count() -> None:
    of = {make_of(Adder, CONTEXT, {}), make_of(Flaky, CONTEXT, {})}
    for rank, world_size in ((1, 2), (0, 3)):
        context = WorkerContext(
            group="adders", rank=rank, world_size=world_size, local_rank=0, local_world_size=2, node="a", address="10.0.0.1"
        )
        of.add(make_of(Adder, context, {}))
    assert len(of) == 4


def test_a_class_that_was_written_anew_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(text: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "mine.py").write_text(f"class Mine:\n    {text}\n")
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(folder))
            patched.delitem(sys.modules, "mine", raising=False)
            return make_of(importlib.import_module("mine").Mine, None, {})

    assert written("x = 1") == written("x = 1") != written("x = 2")


def test_settings_that_cannot_be_compared_never_count_as_the_same() -> None:
    assert make_of(Adder, CONTEXT, {"lock": threading.Lock()}) == UNKNOWN
    assert make_of(Adder, CONTEXT, {"function": lambda: 0}) == UNKNOWN
