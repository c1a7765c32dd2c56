"""Everything that can be refused before a process starts, refused at once: config, tokenizer, data, rewards, plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from rolemesh import models
from rolemesh.algorithms import ALGORITHMS, check_needs
from rolemesh.config import check_config
from rolemesh.config.model_files import read_model_facts
from rolemesh.config.schema import Config, ServeConfig
from rolemesh.data import EvalSet, PromptMixture, open_prompts, open_sft_prompts
from rolemesh.data.mixture import merged_summary
from rolemesh.engines.rollout import ENGINES, check_engine
from rolemesh.environments import BUILTIN_TOOLS, ENVIRONMENTS, TOOL_PARSERS, check_environment_section, tool_schemas
from rolemesh.errors import ConfigError, Problem, ResourceError
from rolemesh.names import CRITIC, REWARD
from rolemesh.observe.sinks import BUILTIN_SINKS, check_sinks
from rolemesh.plan import RUN_HELPERS, Inventory, Plan, VersionReport, build_plan, check_versions, impossible, with_versions
from rolemesh.plan.needs import with_unplaced
from rolemesh.rewards import REWARDS, check_rewards
from rolemesh.roles import worker_class
from rolemesh.training.environment import check_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What is to be placed, and needs a plan."""

    config: Config
    """With the roles and pools alone that will be started."""
    inventory: Inventory | None
    """The machines that the run has to itself; None when it joins a cluster, whose inventory is taken there."""
    versions: VersionReport

    @classmethod
    def of(cls, config: Config, inventory: Inventory | None, roles: Sequence[str] | None = None) -> Self:
        """Of these roles of a config, or of all."""
        return cls(config=_with_roles(config, roles), inventory=inventory, versions=check_versions(config.rollout.engine))

    def plan_for(self, inventory: Inventory) -> Plan:
        return with_versions(build_plan(self.config, inventory, helpers=RUN_HELPERS), self.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a run starts from once nothing is left to refuse but a place for it."""

    config: Config
    site: Site
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptMixture
    eval_set: EvalSet
    sft_prompts: PromptMixture | None

    def with_plan(self, plan: Plan) -> Prepared:
        return Prepared(**{field.name: getattr(self, field.name) for field in fields(self)}, plan=plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Checked):
    """What a run starts from once nothing is left to refuse."""

    plan: Plan


def prepare(config: Config, inventory: Inventory) -> Prepared:
    """Check everything and place it on machines that this run has to itself. Raises ConfigError or ResourceError, as `check` does."""
    checked = check(config, inventory)
    return checked.with_plan(checked.site.plan_for(inventory))


def check(config: Config, inventory: Inventory | None, *, warm_start: bool = True, roles: Sequence[str] | None = None) -> Checked:
    """Check everything that can be known without a cluster. Raises ConfigError with all problems of config, model, data, rewards and
    plan, or ResourceError when only the plan has some. Without an inventory, of a cluster that is still to be joined, the plan's
    problems are those that no cluster can solve. `warm_start` off leaves out the data of the `sft` section, where it is not used (any
    more). `roles` names those that will be started, for evaluation or generation: what only training needs is not asked for then, nor
    is room for other roles."""
    training, site = roles is None, Site.of(config, inventory, roles)
    problems = [*check_config(config, training=training, builtins=_builtin_names()), *site.versions.problems]
    readable = (described := _collect(problems, lambda: models.load_config(config.model))) is not None
    if readable:
        longest = config.data.max_prompt_tokens + config.data.max_response_tokens
        _collect(problems, lambda: models.check_positions(described, longest))
    _collect(problems, lambda: models.check_weights(config.model))
    tokenizer = _collect(problems, lambda: models.load_tokenizer(config.model)) if readable else None
    if tokenizer is not None:
        _collect(problems, lambda: models.stop_token_ids(tokenizer, config.model))
    tools = _collect(problems, lambda: tool_schemas(config.environment)) or []
    opened = _collect(problems, lambda: open_prompts(config, tokenizer, tools)) if tokenizer is not None else None
    sft_prompts = None
    if opened is not None and config.sft is not None and warm_start and training:
        sft_prompts = _collect(problems, lambda: open_sft_prompts(config, tokenizer, tools))
    if opened is None:
        _collect(problems, lambda: check_rewards(config.reward))
    else:  # held-out answers are scored by the same functions
        prompts, held_out = opened
        _collect(problems, lambda: check_rewards(config.reward, merged_summary([prompts.summary(), held_out.summary])))
    if training:
        _collect(problems, lambda: check_needs(config))
        if CRITIC in config.roles and config.algorithm.critic_path is not None:
            _collect(problems, lambda: _check_critic_model(config, tokenizer))
        if readable:
            _collect(problems, lambda: models.check_lora(config.model))
        _collect(problems, lambda: check_sinks(config.trainer.sinks))
    if tokenizer is not None and REWARD in site.config.roles:
        for number in config.reward_models:
            _collect(problems, partial(_check_reward_model, config, number, tokenizer))
    filtered = config.rollout.top_p < 1 or config.rollout.top_k > 0
    _collect(problems, lambda: check_engine(config.rollout.engine, deterministic=config.deterministic, filtered=filtered))
    if (environment := config.environment) is not None:
        _collect(problems, lambda: check_environment_section(environment, tokenizer, chat=config.data.chat))
    if (serve := config.rollout.serve) is not None:
        _collect(problems, lambda: _check_address(serve))
    for role in config.roles:
        _collect(problems, partial(worker_class, role, config))
    _collect(problems, lambda: check_environment(config))
    found = with_unplaced(problems, lambda: impossible(site.config) if inventory is None else site.plan_for(inventory).problems)
    if problems:
        raise ConfigError(problems=found)
    if found:
        raise ResourceError(problems=found)
    assert tokenizer is not None
    assert opened is not None
    return Checked(config=config, site=site, tokenizer=tokenizer, prompts=opened[0], eval_set=opened[1], sft_prompts=sft_prompts)


def _check_address(serve: ServeConfig) -> None:
    from rolemesh.serving import check_address  # an HTTP server is loaded where one is wanted

    check_address(serve.host, serve.port)


def _check_critic_model(config: Config, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """The critic's own model must be complete and read the policy's token ids."""
    model = config.model.model_copy(update={"path": config.algorithm.critic_path, "tokenizer": None})
    try:
        models.load_config(model)
        models.check_weights(model)
        known = models.load_tokenizer(model).get_vocab()
    except ConfigError as error:
        raise ConfigError(problems=[replace(problem, subject="algorithm.critic_path") for problem in error.problems]) from error
    if tokenizer is not None and known != tokenizer.get_vocab():
        free = f"{len(known)} tokens in {model.path}, {len(tokenizer)} in {config.model.path}, not all with the same ids"
        raise ConfigError.one(
            "algorithm.critic_path", "the critic must have the vocabulary of the policy", free, "Use a model of the same family"
        )


def _check_reward_model(config: Config, number: int, policy: PreTrainedTokenizerBase) -> None:
    """What `check_config` leaves open of a reward model: that transformers reads its config, and its tokenizer fits."""
    option, model = f"reward.{number}.model", config.reward_models[number]
    try:
        models.load_config(model.as_model)
    except ConfigError as error:
        raise ConfigError(problems=[replace(problem, subject=f"{option}.path") for problem in error.problems]) from error
    models.RewardReader(model, policy, option=option)


def check_saved_model(folder: Path, checked: Checked) -> None:
    """Raise ConfigError when the model in a checkpoint has other sizes than the config's, or gives tokens other ids."""
    model, remedy = checked.config.model, "Resume with the model of the run, or train on in a new run"
    saved, now = (read_model_facts(path) for path in (str(folder), model.path))
    sizes = {name: (getattr(saved, name), getattr(now, name)) for name in ("layers", "hidden", "vocab")}
    if other := [f"{name} {after} instead of {before}" for name, (before, after) in sizes.items() if before != after]:
        need = f"must be a model of the sizes of that in {folder}"
        raise ConfigError.one("model.path", need, f"{', '.join(other)} in {model.path}", remedy)
    known = models.load_tokenizer(model.model_copy(update={"path": str(folder), "tokenizer": None})).get_vocab()
    mine = checked.tokenizer.get_vocab()
    if known != mine:
        subject = "model.path" if model.tokenizer is None else "model.tokenizer"
        found = f"{len(mine)} tokens, there {len(known)}, not all with the same ids"
        raise ConfigError.one(subject, f"must have the vocabulary of {folder}", found, remedy)


def _with_roles(config: Config, names: Sequence[str] | None) -> Config:
    """The config with these roles alone and the pools that they use."""
    if names is None:
        return config
    roles = {name: role for name, role in config.roles.items() if name in names}
    used = {role.pool for role in roles.values()}
    return config.model_copy(update={"roles": roles, "pools": {name: pool for name, pool in config.pools.items() if name in used}})


def _builtin_names() -> dict[str, list[str]]:
    """Names that options may take, by option."""
    return {
        "reward.name": list(REWARDS),
        "algorithm.name": list(ALGORITHMS),
        "rollout.engine": list(ENGINES),
        "environment.name": list(ENVIRONMENTS),
        "environment.parser": list(TOOL_PARSERS),
        "environment.tools": list(BUILTIN_TOOLS),
        "trainer.sinks": list(BUILTIN_SINKS),
    }


def _collect(problems: list[Problem], check: Callable[[], T]) -> T | None:
    """Run a check; its problems are added unless one of the same subject is there already."""
    try:
        return check()
    except ConfigError as error:
        known = {problem.subject for problem in problems}
        problems.extend(problem for problem in error.problems if problem.subject not in known)
        return None
