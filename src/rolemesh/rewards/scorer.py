"""`RewardScorer` applies the `reward` section to samples. Called by the reward role, in any thread.

A scoring function is foreign code: whatever it raises becomes the state of that sample, with the function's name, and the row is
masked. Only a function that never works stops the run, with `RewardError`: otherwise a broken verifier would look like a policy that
never earns anything.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from rolemesh.batch import Batch
from rolemesh.config.schema import RewardConfig
from rolemesh.errors import RolemeshError
from rolemesh.protocols.reward import Sample
from rolemesh.protocols.task import load_task
from rolemesh.registry import resolve
from rolemesh.rewards.builtin import REWARDS
from rolemesh.rewards.outcome import Outcome, Status, outcome_columns, split_result

ASYNC_LIMIT: Final = 64
"""Asynchronous scores of one function that are under way at the same time."""

ERROR_LENGTH: Final = 500
"""Characters of an exception's message that are kept with a sample."""


class RewardError(RolemeshError):
    """A reward function raised for every sample of a call. Says which function, the exception, and the first sample."""

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

    @classmethod
    def message(cls, **fields: Any) -> str:
        return (
            f"reward function {fields['function']} raised for all {fields['samples']} samples of a call: "
            f"{fields['error_type']}: {fields['error_message']}\nfirst sample: {fields['first']}\n{fields['error_traceback']}"
            "Repair the function or the data; a reward that cannot be computed is never taken for 0"
        )


@dataclass(slots=True, kw_only=True)
class _Part:
    """One entry of the `reward` section."""

    name: str
    function: Callable[..., Any]
    config: RewardConfig
    worked: bool = False
    """It has scored a sample."""
    failing_draws: set[int] = field(default_factory=set)
    """Prompts for which it raised since it last worked; more than two are not remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Score:
    value: float | None = None
    status: Status = "ok"
    extras: Mapping[str, Any] = field(default_factory=dict)
    error: Exception | None = None


class RewardScorer:
    """Scores samples with the functions of the `reward` section: built-ins by name, a user's own by import path.

    A function takes a `Sample` and the options of its entry and may be asynchronous. It returns what `split_result` says. Raises
    ConfigError when a function cannot be found.
    """

    def __init__(self, configs: Sequence[RewardConfig]) -> None:
        self._parts = [
            _Part(name=name, function=resolve(config.name, REWARDS, subject=f"reward.{number}.name"), config=config)
            for number, (name, config) in enumerate(zip(part_names(configs), configs, strict=True))
        ]

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One outcome for each sample, in their order.

        The reward is the sum of weight * score. A sample has none if a function raised or returned something else than a number
        (`error`), gave a number that is not finite (`not_finite`), or None (`abstained`); the first of these that applies.

        Raises RewardError when a function raised for every sample of this call, and has never worked before or has failed on at least
        two prompts since it last did (one prompt alone may be at fault).
        """
        columns = [self._score_part(part, samples) for part in self._parts]
        return [self._outcome([column[row] for column in columns]) for row in range(len(samples))]

    def score_batch(self, batch: Batch) -> Batch:
        """The same rows with `reward`, `reward_status` and `extra/...`. Reads source, prompt, response, answer, task, finish_reason.

        With several functions their extras are named `extra/FUNCTION/KEY`, and `extra/FUNCTION` holds the score of each.
        """
        return batch.select([]).with_columns(outcome_columns(self.score(samples_of(batch))))

    def _score_part(self, part: _Part, samples: Sequence[Sample]) -> list[_Score]:
        results = [_call(part, sample) for sample in samples]
        waiting = {row: result for row, result in enumerate(results) if inspect.isawaitable(result)}
        if waiting:
            for row, result in zip(waiting, _run(_gather(list(waiting.values()))), strict=True):
                results[row] = result
        scores = [_judged(part, result) for result in results]
        self._refuse_broken(part, samples, scores)
        return scores

    def _refuse_broken(self, part: _Part, samples: Sequence[Sample], scores: Sequence[_Score]) -> None:
        errors = [score.error for score in scores if score.error is not None]
        if len(errors) < len(scores):
            part.worked, part.failing_draws = True, set()
            return
        part.failing_draws = set(sorted(part.failing_draws | {sample.draw for sample in samples})[:2])
        if errors and (not part.worked or len(part.failing_draws) > 1):
            raise _reward_error(part, errors[0], samples) from errors[0]

    def _outcome(self, scores: Sequence[_Score]) -> Outcome:
        named = list(zip(self._parts, scores, strict=True))
        extras: dict[str, Any] = {}
        for part, score in named:
            prefix = f"{part.name}/" if len(named) > 1 else ""
            extras |= {prefix + key: value for key, value in score.extras.items()}
            if len(named) > 1:
                extras[part.name] = score.value
        parts = {part.name: score.value for part, score in named}
        status = next(status for status in _PRECEDENCE if status == "ok" or any(score.status == status for score in scores))
        if status != "ok":
            error = "; ".join(_describe(part, score) for part, score in named if score.status in ("error", "not_finite"))
            return Outcome(reward=None, status=status, error=error, parts=parts, extras=extras)
        reward = sum(part.config.weight * (score.value or 0.0) for part, score in named)
        return Outcome(reward=reward, parts=parts, extras=extras)


_PRECEDENCE: Final[tuple[Status, ...]] = ("error", "not_finite", "abstained", "ok")


def part_names(configs: Sequence[RewardConfig]) -> list[str]:
    """A name for each entry: that of its function, with #2, #3 ... for one that occurs again."""
    names: list[str] = []
    for number, config in enumerate(configs):
        before = sum(other.name == config.name for other in configs[:number])
        names.append(f"{config.name}#{before + 1}" if before else config.name)
    return names


def samples_of(batch: Batch) -> list[Sample]:
    """The rows of a batch as reward functions see them."""
    columns = [batch.scalars(name) for name in ("source", "prompt", "response", "answer", "task", "finish_reason")]
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
        )
        for (draw, number), source, prompt, response, answer, task, finish_reason in zip(batch.ids, *columns, strict=True)
    ]


def _call(part: _Part, sample: Sample) -> Any:
    """What the function returned, an awaitable included, or the exception that it raised."""
    try:
        return part.function(sample, **part.config.options)
    except Exception as error:  # noqa: BLE001 - foreign code; what it raises becomes the state of the sample
        return error


async def _gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    limit = asyncio.Semaphore(ASYNC_LIMIT)

    async def bounded(awaitable: Awaitable[Any]) -> Any:
        async with limit:
            return await awaitable

    return list(await asyncio.gather(*map(bounded, awaitables), return_exceptions=True))


def _run(coroutine: Any) -> list[Any]:
    """Run a coroutine to its end, in a thread of its own when this one already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return list(asyncio.run(coroutine))
    with ThreadPoolExecutor(1, thread_name_prefix="reward") as pool:
        return list(pool.submit(asyncio.run, coroutine).result())


def _judged(part: _Part, result: Any) -> _Score:
    if isinstance(result, Exception):
        return _Score(status="error", error=result)
    if isinstance(result, BaseException):  # cancelled
        return _Score(status="error", error=RuntimeError(f"{type(result).__name__}: {result}"))
    try:
        value, extras = split_result(result)
    except Exception as error:  # noqa: BLE001 - values of foreign types; converting them may raise anything
        return _Score(status="error", error=error)
    if value is None:
        return _Score(status="abstained", extras=extras)
    if not math.isfinite(value):
        return _Score(status="not_finite", extras=extras)
    threshold = part.config.threshold
    return _Score(value=value if threshold is None else float(value >= threshold), extras=extras)


def _describe(part: _Part, score: _Score) -> str:
    if score.error is None:
        return f"{part.name}: score is not finite"
    return f"{part.name}: {type(score.error).__name__}: {str(score.error)[:ERROR_LENGTH]}"


def _reward_error(part: _Part, error: Exception, samples: Sequence[Sample]) -> RewardError:
    first = samples[0]
    return RewardError(
        function=part.name,
        samples=len(samples),
        error_type=type(error).__name__,
        error_message=str(error)[:ERROR_LENGTH],
        error_traceback="".join(traceback.format_exception(error)),
        first=f"draw {first.draw} sample {first.sample} of {first.source!r}: response {first.response[:200]!r}, answer {first.answer!r}",
    )
