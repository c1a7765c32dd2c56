"""Options that may be changed while a run is under way, by `rolemesh set RUN key=value` from any process of its cluster.

The wish goes to the run's KV store under `set/`, the controller looks at it, answers under `answers/`, and takes it up at the next step.
From then on it is part of the run's config, for a resume too.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from typing import Any, Final

from rolemesh.config import check_config, dump_config, load_config
from rolemesh.config.options import option_names
from rolemesh.errors import ConfigError, DeadlineExceeded, Problem
from rolemesh.observe import RunDirectory, write_text
from rolemesh.registry import nearest
from rolemesh.runtime import KvStore, beside, create_backend
from rolemesh.training.run import TrainingRun

CHANGEABLE: Final = (
    "trainer.steps",
    "trainer.save_every",
    "trainer.keep_checkpoints",
    "trainer.eval_every",
    "trainer.save_samples_every",
    "algorithm.kl_coefficient",
    "algorithm.kl_target",
    "rollout.temperature",
)
"""What the controller alone reads, anew in every step."""
WISHES, ANSWERS = "set/", "answers/"
QUIET_SECONDS = 3600.0


def check_wishes(overrides: Sequence[str]) -> None:
    """Raise ConfigError for overrides that no running run takes."""
    problems = []
    for text in overrides:
        key = text.partition("=")[0].strip()
        if "=" not in text or key not in CHANGEABLE:
            hint = None if key in option_names() else nearest(key, CHANGEABLE)
            remedy = (f"Did you mean {hint!r}? " if hint else "") + "Stop the run and give others with --resume"
            problems.append(Problem(subject=text, need=f"key=value, where key is one of {', '.join(CHANGEABLE)}", free=key, remedy=remedy))
    if problems or not overrides:
        raise ConfigError(problems=problems or [Problem(subject="set", need="at least one key=value", free="none")])


def change(directory: RunDirectory, overrides: Sequence[str], deadline: float) -> int:
    """Change options of a run that is under way. Returns the step from which on they hold. Raises ConfigError when it is not running or
    refuses them, and DeadlineExceeded when it does not answer."""
    check_wishes(overrides)
    address = json.loads(directory.cluster.read_text(encoding="utf-8"))["address"] if directory.cluster.exists() else ""
    if not directory.is_running() or not address:
        found = f"{directory.name} " + ("runs in one process (backend local)" if directory.is_running() else "is not running")
        raise ConfigError.one("run", "must be running on a Ray cluster", found, "Change it with rolemesh train --resume RUN key=value")
    backend = create_backend("ray", address=address)

    async def asked() -> int:
        async with KvStore(backend.find_store(directory.name), owner="rolemesh set") as store:
            return await ask(store, overrides, deadline)

    try:
        return backend.run(asked())
    finally:
        backend.stop()


async def ask(store: KvStore, overrides: Sequence[str], deadline: float) -> int:
    """Put a wish into the store of a run and wait for its answer, as `change` does."""
    wish = uuid.uuid4().hex
    await store.put(f"{WISHES}{wish}", list(overrides))
    answer = await store.get(f"{ANSWERS}{wish}", deadline)
    await store.delete(f"{ANSWERS}{wish}")
    if "problems" in answer:
        raise ConfigError(problems=[Problem(**problem) for problem in answer["problems"]])
    return int(answer["step"])


def followed(run: TrainingRun) -> AbstractAsyncContextManager[None]:
    """Look at wishes meanwhile."""
    return beside(_follow(run), run.recorder.note, "options cannot be changed")


async def _follow(run: TrainingRun) -> None:
    store = run.session.kv
    wishes = store.watch(WISHES)
    while True:
        try:
            change = await wishes.next(QUIET_SECONDS)
        except DeadlineExceeded:
            continue  # nobody wished anything
        if change.kind == "put":
            await store.put(f"{ANSWERS}{change.key.removeprefix(WISHES)}", _answer(run, change.value))
            await store.delete(change.key)  # the next controller of this run has it in its config


def _answer(run: TrainingRun, overrides: Sequence[str]) -> dict[str, Any]:
    step = run.recorder.step + 1
    try:
        check_wishes(overrides)
        wished = load_config(str(run.directory.config), overrides)
        if problems := check_config(wished):
            raise ConfigError(problems=problems)
        steps = (run.wished or run.config).trainer.steps
        if wished.trainer.steps < min(step, steps):  # the last step is the one that is evaluated and saved
            raise ConfigError.one(
                "trainer.steps",
                f"at least {step}, since step {step - 1} is under way or done",
                str(wished.trainer.steps),
                f"Set trainer.steps={step} to end soon, with an evaluation and a checkpoint",
            )
    except ConfigError as error:
        return {"problems": [asdict(problem) for problem in error.problems]}
    write_text(run.directory.config, dump_config(wished))
    run.wished = wished
    run.recorder.note(f"from step {step} on: {', '.join(overrides)}")
    return {"step": step}
