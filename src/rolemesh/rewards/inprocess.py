"""`InProcess` runs scoring functions where it is: the executor for a debugger. It cannot end a function that does not return."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from rolemesh.config.schema import RewardConfig
from rolemesh.rewards.functions import ScoringFunctions, awaited, function_specs
from rolemesh.rewards.work import Answer, Usage, Work

T = TypeVar("T")
ASYNC_LIMIT: Final = 64
"""Asynchronous scores that are under way at the same time."""


class InProcess:
    """An `Executor`. Deadlines end asynchronous functions alone, and memory is not watched.

    Raises ConfigError when a function cannot be found.
    """

    def __init__(self, configs: Sequence[RewardConfig]) -> None:
        self._functions = ScoringFunctions(function_specs(configs))
        self._functions.prepare()
        self._usage = Usage(samples=[0])

    def run(self, works: Sequence[Work]) -> list[Answer]:
        waiting = [index for index, work in enumerate(works) if self._functions.is_async(work.part)]
        later = dict(zip(waiting, _run(self._gather([works[index] for index in waiting])), strict=True)) if waiting else {}
        answers = [
            later[index] if index in later else self._functions.answer(work, lambda result: _run(awaited(result)))
            for index, work in enumerate(works)
        ]
        for answer in answers:
            self._usage.count(0, answer.seconds)
        return answers

    async def _gather(self, works: Sequence[Work]) -> list[Answer]:
        limit = asyncio.Semaphore(ASYNC_LIMIT)

        async def bounded(work: Work) -> Answer:
            async with limit:
                return await self._functions.answer_async(work)

        return list(await asyncio.gather(*map(bounded, works)))

    def take_usage(self) -> Usage:
        usage, self._usage = self._usage, Usage(samples=[0])
        return usage

    def close(self) -> None:
        """Nothing was started."""


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in a thread of its own when this one already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, thread_name_prefix="reward") as pool:
        return pool.submit(asyncio.run, coroutine).result()
