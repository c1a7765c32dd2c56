"""Whether a request for resources can ever be served, decided before it waits. Called by `runtime/guard.py` with its books.

The outlook: everyone who does not wait gives back all that it holds, sooner or later; what becomes free serves the queues in their
order; who is served waits no longer. Whoever still waits when nothing moves any more waits for ever. (This is the reduction of a
resource graph with several units: Holt, "Some deadlock properties of computer systems", 1972.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rolemesh.runtime.ledger import Lease, Ledger, Request


@dataclass(eq=False, slots=True, kw_only=True)
class _Held:
    """Something that is held in the outlook. `lease` is None for what is only going to be held."""

    ledger: Ledger
    who: str
    share: Fraction
    places: tuple[int, ...]
    lease: Lease | None = None


def waits_for_ever(request: Request, ledgers: Sequence[Ledger]) -> list[str]:
    """Who waits for whom, in a ring, if the request (in one of the queues already) would never be served; else nothing."""
    outlook = _Outlook(ledgers)
    while outlook.release() or outlook.serve():
        pass
    return outlook.ring(request.who) if any(request in queue for _, queue in outlook.queues) else []


class _Outlook:
    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self.queues = [(ledger, deque(ledger.queue)) for ledger in ledgers]
        self.held = [
            _Held(ledger=ledger, who=lease.who, share=lease.share, places=lease.places, lease=lease)
            for ledger in ledgers
            for lease in ledger.leases
        ]

    def waiting(self) -> set[str]:
        return {request.who for _, queue in self.queues for request in queue}

    def release(self) -> bool:
        """Who does not wait gives back whatever is not lent on. False when nobody can."""
        waiting, moved = self.waiting(), False
        for held in [held for held in self.held if held.who not in waiting]:
            lent = {place for loan in self._loans(held) for place in loan.places}
            kept = tuple(place for place in held.places if place in lent)
            moved, held.places = moved or kept != held.places, kept
        self.held = [held for held in self.held if held.places]
        return moved

    def _loans(self, held: _Held) -> list[_Held]:
        return [loan for loan in self.held if held.lease is not None and loan.ledger is held.lease.lending]

    def serve(self) -> bool:
        """The queues move on. False when none does."""
        moved = False
        for ledger, queue in self.queues:
            while queue and (places := queue[0].wish.pick(self._room(ledger))) is not None:
                request = queue.popleft()
                self.held.append(_Held(ledger=ledger, who=request.who, share=request.wish.share, places=places))
                moved = True
        return moved

    def _room(self, ledger: Ledger) -> dict[int, Fraction]:
        return ledger.room([held for held in self.held if held.ledger is ledger])

    # -- naming the ring ------------------------------------------------------------------------------------------------------

    def ring(self, start: str) -> list[str]:
        """The shortest way from `start` over those it waits for back to itself, one sentence each. That it holds a part itself is said
        where no way goes over others."""
        ways: deque[tuple[str, list[str]]] = deque([(start, [])])
        seen: set[str] = set()
        told: list[str] = []
        alone: list[str] = []
        while ways:
            who, told = ways.popleft()
            for other, sentence in self._blockers(who):
                if who == other == start:
                    alone = [sentence]
                elif other == start:
                    return [*told, sentence]
                elif other not in seen:
                    seen.add(other)
                    ways.append((other, [*told, sentence]))
        return told or alone  # those it waits for wait for each other, or nobody else is in the way

    def _blockers(self, who: str) -> Iterator[tuple[str, str]]:
        """Whom somebody waits for who waits as well, and how."""
        for ledger, queue in self.queues:
            for index, request in enumerate(queue):
                if request.who != who:
                    continue
                wants = f"{who} waits for {ledger.describe(request.wish)}"
                if request.wish.pick(self._room(ledger)) is None:
                    yield from self._holders(ledger, wants)
                for before in list(queue)[:index]:
                    yield before.who, f"{wants}, behind {before.who}"

    def _holders(self, ledger: Ledger, wants: str) -> Iterator[tuple[str, str]]:
        for held in self.held:
            if held.ledger is ledger:
                for party in self._bound(held):
                    yield party, f"{wants}, held by {held.who}" + (f" and lent to {party}" if party != held.who else "")

    def _bound(self, held: _Held) -> Iterator[str]:
        """Who has to go on for it to come back: its holder if that one waits, else who has borrowed it."""
        if held.who in self.waiting():
            yield held.who
        for loan in self._loans(held):
            yield from self._bound(loan)
