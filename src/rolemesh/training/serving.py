"""The endpoint of a run (`rollout.serve`): where it listens, its token, and what is counted of it. `serving/` has the server itself."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolemesh.errors import ConfigError
from rolemesh.names import ROLLOUT
from rolemesh.roles.rollout_manager import RolloutManager

if TYPE_CHECKING:
    from rolemesh.training.run import TrainingRun

ENDED = "the run has ended, and its policy answers no more"


@asynccontextmanager
async def served(run: TrainingRun) -> AsyncIterator[None]:
    """Answer requests from outside meanwhile, if the config says so."""
    serve, rollout = run.config.rollout.serve, run.session.groups.get(ROLLOUT)
    if serve is None or not isinstance(rollout, RolloutManager):
        yield
        return
    if not rollout.takes_requests:
        need = "roles.rollout must have tensor_parallel 1, and a worker class that answers single requests, as its built-in one"
        raise ConfigError.one("rollout.serve", need, f"{rollout.worker_class.__qualname__}, tensor_parallel {rollout.tensor_parallel}")
    from rolemesh.models import stop_token_ids
    from rolemesh.serving import Served, Server  # an HTTP server is loaded where one is wanted

    config, tokenizer = run.config, run.session.tokenizer
    token = run.directory.serving_token
    policy = Served(
        model=config.name, tokenizer=tokenizer, stop_token_ids=stop_token_ids(tokenizer, config.model), answering=rollout,
    )  # fmt: skip
    try:
        async with Server(policy, config, serve, _token(token)).listening() as address:
            run.serving = address
            run.recorder.events.write("run", "serving", "listening", message=address)
            run.recorder.display.note(f"serving {config.name} at {address}, token in {token}")
            try:
                yield
            finally:
                run.serving = ""
                rollout.requests.close(ENDED)
    finally:
        await rollout.requests.stop()


def _token(file: Path) -> str:
    """The token of the run, which a resumed one keeps. Only this user may read it."""
    from rolemesh.serving.server import new_token

    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
            written.write(new_token() + "\n")
    except FileExistsError:
        file.chmod(0o600)
    token = file.read_text().strip()
    if not token:
        raise ConfigError.one("rollout.serve", f"{file} must hold a token", "an empty file", "Delete it; a new one is made then")
    return token


def told(run: TrainingRun) -> dict[str, Any]:
    """For `status.json`: the address, and what was counted since the start."""
    rollout = run.session.groups.get(ROLLOUT)
    if not run.serving or not isinstance(rollout, RolloutManager):
        return {}
    counts = {name.partition("/")[2]: count for name, count in sorted(rollout.requests.counts.items())}
    return {"serving": {"address": run.serving, "under_way": rollout.requests.under_way, **counts}}


def record(run: TrainingRun) -> None:
    """What was counted since the last step goes into the row of this one."""
    rollout = run.session.groups[ROLLOUT]
    if isinstance(rollout, RolloutManager):
        run.recorder.metrics.merge(rollout.requests.metrics())
