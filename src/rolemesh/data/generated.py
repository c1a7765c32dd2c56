"""Problems that reasoning-gym generates, each from (seed, index). The data side's home of `reasoning_gym`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import reasoning_gym
from reasoning_gym.factory import DATASETS

from rolemesh.data.sources import GENERATED, Problem
from rolemesh.errors import ConfigError
from rolemesh.errors import Problem as Wrong
from rolemesh.protocols.task import dump_task
from rolemesh.registry import nearest

OWN_OPTIONS: Final = {"seed": "it is derived from `seed`", "size": "use data.size"}

HASH_ORDERED: Final = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"})
"""Tasks of reasoning-gym 0.1.25 whose problems depend on the order of Python sets, so on PYTHONHASHSEED."""

PROBED: Final = 4
"""Problems that the fingerprint and the summary look at."""


class GeneratedSource:
    """`size` problems of one reasoning-gym task. Each problem's `task` is the task's name, its options and the whole entry."""

    generated: ClassVar[bool] = True

    def __init__(
        self, task: str, options: Mapping[str, Any], *, size: int, seed: int, subject: str, name: str | None = None, where: str
    ) -> None:
        """`name` is that of the source, by default the task's; `where` the option that holds `options`, for messages."""
        _check_task(task, options, subject, where)
        _check_hash_seed(task, subject)
        self.name = name or task
        self._task = task
        self._options = dict(options)
        self._size = size
        try:
            self._dataset = reasoning_gym.create_dataset(task, seed=seed, size=size, **options)
        except (AssertionError, TypeError, ValueError, KeyError) as error:
            raise ConfigError.one(where, f"must suit the task {task}", f"{self._options}: {error}") from error
        first = [self._entry(index) for index in range(min(PROBED, size))]
        identity = {"task": task, "options": self._options, "size": size, "seed": seed, "first": first}
        self._fingerprint = hashlib.sha256(str(dump_task(identity)).encode()).hexdigest()

    def __len__(self) -> int:
        return self._size

    def _entry(self, index: int) -> dict[str, Any]:
        return dict(self._dataset[index])

    def problem(self, index: int) -> Problem:
        entry = self._entry(index)
        task = {"task": self._task, "options": self._options, "entry": entry}
        return Problem(prompt=entry["question"], answer=entry["answer"], task=task, source=self.name)

    def fingerprint(self) -> str:
        """Covers name, options, size, seed and the first problems, which another version of the generator may make differently."""
        return self._fingerprint

    def summary(self) -> dict[str, dict[str, int]]:
        """Counts of the first problems, taken for all: a task either gives answers or leaves them to its verifier."""
        probe = [self.problem(index) for index in range(min(PROBED, len(self)))]
        answered = len(self) if all(problem.answer is not None for problem in probe) else 0
        return {self.name: {"rows": len(self), "answer": answered, **{f"task.{key}": len(self) for key in probe[0].task}}}


def _check_task(task: str, options: Mapping[str, Any], subject: str, where: str) -> None:
    """Raise ConfigError for an unknown task, and for options that it does not have, all at once."""
    if task not in DATASETS:
        hint = nearest(task, DATASETS)
        remedy = f"Did you mean {GENERATED}{hint}?" if hint else f"Known tasks: {', '.join(sorted(DATASETS))}"
        raise ConfigError.one(subject, "must name a reasoning-gym task", repr(task), remedy)
    known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - set(OWN_OPTIONS)
    problems = []
    for name in options:
        if name in OWN_OPTIONS:
            problems.append(Wrong(subject=f"{where}.{name}", need=f"cannot be set: {OWN_OPTIONS[name]}", free=repr(options[name])))
        elif name not in known:
            hint = nearest(name, known)
            remedy = f"Did you mean {hint}?" if hint else f"It has {', '.join(sorted(known)) or 'none'}"
            problems.append(Wrong(subject=f"{where}.{name}", need=f"the task {task} has no such option", remedy=remedy))
    try:
        json.dumps(dict(options))
    except TypeError as error:
        problems.append(Wrong(subject=where, need="must be plain YAML values", free=str(error)))
    if problems:
        raise ConfigError(problems=problems)


def _check_hash_seed(task: str, subject: str) -> None:
    """Raise ConfigError when another process (a resumed run) would make other problems from the same seed."""
    fixed = os.environ.get("PYTHONHASHSEED", "random") != "random" or not sys.flags.hash_randomization
    if task in HASH_ORDERED and not fixed:
        raise ConfigError.one(
            subject,
            f"the problems of {task} depend on PYTHONHASHSEED, which must be fixed so that a resumed run draws the same ones",
            "not set",
            "Set the environment variable PYTHONHASHSEED=0",
        )
