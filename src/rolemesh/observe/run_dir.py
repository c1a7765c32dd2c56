"""The directory of one run, `<runs_dir>/<name>-<id>/`: the contract between a run and everything that reads it.

A run creates it; `status`, `set`, `export` and other commands, and `--resume`, find it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import psutil

from rolemesh.errors import ConfigError
from rolemesh.observe.files import read_json_lines, write_json, write_text
from rolemesh.registry import did_you_mean

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ID: Final = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]{4}$")
_MARKS: Final = ("status.json", "config.yaml")
"""A folder that holds one of these is taken for a run."""
ACTIVE: Final = ("created", "waiting", "starting", "running")
"""States of a run whose controller lives."""


class _Below:
    """A path below that of the run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, kind: type[RunDirectory]) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of a run's files. Every path is fixed here; whether a file exists yet depends on how far the run has come."""

    path: Path

    config = _Below("config.yaml")
    """The resolved config, YAML."""
    plan = _Below("plan.json")
    """The plan that was launched, JSON."""
    metrics = _Below("metrics.jsonl")
    """JSON objects: one for each step, and one for each supervised step, evaluation and checkpoint; see docs/reference/metrics.md."""
    events = _Below("events.jsonl")
    """State changes and failures, one JSON object each."""
    journal = _Below("journal")
    """Epochs, generations, commits and scores that cannot be repeated; fsynced."""
    cluster = _Below("cluster.json")
    """Where the run's cluster is, JSON: what joins it from another process."""
    trace = _Below("trace.json")
    """Timeline for Perfetto or chrome://tracing."""
    samples = _Below("samples")
    """Folder of Parquet files with samples."""
    checkpoints = _Below("checkpoints")
    """Folder of `step-N/` folders."""
    logs = _Below("logs")
    """Folder with the output of every worker."""
    summary = _Below("summary.json")
    """How the run ended, JSON."""
    status = _Below("status.json")
    """What the run does now, JSON."""
    serving_token = _Below("serving-token")
    """The token that requests from outside need; for its owner's eyes alone."""

    @classmethod
    def create(cls, runs_dir: Path, name: str) -> Self:
        """A new directory. Its id is the time (UTC) and four random hex digits; two runs never get the same one.

        Raises ConfigError when `name` cannot be part of a folder name, or the folder cannot be made.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError.one("name", "must consist of letters, digits, '.', '_' and '-', the first a letter or digit", repr(name))
        path = runs_dir.expanduser() / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            return cls.create(runs_dir, name)
        except (OSError, ValueError) as error:  # ValueError: characters that no path may hold
            need, found = f"it must be possible to make a folder in {str(runs_dir)!r}", f"{type(error).__name__}: {error}"
            raise ConfigError.one("runs_dir", need, found, "Set runs_dir to another folder") from error
        run = cls(path)
        for folder in (run.samples, run.checkpoints, run.logs):
            folder.mkdir()
        run.write_status({"state": "created"})
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing directory. Raises ConfigError when it is no run."""
        if not is_run(path):
            found = "without them" if path.is_dir() else "does not exist"
            raise ConfigError.one("run", f"a run directory holds {' or '.join(_MARKS)}", f"{path} {found}")
        return cls(path)

    @property
    def name(self) -> str:
        """`<name>-<id>`, unique among the runs of a folder."""
        return self.path.resolve().name

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step}"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the only process that works in this directory: a lock that ends with this process, however it ends.

        Raises ConfigError when another one holds it. Where the file system knows no locks nothing is locked.
        """
        with self._locked() as mine:
            if mine is False:
                found = f"controller with pid {self.read_status().get('pid', '?')}"
                raise ConfigError.one("run", f"{self.name} must not be running", found, "Stop it first, or start a new run")
            yield

    def is_running(self) -> bool:
        """True while a process holds this directory, or may: the status says so and the file system knows no locks."""
        with self._locked() as mine:
            if mine is None:
                status = self.read_status()
                return status.get("state") in ACTIVE and psutil.pid_exists(int(status.get("pid", -1)))
            return not mine

    @contextmanager
    def _locked(self) -> Iterator[bool | None]:
        """True with the lock of the directory, False when another process has it, None where there are no locks."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine: bool | None = True
            except OSError as error:
                mine = False if isinstance(error, BlockingIOError) else None
            yield mine
        finally:
            os.close(descriptor)

    def read_status(self) -> dict[str, Any]:
        """The last written status; empty when the run has none. Raises ConfigError for a file that is no status."""
        if not self.status.exists():
            return {}
        try:
            status = json.loads(self.status.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _damaged(self.status, f"{type(error).__name__}: {error}") from error
        if not isinstance(status, dict):
            raise _damaged(self.status, f"a JSON {type(status).__name__}")
        return status

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace the status as a whole; a reader never sees a part of it."""
        write_json(self.status, status)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics. Raises ConfigError for a file that holds something else."""
        try:
            rows = read_json_lines(self.metrics)
        except (OSError, ValueError) as error:
            raise _damaged(self.metrics, f"{type(error).__name__}: {error}") from error
        if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
            raise _damaged(self.metrics, "a line that is no row of a step")
        return rows

    def truncate_metrics(self, after_step: int) -> int:
        """Drop the rows of steps above `after_step`, which a resumed run makes again, and return how many there were."""
        rows = self.read_metrics()
        kept = [row for row in rows if row["step"] <= after_step]
        if len(kept) < len(rows):
            write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))
        return len(rows) - len(kept)


def _damaged(file: Path, found: str) -> ConfigError:
    remedy = "It was changed from outside; repair it or move it away"
    return ConfigError.one("run", f"{file} must be as the run wrote it", found, remedy)


def is_run(path: Path) -> bool:
    """True for a folder that was made by a run."""
    return any((path / mark).is_file() for mark in _MARKS)


def owner_of(checkpoint: Path) -> RunDirectory | None:
    """The run among whose checkpoints this path lies, whether or not it is there; None where it is no such path."""
    above = checkpoint.resolve().parents
    owner = RunDirectory(above[1]) if len(above) > 1 else None
    return owner if owner is not None and owner.checkpoints == above[0] and is_run(owner.path) else None


def list_runs(runs_dir: Path) -> list[RunDirectory]:
    """The runs of a folder, oldest first by the time in their names; folders without one come first."""
    runs_dir = runs_dir.expanduser()
    if not runs_dir.is_dir():
        return []
    return [RunDirectory(path) for path in sorted(filter(is_run, runs_dir.iterdir()), key=_created)]


def _created(path: Path) -> tuple[str, int]:
    found = _ID.search(path.name)
    # Within one second the time of the last change of the config decides; it is written once, at the start.
    mark = next(path / mark for mark in reversed(_MARKS) if (path / mark).is_file())
    return (found.group(1) if found else "", mark.stat().st_mtime_ns)


def find_run(runs_dir: Path, run: str | None) -> RunDirectory:
    """A run by path, by name, the newest with this name before the id (`demo`), by the beginning of its name if only one run has it, or
    the newest of all when `run` is None.

    Raises ConfigError that lists the candidates otherwise.
    """
    if run is not None and is_run(path := Path(run).expanduser()):
        return RunDirectory(path)
    runs = list_runs(runs_dir)
    if run is None:
        if not runs:
            raise ConfigError.one("run", "there must be a run to work on", f"none in {runs_dir}", "Start one with `rolemesh train`")
        return runs[-1]
    exact = [found for found in runs if found.name == run]
    of_recipe = [found for found in runs if _ID.sub("", found.name) == run]
    matching = exact or of_recipe[-1:] or [found for found in runs if found.name.startswith(run)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        names = ", ".join(found.name for found in matching[-5:])
        raise ConfigError.one("run", f"{run!r} must fit one run", f"{len(matching)}: {names}", "Write more of the name")
    if (owner := owner_of(path := Path(run).expanduser())) is not None:
        there = ", ".join(sorted((found.name for found in owner.checkpoints.glob("step-*")), key=lambda name: (len(name), name))) or "none"
        found = f"the checkpoints of {owner.name}: {there}; trainer.keep_checkpoints removes older ones"
        remedy = f"Give {owner.path}, whose newest checkpoint is taken"
        raise ConfigError.one("run", f"{run!r} must be a run, not a checkpoint of one", found, remedy)
    known = [one.name for one in runs]
    found = f"{len(known)} runs, the newest {', '.join(known[:-6:-1])}" if known else "no runs"
    raise ConfigError.one("run", f"no run in {runs_dir} is called {run!r}", found, did_you_mean(run, known).rstrip())
