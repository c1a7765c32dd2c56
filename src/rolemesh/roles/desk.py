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
            coming, self._coming = self._coming, []
            leaving, self._leaving = self._leaving, set()
            ended = leaving & self._told.keys()
            for id in ended:
                del self._told[id]
        engine.abort(ended)
        for ask in coming:
            requests = [request for request in ask.requests if request.id not in leaving]
            try:
                engine.add(requests, ask.sampling)
            except ValueError as error:
                self._post([News(request.id, 0, [], [], (), None, str(error)) for request in requests])
            else:
                with self._lock:
                    self._told.update((request.id, 0) for request in requests)

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
