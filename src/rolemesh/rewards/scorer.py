"""`RewardScorer` turns samples into rewards by the `reward` section. Called by the reward role, in any thread.

An executor runs the functions. What goes wrong in one becomes the state of that sample, with the function's name, and the row is masked.
Only a function that never works stops the run, with `RewardError`: otherwise a broken verifier would look like a policy that never earns
anything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rolemesh.batch import Batch
from rolemesh.config.schema import RewardConfig
from rolemesh.errors import RolemeshError
from rolemesh.protocols.reward import Sample
from rolemesh.protocols.task import load_task
from rolemesh.rewards.check import scores_source
from rolemesh.rewards.outcome import Outcome, Status, outcome_columns
from rolemesh.rewards.work import Answer, Executor, Extra, Fault, Work

_PLACE: Final = re.compile(r'^  File "(.+)", line (\d+), in (\S+)$', re.MULTILINE)
"""A place in a traceback."""


class RewardError(RolemeshError):
    """A reward function failed for every sample of a call. Says which function, how, and the first sample."""

    exit_code = 4

    def __init__(self, *, function: str, samples: int, error_type: str, error_message: str, error_traceback: str, first: str) -> None:
        super().__init__(
            function=function,
            samples=samples,
            error_type=error_type,
            error_message=error_message,
            error_traceback=error_traceback,
            first=first,
        )
        self.add_note(error_traceback)  # for the file that keeps the whole trace; the message itself stays short

    @classmethod
    def message(cls, **fields: Any) -> str:
        places = _PLACE.findall(fields["error_traceback"])
        where = " ({}, line {}, in {})".format(*places[-1]) if places else ""
        return (
            f"reward function {fields['function']} failed for all {fields['samples']} samples of a call\nfirst sample: {fields['first']}\n"
            "Repair the function or the data; a reward that cannot be computed is never taken for 0\n"
            f"{fields['error_type']}: {fields['error_message']}{where}"
        )


@dataclass(slots=True, kw_only=True)
class _Part:
    """One entry of the `reward` section."""

    name: str
    config: RewardConfig
    worked: bool = False
    """It has scored a sample."""
    failing_draws: set[int] = field(default_factory=set)
    """Prompts for which it failed since it last worked; more than two are not remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Score:
    value: float | None = None
    status: Status = "ok"
    extras: Mapping[str, Extra] = field(default_factory=dict)
    fault: Fault | None = None


class RewardScorer:
    """Scores samples with the functions of the `reward` section: built-ins by name, a user's own by import path.

    A function takes a `Sample` and the options of its entry and may be asynchronous. It returns what `split_result` says. The `executor`
    must have been made for the functions of the same section (`functions_of`), None if there are none; it remains the caller's to close.
    What models say comes from elsewhere.
    """

    def __init__(self, configs: Sequence[RewardConfig], executor: Executor | None) -> None:
        self._executor = executor
        self._parts = [_Part(name=name, config=config) for name, config in zip(part_names(configs), configs, strict=True)]

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """What the functions make of the samples; see `outcomes`."""
        return self.outcomes(samples, self.answers(samples))

    def rows_of(self, number: int, samples: Sequence[Sample]) -> list[int]:
        """Positions of the samples that entry `number` of the section scores."""
        return [row for row, sample in enumerate(samples) if scores_source(self._parts[number].config, sample.source)]

    def answers(self, samples: Sequence[Sample]) -> dict[int, list[Answer]]:
        """By number of the entry what each function says of its samples (`rows_of`)."""
        rows = {number: self.rows_of(number, samples) for number, part in enumerate(self._parts) if part.config.model is None}
        if self._executor is None:
            return {}
        works = [Work(part=part, sample=samples[row]) for part, mine in enumerate(rows.values()) for row in mine]
        found = iter(self._executor.run(works))
        return {number: [next(found) for _ in mine] for number, mine in rows.items()}

    def outcomes(self, samples: Sequence[Sample], answers: Mapping[int, Sequence[Answer]]) -> list[Outcome]:
        """One outcome for each sample, in their order; `answers` are those of all entries, by number.

        The reward is the sum of weight * score over the functions for the sample's source. A sample has none if a function failed, by
        raising, ending its process or returning something else than a number (`error`), took too long (`timeout`), gave a number that
        is not finite (`not_finite`), or None (`abstained`); the first of these that applies.

        Raises RewardError when a function failed for every sample of this call, and has never worked before or has failed on at least
        two prompts since it last did (one prompt alone may be at fault).
        """
        scored: list[list[tuple[_Part, _Score]]] = [[] for _ in samples]
        for number, part in enumerate(self._parts):
            mine = self.rows_of(number, samples)
            scores = [_judged(part, answer) for answer in answers[number]]
            _refuse_broken(part, [samples[row] for row in mine], scores)
            for row, score in zip(mine, scores, strict=True):
                scored[row].append((part, score))
        return [self._outcome(named) for named in scored]

    def score_batch(self, batch: Batch) -> Batch:
        """The same rows with `reward`, `reward_status` and `extra/...`. Reads source, prompt, response, answer, task, finish_reason.

        With several functions their extras are named `extra/FUNCTION/KEY`, and `extra/FUNCTION` holds the score of each.
        """
        return batch.select([]).with_columns(outcome_columns(self.score(samples_of(batch))))

    def _outcome(self, named: Sequence[tuple[_Part, _Score]]) -> Outcome:
        scores = [score for _, score in named]
        several = len(self._parts) > 1
        extras: dict[str, Any] = {}
        for part, score in named:
            prefix = f"{part.name}/" if several else ""
            extras |= {prefix + key: value for key, value in score.extras.items()}
            if several:
                extras[part.name] = score.value
        parts = {part.name: score.value for part, score in named}
        if not named:
            return Outcome(reward=None, status="error", error="no reward scores its data source")
        status = next(status for status in _PRECEDENCE if status == "ok" or any(score.status == status for score in scores))
        if status != "ok":
            error = "; ".join(_describe(part, score) for part, score in named if score.status in ("error", "timeout", "not_finite"))
            return Outcome(reward=None, status=status, error=error, parts=parts, extras=extras)
        reward = sum(part.config.weight * (score.value or 0.0) for part, score in named)
        if not math.isfinite(reward):  # finite scores can add up to more than a float holds
            return Outcome(reward=None, status="not_finite", error=f"sum of the weighted scores: {reward}", parts=parts, extras=extras)
        return Outcome(reward=reward, parts=parts, extras=extras)


_PRECEDENCE: Final[tuple[Status, ...]] = ("error", "timeout", "not_finite", "abstained", "ok")


def functions_of(configs: Sequence[RewardConfig]) -> list[RewardConfig]:
    """The entries that name a function."""
    return [config for config in configs if config.model is None]


def part_names(configs: Sequence[RewardConfig]) -> list[str]:
    """A name for each entry: that of its function or model, with #2, #3 ... for one that occurs again."""
    names: list[str] = []
    for number, config in enumerate(configs):
        before = sum(other.name == config.name for other in configs[:number])
        names.append(f"{config.name}#{before + 1}" if before else config.name)
    return names


def samples_of(batch: Batch) -> list[Sample]:
    """The rows of a batch as reward functions see them."""
    columns = [batch.scalars(name) for name in ("source", "prompt", "response", "answer", "task", "finish_reason")]
    columns += [batch.scalars(name) if name in batch.names else [None] * len(batch) for name in ("turns", "environment_reward")]
    return [
        Sample(
            draw=int(draw),
            sample=int(number),
            source=source,
            prompt=prompt,
            response=response,
            answer=answer,
            task=load_task(task),
            finish_reason=finish_reason,
            turns=tuple(json.loads(turns)) if turns else (),
            environment_reward=None if earned is None or math.isnan(earned) else float(earned),
        )
        for (draw, number), source, prompt, response, answer, task, finish_reason, turns, earned in zip(batch.ids, *columns, strict=True)
    ]


def _refuse_broken(part: _Part, samples: Sequence[Sample], scores: Sequence[_Score]) -> None:
    if not scores:  # none of these samples is its business
        return
    faults = [score.fault for score in scores if score.fault is not None]
    if len(faults) < len(scores):
        part.worked, part.failing_draws = True, set()
        return
    part.failing_draws = set(sorted(part.failing_draws | {sample.draw for sample in samples})[:2])
    if faults and (not part.worked or len(part.failing_draws) > 1):
        raise _reward_error(part, faults[0], samples)


def _judged(part: _Part, answer: Answer) -> _Score:
    if answer.fault is not None:
        return _Score(status="timeout" if answer.fault.timed_out else "error", fault=answer.fault)
    if answer.value is None:
        return _Score(status="abstained", extras=answer.extras)
    if not math.isfinite(answer.value):
        return _Score(status="not_finite", extras=answer.extras)
    threshold = part.config.threshold
    return _Score(value=answer.value if threshold is None else float(answer.value >= threshold), extras=answer.extras)


def _describe(part: _Part, score: _Score) -> str:
    return f"{part.name}: {score.fault or 'score is not finite'}"


def _reward_error(part: _Part, fault: Fault, samples: Sequence[Sample]) -> RewardError:
    first = samples[0]
    return RewardError(
        function=part.name,
        samples=len(samples),
        error_type=fault.type,
        error_message=fault.message,
        error_traceback=fault.traceback,
        first=f"draw {first.draw} sample {first.sample} of {first.source!r}: response {first.response[:200]!r}, answer {first.answer!r}",
    )
