"""Runs that are not the whole loop: supervised fine-tuning, evaluation, answering prompts. Each opens only the roles that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rolemesh.batch import Batch
from rolemesh.config.schema import Config
from rolemesh.errors import ConfigError
from rolemesh.models import encode_prompt
from rolemesh.observe import RunDirectory, write_json
from rolemesh.plan import local_inventory
from rolemesh.runtime import Backend, CallRecord
from rolemesh.training import evaluation, phases
from rolemesh.training.launch import backend_for, open_run, run_on
from rolemesh.training.preflight import Prepared, prepare
from rolemesh.training.recorder import Display
from rolemesh.training.session import Session


def run_sft(config: Config, display: Display) -> Path:
    """Fine-tune by the `sft` section; returns the Hugging Face folder that it leaves."""
    inventory = local_inventory()
    prepared = prepare(config, inventory)
    directory = RunDirectory.create(config.runs_dir, config.name)
    backend = backend_for(config, inventory)

    async def main() -> Path:
        async with open_run(prepared, directory, backend, display, roles=["actor"]) as run:
            await phases.warm_start(run)
            await phases.save(run)
            folder = directory.checkpoint(0) / "model"
            write_json(directory.summary, {"run": directory.name, "state": "finished", "steps": 0, "model": str(folder)})
            return folder

    return run_on(backend, main())


def run_evaluation(config: Config) -> dict[str, float]:
    """Held-out accuracy of the config's model."""
    inventory = local_inventory()
    prepared = prepare(config, inventory, training=False, warm_start=False)
    backend = backend_for(config, inventory)

    async def main() -> dict[str, float]:
        async with _session(prepared, backend, ["rollout", "reward"]) as session:
            await session.groups["rollout"].serve_folder(0)
            return await evaluation.held_out(session, prepared.eval_set, 0)

    return run_on(backend, main())


def run_generation(config: Config, prompts: Sequence[str], temperature: float) -> list[str]:
    """Answers to prompts, in their order. Prompts go through the recipe's template. Raises ConfigError for one that is too long."""
    inventory = local_inventory()
    prepared = prepare(config, inventory, training=False, warm_start=False)
    backend = backend_for(config, inventory)
    ids = [_prompt_ids(prepared, number, text) for number, text in enumerate(prompts)]

    async def main() -> list[str]:
        async with _session(prepared, backend, ["rollout"]) as session:
            await session.groups["rollout"].serve_folder(0)
            rows = {"draw": np.arange(len(ids)), "sample": np.zeros(len(ids), dtype=np.int64), "prompt_ids": ids}
            batch = session.store(Batch.from_columns(rows))
            written = await session.groups["rollout"].generate(batch, version=0, temperature=temperature, seed=config.seed)
            return list((await session.read(written, ["response"])).scalars("response"))

    return run_on(backend, main())


def _prompt_ids(prepared: Prepared, number: int, text: str) -> list[int]:
    data = prepared.config.data
    ids = encode_prompt(prepared.tokenizer, data.prompt_template.replace("{prompt}", text), chat=data.chat)
    if len(ids) > data.max_prompt_tokens:
        raise ConfigError.one(
            f"prompt {number}", f"at most data.max_prompt_tokens = {data.max_prompt_tokens} tokens", f"{len(ids)}", "Shorten the prompt"
        )
    return ids


def _session(prepared: Prepared, backend: Backend, roles: Sequence[str]) -> Session:
    return Session(
        prepared.config, prepared.plan, backend, run_id=f"task-{id(prepared):x}", run_dir=None, tokenizer=prepared.tokenizer,
        observer=_ignore_call, announce=_ignore_event, roles=roles,
    )  # fmt: skip


def _ignore_call(record: CallRecord) -> None:
    """Tasks without a run directory record nothing."""


def _ignore_event(stage: str, subject: str, kind: str) -> None:
    """As above."""
