"""What can be known about rewards before the run starts: are the functions there, do options fit, can they score the data? For sessions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from rolemesh.config.schema import RewardConfig
from rolemesh.errors import ConfigError, Problem
from rolemesh.registry import did_you_mean, nearest, resolve
from rolemesh.rewards.builtin import REWARDS
from rolemesh.rewards.declare import declared

MOST_LISTED: Final = 20
"""Names that a message lists."""

Sources: TypeAlias = Mapping[str, Mapping[str, int]]
"""By data source: number of `rows`, and how many have an `answer` and each `task.KEY` (a missing key means none)."""


def check_rewards(configs: Sequence[RewardConfig], sources: Sources | None = None) -> None:
    """Raise ConfigError with everything that is wrong: functions that cannot be found or called with their options, and data sources
    that a function does not know or that lack what it needs (`reward_function`)."""
    problems: list[Problem] = []
    for number, config in enumerate(configs):
        if config.model is not None:
            continue
        try:
            function = resolve(config.name, REWARDS, subject=f"reward.{number}.name")
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        problems.extend(_call_problems(number, config, function))
        mine = {source: counts for source, counts in (sources or {}).items() if scores_source(config, source)}
        problems.extend(_source_problems(number, config, function, mine))
    if sources:
        problems.extend(_binding_problems(configs, sources))
    if problems:
        raise ConfigError(problems=problems)


def scores_source(config: RewardConfig, source: str) -> bool:
    """Whether a reward scores answers to the prompts of a source."""
    return config.sources is None or source in config.sources


def full_reward(configs: Sequence[RewardConfig], source: str) -> float:
    """The reward of an answer that all functions and models for its source give 1: the sum of their positive weights."""
    return sum(max(config.weight, 0.0) for config in configs if scores_source(config, source))


def _binding_problems(configs: Sequence[RewardConfig], sources: Sources) -> Iterator[Problem]:
    """Sources that rewards name and the data do not have, and sources without any reward."""
    for number, config in enumerate(configs):
        for name in config.sources or ():
            if name not in sources:
                yield Problem(
                    subject=f"reward.{number}.sources",
                    need=f"must name data sources: {', '.join(sorted(sources)[:MOST_LISTED])}",
                    free=repr(name),
                    remedy=did_you_mean(name, sources).rstrip() or "Correct it, or give the source this name (data.train.<n>.name)",
                )
    unscored = [source for source in sources if not any(scores_source(config, source) for config in configs)]
    if unscored and configs:
        rows = ", ".join(f"{source!r} ({sources[source]['rows']} rows)" for source in unscored[:MOST_LISTED])
        yield Problem(
            subject="reward",
            need="every data source needs a reward that scores it",
            free=rows,
            remedy="Add them to reward.<n>.sources, or leave that out",
        )


def _call_problems(number: int, config: RewardConfig, function: Any) -> Iterator[Problem]:
    if not callable(function):
        yield Problem(subject=f"reward.{number}.name", need=f"{config.name} must be a function", free=type(function).__name__)
        return
    signature = inspect.signature(function)
    taken = [name for name, parameter in signature.parameters.items() if parameter.kind == parameter.KEYWORD_ONLY]
    try:
        signature.bind(object(), **config.options)
    except TypeError as error:
        guesses = [f"{hint} instead of {name}" for name in config.options if name not in taken and (hint := nearest(name, taken))]
        remedy = f"Did you mean {', '.join(guesses)}?" if guesses else f"It is called as {config.name}(sample, **options)"
        yield Problem(
            subject=f"reward.{number}.options", need=f"{config.name}{signature} must take a sample and them", free=str(error), remedy=remedy
        )
        return
    try:
        declared(function).check(**config.options)
    except ValueError as error:
        yield Problem(subject=f"reward.{number}.options", need=f"{config.name} must be able to use them", free=str(error))


def _source_problems(number: int, config: RewardConfig, function: Any, sources: Sources) -> Iterator[Problem]:
    subject = f"reward.{number}.name"
    known = declared(function).sources
    unknown = {} if known is None else {source: counts["rows"] for source, counts in sources.items() if source not in known}
    if unknown:
        found = ", ".join(f"{source!r} ({rows} rows)" for source, rows in unknown.items())
        yield Problem(
            subject=subject,
            need=f"{config.name} knows the data sources {', '.join(sorted(known or ()))}",
            free=found,
            remedy="Correct the source column, name a function that knows them, or add them to @reward_function(sources=...)",
        )
    for need in declared(function).needs:
        lacking = {
            source: counts["rows"] - counts.get(need, 0) for source, counts in sources.items() if counts.get(need, 0) < counts["rows"]
        }
        if lacking:
            found = ", ".join(f"none in {rows} of {sources[source]['rows']} rows of source {source!r}" for source, rows in lacking.items())
            yield Problem(subject=subject, need=f"{config.name} needs {_shown(need)} in every row", free=found, remedy=_remedy(need))


def _shown(need: str) -> str:
    return f"the column {need.removeprefix('task.')!r}" if need.startswith("task.") else "a reference answer"


def _remedy(need: str) -> str:
    if need.startswith("task."):
        return "Use data that has it (for reasoning_gym: data.train=reasoning_gym:TASK), or another reward"
    return "Set data.answer_key to the column that has it, or use another reward"
