"""Where problems come from: `open_source` opens an entry of `data.train` or `data.eval` as `ProblemSource`. Called by `data.held_out`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from rolemesh.config.packaged import local_path
from rolemesh.config.schema import DataConfig, SourceConfig
from rolemesh.errors import ConfigError

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A text, or a list of chat messages (`role`, `content`)."""

GENERATED: Final = "reasoning_gym:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a source, before template and tokenizer."""

    prompt: Prompt
    answer: str | None
    task: Mapping[str, Any]
    """What a verifier needs beyond the answer: see `protocols.task` for what it may hold."""
    source: str

    @property
    def key(self) -> str:
        """Equal keys are equal prompts: the text, or the messages as JSON."""
        return self.prompt if isinstance(self.prompt, str) else json.dumps(list(self.prompt), ensure_ascii=False, sort_keys=True)


class ProblemSource(Protocol):
    """Numbered problems. The same index always gives the same problem."""

    name: str
    generated: ClassVar[bool]
    """Problems are made when asked for, in any number; so only a sample of them is checked before the run starts."""

    def __len__(self) -> int: ...

    def problem(self, index: int) -> Problem:
        """The problem at `index`, 0 <= index < len."""
        ...

    def fingerprint(self) -> str:
        """Equal fingerprints promise equal problems at equal indices."""
        ...

    def summary(self) -> dict[str, dict[str, int]]:
        """By value of `Problem.source`: how many `rows` there are, and how many of them have an `answer` and each `task.KEY`."""
        ...


def derive_seed(seed: int, purpose: str) -> int:
    """A seed below 2^31 that shares nothing with those of other seeds and purposes.

    Generators number their problems by seed + index, so neighbouring seeds would give nearly the same problems.
    """
    return int.from_bytes(hashlib.sha256(f"{purpose}:{seed}".encode()).digest()[:4], "big") >> 1


def source_config(data: DataConfig, source: SourceConfig) -> DataConfig:
    """The `data` section as it holds for one source."""
    own = ("options", "size", "prompt_key", "answer_key", "prompt_template")
    return data.model_copy(update={name: value for name in own if (value := getattr(source, name)) is not None})


def open_source(
    source: str | SourceConfig, config: DataConfig, *, subject: str, size: int, seed: int, options: str = "data"
) -> ProblemSource:
    """The source of this path: `reasoning_gym:TASK`, a `.jsonl` or `.parquet` file, or a saved dataset.

    `config` is that of the source (`source_config`); `size` and `seed` are those of a generated task. `subject` is the option for
    messages, and `options` the one that holds keys and settings of the task. Raises ConfigError when the source cannot be used.
    """
    given = SourceConfig(path=source) if isinstance(source, str) else source
    if given.path.startswith(GENERATED):
        from rolemesh.data.generated import GeneratedSource  # imports reasoning-gym, which takes a second

        task = given.path.removeprefix(GENERATED)
        where = f"{options}.options"
        return GeneratedSource(task, config.options, size=size, seed=seed, subject=subject, name=given.name, where=where)
    from rolemesh.data.files import FileSource

    path = local_path(given.path, subject=subject)
    if path.suffix not in (".jsonl", ".parquet") and not path.is_dir():
        raise ConfigError.one(
            subject, f"must be a .jsonl or .parquet file, a saved dataset, or a task like {GENERATED}chain_sum", repr(given.path)
        )
    return FileSource(path, given, config, subject=subject, options=options)
