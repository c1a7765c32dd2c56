"""The held-out prompts, and `open_prompts`, which opens training and held-out prompts so that they share none. Called by sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from rolemesh.batch import Batch
from rolemesh.config.schema import Config, DataConfig
from rolemesh.data.filters import DUPLICATE, OVERLONG, Look, PromptFilter, PromptReport, Tokenizer, prompt_batch
from rolemesh.data.prompts import CHECKED_UP_FRONT, PromptStream
from rolemesh.data.sft import refuse_unanswered
from rolemesh.data.sources import ProblemSource, derive_seed, open_source
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
    report: PromptReport

    def __len__(self) -> int:
        return self.prompts.num_rows

    def batch(self) -> Batch:
        """All prompts: columns as of `PromptStream.draw`."""
        return self.prompts


def open_prompts(config: Config, tokenizer: Tokenizer) -> tuple[PromptStream, EvalSet]:
    """Training prompts, and held-out ones that share no prompt with them.

    Held-out prompts come from `data.eval`. Without it they come from a generated training task by another seed, or are set aside from
    the rows of a training file; then they take at most a fifth of the training prompts. Raises ConfigError.
    """
    train, held_out = _open_both(config, tokenizer)
    return PromptStream(config.data, train, tokenizer, derive_seed(config.seed, "order"), held_out.keys), held_out


def open_sft_prompts(config: Config, tokenizer: Tokenizer) -> PromptStream:
    """The training prompts in another order, for supervised batches. Its draw numbers are its own. Raises ConfigError."""
    train, held_out = _open_both(config, tokenizer)
    refuse_unanswered(train.summary())
    return PromptStream(config.data, train, tokenizer, derive_seed(config.seed, "sft order"), held_out.keys)


def _open_both(config: Config, tokenizer: Tokenizer) -> tuple[ProblemSource, EvalSet]:
    data = config.data
    train = open_source(data.train, data, subject="data.train", size=data.size, seed=derive_seed(config.seed, "train"))
    if data.eval is None and not train.generated:
        source = train
    else:
        seed = derive_seed(config.seed, "eval")
        source = open_source(data.eval or data.train, data, subject="data.eval", size=data.eval_size, seed=seed)
    return train, _hold_out(config, source, train, tokenizer)


def _hold_out(config: Config, source: ProblemSource, train: ProblemSource, tokenizer: Tokenizer) -> EvalSet:
    data = config.data
    report = PromptReport(source=f"data.eval {source.name}", problems=len(source))
    looks = _look_through(data, source, tokenizer, report)
    kept = [look for look in looks if look.reason is None]
    if not kept:
        raise ConfigError.one("data.eval", "at least one prompt must be left", str(report), "Change the limits of the data section")
    affordable = len(kept) if data.eval is not None else _affordable(train, kept)
    chosen = np.random.default_rng(derive_seed(config.seed, "eval order")).permutation(len(kept))[: min(data.eval_size, affordable)]
    used = [kept[index] for index in sorted(chosen)]
    report.kept, report.unused, report.cut = len(used), len(kept) - len(used), sum(look.cut for look in used)
    keys = frozenset(look.problem.key for look in (used if data.eval is None else looks))
    return EvalSet(name=source.name, prompts=prompt_batch(used, list(range(len(used)))), keys=keys, report=report)


def _look_through(data: DataConfig, source: ProblemSource, tokenizer: Tokenizer, report: PromptReport) -> list[Look]:
    """Look at every problem; of generated ones that are equal only the first stays. Counts the removed ones."""
    prompt_filter = PromptFilter(data, tokenizer)
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
