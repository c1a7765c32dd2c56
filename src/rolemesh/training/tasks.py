"""Runs that are not the whole loop: supervised fine-tuning, evaluation, answering prompts. Each opens only the roles that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rolemesh.batch import Batch
from rolemesh.config.schema import Config
from rolemesh.models import encode_prompt
from rolemesh.observe import RunDirectory
from rolemesh.plan import local_inventory
from rolemesh.runtime import Backend, CallRecord
from rolemesh.training import evaluation, phases
from rolemesh.training.launch import backend_for, open_run, stop_backend
from rolemesh.training.preflight import Prepared, prepare
from rolemesh.training.recorder import Display
from rolemesh.training.session import Session


def run_sft(config: Config, display: Display) -> Path:
    """Fine-tune by the `sft` section; returns the Hugging Face folder that it leaves."""
    prepared = prepare(config, local_inventory())
    directory = RunDirectory.create(config.runs_dir, config.name)
    backend = backend_for(config)

    async def main() -> Path:
        async with open_run(prepared, directory, backend, display, roles=["actor"]) as run:
            await phases.warm_start(run)
            await phases.save(run)
            return run.directory.checkpoint(0) / "model"

    try:
        return backend.run(main())
    finally:
        stop_backend(backend)


def run_evaluation(config: Config) -> dict[str, float]:
    """Held-out accuracy of the config's model."""
    prepared = prepare(config, local_inventory(), training=False)
    backend = backend_for(config)

    async def main() -> dict[str, float]:
        async with _session(prepared, backend, ["rollout", "reward"]) as session:
            await session.groups["rollout"].serve_folder(0)
            return await evaluation.held_out(session, prepared.eval_set, 0)

    try:
        return backend.run(main())
    finally:
        stop_backend(backend)


def run_generation(config: Config, prompts: Sequence[str], temperature: float) -> list[str]:
    """Answers to prompts, in their order. Prompts go through the recipe's template."""
    prepared = prepare(config, local_inventory(), training=False)
    backend = backend_for(config)
    ids = [encode_prompt(prepared.tokenizer, config.data.prompt_template.format(prompt=text), chat=config.data.chat) for text in prompts]

    async def main() -> list[str]:
        async with _session(prepared, backend, ["rollout"]) as session:
            await session.groups["rollout"].serve_folder(0)
            rows = {"draw": np.arange(len(ids)), "sample": np.zeros(len(ids), dtype=np.int64), "prompt_ids": ids}
            batch = session.store(Batch.from_columns(rows))
            written = await session.groups["rollout"].generate(batch, version=0, temperature=temperature, seed=config.seed)
            return list((await session.read(written, ["response"])).scalars("response"))

    try:
        return backend.run(main())
    finally:
        stop_backend(backend)


def _session(prepared: Prepared, backend: Backend, roles: Sequence[str]) -> Session:
    return Session(
        prepared.config, prepared.plan, backend, run_id=f"task-{id(prepared):x}", run_dir=None, tokenizer=prepared.tokenizer,
        observer=_ignore_call, announce=_ignore_event, roles=roles,
    )  # fmt: skip


def _ignore_call(record: CallRecord) -> None:
    """Tasks without a run directory record nothing."""


def _ignore_event(stage: str, subject: str, kind: str) -> None:
    """As above."""
