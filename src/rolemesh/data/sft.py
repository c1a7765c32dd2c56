"""Batches for supervised fine-tuning: the reference answer is the response. Called by the warm start and by `rolemesh sft`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rolemesh.batch import Batch
from rolemesh.data.filters import Tokenizer
from rolemesh.data.mixture import PromptMixture
from rolemesh.data.prompts import PromptStream
from rolemesh.errors import ConfigError


def sft_batch(stream: PromptStream | PromptMixture, n: int, tokenizer: Tokenizer, max_response_tokens: int) -> Batch:
    """The next n problems: columns draw, sample, source, prompt_ids, response_ids (answer and end token), token_weight.

    `token_weight` is 1 / (response tokens of the batch): the loss, a weighted sum, is the mean over tokens. An answer longer than
    `max_response_tokens`, the end token included, is left out, counted in `stream.report.answers_too_long`, and replaced by the next
    problem. Raises ConfigError for a problem without an answer, and when no answer of a whole pass fits.
    """
    parts: list[Batch] = []
    missing, rejected = n, 0
    while missing:
        batch, fitting = _answered(stream.draw(missing), tokenizer, max_response_tokens)
        stream.leave_out(len(batch) - len(fitting))
        rejected = 0 if fitting else rejected + len(batch)
        if rejected >= stream.report.problems:
            raise _none_fits(stream, max_response_tokens)
        parts.append(batch.take(fitting))
        missing -= len(fitting)
    whole = Batch.concat(parts)
    tokens = int(whole.lengths("response_ids").sum())
    return whole.with_columns({"token_weight": np.full(len(whole), 1.0 / tokens)})


def _answered(batch: Batch, tokenizer: Tokenizer, limit: int) -> tuple[Batch, list[int]]:
    """The batch with `response_ids`, and the rows of it that are within the limit."""
    responses: list[list[int]] = []
    for row, answer in enumerate(batch.scalars("answer")):
        if answer is None:
            raise _unanswered(f"draw {batch.ids[row][0]} of source {batch.scalars('source')[row]!r} has none")
        responses.append([*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
    fitting = [row for row, response in enumerate(responses) if len(response) <= limit]
    return batch.select(["source", "prompt_ids"]).with_columns({"response_ids": responses}), fitting


def refuse_unanswered(summary: Mapping[str, Mapping[str, int]]) -> None:
    """Raise ConfigError when a source (`ProblemSource.summary`) has problems without an answer."""
    lacking = {source: counts["rows"] - counts["answer"] for source, counts in summary.items()}
    if any(lacking.values()):
        listed = ", ".join(f"{count} of {summary[source]['rows']} in source {source!r}" for source, count in lacking.items() if count)
        raise _unanswered(f"problems without one: {listed}")


def _unanswered(found: str) -> ConfigError:
    return ConfigError.one(
        "sft", "every problem must have a reference answer to learn from", found, "Leave the sft section out, or use data with answers"
    )


def _none_fits(stream: PromptStream | PromptMixture, limit: int) -> ConfigError:
    return ConfigError.one(
        "data.max_response_tokens",
        "must leave room for reference answers and an end token",
        f"{limit}, and no answer of {stream.report.problems} problems fits",
        "Raise it",
    )
