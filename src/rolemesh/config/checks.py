"""Rules between options. `check_config` is pure apart from looking whether named files exist, and reports everything at once.

Called by the command line and by sessions after `load_config`. What depends on the machine (sizes no pool can hold) is the plan's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from rolemesh.config.data_checks import data_problems
from rolemesh.config.model_files import BUILTIN_MODELS, check_model_files, read_model_facts
from rolemesh.config.packaged import local_path
from rolemesh.config.pool_checks import check_pools, check_roles, missing_role, multiples_near
from rolemesh.config.reward_checks import check_reward
from rolemesh.config.reward_heads import check_language_model
from rolemesh.config.rollout_schema import COOLEST, HOTTEST
from rolemesh.config.schema import Config, LoraConfig
from rolemesh.config.yaml_text import show
from rolemesh.errors import ConfigError, Problem
from rolemesh.names import ACTOR, CRITIC, REF, ROLLOUT
from rolemesh.registry import did_you_mean, is_import_path

LONGEST_NAME: Final = 64
"""Characters of a name; with the id of the run behind it, it has to fit into the name of a folder."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*\Z")


def check_config(config: Config, *, training: bool = True, builtins: Mapping[str, Collection[str]] | None = None) -> list[Problem]:
    """Every rule between options that `config` breaks, each with a remedy; empty when it can be used.

    `training=False` (evaluation, generation) leaves out what only training needs, so temperature 0 is allowed there. `builtins` gives the
    known names of `algorithm.name`, `rollout.engine`, `reward.name` and `trainer.sinks`, which live in higher layers; without it only
    the form of those names is checked.
    """
    problems = [*_names(config), *_model(config), *data_problems(config), *_code(config, builtins or {})]
    problems += [*check_pools(config), *check_roles(config), *check_reward(config, builtins or {}), *_cluster(config), *_serve(config)]
    problems += _temperature(config.rollout.temperature, training)
    if training:
        problems += [*_algorithm(config), *_filters(config), *_batches(config), *_optimizer(config), *_folders(config)]
    return problems


def _folders(config: Config) -> Iterator[Problem]:
    folder = config.runs_dir.expanduser()
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    if found := _unusable(there):
        yield Problem(
            subject="runs_dir",
            need="it must be possible to make folders in it",
            free=found,
            remedy=f"Set runs_dir to another folder; relative ones are in the folder where the command runs ({Path.cwd()})",
        )
    shared = config.trainer.publish_folder
    if shared is not None and (found := _unusable(shared.expanduser())):
        yield Problem(
            subject="trainer.publish_folder",
            need="must be a folder that is there and can be written, here and on every node",
            free=found,
            remedy="Mount or make it (it is not made here: a folder on one node alone would be of no use), or leave the option out",
        )


def _unusable(folder: Path) -> str:
    """Why no folders can be made in it; empty when they can."""
    if not folder.is_dir():
        return f"{folder} is a file" if folder.exists() else f"no folder {folder}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"no permission for {folder}"


def _cluster(config: Config) -> Iterator[Problem]:
    if config.cluster.detached and config.backend == "local":
        remedy = "Set backend=ray, or leave cluster.detached out"
        yield Problem(subject="cluster.detached", need="needs worker processes", free="backend=local", remedy=remedy)


def _serve(config: Config) -> Iterator[Problem]:
    serve, call = config.rollout.serve, config.deadlines.call
    if serve is not None and serve.in_flight == "wait" and serve.patience >= call:
        need = f"must be below deadlines.call, within which the weights have to be taken ({call:g})"
        yield Problem(subject="rollout.serve.patience", need=need, free=f"{serve.patience:g}", remedy="Lower it, or raise deadlines.call")


def _names(config: Config) -> Iterator[Problem]:
    for kind, names in (("name", [config.name]), ("roles", list(config.roles)), ("pools", list(config.pools))):
        for name in names:
            if not _NAME.match(name) or len(name) > LONGEST_NAME:
                yield Problem(
                    subject=kind,
                    need=f"names must start with a letter, hold only letters, digits, _ and -, and have at most {LONGEST_NAME} characters",
                    free=show(name),
                    remedy="They become names of folders and processes; rename it",
                )


def _model(config: Config) -> Iterator[Problem]:
    if config.model.path not in BUILTIN_MODELS:
        try:
            check_model_files(config.model.path)
            check_language_model(config.model.path)
        except ConfigError as error:
            yield from error.problems
    if config.model.lora is not None:
        yield from _lora(config.model.path, config.model.lora)
    if config.model.tokenizer is not None and config.model.tokenizer not in BUILTIN_MODELS:
        yield from _tokenizer(config.model.tokenizer)


def _lora(path: str, lora: LoraConfig) -> Iterator[Problem]:
    if not lora.target_modules:
        yield Problem(
            subject="model.lora.target_modules",
            need="must name at least one layer, or be all-linear",
            free="[]",
            remedy="Set model.lora.target_modules=all-linear",
        )
    try:
        hidden = read_model_facts(path).hidden
    except ConfigError:
        return  # told of the model itself, by the plan too
    if lora.rank > hidden:
        yield Problem(
            subject="model.lora.rank",
            need=f"must be at most the hidden size of the model ({hidden}): its layers have no higher rank to learn",
            free=str(lora.rank),
            remedy=f"Set model.lora.rank={min(16, hidden)}",
        )


def _tokenizer(text: str) -> Iterator[Problem]:
    try:
        folder = local_path(text, subject="model.tokenizer")
    except ConfigError as error:
        yield from error.problems
        return
    if not folder.is_dir():
        yield Problem(
            subject="model.tokenizer",
            need="must be a folder with a tokenizer",
            free=f"no folder {text!r}",
            remedy="Give its path, or model.tokenizer=null to use the model's own",
        )


def _code(config: Config, builtins: Mapping[str, Collection[str]]) -> Iterator[Problem]:
    """Names of built-ins and import paths of user code. Nothing is imported here."""
    names = {"algorithm.name": config.algorithm.name, "rollout.engine": config.rollout.engine}
    if (environment := config.environment) is not None:
        names |= {"environment.name": environment.name, "environment.parser": environment.parser}
        names |= {f"environment.tools.{index}": tool for index, tool in enumerate(environment.tools)}
    names |= {f"reward.{index}.name": reward.name for index, reward in enumerate(config.reward) if reward.model is None}
    names |= {f"trainer.sinks.{index}": sink for index, sink in enumerate(config.trainer.sinks)}
    for subject, name in names.items():
        yield from _named(subject, name, builtins.get(re.sub(r"\.\d+", "", subject)))
    for name, role in config.roles.items():
        if role.worker is not None and not is_import_path(role.worker):
            yield Problem(
                subject=f"roles.{name}.worker",
                need="must be an import path like my_pkg.module:MyWorker",
                free=repr(role.worker),
                remedy="Write package.module, a colon, and the name of the class",
            )


def _named(subject: str, name: str, known: Collection[str] | None) -> Iterator[Problem]:
    if is_import_path(name) or (name.isidentifier() if known is None else name in known):
        return
    listed = f"one of {', '.join(sorted(known))}" if known else "a built-in name"
    dotted = name.replace(":", ".").rpartition(".")
    guess = f"{dotted[0]}:{dotted[2]}"
    remedy = did_you_mean(name, known or ()) or (f"Did you mean {guess!r}? " if is_import_path(guess) else "")
    yield Problem(
        subject=subject,
        need=f"must be {listed} or an import path like my_pkg.module:name",
        free=repr(name),
        remedy=f"{remedy}In an import path a colon stands before the last name",
    )


def _algorithm(config: Config) -> Iterator[Problem]:
    if config.algorithm.name == "grpo" and config.algorithm.group_size < 2:
        yield Problem(
            subject="algorithm.group_size",
            need="must be at least 2 for grpo: an answer is compared with the others of its group, alone its advantage is always 0",
            free=str(config.algorithm.group_size),
            remedy="Set algorithm.group_size=8",
        )
    yield from _critic(config)
    yield from _reference(config)
    if config.model.lora is not None and ACTOR in config.roles and config.roles[ACTOR].tensor_parallel > 1:
        yield Problem(
            subject="roles.actor.tensor_parallel",
            need="must be 1 with model.lora: adapters are not split over a row of ranks",
            free=str(config.roles[ACTOR].tensor_parallel),
            remedy="Set roles.actor.tensor_parallel=1; trainer.sharding=fsdp divides the model too",
        )
    if config.model.lora is None and config.trainer.publish == "adapter":
        yield Problem(
            subject="trainer.publish",
            need="must be merged without model.lora: there is no adapter",
            free=repr(config.trainer.publish),
            remedy="Set trainer.publish=merged, or train an adapter: model.lora.rank=16",
        )


def _critic(config: Config) -> Iterator[Problem]:
    if config.algorithm.name == "ppo" and CRITIC not in config.roles:
        yield missing_role(config, CRITIC, "algorithm ppo needs a critic", ", or set algorithm.name=grpo, which has none")
    elif config.algorithm.name == "grpo" and CRITIC in config.roles:
        yield Problem(
            subject="roles.critic",
            need="algorithm grpo has no critic",
            free="algorithm.name=grpo",
            remedy="Set algorithm.name=ppo, or leave the role out",
        )
    if CRITIC in config.roles and config.algorithm.critic_warmup >= config.trainer.steps:
        yield Problem(
            subject="algorithm.critic_warmup",
            need=f"must be below trainer.steps ({config.trainer.steps}), or the policy is never trained",
            free=str(config.algorithm.critic_warmup),
            remedy="Lower it",
        )
    path = config.algorithm.critic_path if CRITIC in config.roles else None
    if path is not None and path not in BUILTIN_MODELS:
        try:
            check_model_files(path)
        except ConfigError as error:
            yield from (replace(problem, subject="algorithm.critic_path") for problem in error.problems)


def _reference(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.kl_coefficient > 0 and REF not in config.roles:
        need = "algorithm.kl_coefficient above 0 needs a reference model"
        yield missing_role(config, REF, need, ", or set algorithm.kl_coefficient=0")
    if algorithm.kl_target is not None and algorithm.kl_coefficient == 0:
        yield Problem(
            subject="algorithm.kl_target",
            need="needs algorithm.kl_coefficient above 0, which it changes by factors",
            free="algorithm.kl_coefficient=0",
            remedy="Set algorithm.kl_coefficient=0.05 to start from, or algorithm.kl_target=null",
        )
    if algorithm.kl_in == "reward" and algorithm.kl_coefficient > 0 and algorithm.name == "grpo":
        yield Problem(
            subject="algorithm.kl_in",
            need="must be loss for grpo: an answer has one reward there, its tokens have none",
            free="reward",
            remedy="Set algorithm.kl_in=loss, or algorithm.name=ppo",
        )


def _temperature(found: float, training: bool) -> Iterator[Problem]:
    if found == 0 and training:
        yield Problem(
            subject="rollout.temperature",
            need="must be above 0 for training: greedy answers to a prompt are all equal, and log-probabilities are divided by it",
            free="0",
            remedy="Set rollout.temperature=1.0; evaluation is greedy on its own",
        )
    elif found != 0 and not COOLEST <= found <= HOTTEST:
        need = f"within {COOLEST:g} to {HOTTEST:g}, since logits are divided by it in float32"
        yield Problem(
            subject="rollout.temperature",
            need=f"must be {need}" if training else f"must be 0 (greedy) or {need}",
            free=f"{found:g}",
            remedy="Set it to 1.0, which samples from the model as it is"
            + ("" if training else " (--temperature of a command goes before it)"),
        )


def _filters(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    for key, value, full in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, 0)):
        if value != full:
            yield Problem(
                subject=f"rollout.{key}",
                need=f"must be {full} for training: otherwise sampled and trained probabilities differ",
                free=str(value),
                remedy=f"Set rollout.{key}={full}",
            )


def _batches(config: Config) -> Iterator[Problem]:
    prompts, parts = config.trainer.prompts_per_step, config.trainer.minibatches
    if prompts < parts:
        yield Problem(
            subject="trainer.minibatches",
            need=f"must be at most trainer.prompts_per_step ({prompts}): every mini-batch needs a prompt",
            free=str(parts),
            remedy=f"Set trainer.minibatches={prompts} or lower, or trainer.prompts_per_step={parts} or higher",
        )
    elif prompts % parts:
        divisors = [n for n in range(1, prompts + 1) if prompts % n == 0]
        near_parts = f"{max(n for n in divisors if n < parts)} or {min(n for n in divisors if n > parts)}"
        yield Problem(
            subject="trainer.minibatches",
            need=f"must divide trainer.prompts_per_step ({prompts})",
            free=str(parts),
            remedy=f"Nearest valid: trainer.minibatches={near_parts}, or trainer.prompts_per_step={multiples_near(prompts, parts)}",
        )


def _optimizer(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    pools = {name: role.pool for name, role in config.roles.items()}
    if trainer.offload and pools.get(ACTOR) != pools.get(ROLLOUT):
        yield Problem(
            subject="trainer.offload",
            need="needs actor and rollout in one pool: elsewhere the actor's devices are its own",
            free=f"actor in pool {pools.get(ACTOR)}, rollout in pool {pools.get(ROLLOUT)}",
            remedy="Set trainer.offload=false, or name one pool for both",
        )
    if any(not 0 <= beta < 1 for beta in trainer.betas):
        yield Problem(
            subject="trainer.betas",
            need="both must be at least 0 and below 1",
            free=str(list(trainer.betas)),
            remedy="The default is [0.9, 0.999]",
        )
    sft = config.sft
    if sft is not None and sft.schedule == "linear" and sft.steps <= sft.warmup_steps:
        yield Problem(
            subject="sft.steps",
            need=f"must be above sft.warmup_steps ({sft.warmup_steps}) for sft.schedule=linear",
            free=str(sft.steps),
            remedy="Raise sft.steps, lower sft.warmup_steps, or use sft.schedule=constant",
        )
    if trainer.schedule == "constant":
        return
    if trainer.schedule_steps is None:
        whole_run = trainer.steps * trainer.minibatches * trainer.epochs
        yield Problem(
            subject="trainer.schedule_steps",
            need=f"must be set for trainer.schedule={trainer.schedule}; it is never taken from trainer.steps",
            free="not set",
            remedy=f"Set trainer.schedule_steps={whole_run} to end with this run, or use constant",
        )
    elif trainer.schedule_steps <= trainer.warmup_steps:
        yield Problem(
            subject="trainer.schedule_steps",
            need=f"must be above trainer.warmup_steps ({trainer.warmup_steps}), which it includes",
            free=str(trainer.schedule_steps),
            remedy="Raise trainer.schedule_steps or lower trainer.warmup_steps",
        )
