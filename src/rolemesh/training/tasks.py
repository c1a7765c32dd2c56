"""Runs that are not the whole loop: supervised fine-tuning, evaluation, answering prompts. Each opens only the roles that it needs."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rolemesh.batch import Batch
from rolemesh.config.schema import Config, ServeConfig
from rolemesh.environments import tool_schemas
from rolemesh.errors import ConfigError, Problem
from rolemesh.models import encode_prompt
from rolemesh.names import ROLLOUT
from rolemesh.observe import write_json
from rolemesh.roles.rollout_manager import RolloutManager
from rolemesh.runtime import Backend, CallRecord
from rolemesh.training import checkpoint, evaluation, phases, saving
from rolemesh.training.admission import Wait
from rolemesh.training.launch import backend_for, open_run, own_inventory, ready, run_directory, run_on, tell_wait
from rolemesh.training.preflight import Checked, Prepared, check
from rolemesh.training.recorder import Display
from rolemesh.training.session import Session

BRING_BACK_SECONDS = 1.0
"""Between two looks whether a replica that serves no more can come back, where there are no rounds."""


def _ignore_wait(wait: Wait) -> None:
    """Whoever evaluates from a program sees the outcome."""


def run_sft(config: Config, display: Display) -> Path:
    """Fine-tune by the `sft` section; returns the Hugging Face folder that it leaves."""
    inventory = own_inventory(config)
    checked = check(config, inventory)
    with run_directory(config) as directory:
        backend = backend_for(config, inventory, directory.name)

        async def main() -> Path:
            prepared = await ready(checked, backend, inventory, directory.name, lambda wait: tell_wait(directory, config, display, wait))
            async with open_run(prepared, directory, backend, display, roles=["actor"]) as run:
                await phases.warm_start(run)
                await phases.save(run)
                await saving.end(run)
                folder = directory.checkpoint(0) / checkpoint.MODEL
                write_json(directory.summary, {"run": directory.name, "state": "finished", "steps": 0, "model": str(folder)})
                return folder

        return run_on(backend, main())


def run_evaluation(
    config: Config, sampling: evaluation.Sampling | None = None, *, tell: Callable[[Wait], None] = _ignore_wait
) -> dict[str, float]:
    """How well the config's model answers the held-out prompts: greedily, or by several samples a prompt. `tell` hears of a wait for
    room on a cluster."""
    inventory = own_inventory(config)
    roles = ["rollout", "reward"]
    checked = check(config, inventory, roles=roles)
    run = f"{config.name}-{secrets.token_hex(6)}"
    backend = backend_for(config, inventory, run)

    async def main() -> dict[str, float]:
        prepared = await ready(checked, backend, inventory, run, tell)
        async with _session(prepared, backend, run, roles) as session:
            await session.groups["rollout"].serve_folder(0)
            if sampling is None:
                return await evaluation.held_out(session, prepared.eval_set, 0)
            return await evaluation.sampled(session, prepared.eval_set, 0, sampling)

    return run_on(backend, main())


def run_serving(config: Config, display: Display) -> None:
    """Answer requests from outside with the config's model until this process is told to end, as a run that is in training does."""
    serve = config.rollout.serve or ServeConfig()
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"serve": serve})})
    inventory = own_inventory(config)
    checked = check(config, inventory, roles=[ROLLOUT])
    with run_directory(config.model_copy(update={"name": f"{config.name}-serve"})) as directory:  # whoever asks for the run means the other
        backend = backend_for(config, inventory, directory.name)

        async def main() -> None:
            prepared = await ready(checked, backend, inventory, directory.name, lambda wait: tell_wait(directory, config, display, wait))
            async with open_run(prepared, directory, backend, display, roles=[ROLLOUT]) as run:
                rollout = run.session.groups[ROLLOUT]
                assert isinstance(rollout, RolloutManager)
                await rollout.serve_folder(0)
                while True:
                    await backend.sleep(BRING_BACK_SECONDS)
                    await rollout.bring_back()

        run_on(backend, main())


def run_generation(config: Config, prompts: Sequence[str], temperature: float) -> list[str]:
    """Answers to prompts, in their order, with the environment's part where there is one. Prompts go through the recipe's template.

    Raises ConfigError with all prompts that cannot be used, and for a temperature that is no number of at least 0.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError.one("temperature", "must be a number of at least 0", str(temperature), "0 is greedy, 1 samples as in training")
    inventory = own_inventory(config)
    checked = check(config, inventory, roles=["rollout"])
    ids = _encoded(checked, prompts)
    run = f"{config.name}-{secrets.token_hex(6)}"
    backend = backend_for(config, inventory, run)

    async def main() -> list[str]:
        prepared = await ready(checked, backend, inventory, run, _ignore_wait)
        async with _session(prepared, backend, run, ["rollout"]) as session:
            await session.groups["rollout"].serve_folder(0)
            columns: dict[str, Any] = {"draw": np.arange(len(ids)), "sample": np.zeros(len(ids), dtype=np.int64), "prompt_ids": ids}
            columns |= {"prompt": list(prompts), "source": ["generate"] * len(ids), "answer": [None] * len(ids), "task": [None] * len(ids)}
            batch = session.store(Batch.from_columns(columns))
            written = await session.groups["rollout"].generate(batch, version=0, temperature=temperature, seed=config.seed)
            return list((await session.read(written, ["response"])).scalars("response"))

    return run_on(backend, main())


def _encoded(prepared: Checked, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of every prompt. Raises ConfigError with all that cannot be used."""
    if not prompts:
        raise ConfigError.one("prompts", "there must be at least one", "none", "Give them as arguments, or on standard input, a line each")
    data, problems, encoded = prepared.config.data, [], []
    form: dict[str, Any] = {"chat": data.chat, "tools": tool_schemas(prepared.config.environment)}
    for number, text in enumerate(prompts):
        subject = f"prompt {number}"
        try:
            text.encode()  # what the shell could not decode is no text
        except UnicodeEncodeError as error:
            problems.append(Problem(subject=subject, need="must be valid Unicode", free=str(error), remedy="Check its encoding"))
            continue
        ids = encode_prompt(prepared.tokenizer, data.prompt_template.replace("{prompt}", text), **form)
        if not 0 < len(ids) <= data.max_prompt_tokens:
            need = f"1 to data.max_prompt_tokens = {data.max_prompt_tokens} tokens"
            problems.append(Problem(subject=subject, need=need, free=str(len(ids)), remedy="Change the prompt"))
        encoded.append(ids)
    if problems:
        raise ConfigError(problems=problems)
    return encoded


def _session(prepared: Prepared, backend: Backend, run: str, roles: Sequence[str]) -> Session:
    return Session(
        prepared.config, prepared.plan, backend, run_id=run, run_dir=None, tokenizer=prepared.tokenizer,
        observer=_ignore_call, announce=_ignore_event, roles=roles,
    )  # fmt: skip


def _ignore_call(record: CallRecord) -> None:
    """Tasks without a run directory record nothing."""


def _ignore_event(stage: str, subject: str, kind: str) -> None:
    """As above."""
