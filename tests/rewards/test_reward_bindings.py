"""Rewards bound to data sources: who scores what, and what is refused before the start."""

from __future__ import annotations

import pytest

from rolemesh.config.schema import RewardConfig
from rolemesh.errors import ConfigError
from rolemesh.protocols.reward import Sample
from rolemesh.rewards import InProcess, RewardError, RewardScorer, check_rewards, full_reward

COUNTS = {"sums": {"rows": 8, "answer": 8, "task.level": 8}, "words": {"rows": 4, "answer": 0}}
LENGTH, BROKEN = "reward_functions:length", "reward_functions:by_response"


def answer(source, response, draw=0):
    return Sample(draw=draw, sample=0, source=source, prompt="?", response=response, answer="5", task={}, finish_reason="stop")


def scorer(*configs):
    made = [RewardConfig(**config) for config in configs]
    return RewardScorer(made, InProcess(made))


def problems_of(*configs, sources=COUNTS):
    with pytest.raises(ConfigError) as caught:
        check_rewards([RewardConfig(**config) for config in configs], sources)
    return caught.value.problems


def test_each_sample_is_scored_by_the_rewards_of_its_source():
    mixed = scorer(
        {"name": LENGTH, "sources": ("words",), "weight": 2.0},
        {"name": "exact", "sources": ("sums",)},
        {"name": "reward_functions:length_and_more", "weight": 0.5},
    )
    words, sums = mixed.score([answer("words", "four"), answer("sums", "5")])
    assert (words.reward, sums.reward) == (2 * 4 + 0.5 * 4, 1 + 0.5 * 1)
    assert words.parts == {LENGTH: 4.0, "reward_functions:length_and_more": 4.0}
    assert sums.parts == {"exact": 1.0, "reward_functions:length_and_more": 1.0}


def test_a_function_that_fails_masks_its_own_source_alone():
    mixed = scorer({"name": BROKEN, "sources": ("words",)}, {"name": LENGTH, "sources": ("sums",)})
    outcomes = mixed.score([answer("words", "raise"), answer("words", "2"), answer("sums", "raise")])
    assert [outcome.status for outcome in outcomes] == ["error", "ok", "ok"]
    assert [outcome.reward for outcome in outcomes] == [None, 2.0, 5.0]


def test_a_function_that_always_fails_is_named_though_others_work():
    mixed = scorer({"name": BROKEN, "sources": ("words",)}, {"name": LENGTH, "sources": ("sums",)})
    mixed.score([answer("sums", "raise")])  # nothing of its source: neither worked nor failed
    with pytest.raises(RewardError, match=f"{BROKEN} failed for all 2 samples"):
        mixed.score([answer("words", "raise", 0), answer("words", "raise", 1), answer("sums", "1", 2)])


def test_a_sample_that_no_reward_scores_is_an_error_never_0():
    (outcome,) = scorer({"name": LENGTH, "sources": ("words",)}).score([answer("sums", "1")])
    assert (outcome.reward, outcome.status, outcome.error) == (None, "error", "no reward scores its data source")


def test_full_reward_is_that_of_the_source():
    configs = [
        RewardConfig(name="exact", sources=("sums",)),
        RewardConfig(name=LENGTH, sources=("words",), weight=2.0),
        RewardConfig(name="exact", weight=-1.0),
        RewardConfig(name="exact", weight=0.5),
    ]
    assert (full_reward(configs, "sums"), full_reward(configs, "words"), full_reward(configs, "other")) == (1.5, 2.5, 0.5)


def test_E07_a_source_without_a_reward_is_refused_with_its_rows():
    (problem,) = problems_of({"name": "exact", "sources": ("sums",)})
    assert (problem.subject, problem.free) == ("reward", "'words' (4 rows)")


def test_E07_a_reward_for_a_source_that_is_not_there_is_refused_with_the_nearest():
    problems = problems_of({"name": LENGTH}, {"name": LENGTH, "sources": ("sum", "words")})
    assert [(problem.subject, problem.free, problem.remedy) for problem in problems] == [
        ("reward.1.sources", "'sum'", "Did you mean 'sums'?"),
    ]


def test_needs_of_a_function_are_asked_of_its_sources_alone():
    check_rewards([RewardConfig(name="exact", sources=("sums",)), RewardConfig(name=LENGTH, sources=("words",))], COUNTS)
    (problem,) = problems_of({"name": "exact"})
    assert problem.free == "none in 4 of 4 rows of source 'words'"
