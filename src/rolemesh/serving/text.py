"""Growing token ids as growing text: what is certain of it so far, and where a stop text ends it. Called by `server.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no whole character (yet)."""


class Reading:
    """One answer. `text` never takes back what it was. Without `live` and stop texts it is empty until the answer is finished."""

    def __init__(self, decode: Decode, stops: Sequence[str], *, live: bool) -> None:
        self._decode, self._stops = decode, list(stops)
        self._live = live or bool(self._stops)
        self._known = ""
        """Text of the first `_read` tokens. The next ones are decoded with those from `_base` on in front, as their text may depend on
        them."""
        self._base = self._read = 0
        self._finished = False
        self.text = ""
        self.tokens = 0
        """Tokens that count: those up to the stop text, which is not part of the text, or all."""
        self.stopped = False

    def read(self, token_ids: Sequence[int], *, finished: bool) -> None:
        """Take up the tokens so far."""
        if self.stopped or self._finished or not (finished or len(token_ids) > self.tokens):
            return
        before, self.tokens, self._finished = self.tokens, len(token_ids), finished
        if not self._live:
            self.text = self._decode(token_ids) if finished else ""
            return
        began = self._known, self._base, self._read
        grown = self._grow(token_ids, len(token_ids))
        if self._stop_in(grown, len(began[0])) is not None:
            self._known, self._base, self._read = began
            if self._end(token_ids, before):
                return
        self.text = grown[: self._certain(grown)]
        if finished:
            whole = self._decode(token_ids)
            self.text = whole if whole.startswith(self.text) else grown

    def _end(self, token_ids: Sequence[int], before: int) -> bool:
        """With the first token that completes a stop text, wherever the pieces ended that tokens came in."""
        for count in range(before + 1, len(token_ids) + 1):
            known = len(self._known)
            grown = self._grow(token_ids, count)
            if (place := self._stop_in(grown, known)) is not None:
                self.text, self.tokens, self.stopped = grown[:place], count, True
                return True
        return False

    def _grow(self, token_ids: Sequence[int], count: int) -> str:
        """The text of the first `count`."""
        before, now = self._decode(token_ids[self._base : self._read]), self._decode(token_ids[self._base : count])
        grown = self._known + now[len(before) :]
        if not now.endswith(UNFINISHED):
            self._known, self._base, self._read = grown, self._read, count
        return grown

    def _stop_in(self, text: str, known: int) -> int | None:
        """Where the first stop text begins, of those that end behind the part that is known to have none."""
        places = [place for stop in self._stops if (place := text.find(stop, max(0, known - len(stop)))) >= 0]
        return min(places, default=None)

    def _certain(self, text: str) -> int:
        """How much can be shown: no half character, and nothing that may turn out to be the beginning of a stop text."""
        end = len(text.rstrip(UNFINISHED))
        return end - max((_begun(stop, text[max(0, end - len(stop) + 1) : end]) for stop in self._stops), default=0)


def _begun(stop: str, tail: str) -> int:
    """How many characters at the end of `tail`, which is shorter than `stop`, are the beginning of it."""
    place = tail.find(stop[0])
    while place >= 0 and not stop.startswith(tail[place:]):
        place = tail.find(stop[0], place + 1)
    return len(tail) - place if place >= 0 else 0
