"""What `rolemesh eval` makes of --samples, --k and --temperature."""

from __future__ import annotations

import pytest

from rolemesh.cli.running import sampling
from rolemesh.config import load_config
from rolemesh.errors import ConfigError


def checked(samples=None, k="1", temperature=None, recipe="1.0"):
    config = load_config(None, [f"rollout.temperature={recipe}"])
    return sampling(config, samples, k, temperature)


def test_without_samples_the_answers_are_greedy():
    assert checked() is None


def test_samples_have_the_temperature_of_the_recipe_unless_another_is_given():
    assert checked(4, "1, 4,4") == (4, (1, 4), 1.0)
    assert checked(4, recipe="0.7") == (4, (1,), 0.7)
    assert checked(2, temperature=0.5) == (2, (1,), 0.5)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"samples": 2, "k": "1,4"}, "--k: must be whole numbers from 1 to --samples=2"),
        ({"samples": 2, "k": "0"}, "--k: must be whole numbers"),
        ({"samples": 2, "k": "one"}, "--k: must be whole numbers"),
        ({"samples": 0}, "--samples: must be at least 1"),
        ({"k": "1,2"}, "--samples: is needed for --k"),
        ({"temperature": 0.5}, "--samples: is needed for --k and --temperature"),
        ({"samples": 2, "temperature": 0.0}, "--temperature: must be above 0"),
    ],
)
def test_what_does_not_fit_is_refused(given, found):
    with pytest.raises(ConfigError, match=found):
        checked(**given)


def test_everything_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        checked(2, "3", 0.0)
    assert [problem.subject for problem in caught.value.problems] == ["--k", "--temperature"]
