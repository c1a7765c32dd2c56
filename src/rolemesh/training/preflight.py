"""Everything that can be refused before a process starts, refused at once: config, tokenizer, data, rewards, plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rolemesh.config import check_config
from rolemesh.config.schema import Config
from rolemesh.data import EvalSet, PromptStream, open_prompts
from rolemesh.errors import ConfigError, Problem, ResourceError
from rolemesh.models import load_config, load_tokenizer
from rolemesh.plan import Inventory, Plan, build_plan
from rolemesh.rewards import check_rewards
from rolemesh.roles import worker_class

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run starts from once nothing is left to refuse."""

    config: Config
    plan: Plan
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptStream
    eval_set: EvalSet


def prepare(config: Config, inventory: Inventory) -> Prepared:
    """Check everything. Raises ConfigError with all problems of config, model, data and rewards, then ResourceError with the plan's."""
    problems = list(check_config(config))
    if not problems:
        _collect(problems, lambda: load_config(config.model))
        tokenizer = _collect(problems, lambda: load_tokenizer(config.model))
        opened = _collect(problems, lambda: open_prompts(config, tokenizer)) if tokenizer is not None else None
        sources = opened[0].source.summary() if opened is not None else None
        _collect(problems, lambda: check_rewards(config.reward, sources))
        for role in config.roles:
            _collect(problems, lambda role=role: worker_class(role, config))  # type: ignore[misc]
    if problems:
        raise ConfigError(problems=problems)
    assert tokenizer is not None
    assert opened is not None
    plan = build_plan(config, inventory)
    if plan.problems:
        raise ResourceError(problems=plan.problems)
    return Prepared(config=config, plan=plan, tokenizer=tokenizer, prompts=opened[0], eval_set=opened[1])


def _collect(problems: list[Problem], check: Callable[[], T]) -> T | None:
    try:
        return check()
    except ConfigError as error:
        problems.extend(error.problems)
        return None
