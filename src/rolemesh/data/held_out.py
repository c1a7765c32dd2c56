"""The held-out prompts, and `open_prompts`, which opens training and held-out prompts so that they share none. Called by sessions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rolemesh.batch import Batch
from rolemesh.config.schema import Config, DataConfig, SourceConfig
from rolemesh.data.filters import DUPLICATE, OVERLONG, Look, PromptFilter, PromptReport, Tokenizer, Tools, prompt_batch
from rolemesh.data.mixture import PromptMixture, merged_summary, shares
from rolemesh.data.prompts import CHECKED_UP_FRONT, PromptStream
from rolemesh.data.sft import refuse_unanswered
from rolemesh.data.sources import ProblemSource, derive_seed, open_source, source_config
from rolemesh.errors import ConfigError

LARGEST_SHARE: Final = 0.2
"""Part of the training prompts that a held-out set of the same file or task may take away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """Fixed prompts for evaluation. Their `draw` numbers are their own (0, 1, ...), unrelated to those of the training stream."""

    name: str
    prompts: Batch
    keys: frozenset[str]
    """Keys of the problems that training must not see: those of `prompts`, and all others of `data.eval`."""
    reports: Sequence[PromptReport]
    """One for each source."""
    summary: dict[str, dict[str, int]]
    """As of `ProblemSource`, where `data.eval` gives other sources than those of training."""

    def __len__(self) -> int:
        return self.prompts.num_rows

    @property
    def report(self) -> PromptReport:
        """The reports of all sources in one."""
        return PromptReport.merged(self.reports)

    def batch(self) -> Batch:
        """All prompts: columns as of `PromptStream.draw`."""
        return self.prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A source with the `data` section as it holds for it."""

    source: ProblemSource
    config: DataConfig
    subject: str
    weight: float


def open_prompts(config: Config, tokenizer: Tokenizer, tools: Tools = ()) -> tuple[PromptMixture, EvalSet]:
    """Training prompts, and held-out ones that share no prompt with them; chat templates are told of `tools`.

    Held-out prompts come from `data.eval`. Without it they come, for each source, from a generated training task by another seed, or are
    set aside from the rows of a training file; then they take at most a fifth of its prompts. Raises ConfigError.
    """
    train, held_out = _open_both(config, tokenizer, tools)
    return _mixture(config, train, "order", tokenizer, held_out.keys, tools), held_out


def open_sft_prompts(config: Config, tokenizer: Tokenizer, tools: Tools = ()) -> PromptMixture:
    """The training prompts in another order, or those of `sft.train`, for supervised batches, without the held-out ones. Its draw numbers
    are its own. Raises ConfigError."""
    train, held_out = _open_both(config, tokenizer, tools)
    if config.sft is not None and config.sft.train is not None:
        train = [_open(config, "train", 0, 1, SourceConfig(path=config.sft.train), None, section="sft")]
    refuse_unanswered(merged_summary([opened.source.summary() for opened in train]))
    return _mixture(config, train, "sft order", tokenizer, held_out.keys, tools)


def _mixture(
    config: Config, train: Sequence[_Opened], purpose: str, tokenizer: Tokenizer, exclude: Collection[str], tools: Tools
) -> PromptMixture:
    streams = [
        PromptStream(opened.config, opened.source, tokenizer, _seed(config, purpose, number), exclude, subject=opened.subject, tools=tools)
        for number, opened in enumerate(train)
    ]
    return PromptMixture(streams, [opened.weight for opened in train])


def _seed(config: Config, purpose: str, number: int) -> int:
    return derive_seed(config.seed, f"{purpose} {number}" if number else purpose)


def _open_both(config: Config, tokenizer: Tokenizer, tools: Tools) -> tuple[list[_Opened], EvalSet]:
    data = config.data
    train = [_open(config, "train", number, len(data.train), source, None) for number, source in enumerate(data.train)]
    given = data.train if data.eval is None else data.eval
    parts = []
    for number, size in enumerate(shares(data.eval_size, [source.weight for source in given])):
        if data.eval is None and not train[number].source.generated:
            held_out = train[number]
        else:
            held_out = _open(config, "eval", number, len(given), given[number], size)
        parts.append(_hold_out(config, held_out, size, train[number].source if data.eval is None else None, tokenizer, number, tools))
    return train, _eval_set(parts, merged_summary([part.source.summary() for part in parts]) if data.eval is not None else {})


def _open(
    config: Config, option: str, number: int, count: int, source: SourceConfig, size: int | None, *, section: str = "data"
) -> _Opened:
    """Open one source of `data.train`, `data.eval` or `sft.train`, which has `count` of them; `size` is that of a generated task, if not
    its own."""
    own = source_config(config.data, source)
    subject = f"{section}.{option}.{number}" if count > 1 else f"{section}.{option}"
    opened = open_source(
        source,
        own,
        subject=subject,
        size=own.size if size is None else size,
        seed=_seed(config, option, number),
        options=subject if count > 1 else "data",
    )
    return _Opened(source=opened, config=own, subject=subject, weight=source.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldOut:
    """What one source gives for evaluation."""

    source: ProblemSource
    looks: list[Look]
    keys: frozenset[str]
    report: PromptReport


def _eval_set(parts: Sequence[_HeldOut], summary: dict[str, dict[str, int]]) -> EvalSet:
    looks = [look for part in parts for look in part.looks]
    return EvalSet(
        name=" + ".join(part.source.name for part in parts),
        prompts=prompt_batch(looks, list(range(len(looks)))),
        keys=frozenset().union(*(part.keys for part in parts)),
        reports=[part.report for part in parts],
        summary=summary,
    )


def _hold_out(
    config: Config, opened: _Opened, size: int, train: ProblemSource | None, tokenizer: Tokenizer, number: int, tools: Tools
) -> _HeldOut:
    """At most `size` prompts of a source; `train` is the source of training prompts that they are taken from, if they are."""
    source = opened.source
    report = PromptReport(source=f"data.eval {source.name}", problems=len(source))
    looks = _look_through(opened.config, source, tokenizer, report, tools)
    kept = [look for look in looks if look.reason is None]
    if not kept:
        raise ConfigError.one("data.eval", "at least one prompt must be left", str(report), "Change the limits of the data section")
    affordable = len(kept) if train is None else _affordable(train, kept)
    chosen = np.random.default_rng(_seed(config, "eval order", number)).permutation(len(kept))[: min(size, affordable)]
    used = [kept[index] for index in sorted(chosen)]
    report.kept, report.unused, report.cut = len(used), len(kept) - len(used), sum(look.cut for look in used)
    keys = frozenset(look.problem.key for look in (looks if train is None else used))
    return _HeldOut(source=source, looks=used, keys=keys, report=report)


def _look_through(data: DataConfig, source: ProblemSource, tokenizer: Tokenizer, report: PromptReport, tools: Tools) -> list[Look]:
    """Look at every problem; of generated ones that are equal only the first stays. Counts the removed ones."""
    prompt_filter = PromptFilter(data, tokenizer, tools=tools)
    looks: dict[str | int, Look] = {}
    for index in range(len(source)):
        problem = source.problem(index)
        if source.generated and problem.key in looks:
            report.removed[DUPLICATE] += 1
            continue
        look = prompt_filter.look(problem)
        look.count(report)
        looks[problem.key if source.generated else index] = look
    overlong = [look.length for look in looks.values() if look.reason == OVERLONG]
    if overlong and data.overlong == "error":
        raise prompt_filter.overlong_error("data.eval", count=len(overlong), checked=len(source), longest=max(overlong))
    return list(looks.values())


def _affordable(train: ProblemSource, kept: list[Look]) -> int:
    """How many of `kept` may be held out: all, or fewer where they would take more than `LARGEST_SHARE` of the training prompts.

    A file that gives both is one such case. One-digit sums are another: there are 200, and 256 draws hold about 145 different ones, which
    would leave 55 to learn from.
    """
    keys = {look.problem.key for look in kept}
    seen = [train.problem(index).key in keys for index in range(min(CHECKED_UP_FRONT, len(train)))]
    share = sum(seen) / len(seen)
    return len(kept) if share <= LARGEST_SHARE else max(1, int(len(kept) * LARGEST_SHARE / share))
