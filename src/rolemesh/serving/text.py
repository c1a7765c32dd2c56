"""Growing token ids as growing text: what is certain of it so far, and where a stop text ends it. Called by `server.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no whole character (yet)."""


class Reading:
    """One answer. `text` never takes back what it was, unless the tokens do."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, [stop for stop in stops if stop]
        self._read = 0
        self.text = ""
        self.tokens = 0
        """Tokens that count: those up to the stop text, which is not part of the text, or all."""
        self.stopped = False

    def read(self, token_ids: Sequence[int], *, finished: bool) -> None:
        """Take up the tokens so far."""
        if self.stopped:
            return
        whole = self._decode(token_ids)
        if (place := self._stop_in(whole)) is not None:
            # The fewest tokens whose text has it; those of the last look had not.
            self.tokens = next(count for count in range(self._read + 1, len(token_ids) + 1) if self._stops_within(token_ids[:count]))
            self.text, self.stopped = whole[:place], True
            return
        self._read = self.tokens = len(token_ids)
        self.text = whole if finished else whole[: self._certain(whole)]

    def _stops_within(self, token_ids: Sequence[int]) -> bool:
        return self._stop_in(self._decode(token_ids)) is not None

    def _stop_in(self, text: str) -> int | None:
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        return min(places, default=None)

    def _certain(self, text: str) -> int:
        """How much can be shown: no half character, and nothing that may turn out to be the beginning of a stop text."""
        end = len(text.rstrip(UNFINISHED))
        ends = [end - length for stop in self._stops for length in range(1, len(stop)) if text[:end].endswith(stop[:length])]
        return min(ends, default=end)
