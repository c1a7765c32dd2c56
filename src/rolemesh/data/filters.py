"""Which problems become prompts: template, tokens, the length limit, and what is held out. Called by streams and held-out sets."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from rolemesh.batch import Batch
from rolemesh.config.schema import DataConfig
from rolemesh.data.sources import Problem, Prompt
from rolemesh.errors import ConfigError
from rolemesh.models.prompts import as_messages, encode_prompt, render_prompt
from rolemesh.protocols.task import dump_task

Tokenizer: TypeAlias = Any
"""A tokenizer of `models.load_tokenizer`."""

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Schemas of the tools that chat templates are told of."""

OVERLONG: Final = "overlong"
IN_EVAL: Final = "in_eval"
NO_TOKENS: Final = "no_tokens"
DUPLICATE: Final = "duplicate"
TEMPLATE_MARK: Final = "{prompt}"


@dataclass(slots=True, kw_only=True)
class PromptReport(Mapping[str, int]):
    """What became of the problems of a source. `str(report)` is the line to print.

    As a mapping: the number `kept` and the numbers removed by reason.
    """

    source: str
    problems: int
    """Problems that the source has."""
    kept: int = 0
    cut: int = 0
    """Of those kept: cut to the length limit."""
    removed: Counter[str] = field(default_factory=Counter)
    """Removed problems by reason: `overlong`, `in_eval` (the same prompt is held out), `no_tokens`, `duplicate` (held-out sets)."""
    unused: int = 0
    """Held-out sets: usable problems beyond `data.eval_size`."""
    answers_too_long: int = 0
    """Draws that supervised batches left out because the answer exceeds the limit."""

    @classmethod
    def merged(cls, reports: Sequence[PromptReport]) -> PromptReport:
        """The reports of several sources in one."""
        whole = cls(source=" + ".join(report.source for report in reports), problems=sum(report.problems for report in reports))
        for report in reports:
            whole.kept, whole.cut, whole.unused = whole.kept + report.kept, whole.cut + report.cut, whole.unused + report.unused
            whole.removed.update(report.removed)
            whole.answers_too_long += report.answers_too_long
        return whole

    @property
    def checked(self) -> int:
        """Problems looked at so far; all of them, except for generated tasks, which are looked at as they are drawn."""
        return self.kept + self.unused + self.removed.total()

    def __getitem__(self, key: str) -> int:
        return {"kept": self.kept, **self.removed}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(("kept", *self.removed))

    def __len__(self) -> int:
        return 1 + len(self.removed)

    def __str__(self) -> str:
        seen = f"{self.checked} of {self.problems}" if self.checked < self.problems else f"{self.problems}"
        parts = [f"{self.source}: {seen} problems checked, {self.kept} kept", f"{self.removed.total()} removed{self._reasons()}"]
        for count, what in (
            (self.cut, "cut to the length limit"),
            (self.unused, "not used"),
            (self.answers_too_long, "answers too long for supervised batches"),
        ):
            if count:
                parts.append(f"{count} {what}")
        return ", ".join(parts)

    def _reasons(self) -> str:
        return f" ({', '.join(f'{reason} {count}' for reason, count in self.removed.most_common())})" if self.removed else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the filter says about one problem: a reason for removal, or the prompt."""

    problem: Problem
    reason: str | None = None
    text: str = ""
    """Prompt text as given to the tokenizer."""
    messages: str | None = None
    """JSON of the chat messages that the text was made of, with `data.chat`."""
    ids: tuple[int, ...] = ()
    length: int = 0
    """Tokens of the prompt before cutting."""

    @property
    def cut(self) -> bool:
        return self.reason is None and len(self.ids) < self.length

    def count(self, report: PromptReport) -> None:
        """Add this problem to the counts."""
        if self.reason is not None:
            report.removed[self.reason] += 1
        else:
            report.kept += 1
            report.cut += self.cut


class PromptFilter:
    """Applies the `data` section to single problems.

    Prompts above `max_prompt_tokens` are removed (`overlong`: drop), or cut: `left` takes tokens away at the beginning and keeps the
    end, a BOS stays in front; `right` keeps the beginning. Under `error` they come back as removed for `overlong`, and the caller
    raises `overlong_error`.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, *, exclude: Collection[str] = frozenset(), tools: Tools = ()) -> None:
        if TEMPLATE_MARK not in config.prompt_template:
            raise ConfigError.one("data.prompt_template", f"must contain {TEMPLATE_MARK}", repr(config.prompt_template))
        self._config, self._tokenizer, self._exclude = config, tokenizer, exclude
        self._form: dict[str, Any] = {"chat": config.chat, "tools": tools}

    def look(self, problem: Problem) -> Look:
        if problem.key in self._exclude:
            return Look(problem=problem, reason=IN_EVAL)
        prompt = self._templated(problem.prompt)
        ids: list[int] = encode_prompt(self._tokenizer, prompt, **self._form)
        limit = self._config.max_prompt_tokens
        if not ids:
            return Look(problem=problem, reason=NO_TOKENS)
        if len(ids) > limit and self._config.overlong in ("error", "drop"):
            return Look(problem=problem, reason=OVERLONG, length=len(ids))
        text = render_prompt(self._tokenizer, prompt, **self._form)
        messages = json.dumps(as_messages(prompt)) if self._config.chat else None
        return Look(problem=problem, text=text, messages=messages, ids=tuple(self._cut(ids, limit)), length=len(ids))

    def _templated(self, prompt: Prompt) -> Prompt:
        if isinstance(prompt, str):
            # not str.format: prompts and templates may hold braces
            return self._config.prompt_template.replace(TEMPLATE_MARK, prompt)
        if self._config.prompt_template != TEMPLATE_MARK:
            raise ConfigError.one(
                "data.prompt_template",
                f"must be {TEMPLATE_MARK!r} for prompts that are chat messages",
                repr(self._config.prompt_template),
                "Write the template into the messages, or turn them into text",
            )
        return prompt

    def _cut(self, ids: list[int], limit: int) -> list[int]:
        if len(ids) <= limit or self._config.overlong == "right":
            return ids[:limit]
        head = ids[:1] if ids[0] == self._tokenizer.bos_token_id else []
        return head + ids[len(ids) - (limit - len(head)) :]

    def overlong_error(self, subject: str, *, count: int, checked: int, longest: int) -> ConfigError:
        """The error for `overlong: error`."""
        return ConfigError.one(
            subject,
            f"no prompt may exceed data.max_prompt_tokens={self._config.max_prompt_tokens} while data.overlong=error",
            f"{count} of {checked} that do, the longest of {longest} tokens",
            "Raise data.max_prompt_tokens, or set data.overlong to left, right or drop",
        )


def prompt_batch(looks: list[Look], draws: list[int]) -> Batch:
    """The kept problems as a batch: one row a prompt, `sample` 0."""
    problems = [look.problem for look in looks]
    chat = {"messages": [look.messages for look in looks]} if any(look.messages is not None for look in looks) else {}
    return Batch.from_columns(
        {
            **chat,
            "draw": draws,
            "sample": [0] * len(looks),
            "source": [problem.source for problem in problems],
            "prompt": [look.text for look in looks],
            "prompt_ids": [list(look.ids) for look in looks],
            "answer": [problem.answer for problem in problems],
            "task": [dump_task(problem.task) for problem in problems],
        }
    )
