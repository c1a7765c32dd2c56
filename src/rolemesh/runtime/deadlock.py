"""Whether a request for resources can ever be served, decided before it waits. Called by `runtime/guard.py` with its books.

The outlook: everyone who does not wait gives back all that it holds, sooner or later; what becomes free serves the queues in their
order; who is served waits no longer. Whoever still waits when nothing moves any more waits for ever. (This is the reduction of a
resource graph with several units: Holt, "Some deadlock properties of computer systems", 1972.)
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rolemesh.runtime.ledger import Lease, Ledger, Request, with_loans

if TYPE_CHECKING:
    from rolemesh.runtime.guard import ResourceGuard


def waits_for_ever(request: Request, pools: Iterable[Ledger], guard: ResourceGuard) -> list[str]:
    """Who waits for whom, in a ring, if the request (in one of the queues already) would never be served; else nothing."""
    outlook = _Outlook(pools, guard)
    while outlook.release() or outlook.serve():
        pass
    return outlook.ring(request.who) if any(request in ledger.queue for ledger in outlook.ledgers()) else []


class _Outlook:
    """Copies of the books, which move on."""

    def __init__(self, pools: Iterable[Ledger], guard: ResourceGuard) -> None:
        self._pools, self._guard = [_copied(pool) for pool in pools], guard

    def ledgers(self) -> list[Ledger]:
        return [ledger for pool in self._pools for ledger in with_loans(pool)]

    def waiting(self) -> set[str]:
        return {request.who for ledger in self.ledgers() for request in ledger.queue}

    def release(self) -> bool:
        """Who does not wait gives back whatever is not lent on. False when nobody can."""
        waiting, moved = self.waiting(), False
        for ledger in self.ledgers():
            for lease in [lease for lease in ledger.leases if lease.who not in waiting]:
                lent = {place for loan in lease.lent for place in loan.places}
                kept = tuple(place for place in lease.places if place in lent)
                moved, lease.places = moved or kept != lease.places, kept
                if not kept:
                    ledger.leases.remove(lease)
        return moved

    def serve(self) -> bool:
        """The queues move on. False when none does."""
        return any(ledger.serve(self._guard, 0.0) for ledger in self.ledgers())

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
        for ledger in self.ledgers():
            for index, request in enumerate(ledger.queue):
                if request.who != who:
                    continue
                wants = f"{who} waits for {ledger.describe(request.wish)}"
                if request.wish.pick(ledger.room()) is None:
                    yield from self._holders(ledger, wants)
                for before in list(ledger.queue)[:index]:
                    yield before.who, f"{wants}, behind {before.who}"

    def _holders(self, ledger: Ledger, wants: str) -> Iterator[tuple[str, str]]:
        for lease in ledger.leases:
            for party in self._bound(lease):
                yield party, f"{wants}, held by {lease.who}" + (f" and lent to {party}" if party != lease.who else "")

    def _bound(self, lease: Lease) -> Iterator[str]:
        """Who has to go on for it to come back: its holder if that one waits, else who has borrowed it."""
        if lease.who in self.waiting():
            yield lease.who
        for loan in lease.lent:
            yield from self._bound(loan)


def _copied(ledger: Ledger) -> Ledger:
    twin = copy.copy(ledger)
    twin.queue, twin.leases = deque(ledger.queue), [copy.copy(lease) for lease in ledger.leases]
    for lease in twin.leases:
        lease.lending = _copied(lease.lending)
    return twin
