"""Requests from outside a round, as a rollout worker keeps them: `rollout_requests.py` posts and collects, on the control thread, while
the compute thread drives the engine. So they join the batch that runs, and tokens are told of as they come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence

from rolemesh.protocols.engine import Completion, FinishReason, RolloutEngine
from rolemesh.protocols.requests import FIRST_DRAW, Ask, News

SHOW_SECONDS = 0.02
"""Between two looks at what running requests have so far."""

Id = tuple[int, int]


class Desk:
    """`exchange` is for the control thread, everything else for the compute thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client = ""
        self._coming: list[Ask] = []
        self._leaving: set[Id] = set()
        self._news: list[News] = []
        self._told: dict[Id, int] = {}
        """Requests in the engine, with the number of tokens told so far."""
        self._alone = False
        """They are to be alone there."""
        self._shown = 0.0

    def exchange(self, client: str, asks: Sequence[Ask], cancelled: Collection[Id]) -> list[News]:
        """Take on requests, let go of others, and return what is new. What another `client` has asked for, before, ends."""
        with self._lock:
            if client != self._client:
                self._client = client
                self._leaving |= self._told.keys()
                self._coming, self._news = [], []
            self._coming += asks
            self._leaving.update(cancelled)
            news, self._news = self._news, []
        return news

    @property
    def busy(self) -> bool:
        return bool(self._told or self._coming or self._leaving)

    def admit(self, engine: RolloutEngine) -> None:
        """Give the engine what has come, and end what nobody waits for any more."""
        if not (self._coming or self._leaving):
            return
        with self._lock:
            leaving, self._leaving = self._leaving, set()
            kept = [tuple(request for request in ask.requests if request.id not in leaving) for ask in self._coming]
            self._coming = [ask._replace(requests=left) for ask, left in zip(self._coming, kept, strict=True) if left]
            ended = leaving & self._told.keys()
            for id in ended:
                del self._told[id]
        engine.abort(ended)
        while (ask := self._next()) is not None:
            try:
                engine.add(ask.requests, ask.sampling)
            except ValueError as error:
                with self._lock:
                    for request in ask.requests:
                        del self._told[request.id]
                self._post([News(request.id, 0, [], [], (), None, str(error)) for request in ask.requests])

    def _next(self) -> Ask | None:
        """What may join now. One that is to be alone waits for those before it to end, and those behind it wait for it."""
        with self._lock:
            if not self._coming or (self._told and (self._alone or self._coming[0].alone)):
                return None
            ask = self._coming.pop(0)
            self._alone = ask.alone
            self._told.update((request.id, 0) for request in ask.requests)
        return ask

    def blame(self, error: Exception) -> set[Id]:
        """The engine has raised: tell so of the requests that it has from here, which the caller ends, and return them."""
        with self._lock:
            ids = set(self._told)
            self._told.clear()
        raised = type(error).__name__, str(error)
        self._post([News(id, 0, [], [], (), None, raised=raised) for id in ids])
        return ids

    def take(self, completions: Sequence[Completion]) -> list[Completion]:
        """Tell of those that were asked for here, and return the others."""
        mine = [completion for completion in completions if completion.id[0] >= FIRST_DRAW]
        if not mine:
            return list(completions)
        self._tell(mine, finished=True)
        return [completion for completion in completions if completion.id[0] < FIRST_DRAW]

    def show(self, engine: RolloutEngine, *, now: bool = False) -> None:
        """Tell what running requests have so far, now and then."""
        time_now = time.monotonic()
        if self._told and (now or time_now - self._shown >= SHOW_SECONDS):
            self._shown = time_now
            self._tell(engine.so_far(self._told), finished=False)

    def forget(self) -> None:
        """The engine has been emptied. Who waits hears of the failure from the call that failed."""
        with self._lock:
            self._told.clear()
            self._coming, self._news = [], []
            self._leaving.clear()

    def running(self, engine: RolloutEngine) -> set[Id]:
        """Requests that have begun."""
        return {completion.id for completion in engine.so_far(self._told)}

    def _tell(self, completions: Sequence[Completion], *, finished: bool) -> None:
        news = []
        with self._lock:
            for one in completions:
                told = self._told.get(one.id)
                if told is None or not (finished or len(one.token_ids) > told):
                    continue
                reason: FinishReason | None = one.finish_reason if finished else None
                news.append(News(one.id, told, one.token_ids[told:], one.logprobs[told:], one.spans, reason))
                self._told[one.id] = len(one.token_ids)
                if finished:
                    del self._told[one.id]
        self._post(news)

    def _post(self, news: Sequence[News]) -> None:
        with self._lock:
            self._news += news
