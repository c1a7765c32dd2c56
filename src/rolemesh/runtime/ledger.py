"""The books of the resource guard (`runtime/guard.py`): what a pool has, who holds what of it, and who waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Self

from rolemesh.errors import ResourceError

if TYPE_CHECKING:
    from rolemesh.runtime.guard import ResourceGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A row of the ledger. Times are the backend's, seconds."""

    who: str
    slots: tuple[int, ...]
    """Empty in a pool of an amount."""
    amount: float
    """Slots times the share of each, or the amount."""
    since: float
    until: float | None
    """When the holder said it would give back."""
    lent_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request in the queue, first come first served."""

    who: str
    amount: float
    since: float
    until: float
    """When it gives up."""
    lent_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """A pool of the guard for status pages. What is lent on is listed with the borrower and the lender both."""

    name: str
    budget: float
    free: float
    time: float
    holders: tuple[Holding, ...]
    waiting: tuple[Waiting, ...]


def exact(amount: float) -> Fraction:
    """Sums of shares must be exact: three times a third is a whole, and nothing is ever over budget by a rounding."""
    return Fraction(amount).limit_denominator(1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """`count` places with `share` of each free; of `among` only, if given."""

    count: int
    share: Fraction
    among: tuple[int, ...] | None = None

    def pick(self, room: dict[int, Fraction]) -> tuple[int, ...] | None:
        """Places that serve it now, those with the least room first, so that whole ones stay whole. None if there are too few."""
        places = room if self.among is None else self.among
        fitting = sorted((room[place], place) for place in places if room.get(place, Fraction(0)) >= self.share)
        return tuple(sorted(place for _, place in fitting[: self.count])) if len(fitting) >= self.count else None

    @property
    def amount(self) -> Fraction:
        return self.count * self.share


@dataclass(eq=False, slots=True)
class Request:
    """Somebody's wish in a queue, until `served` has the lease or says why there is none. `hold` and times are seconds."""

    who: str
    wish: Wish
    since: float
    until: float
    hold: float | None
    served: asyncio.Future[Lease]


@dataclass(eq=False, slots=True)
class Ledger:
    """Places that are given out: those of a pool, or those of a lease, for lending."""

    name: str
    budget: dict[int, Fraction]
    counted: bool
    """Its places are numbered slots; else there is one place, which holds an amount."""
    lender: Lease | None = None
    leases: list[Lease] = field(default_factory=list)
    queue: deque[Request] = field(default_factory=deque)

    def room(self) -> dict[int, Fraction]:
        """What is free at each place; a lender's that is leaving lends no more."""
        room = dict(self.budget)
        for lease in self.leases:
            for place in lease.places:
                if place in room:
                    room[place] -= lease.share
        return room

    def serve(self, guard: ResourceGuard, now: float) -> list[tuple[Request, Lease]]:
        """Give what is free to those in front, in order, until one does not fit."""
        served = []
        while self.queue and (places := self.queue[0].wish.pick(self.room())) is not None:
            request = self.queue.popleft()
            self.leases.append(Lease(guard, self, request, places, now))
            served.append((request, self.leases[-1]))
        return served

    def wish(self, amount: float, slots: Sequence[int] | None, share: float | None) -> Wish:
        if not self.counted:
            return Wish(count=1, share=exact(amount))
        among = tuple(sorted(set(slots))) if slots is not None else None
        count = len(among) if among is not None else amount
        if count != int(count):
            raise ResourceError.one(f"pool {self.name}", "a whole number of slots", f"{amount:g}", "Give share=... for a part of a slot")
        return Wish(count=int(count), share=exact(1 if share is None else share), among=among)

    @property
    def lender_name(self) -> str:
        return self.lender.who if self.lender else ""

    def describe(self, wish: Wish) -> str:
        if not self.counted:
            return f"{float(wish.amount):g} of {self.name}"
        which = f" ({', '.join(map(str, wish.among))})" if wish.among else ""
        share = f"{float(wish.share):g} of " if wish.share != 1 else ""
        return f"{share}{wish.count} slot{'s' if wish.count > 1 else ''}{which} of {self.name}"


class Lease:
    """What somebody holds, until `release` or the end of a `with` block."""

    def __init__(self, guard: ResourceGuard, ledger: Ledger, request: Request, places: tuple[int, ...], now: float) -> None:
        self.who, self.share, self.since = request.who, request.wish.share, now
        self.until = now + request.hold if request.hold is not None else None
        self.places = places
        self.leaving: set[int] = set()
        """Given back already, but still lent on."""
        self.ledger, self._guard = ledger, guard
        self.lending = Ledger(f"{ledger.name} lent by {request.who}", {}, ledger.counted, lender=self)

    @property
    def pool(self) -> str:
        return self.ledger.name

    @property
    def slots(self) -> tuple[int, ...]:
        """Numbers of the slots held; empty in a pool of an amount, and when all is given back."""
        return self.places if self.ledger.counted else ()

    @property
    def amount(self) -> float:
        return float(len(self.places) * self.share)

    @property
    def lent(self) -> list[Lease]:
        """What others have borrowed from it."""
        return list(self.lending.leases)

    def release(self, slots: Sequence[int] | None = None) -> None:
        """Give back, all or these slots; what is lent on follows when its borrower gives it back. Raises ResourceError for slots that
        are not held; giving all back twice is fine."""
        self._guard._give_back(self, self.places if slots is None else tuple(slots))

    async def borrow(
        self, amount: float, *, who: str, deadline: float, slots: Sequence[int] | None = None, hold: float | None = None
    ) -> Lease:
        """Hand some of it to somebody else, who gives it back to this lease; waits for other borrowers. See `ResourceGuard.acquire`."""
        self.lending.budget = {place: self.share for place in self.places if place not in self.leaving}
        wish = self.lending.wish(amount, slots, float(self.share))
        return await self._guard._acquire(self.lending, wish, who, deadline, hold)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def with_loans(ledger: Ledger) -> Iterator[Ledger]:
    """A ledger, and those of everything that is lent on from it."""
    yield ledger
    for lease in ledger.leases:
        yield from with_loans(lease.lending)
