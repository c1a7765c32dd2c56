"""Episodes: turns of the model and of its environment, thousands of them on one event loop. Called by the rollout role.

The loop runs in a thread of its own and computes nothing but environments. It and whoever drives the engine talk through two calls:
`news` hands out requests for the next turns and episodes that have ended, `give` takes completions. So an engine goes on with what it
has while environments wait, and an environment that takes its time holds up its own episode alone.

The tokens of an episode are the ids that the engine sampled, untouched, and between them the ids of messages, each made once.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from rolemesh.config.schema import EnvironmentConfig
from rolemesh.environments import threads
from rolemesh.environments.answers import checked_messages, checked_step, describe_error
from rolemesh.environments.turns import TurnEncoder
from rolemesh.environments.waiting import step_deadline
from rolemesh.errors import DeadlineExceeded
from rolemesh.protocols.engine import Completion, FinishReason, Request, WeightSpan
from rolemesh.protocols.environment import Environment, Message, Start, Turn

T = TypeVar("T")

GRACE: Final = 30.0
"""Seconds beyond the deadline of an environment after which it must be holding up the event loop itself."""


@dataclass(slots=True, kw_only=True)
class Episode:
    """One answer of several turns, so far. `mask` and `logprobs` have one entry for each of `token_ids`: 1 and the log-probability where
    the model sampled it, 0 and 0 where a message put it."""

    start: Start
    prompt_ids: Sequence[int]
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[WeightSpan] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Who said what: {"role", "text", "tokens"}."""
    finish_reason: FinishReason = "abort"
    """`stop` where the environment ended it, `length` at a limit of tokens or turns."""
    reward: float | None = None
    error: str | None = None
    """What the environment failed with."""
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    """That the environment took."""

    @property
    def id(self) -> tuple[int, int]:
        return self.start.draw, self.start.sample

    def sample(self, completion: Completion, text: str) -> Turn:
        """Take in what the model wrote."""
        number = 1 + sum(turn["role"] == "assistant" for turn in self.turns)
        before = len(self.token_ids)
        self.token_ids += completion.token_ids
        self.mask += [1] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        for span in completion.spans:
            last = self.spans.pop() if self.spans and self.spans[-1].version == span.version else None
            begin = last.start if last else self.spans[-1].stop if self.spans else 0
            self.spans.append(WeightSpan(span.version, begin, before + span.stop))
        self.turns.append({"role": "assistant", "text": text, "tokens": len(completion.token_ids)})
        return Turn(number=number, token_ids=completion.token_ids, text=text)

    def tell(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Put messages behind."""
        self.token_ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        told = [{"role": message.role, "text": message.content, "tokens": 0} for message in messages]
        told[-1]["tokens"] = len(ids)
        self.turns += told


class EpisodeLoop:
    """Plays episodes. All methods are for the thread that drives the engine."""

    def __init__(
        self,
        make: Callable[[], Environment],
        encoder: TurnEncoder,
        limits: EnvironmentConfig,
        *,
        max_response_tokens: int,
        context: int | None = None,
    ) -> None:
        """`make` makes the environment of one episode. `context` is the most tokens that the model takes, prompt and answer together."""
        self._make, self._encoder, self._limits = make, encoder, limits
        self._max_response, self._context = max_response_tokens, context
        self._news: queue.SimpleQueue[Request | Episode] = queue.SimpleQueue()
        self._sampled: dict[tuple[int, int], asyncio.Future[Completion]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.unfinished = 0
        """Episodes that have begun and were not handed out."""
        self._moved = 0.0
        """When something was last handed over, in either direction."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="episodes")
        self._thread.start()

    def begin(self, rows: Sequence[tuple[Start, Sequence[int]]]) -> None:
        """Begin an episode for each row and its prompt's ids. Their ids must differ from those under way."""
        self.unfinished, self._moved = self.unfinished + len(rows), time.monotonic()
        self._loop.call_soon_threadsafe(self._begin, rows, self._news)

    def news(self, *, wait: float = 0.0) -> tuple[list[Request], list[Episode]]:
        """Turns to be sampled, and episodes that have ended, since the last call. A caller who has nothing to compute waits so many seconds
        for the first. Raises DeadlineExceeded when none has come for longer than any environment may take."""
        requests: list[Request] = []
        ended: list[Episode] = []
        patience = wait
        try:
            while True:
                one = self._news.get(timeout=patience) if patience else self._news.get_nowait()
                patience = 0.0
                (requests if isinstance(one, Request) else ended).append(one)  # type: ignore[arg-type]
        except queue.Empty:
            pass
        if requests or ended:
            self._moved = time.monotonic()
        elif wait and time.monotonic() - self._moved > self._limits.deadline + GRACE:
            raise self._held_up("the next turn")
        self.unfinished -= len(ended)
        return requests, ended

    def give(self, completions: Iterable[Completion]) -> None:
        """What the engine made of requests."""
        self._moved = time.monotonic()
        self._loop.call_soon_threadsafe(self._give, list(completions))

    def cancel(self) -> None:
        """End all episodes. Raises DeadlineExceeded when their environments do not let go."""
        self._news, self.unfinished = queue.SimpleQueue(), 0
        self._wait_for(self._cancel(), "the end of the episodes")

    def close(self) -> None:
        """End all episodes and the loop."""
        if not self._loop.is_closed():
            self.cancel()
            self._wait_for(self._end_all(), "the end of what its tools started")
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(GRACE)
            self._loop.close()

    def _wait_for(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Have the event loop do something. Raises DeadlineExceeded."""
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop).result(self._limits.deadline + GRACE)
        except TimeoutError:
            raise self._held_up(what) from None

    def _held_up(self, what: str) -> DeadlineExceeded:
        held = "does it block the event loop? await, or use a thread"
        if threads.all_held(self._loop):
            held = f"all {threads.THREADS} threads are held by functions that have not returned"
        subject = f"environment {self._limits.name} for {what} ({held})"
        return DeadlineExceeded(waiter="rollout", subject=subject, seconds=self._limits.deadline + GRACE)

    # -- on the event loop ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Until the loop is stopped. A task that ends with SystemExit or KeyboardInterrupt lets it out of the loop as well; whoever waits
        for the task is told, and the others go on."""
        while True:
            try:
                self._loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):
                continue

    def _begin(self, rows: Sequence[tuple[Start, Sequence[int]]], news: queue.SimpleQueue[Request | Episode]) -> None:
        for start, prompt_ids in rows:
            task = self._loop.create_task(self._run(Episode(start=start, prompt_ids=prompt_ids), news))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _give(self, completions: list[Completion]) -> None:
        for completion in completions:
            future = self._sampled.pop(completion.id, None)
            if future is not None and not future.done():
                future.set_result(completion)

    async def _cancel(self) -> None:
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sampled.clear()

    async def _end_all(self) -> None:
        """What environments and tools have left running, such as the sandbox, ends with the loop."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    async def _run(self, episode: Episode, news: queue.SimpleQueue[Request | Episode]) -> None:
        try:
            environment = self._make()
            try:
                episode.finish_reason = await self._play(episode, environment, news)
            finally:
                await self._within(episode, environment.close(), "close")
        except GeneratorExit:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
                raise  # by us, and not by a library that it uses
            episode.finish_reason, episode.reward, episode.error = "abort", None, describe_error(error)
        news.put(episode)

    async def _play(self, episode: Episode, environment: Environment, news: queue.SimpleQueue[Request | Episode]) -> FinishReason:
        """Turn after turn; returns why it ended."""
        opening = checked_messages(await self._within(episode, environment.reset(episode.start), "reset"), "reset")
        if opening and not self._tell(episode, opening):
            raise ValueError(f"what reset says leaves no room in an answer of {self._room(episode)} tokens (data.max_response_tokens)")
        for number in range(1, self._limits.max_turns + 1):
            completion = await self._sample(episode, news)
            turn = episode.sample(completion, self._encoder.decode(completion.token_ids))
            if completion.finish_reason != "stop":
                return completion.finish_reason
            step = checked_step(await self._within(episode, environment.step(turn), "step"), "step")
            episode.counts.update(step.counts)
            if step.reward is not None:
                episode.reward = (episode.reward or 0.0) + step.reward
            if step.done:
                return "stop"
            if not step.messages:
                raise ValueError(f"step {number} has neither messages nor done=True")
            if number == self._limits.max_turns or not self._tell(episode, step.messages):
                break
        return "length"

    def _room(self, episode: Episode) -> int:
        """Tokens that an answer may have."""
        context = self._max_response if self._context is None else self._context - len(episode.prompt_ids)
        return min(self._max_response, context)

    def _tell(self, episode: Episode, messages: Sequence[Message]) -> bool:
        """Put messages behind, each cut to its limit. False, and nothing done, where no token could be sampled behind them."""
        limit = self._limits.max_observation_tokens
        short = [self._encoder.shorten(message, limit) for message in messages]
        ids = self._encoder.encode(short, (*episode.prompt_ids, *episode.token_ids[-1:])[-1])
        if len(episode.token_ids) + len(ids) >= self._room(episode):
            return False
        episode.counts["observations_cut"] += sum(one is not other for one, other in zip(short, messages, strict=True))
        episode.tell(ids, short)
        return True

    async def _sample(self, episode: Episode, news: queue.SimpleQueue[Request | Episode]) -> Completion:
        """The model's next turn. Whoever drives the engine gives it, or cancels the episode."""
        future: asyncio.Future[Completion] = self._loop.create_future()
        self._sampled[episode.id] = future
        news.put(Request(id=episode.id, prompt_ids=[*episode.prompt_ids, *episode.token_ids], start=len(episode.token_ids)))
        return await future

    async def _within(self, episode: Episode, work: Awaitable[T], what: str) -> T:
        began = time.monotonic()
        try:
            async with step_deadline(self._limits.deadline) as limit:
                return await work
        except TimeoutError:
            if limit.timeout.expired():
                where = f", in {', '.join(limit.interrupted)}" if limit.interrupted else ""
                raise TimeoutError(f"{what} took longer than environment.deadline ({self._limits.deadline:g} s){where}") from None
            raise
        finally:
            episode.seconds += time.monotonic() - began
