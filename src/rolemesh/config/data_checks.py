"""Rules of the `data` section, a part of `checks.check_config`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rolemesh.config.packaged import PACKAGE, local_path
from rolemesh.config.schema import Config, SourceConfig
from rolemesh.errors import ConfigError, Problem
from rolemesh.registry import did_you_mean

DATA_SUFFIXES: Final = (".parquet", ".jsonl")
REASONING_GYM: Final = "reasoning_gym"

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
_SCHEME = re.compile(r"^([A-Za-z_][A-Za-z0-9_-]*):(.*)$")


def data_problems(config: Config) -> Iterator[Problem]:
    """What is wrong with the sources of `data.train` and `data.eval`. Looks whether files exist, and reads none."""
    data = config.data
    yield from _sources("data.train", data.train)
    if data.eval is not None:
        yield from _sources("data.eval", data.eval)
    if config.sft is not None and config.sft.train is not None:
        yield from _source("sft.train", config.sft.train)
    templates = [("data.prompt_template", data.prompt_template)]
    for option, sources in (("data.train", data.train), ("data.eval", data.eval or ())):
        templates += [(f"{option}.{number}.prompt_template", source.prompt_template or "{prompt}") for number, source in enumerate(sources)]
    for subject, template in templates:
        if "{prompt}" not in template:
            yield Problem(
                subject=subject,
                need="must contain {prompt}, which is replaced by the prompt",
                free=repr(template),
                remedy=f"Write for example {subject}='Question: {{prompt}} Answer:'",
            )


def _sources(option: str, sources: Sequence[SourceConfig]) -> Iterator[Problem]:
    if not sources:
        yield Problem(subject=option, need="at least one source is needed", free="none", remedy=f"Write {option}=FILE.jsonl")
    for number, source in enumerate(sources):
        yield from _source(option if len(sources) == 1 else f"{option}.{number}", source.path)
    for label, count in Counter(source.label for source in sources).items():
        if count > 1:
            yield Problem(
                subject=option,
                need="sources must have different names",
                free=f"{count} of the name {label!r}",
                remedy=f"Set {option}.<n>.name for these",
            )


def _source(subject: str, text: str) -> Iterator[Problem]:
    try:
        path = local_path(text, subject=subject)
    except ConfigError as error:
        yield from error.problems
        return
    scheme = _SCHEME.match(text)
    if scheme and scheme[1] != PACKAGE.rstrip(":") and not path.exists():
        yield from _task(subject, scheme[1], scheme[2])
    elif path.is_dir():
        yield from _saved_dataset(subject, path)
    elif path.suffix not in DATA_SUFFIXES:
        task = f" For a reasoning-gym task write {REASONING_GYM}:{text}" if _WORD.match(text) else ""
        yield Problem(
            subject=subject,
            need=f"must be a {' or '.join(DATA_SUFFIXES)} file, the folder of a saved dataset, or a task like {REASONING_GYM}:chain_sum",
            free=repr(text),
            remedy=f"Convert the file to one of these formats.{task}",
        )
    elif not path.is_file():
        guess = did_you_mean(path.name, [other.name for other in path.parent.glob("*")])
        yield Problem(
            subject=subject,
            need="the file must exist",
            free=f"no file {text!r}",
            remedy=f"{guess}Paths are relative to the folder where the command runs ({Path.cwd()})",
        )


def _saved_dataset(subject: str, folder: Path) -> Iterator[Problem]:
    """A folder must be what `save_to_disk` of Hugging Face `datasets` leaves for one split."""
    if (folder / "state.json").is_file():
        return
    splits = sorted(state.parent.name for state in folder.glob("*/state.json"))
    yield Problem(
        subject=subject,
        need="a folder must hold one saved dataset (state.json)",
        free=f"the splits {', '.join(splits)}" if splits else f"no state.json in {folder}",
        remedy=f"Name one of them: {subject}={folder / splits[0]}" if splits else "Save it with `dataset.save_to_disk(folder)`",
    )


def _task(subject: str, scheme: str, task: str) -> Iterator[Problem]:
    if scheme != REASONING_GYM:
        yield Problem(
            subject=subject,
            need=f"the part before the colon must be {REASONING_GYM}",
            free=repr(scheme),
            remedy=f"Write {REASONING_GYM}:{task or 'chain_sum'}, or the path of a {' or '.join(DATA_SUFFIXES)} file",
        )
    elif not task.isidentifier():
        yield Problem(
            subject=subject,
            need="must name a reasoning-gym task after the colon",
            free=repr(task),
            remedy=f"Write for example {REASONING_GYM}:chain_sum",
        )
