"""The functions of the `reward` section, found by name and applied to one sample. Runs in the scoring processes, or in this one.

A scoring function is foreign code: whatever it raises is its answer.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, SupportsFloat

from rolemesh.registry import resolve
from rolemesh.rewards.builtin import REWARDS
from rolemesh.rewards.declare import declared
from rolemesh.rewards.work import ERROR_KEY, Answer, Extra, Fault, Work

if TYPE_CHECKING:
    from rolemesh.config.schema import RewardConfig  # not where only functions run: it takes its time to import

MESSAGE_LENGTH: Final = 500
"""Characters of an exception's message that are kept."""
TRACEBACK_LENGTH: Final = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """One entry of the `reward` section as far as running it goes; `deadline` in seconds for one sample."""

    name: str
    options: Mapping[str, Any]
    deadline: float


def function_specs(configs: Sequence[RewardConfig]) -> list[FunctionSpec]:
    """What running the functions needs of the `reward` section."""
    return [FunctionSpec(name=config.name, options=config.options, deadline=config.deadline) for config in configs]


class ScoringFunctions:
    """The functions by part. Raises ConfigError when one cannot be found."""

    def __init__(self, specs: Sequence[FunctionSpec]) -> None:
        self._specs = tuple(specs)
        self._functions = [resolve(spec.name, REWARDS, subject=f"reward.{part}.name") for part, spec in enumerate(specs)]

    def prepare(self) -> None:
        """What the functions want done once before they score (`reward_function(prepare=...)`)."""
        for function in self._functions:
            declared(function).prepare()

    def is_async(self, part: int) -> bool:
        """Several samples of an asynchronous function may be under way at the same time."""
        function = self._functions[part]
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

    @property
    def asynchronous(self) -> list[bool]:
        """`is_async` of every part."""
        return [self.is_async(part) for part in range(len(self._functions))]

    def answer(self, work: Work, wait: Callable[[Awaitable[Any]], Any]) -> Answer:
        """Call the function; `wait` runs what it returns if that is an awaitable."""
        started = time.perf_counter()
        try:
            result = self._call(work)
            value, extras = split_result(wait(result) if inspect.isawaitable(result) else result)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - foreign code; timeouts of some libraries are no Exception
            return Answer(fault=_fault(error), seconds=time.perf_counter() - started)
        return Answer(value=value, extras=extras, seconds=time.perf_counter() - started)

    async def answer_async(self, work: Work) -> Answer:
        """The same for an asynchronous function, which is cancelled when its deadline ends."""
        started = time.perf_counter()
        deadline = self._specs[work.part].deadline
        watch = asyncio.timeout(deadline)
        try:
            async with watch:
                result = await self._call(work)
            value, extras = split_result(result)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - foreign code; timeouts of some libraries are no Exception
            fault = timeout_fault(deadline) if watch.expired() else _fault(error)
            return Answer(fault=fault, seconds=time.perf_counter() - started)
        return Answer(value=value, extras=extras, seconds=time.perf_counter() - started)

    def _call(self, work: Work) -> Any:
        return self._functions[work.part](work.sample, **self._specs[work.part].options)


async def awaited(awaitable: Awaitable[Any]) -> Any:
    """A coroutine, which loops run, of any awaitable."""
    return await awaitable


def timeout_fault(deadline: float) -> Fault:
    """The fault of a sample whose deadline ended."""
    return Fault(type="Timeout", message=f"no score within deadline={deadline:g} s", timed_out=True)


def _fault(error: BaseException) -> Fault:
    try:
        message, trace = str(error), "".join(traceback.format_exception(error))
    except Exception as second:  # noqa: BLE001 - an exception that cannot even be shown
        message, trace = f"(its message cannot be shown: {type(second).__name__})", ""
    return Fault(type=type(error).__name__, message=message[:MESSAGE_LENGTH], traceback=trace[-TRACEBACK_LENGTH:])


def split_result(result: Any) -> tuple[float | None, dict[str, Extra]]:
    """(score, extras) of what a function returned: a number or None, a pair (score, extras), or a mapping with the key `score`.

    Raises TypeError for anything else, and what converting a value raises.
    """
    score, extras = result, {}
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(f"returned a mapping without the key 'score': {sorted(map(str, result))}")
        extras = {key: value for key, value in result.items() if key != "score"}
        score = result["score"]
    elif isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        score, extras = result[0], dict(result[1])
    if score is not None and (isinstance(score, str | bytes) or not isinstance(score, SupportsFloat)):
        raise TypeError(f"returned {type(score).__name__}, expected a number, None, (number, extras) or a mapping with 'score'")
    wrong = [key for key in extras if not isinstance(key, str) or not key or key == ERROR_KEY]
    if wrong:
        raise TypeError(f"returned extras with the key {wrong[0]!r}; keys must be text and not {ERROR_KEY!r}")
    return (None if score is None else float(score)), {key: _plain(value) for key, value in extras.items()}


def _plain(value: Any) -> Extra:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, SupportsFloat):
        number = float(value)
        return number if math.isfinite(number) else None
    return json.dumps(value, sort_keys=True, default=str)
