"""Rules of the section `reward`: that it says something, and that its models can score. Called by `checks.py`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Final

from rolemesh.config.reward_heads import check_scalar_head
from rolemesh.config.schema import Config, RewardConfig
from rolemesh.errors import ConfigError, Problem

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*\Z")
ENVIRONMENT: Final = "environment"
"""The reward that an environment gives."""
_OF_FUNCTIONS: Final = ("options", "deadline", "memory_mb")


def check_reward(config: Config, builtins: Mapping[str, Collection[str]]) -> Iterator[Problem]:
    if not config.reward:
        yield Problem(subject="reward", need="at least one reward is needed", free="none", remedy="Write reward=[{name: exact}]")
    elif all(reward.weight == 0 for reward in config.reward):
        yield Problem(
            subject="reward",
            need="at least one weight must differ from 0",
            free="all weights are 0",
            remedy="Set reward.0.weight=1",
        )
    if config.environment is None and any(reward.name == ENVIRONMENT and reward.model is None for reward in config.reward):
        yield Problem(
            subject="reward",
            need=f"the reward {ENVIRONMENT!r} is what an environment gives",
            free="no section environment",
            remedy="Add the section, or use another reward",
        )
    for number, model in config.reward_models.items():
        yield from _model(f"reward.{number}", config.reward[number], builtins.get("reward.name", ()))
        try:
            check_scalar_head(model.path)
        except ConfigError as error:
            yield from (replace(problem, subject=f"reward.{number}.model.path") for problem in error.problems)


def _model(entry: str, reward: RewardConfig, functions: Collection[str]) -> Iterator[Problem]:
    if reward.name in functions:
        yield Problem(
            subject=f"{entry}.name",
            need="an entry is a function or a model, and this is the name of a built-in verifier",
            free=repr(reward.name),
            remedy="Choose another name for the model, and give the verifier an entry of its own",
        )
    elif not _NAME.match(reward.name):
        yield Problem(
            subject=f"{entry}.name",
            need="an entry is a function or a model: what a model is called has letters, digits, _, . and - alone",
            free=repr(reward.name),
            remedy="Give the function an entry of its own, and the model a plain name",
        )
    for option in _OF_FUNCTIONS:
        if getattr(reward, option) != RewardConfig.model_fields[option].default:
            yield Problem(
                subject=f"{entry}.{option}",
                need="is for functions; a model has the limits of its worker, such as deadlines.call",
                free=str(getattr(reward, option)),
                remedy="Leave it out",
            )
