"""Runs that are not the whole loop: supervised fine-tuning, evaluation, answering prompts. Each opens only the roles that it needs."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rolemesh.batch import Batch
from rolemesh.config.schema import Config, ServeConfig
from rolemesh.environments import tool_schemas
from rolemesh.errors import ConfigError, Problem
from rolemesh.models import encode_prompt
from rolemesh.names import ROLLOUT
from rolemesh.observe import write_json
from rolemesh.roles.rollout_manager import RolloutManager
from rolemesh.runtime import Backend
from rolemesh.training import checkpoint, evaluation, phases, saving
from rolemesh.training.admission import Wait
from rolemesh.training.launch import launch, open_run, own_inventory, run_directory, tell_wait
from rolemesh.training.preflight import Checked, Prepared, check
from rolemesh.training.recorder import Display
from rolemesh.training.run import TrainingRun
from rolemesh.training.session import Session, nobody

T = TypeVar("T")
BRING_BACK_SECONDS = 1.0
"""Between two looks whether a replica that serves no more can come back, where there are no rounds."""


def run_sft(config: Config, display: Display) -> Path:
    """Fine-tune by the `sft` section; returns the Hugging Face folder that it leaves."""

    async def work(run: TrainingRun) -> Path:
        await phases.warm_start(run)
        await phases.save(run)
        await saving.end(run)
        folder = run.directory.checkpoint(0) / checkpoint.MODEL
        write_json(run.directory.summary, {"run": run.directory.name, "state": "finished", "steps": 0, "model": str(folder)})
        return folder

    return _in_directory(check(config, own_inventory(config)), config.name, display, ["actor"], work)


def run_evaluation(
    config: Config, sampling: evaluation.Sampling | None = None, *, tell: Callable[[Wait], None] = nobody
) -> dict[str, float]:
    """How well the config's model answers the held-out prompts: greedily, or by several samples a prompt. `tell` hears of a wait for
    room on a cluster."""
    roles = ["rollout", "reward"]
    if sampling is not None:
        config = _at(config, sampling.temperature)
    checked = check(config, own_inventory(config), roles=roles)

    async def work(session: Session) -> dict[str, float]:
        if sampling is None:
            return await evaluation.held_out(session, checked.eval_set, 0)
        return await evaluation.sampled(session, checked.eval_set, 0, sampling)

    return _in_session(checked, roles, tell, work)


def run_serving(config: Config, display: Display) -> None:
    """Answer requests from outside with the config's model until this process is told to end, as a run that is in training does."""
    serve = config.rollout.serve or ServeConfig()
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"serve": serve})})

    async def work(run: TrainingRun) -> None:
        rollout = run.session.groups[ROLLOUT]
        assert isinstance(rollout, RolloutManager)
        await rollout.serve_folder(0)
        run.recorder.begin_stage("serving", 1)
        while True:
            await run.session.backend.sleep(BRING_BACK_SECONDS)
            await rollout.bring_back()

    checked = check(config, own_inventory(config), roles=[ROLLOUT])
    _in_directory(checked, f"{config.name}-serve", display, [ROLLOUT], work)  # whoever asks for the run by its name means the other


def run_generation(config: Config, prompts: Sequence[str], temperature: float) -> list[str]:
    """Answers to prompts, in their order, with the environment's part where there is one. Prompts go through the recipe's template.

    Raises ConfigError with all prompts that cannot be used, and for a temperature that no engine, or not this one, samples at.
    """
    config = _at(config, temperature)
    checked = check(config, own_inventory(config), roles=[ROLLOUT])
    ids = _encoded(checked, prompts)

    async def work(session: Session) -> list[str]:
        columns: dict[str, Any] = {"draw": np.arange(len(ids)), "sample": np.zeros(len(ids), dtype=np.int64), "prompt_ids": ids}
        columns |= {"prompt": list(prompts), "source": ["generate"] * len(ids), "answer": [None] * len(ids), "task": [None] * len(ids)}
        batch = session.store(Batch.from_columns(columns))
        written = await session.groups[ROLLOUT].generate(batch, version=0, temperature=temperature, seed=config.seed)
        return list((await session.read(written, ["response"])).scalars("response"))

    return _in_session(checked, [ROLLOUT], nobody, work)


def _at(config: Config, temperature: float) -> Config:
    """The config with the temperature that is asked for, so that it is checked as any other."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": temperature})})


def _in_directory(checked: Checked, name: str, display: Display, roles: Sequence[str], work: Callable[[TrainingRun], Awaitable[T]]) -> T:
    """Work with a run of these roles that has a directory, whose name begins so."""
    config = checked.config
    with run_directory(config.model_copy(update={"name": name})) as directory:

        async def main(prepared: Prepared, backend: Backend) -> T:
            async with open_run(prepared, directory, backend, display, roles=roles) as run:
                return await work(run)

        return launch(checked, directory.name, partial(tell_wait, directory, display), main)


def _in_session(checked: Checked, roles: Sequence[str], tell: Callable[[Wait], None], work: Callable[[Session], Awaitable[T]]) -> T:
    """Work with engines that serve the model's own weights as version 0, and leave no directory."""
    run = f"{checked.config.name}-{secrets.token_hex(6)}"

    async def main(prepared: Prepared, backend: Backend) -> T:
        session = Session(prepared.config, prepared.plan, backend, run_id=run, run_dir=None, tokenizer=prepared.tokenizer, roles=roles)
        async with session:
            await session.groups[ROLLOUT].serve_folder(0)
            return await work(session)

    return launch(checked, run, tell, main)


def _encoded(checked: Checked, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of every prompt. Raises ConfigError with all that cannot be used."""
    if not prompts:
        raise ConfigError.one("prompts", "there must be at least one", "none", "Give them as arguments, or on standard input, a line each")
    data, problems, encoded = checked.config.data, [], []
    form: dict[str, Any] = {"chat": data.chat, "tools": tool_schemas(checked.config.environment)}
    for number, text in enumerate(prompts):
        subject = f"prompt {number}"
        try:
            text.encode()  # what the shell could not decode is no text
        except UnicodeEncodeError as error:
            problems.append(Problem(subject=subject, need="must be valid Unicode", free=str(error), remedy="Check its encoding"))
            continue
        ids = encode_prompt(checked.tokenizer, data.prompt_template.replace("{prompt}", text), **form)
        if not 0 < len(ids) <= data.max_prompt_tokens:
            need = f"1 to data.max_prompt_tokens = {data.max_prompt_tokens} tokens"
            problems.append(Problem(subject=subject, need=need, free=str(len(ids)), remedy="Change the prompt"))
        encoded.append(ids)
    if problems:
        raise ConfigError(problems=problems)
    return encoded
