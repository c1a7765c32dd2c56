"""The reference page and the frozen list of options."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolemesh.config import RENAMED, Config
from rolemesh.config.options import locate, options, suggestions, type_words, words_of
from rolemesh.config.reference import option_names, options_reference
from rolemesh.config.schema import DataConfig, PoolConfig, RolloutConfig, TrainerConfig

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "reference" / "options.md"


def test_reference_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == options_reference(), "run: python -m rolemesh.config.reference > docs/reference/options.md"


def test_list_of_options_is_frozen():
    """Adding, renaming or removing an option is a decision: change tests/config/options.txt with it, and RENAMED for old names."""
    frozen = (HERE / "options.txt").read_text(encoding="utf-8").splitlines()
    assert option_names() == frozen
    assert len(frozen) <= 150


def test_every_option_has_a_docstring():
    assert [option.name for option in options() if not option.help] == []
    assert all(option.help.endswith(".") for option in options())


def test_names_are_unique_and_follow_the_schema():
    names = option_names()
    assert len(set(names)) == len(names)
    for name in ("trainer.steps", "roles.<role>.pool", "pools.<pool>.nodes", "reward.<n>.threshold", "sft.steps", "seed"):
        assert name in names
    assert {name.partition(".")[0] for name in names} == set(Config.model_fields)


def test_renamed_options_lead_to_options_that_exist():
    names = option_names()
    assert all(new in names and old not in names for old, new in RENAMED.items())


@pytest.mark.parametrize(
    ("model", "field", "words"),
    [
        (TrainerConfig, "steps", "a whole number above 0"),
        (TrainerConfig, "max_grad_norm", "a number above 0 or null"),
        (TrainerConfig, "betas", "a list of 2 items, each a number"),
        (TrainerConfig, "sinks", "a list, each item text"),
        (RolloutConfig, "top_k", "a whole number of at least 0"),
        (PoolConfig, "gpus", "a number of at least 0"),
        (DataConfig, "overlong", "one of error, left, right, drop"),
        (DataConfig, "eval", "text or a list, each item a mapping of options or null"),
    ],
)
def test_types_in_plain_words(model, field, words):
    assert words_of(model.model_fields[field]) == words


def test_sections_in_plain_words():
    assert type_words(Config.model_fields["trainer"].annotation) == "a mapping of options"
    assert type_words(Config.model_fields["sft"].annotation) == "a mapping of options or null"
    assert type_words(Config.model_fields["pools"].annotation) == "a mapping of names to options"


def test_suggestions_put_the_same_key_elsewhere_first():
    assert suggestions(locate(["algorithm", "epochs"]), 1)[0] == "trainer.epochs"
    assert suggestions(locate(["roles", "actor", "poool"]), 1) == ["roles.actor.pool"]
    assert suggestions(locate(["qqq"]), 1) == []
