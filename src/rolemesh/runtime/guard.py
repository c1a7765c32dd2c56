"""The resource guard: a ledger of who holds what since when and until when, and the queue of those who wait for it.

    guard = ResourceGuard(backend)
    guard.add_slots("main", 8)                                                # eight devices, for example
    with await guard.acquire("main", 8, who="rollout", deadline=60) as all_eight:
        with await all_eight.borrow(4, who="actor", deadline=60) as four:     # between two phases
            ...                                                               # four.slots are four of the eight
                                                                              # back with rollout
Lives with the controller, which is one thread: between two awaits nothing changes. The queue of a pool is strict: who came first is
served first, so a large request is not starved by small ones. A request that could never be served is refused at once.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from rolemesh.errors import DeadlineExceeded, Deadlock, ResourceError, RunStopped
from rolemesh.protocols.backend import Backend
from rolemesh.runtime.deadlock import waits_for_ever
from rolemesh.runtime.ledger import Holding, Lease, Ledger, PoolStatus, Request, Waiting, Wish, exact, with_loans


class ResourceGuard:
    """Pools with budgets. `warn` is told when a slot is shared: one worker a device is the default.

    `who` names one party, of which the guard assumes that it gives nothing back while one of its own requests waits.
    """

    def __init__(self, backend: Backend, *, warn: Callable[[str], None] = warnings.warn) -> None:
        self._backend, self._warn = backend, warn
        self._pools: dict[str, Ledger] = {}
        self._closed = False

    def add_slots(self, name: str, slots: int) -> None:
        """A pool of numbered slots, devices for example."""
        self._add(Ledger(name, dict.fromkeys(range(slots), Fraction(1)), counted=True), slots)

    def add_amount(self, name: str, amount: float) -> None:
        """A pool of something that has no parts to tell apart: memory, CPUs, permits."""
        self._add(Ledger(name, {0: exact(amount)}, counted=False), amount)

    def _add(self, ledger: Ledger, budget: float) -> None:
        if ledger.name in self._pools:
            raise ResourceError.one(f"pool {ledger.name}", "a name of its own", "a pool of this name", "Take another name")
        if budget <= 0:
            raise ResourceError.one(f"pool {ledger.name}", "a budget above 0", f"{budget:g}")
        self._pools[ledger.name] = ledger

    async def acquire(
        self,
        pool: str,
        amount: float = 1,
        *,
        who: str,
        deadline: float,
        slots: Sequence[int] | None = None,
        share: float | None = None,
        hold: float | None = None,
    ) -> Lease:
        """Hold `amount` of a pool (slots: a whole number of them, or exactly those in `slots`), waiting at most `deadline` seconds.

        `share` below 1 takes a part of each slot only, which is warned of. `hold` says after how many seconds the holder means to give
        back; who waits is told when that is overdue. Raises ResourceError for what can never fit, Deadlock when the holders would wait
        for each other, both at once, and DeadlineExceeded naming the holders.
        """
        if pool not in self._pools:
            raise ResourceError.one(f"{who} asks for pool {pool}", f"one of {', '.join(self._pools) or 'none'}", pool, "Add the pool first")
        return await self._acquire(self._pools[pool], self._pools[pool].wish(amount, slots, share), who, deadline, hold)

    async def _acquire(self, ledger: Ledger, wish: Wish, who: str, deadline: float, hold: float | None) -> Lease:
        if self._closed:
            raise RunStopped(f"{who} asks for {ledger.name}, but the guard is closed")
        self._refuse_what_never_fits(ledger, wish, who)
        if ledger.counted and ledger.lender is None and wish.share < 1:
            self._warn(f"{who} takes {ledger.describe(wish)}: others may slow it down. One worker a device is the default")
        now = self._backend.time()
        served: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        request = Request(who, wish, now, now + deadline, hold, served)
        ledger.queue.append(request)
        self._serve(ledger)
        if not served.done():
            self._refuse_deadlock(ledger, request)
            await self._wait(ledger, request, deadline)
        return served.result()

    async def _wait(self, ledger: Ledger, request: Request, deadline: float) -> None:
        try:
            await asyncio.wait({request.served}, timeout=deadline)
        except asyncio.CancelledError:
            if request.served.done() and request.served.exception() is None:
                request.served.result().release()
            self._withdraw(ledger, request)
            raise
        if not request.served.done():
            told = self._tell(ledger, request)
            self._withdraw(ledger, request)
            raise DeadlineExceeded(waiter=request.who, subject=ledger.describe(request.wish), seconds=deadline, last_report=told)

    def _withdraw(self, ledger: Ledger, request: Request) -> None:
        if request in ledger.queue:
            ledger.queue.remove(request)
            self._serve(ledger)

    def _serve(self, ledger: Ledger) -> None:
        for request, lease in ledger.serve(self, self._backend.time()):
            request.served.set_result(lease)

    def _give_back(self, lease: Lease, places: tuple[int, ...]) -> None:
        """What is lent on comes back when its borrower gives it back."""
        strange = sorted(set(places) - set(lease.places))
        if strange:
            subject, found = f"{lease.who} gives back a part of {lease.pool}", f"slot {', '.join(map(str, strange))}"
            raise ResourceError.one(subject, "slots that it holds", found, f"It holds {_part(lease)}")
        lent = {place for loan in lease.lent for place in loan.places}
        lease.leaving |= lent & set(places)
        lease.places = tuple(place for place in lease.places if place not in places or place in lent)
        self._shrink(lease.lending, places)
        ledger = lease.ledger
        if not lease.places and lease in ledger.leases:
            ledger.leases.remove(lease)
        self._serve(ledger)
        lender = ledger.lender
        if lender is not None and lender.leaving & set(places):
            self._give_back(lender, tuple(lender.leaving & set(places)))

    def _shrink(self, lending: Ledger, places: Sequence[int]) -> None:
        """A lender gives places back: those who wait to borrow more than is left are told so."""
        for place in places:
            lending.budget.pop(place, None)
        for request in [request for request in lending.queue if request.wish.pick(lending.budget) is None]:
            lending.queue.remove(request)
            request.served.set_exception(_never(lending, request.wish, request.who))
        self._serve(lending)

    def close(self) -> None:
        """Tell everyone who waits that it is over. Holders give back as ever."""
        self._closed = True
        for ledger in self._ledgers():
            for request in ledger.queue:
                text = f"{request.who} waited for {ledger.describe(request.wish)}, but the guard was closed"
                request.served.set_exception(RunStopped(text))
            ledger.queue.clear()

    # -- telling --------------------------------------------------------------------------------------------------------------

    def snapshot(self) -> list[PoolStatus]:
        """All pools, with what is lent on below its pool."""
        return [self._status(pool) for pool in self._pools.values()]

    def _status(self, pool: Ledger) -> PoolStatus:
        ledgers = list(with_loans(pool))
        return PoolStatus(
            name=pool.name,
            budget=float(sum(pool.budget.values())),
            free=float(sum(pool.room().values())),
            time=self._backend.time(),
            holders=tuple(_holding(lease) for ledger in ledgers for lease in ledger.leases),
            waiting=tuple(_waiting(request, ledger) for ledger in ledgers for request in ledger.queue),
        )

    def _tell(self, ledger: Ledger, request: Request) -> str:
        now = self._backend.time()
        held = [f"{lease.who} holds {_part(lease)} for {now - lease.since:.1f} s{_overdue(lease, now)}" for lease in ledger.leases]
        free, budget = (float(sum(room.values())) for room in (ledger.room(), ledger.budget))
        ahead = [other.who for other in list(ledger.queue)[: ledger.queue.index(request)]]
        queue = [f"ahead in the queue: {', '.join(ahead)}"] if ahead else []
        return "; ".join([*held, f"free: {free:g} of {budget:g}", *queue])

    def _ledgers(self) -> Iterator[Ledger]:
        for pool in self._pools.values():
            yield from with_loans(pool)

    # -- refusing -------------------------------------------------------------------------------------------------------------

    def _refuse_what_never_fits(self, ledger: Ledger, wish: Wish, who: str) -> None:
        if wish.count < 1 or wish.share <= 0:
            raise ResourceError.one(f"{who} asks for {ledger.name}", "an amount above 0", f"{float(wish.amount):g}")
        if wish.pick(ledger.budget) is None:
            raise _never(ledger, wish, who)

    def _refuse_deadlock(self, ledger: Ledger, request: Request) -> None:
        ring = waits_for_ever(request, self._pools.values(), self)
        if ring:
            self._withdraw(ledger, request)
            raise Deadlock(who=request.who, wanted=ledger.describe(request.wish), cycle=ring)


def _never(ledger: Ledger, wish: Wish, who: str) -> ResourceError:
    have = f"{float(sum(ledger.budget.values())):g} in all"
    return ResourceError.one(
        f"{who} asks for {ledger.describe(wish)}", "no more than there is", have, "It would wait for ever: ask for less"
    )


def _holding(lease: Lease) -> Holding:
    lender = lease.ledger.lender_name
    return Holding(who=lease.who, slots=lease.slots, amount=lease.amount, since=lease.since, until=lease.until, lent_by=lender)


def _waiting(request: Request, ledger: Ledger) -> Waiting:
    amount, lender = float(request.wish.amount), ledger.lender_name
    return Waiting(who=request.who, amount=amount, since=request.since, until=request.until, lent_by=lender)


def _part(lease: Lease) -> str:
    return f"slots {', '.join(map(str, lease.slots))}" if lease.slots else f"{lease.amount:g}"


def _overdue(lease: Lease, now: float) -> str:
    return f" ({now - lease.until:.1f} s longer than it said)" if lease.until is not None and now > lease.until else ""
