"""Requests from outside a round, on the controller: which replica answers what, and what has come of it. Part of `rollout_manager.py`.

A request goes to the replica with the fewest tokens to make, or to the one that had the longest beginning of its prompt before, if that is
not much busier. While a replica has requests one task tends it: it exchanges messages with the worker's `Desk` and has the worker go on
between its other calls. What a lost replica had goes to others.

When an engine raises, which request it was is not known: each that it had is tried once more alone, on another replica if there is one.
One with which that raises too is to blame, and fails. Where all are answered it was the engine, and the replica counts as lost.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rolemesh.errors import DeadlineExceeded, Overloaded, RequestFailed, RequestRefused, RolemeshError, Unavailable
from rolemesh.observe import Metrics
from rolemesh.protocols.engine import Request, Sampling
from rolemesh.protocols.requests import FIRST_DRAW, Answer, Ask, Growing, News

SOON, LATER = 0.02, 0.25
"""Seconds between two exchanges with a replica: when something was new, and at most."""
MOVES = 2
"""Replicas that a request may lose; the last one's error is then its own."""
KNOWN_PROMPTS = 4096
"""Beginnings of prompts that are remembered."""
SHORTEST_BEGINNING = 8
"""Tokens."""

Id = tuple[int, int]


@dataclass(slots=True, eq=False)
class Open:
    """A prompt with answers to make."""

    prompt: tuple[int, ...]
    sampling: Sampling
    answers: list[Answer]
    draw: int = -1
    """Of its ids where it is now."""
    replica: int | None = None
    moves: int = 0
    raised: Raised | None = None
    """Whence it comes if it has to be tried alone."""
    error: RolemeshError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def unfinished(self) -> list[int]:
        return [number for number, answer in enumerate(self.answers) if answer.finish_reason is None]

    @property
    def ids(self) -> set[Id]:
        return {(self.draw, number) for number in self.unfinished}

    @property
    def load(self) -> int:
        """Tokens still to be made, those of the prompt among them until the first is there."""
        begun = any(answer.token_ids for answer in self.answers)
        left = sum(self.sampling.max_new_tokens - len(self.answers[number].token_ids) for number in self.unfinished)
        return left + (0 if begun else len(self.prompt))


@dataclass(slots=True)
class Raised:
    """An engine has, with these requests in it. None are left when it is known why, or will not be."""

    replica: int
    suspects: set[Open] = field(default_factory=set)


@dataclass(slots=True)
class _Post:
    """What is to be told to a replica."""

    asks: list[Ask] = field(default_factory=list)
    cancelled: set[Id] = field(default_factory=set)
    written: asyncio.Event = field(default_factory=asyncio.Event)


Talk = Callable[[int, object], Awaitable[list[News]]]
Pump = Callable[[int, Callable[[], bool]], Awaitable[None]]


class Requests:
    """Of one manager. `serving` lists the replicas that may be asked, `loads` the tokens that a round has given to each, `talk` reaches a
    replica's desk, `pump` has it go on while the given function says so, and `lost` hears of one that failed."""

    def __init__(
        self,
        *,
        most: int,
        slots: int,
        serving: Callable[[], Sequence[int]],
        loads: Callable[[], Mapping[int, float]],
        talk: Talk,
        pump: Pump,
        lost: Callable[[int, RolemeshError], None],
    ) -> None:
        self._most, self._slots = most, slots
        self._serving, self._loads, self._talk, self._pump, self._lost = serving, loads, talk, pump, lost
        self._client = uuid.uuid4().hex
        self._draws = itertools.count(FIRST_DRAW)
        self._open: dict[int, Open] = {}
        """By draw."""
        self._unplaced: list[Open] = []
        self._posts: dict[int, _Post] = {}
        self._tending: dict[int, asyncio.Task[None]] = {}
        self._heads: OrderedDict[int, int] = OrderedDict()
        """Who had a prompt with this beginning, by its hash."""
        self._closed = ""
        self.seconds = 1.0
        """How long an answer takes, roughly."""
        self.counts: Counter[str] = Counter()
        """By the name of a metric, since the beginning."""
        self._reported: Counter[str] = Counter()

    # -- for those who ask ----------------------------------------------------------------------------------------------------

    async def answer(self, prompt_ids: Sequence[int], sampling: Sampling, *, count: int, deadline: float) -> Growing:
        """See `Answering`."""
        if self._closed:
            raise Unavailable(self._closed)
        under_way = self.under_way
        if under_way + count > self._most:
            self.counts["serve/refused"] += count
            text = (
                f"{under_way} answers are under way and {count} more are asked for; at most {self._most} at a time (rollout.serve.requests)"
            )
            raise Overloaded(text, retry_after=max(1, round(self.seconds)))
        request = Open(prompt=tuple(prompt_ids), sampling=sampling, answers=[Answer() for _ in range(count)])
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._place(request)
        try:
            while request.unfinished or request.changed.is_set():
                try:
                    async with asyncio.timeout_at(began + deadline):
                        await request.changed.wait()
                except TimeoutError:
                    raise self._late(request, deadline) from None
                request.changed.clear()
                if request.error is not None:
                    raise request.error
                yield request.answers
            self.seconds += 0.2 * (loop.time() - began - self.seconds)
        finally:
            if request.unfinished:
                self.counts["serve/given_up"] += len(request.unfinished)
            self._leave(request)

    @property
    def under_way(self) -> int:
        """Answers that are not finished."""
        return sum(len(request.unfinished) for request in (*self._open.values(), *self._unplaced))

    def _late(self, request: Open, deadline: float) -> DeadlineExceeded:
        made = sum(len(answer.token_ids) for answer in request.answers)
        where = "no replica serves" if request.replica is None else f"{made} tokens came from replica {request.replica}"
        return DeadlineExceeded(waiter="a request", subject=f"{len(request.answers)} answers", seconds=deadline, last_report=where)

    def close(self, reason: str) -> None:
        """Answer nothing any more: who waits, or asks from now on, hears the reason."""
        self._closed = reason
        for request in (*self._open.values(), *self._unplaced):
            self._fail(request, Unavailable(reason))

    async def stop(self) -> None:
        """End the tasks."""
        for task in self._tending.values():
            task.cancel()
        await asyncio.gather(*self._tending.values(), return_exceptions=True)

    # -- placing --------------------------------------------------------------------------------------------------------------

    def place_waiting(self) -> None:
        """Replicas have come back."""
        waiting, self._unplaced = self._unplaced, []
        for request in waiting:
            self._place(request)

    def _place(self, request: Open) -> None:
        serving = self._serving()
        if not serving:
            request.replica = None
            self._unplaced.append(request)
            return
        raised = request.raised
        if raised is not None:
            serving = [replica for replica in serving if replica != raised.replica] or serving
        replica = request.replica = self._choose(request, serving)
        request.draw = next(self._draws)  # a new one each time: what is left of the request elsewhere is another
        self._open[request.draw] = request
        requests = tuple(
            Request(id=(request.draw, number), prompt_ids=request.prompt, counter=(FIRST_DRAW, number)) for number in request.unfinished
        )
        self.counts[f"serve/requests/{replica}"] += len(requests)
        self._post_to(replica).asks.append(Ask(requests, request.sampling, alone=raised is not None))

    def _choose(self, request: Open, serving: Sequence[int]) -> int:
        given = self._loads()
        loads = {replica: given.get(replica, 0.0) for replica in serving}
        for other in self._open.values():
            if other.replica in loads:
                loads[other.replica] += other.load
        least = min(serving, key=lambda replica: (loads[replica], replica))
        heads = list(_beginnings(request.prompt))
        known = next((self._heads[head] for head in heads if self._heads.get(head) in loads), least)
        # A quarter of the slots more is what a replica takes on without being slower for it.
        chosen = known if loads[known] <= loads[least] + request.load * max(1, self._slots // 4) else least
        for head in heads:
            self._heads[head] = chosen
            self._heads.move_to_end(head)
        while len(self._heads) > KNOWN_PROMPTS:
            self._heads.popitem(last=False)
        return chosen

    def _leave(self, request: Open) -> None:
        """It is finished, or nobody waits for it any more."""
        self._judge(request)
        if request.replica is None:
            with suppress(ValueError):
                self._unplaced.remove(request)
            return
        if self._open.pop(request.draw, None) is not None and request.unfinished:
            self._post_to(request.replica).cancelled |= request.ids

    def move_from(self, replica: int, error: RolemeshError) -> None:
        """A replica serves no more: what it has not finished begins anew elsewhere."""
        for request in (*self._open.values(), *self._unplaced):
            if request.raised is not None and request.raised.replica == replica:
                request.raised.suspects.clear()  # it is lost already
        moving = [request for request in self._open.values() if request.replica == replica]
        self._posts.pop(replica, None)
        for request in moving:
            self._post_to(replica, tend=False).cancelled |= request.ids  # for the case that it comes back as it is
            request.moves += 1
            if request.moves > MOVES:
                del self._open[request.draw]
                self._fail(request, error)
            else:
                self._begin_anew(request)

    def _begin_anew(self, request: Open) -> None:
        del self._open[request.draw]
        self.counts["serve/moved"] += len(request.unfinished)
        for number in request.unfinished:
            request.answers[number] = Answer()
        self._place(request)

    def _suspect(self, request: Open, here: Raised, what: tuple[str, str]) -> None:
        """An engine has raised with it, among others or, the second time, alone."""
        if request.raised is None:
            here.suspects.add(request)
            request.raised = here
            self._begin_anew(request)
            return
        where = f"replica {request.raised.replica}, and then replica {here.replica} with this request alone"
        self._fail(request, RequestFailed(f"the engine of {where} raised {what[0]}: {what[1]}", exception=what[0]))

    def _judge(self, request: Open) -> None:
        """It was suspected: what has become of it says whether the engine was to blame."""
        raised = request.raised
        if raised is None or request not in raised.suspects:
            return
        if request.unfinished or request.replica == raised.replica:  # it was the request, or is not known; or the engine works again
            raised.suspects.clear()
            return
        raised.suspects.remove(request)
        if not raised.suspects:
            text = "its engine has raised, and others have answered all requests that it had then; the worker's log says what it raised"
            self._lost(raised.replica, RolemeshError(text=text))

    def _fail(self, request: Open, error: RolemeshError) -> None:
        request.error = error
        request.changed.set()

    # -- tending --------------------------------------------------------------------------------------------------------------

    def _post_to(self, replica: int, *, tend: bool = True) -> _Post:
        post = self._posts.setdefault(replica, _Post())
        post.written.set()
        if tend and (replica not in self._tending or self._tending[replica].done()):
            self._tending[replica] = asyncio.ensure_future(self._tend(replica))
        return post

    def _has(self, replica: int) -> bool:
        return any(request.replica == replica for request in self._open.values())

    async def _tend(self, replica: int) -> None:
        """Until it has nothing more to say."""
        pump: asyncio.Future[None] | None = None
        pause = SOON
        try:
            while (post := self._posts.get(replica)) is not None and (post.asks or post.cancelled or self._has(replica)):
                asks, cancelled = post.asks, post.cancelled
                post.asks, post.cancelled = [], set()
                post.written.clear()
                news = await self._talk(replica, (self._client, asks, cancelled))
                raised = Raised(replica)
                for one in news:
                    self._hear(raised, one)
                if pump is not None and pump.done():
                    pump.result()
                    pump = None
                if pump is None and self._has(replica):
                    pump = asyncio.ensure_future(self._pump(replica, lambda: self._has(replica)))
                pause = SOON if news or asks else min(2 * pause, LATER)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await post.written.wait()
        except RolemeshError as error:
            self._lost(replica, error)
        finally:
            if pump is not None:
                pump.add_done_callback(lambda done: done.cancelled() or done.exception())  # whatever it was, it was told of by a call
                pump.cancel()

    def _hear(self, here: Raised, news: News) -> None:
        """`here` takes those with which the engine has raised."""
        draw, number = news.id
        request = self._open.get(draw)
        if request is None:
            return
        if news.refused:
            self._fail(request, RequestRefused(news.refused.removeprefix(f"request {news.id}: ")))
            return
        if news.raised is not None:
            self._suspect(request, here, news.raised)
            return
        answer = request.answers[number]
        answer.token_ids += news.token_ids
        answer.logprobs += news.logprobs
        answer.spans, answer.finish_reason = news.spans, news.finish_reason
        self.counts[f"serve/tokens/{here.replica}"] += len(news.token_ids)
        request.changed.set()

    # -- what is told ---------------------------------------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """What was counted since this was asked for last."""
        metrics = Metrics()
        for name, count in self.counts.items():
            metrics.sum(name, count - self._reported[name])
        self._reported = self.counts.copy()
        return metrics


def _beginnings(prompt: tuple[int, ...]) -> Iterator[int]:
    """Hashes of the prompt and of beginnings of it whose length is a power of two, the longest first."""
    yield hash(prompt)
    length = 1 << max(len(prompt) - 1, 1).bit_length() - 1
    while length >= SHORTEST_BEGINNING:
        yield hash(prompt[:length])
        length //= 2
