"""The resource guard, on virtual time: who gets what when, who is refused, and who is told what."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.errors import DeadlineExceeded, Deadlock, ResourceError, RunStopped
from rolemesh.runtime import Lease, ResourceGuard, SimulatedBackend

Test = Callable[[ResourceGuard], Awaitable[None]]


def guarded(test: Test, **pools: int | float) -> float:
    """Run a test with a guard: an int is a pool of slots, a float one of an amount. Returns the virtual seconds it took."""
    backend = SimulatedBackend()

    async def main() -> None:
        guard = ResourceGuard(backend)
        for name, budget in pools.items():
            (guard.add_slots if isinstance(budget, int) else guard.add_amount)(name, budget)
        await test(guard)

    backend.run(main())
    return backend.time()


def later(seconds: float, act: Callable[[], object]) -> None:
    asyncio.get_running_loop().call_later(seconds, act)


async def settled() -> None:
    """Everyone who can go on now has."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_S15_devices_go_from_generation_to_training_and_back() -> None:
    """8 for generation, then 4 of them for training, then back, under a ledger that names both all the while."""

    async def test(guard: ResourceGuard) -> None:
        with await guard.acquire("main", 8, who="rollout", deadline=1) as generation:
            assert generation.slots == (0, 1, 2, 3, 4, 5, 6, 7)
            await asyncio.sleep(3600)
            with await generation.borrow(4, who="actor", deadline=1, hold=600) as training:
                assert training.slots == (0, 1, 2, 3)
                with pytest.raises(DeadlineExceeded, match=r"4 slots .*lent by rollout.* actor holds slots 0, 1, 2, 3"):
                    await generation.borrow(4, who="critic", deadline=1, slots=[0, 4, 5, 6])
                (status,) = guard.snapshot()
                rows = [(row.who, row.slots, row.since, row.until, row.lent_by) for row in status.holders]
                assert rows == [
                    ("rollout", (0, 1, 2, 3, 4, 5, 6, 7), 0, None, ""),
                    ("actor", (0, 1, 2, 3), 3600, 4200, "rollout"),
                ]
                assert (status.budget, status.free, status.time) == (8, 0, 3601)
            assert generation.lent == []
        (status,) = guard.snapshot()
        assert (status.free, status.holders) == (8, ())
        with await guard.acquire("main", 8, who="rollout", deadline=1):
            pass

    assert guarded(test, main=8) == 3601


def test_a_lender_that_gives_back_early_gives_the_loan_back_when_it_ends() -> None:
    async def test(guard: ResourceGuard) -> None:
        generation = await guard.acquire("main", 8, who="rollout", deadline=1)
        training = await generation.borrow(4, who="actor", deadline=1)
        generation.release()
        generation.release()
        (status,) = guard.snapshot()
        assert status.free == 4
        assert generation.slots == training.slots == (0, 1, 2, 3)
        with pytest.raises(ResourceError, match="critic asks for 1 slot of main lent by rollout: no more than there is; found 0 in all"):
            await generation.borrow(1, who="critic", deadline=1)
        with pytest.raises(ResourceError, match="found slot 7"):
            training.release([7])
        training.release([1, 3])
        assert (guard.snapshot()[0].free, generation.slots, training.slots) == (6, (0, 2), (0, 2))
        training.release()
        assert (guard.snapshot()[0].free, guard.snapshot()[0].holders) == (8, ())

    guarded(test, main=8)


def test_who_waits_to_borrow_what_the_lender_gives_back_is_told() -> None:
    async def test(guard: ResourceGuard) -> None:
        generation = await guard.acquire("main", 4, who="rollout", deadline=1)
        training = await generation.borrow(4, who="actor", deadline=1)
        waiting = asyncio.ensure_future(generation.borrow(2, who="critic", deadline=60))
        await settled()
        generation.release()
        with pytest.raises(ResourceError, match="critic asks for 2 slots of main lent by rollout"):
            await waiting
        training.release()
        assert guard.snapshot()[0].free == 4

    guarded(test, main=4)


def test_an_expired_wait_names_the_holders_since_when_and_who_was_before() -> None:
    async def test(guard: ResourceGuard) -> None:
        await guard.acquire("main", 5, who="rollout", deadline=1)
        await asyncio.sleep(100)
        await guard.acquire("main", 2, who="reward", deadline=1, hold=10)
        first = asyncio.ensure_future(guard.acquire("main", 4, who="actor", deadline=7200))
        await settled()
        with pytest.raises(DeadlineExceeded) as caught:
            await guard.acquire("main", 3, who="critic", deadline=3600)
        assert str(caught.value) == (
            "critic waited 3600.0 s for 3 slots of main and gave up. Last report: rollout holds slots 0, 1, 2, 3, 4 for 3700.0 s; "
            "reward holds slots 5, 6 for 3600.0 s (3590.0 s longer than it said); free: 1 of 8; ahead in the queue: actor"
        )
        (status,) = guard.snapshot()
        assert [(row.who, row.amount, row.since, row.until) for row in status.waiting] == [("actor", 4, 100, 7300)]
        first.cancel()

    assert guarded(test, main=8) == 3700


def test_what_can_never_fit_is_refused_at_once() -> None:
    async def test(guard: ResourceGuard) -> None:
        with pytest.raises(ResourceError, match=r"actor asks for 9 slots of main: no more than there is; found 8 in all\. .*for ever"):
            await guard.acquire("main", 9, who="actor", deadline=3600)
        with pytest.raises(ResourceError, match=r"1 slot \(8\) of main"):
            await guard.acquire("main", who="actor", deadline=3600, slots=[8])
        with pytest.raises(ResourceError, match=r"actor asks for 80\.5 of memory: no more than there is; found 80 in all"):
            await guard.acquire("memory", 80.5, who="actor", deadline=3600)
        with pytest.raises(ResourceError, match=r"1\.5 of 1 slot of main"):
            await guard.acquire("main", who="actor", deadline=3600, share=1.5)
        with pytest.raises(ResourceError, match=r"a whole number of slots; found 1\.5"):
            await guard.acquire("main", 1.5, who="actor", deadline=3600)
        with pytest.raises(ResourceError, match="above 0; found 0"):
            await guard.acquire("main", 0, who="actor", deadline=3600)
        with pytest.raises(ResourceError, match="one of main, memory; found mian"):
            await guard.acquire("mian", who="actor", deadline=3600)
        with pytest.raises(ResourceError, match="pool main: a name of its own"):
            guard.add_slots("main", 1)

    assert guarded(test, main=8, memory=80.0) == 0


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    order: list[str] = []

    async def test(guard: ResourceGuard) -> None:
        async def use(who: str, amount: int) -> None:
            with await guard.acquire("main", amount, who=who, deadline=1000):
                order.append(who)
                await asyncio.sleep(10)

        users = [use("small 0", 1), use("large", 8), *(use(f"small {number}", 1) for number in range(1, 5))]
        await asyncio.gather(*users)

    assert guarded(test, main=8) == 30
    assert order == ["small 0", "large", "small 1", "small 2", "small 3", "small 4"]


def test_particular_slots_can_be_asked_for() -> None:
    async def test(guard: ResourceGuard) -> None:
        lease = await guard.acquire("main", who="actor", deadline=1, slots=[2, 5])
        assert lease.slots == (2, 5)
        assert (await guard.acquire("main", 3, who="critic", deadline=1)).slots == (0, 1, 3)
        later(5, lease.release)
        assert (await guard.acquire("main", who="ref", deadline=10, slots=[5, 4])).slots == (4, 5)

    assert guarded(test, main=6) == 5


def test_S20_shares_of_a_device_warn_and_fill_it_exactly() -> None:
    async def test(guard: ResourceGuard) -> None:
        leases: list[Lease] = []
        for number in range(3):
            with pytest.warns(UserWarning, match="0.333333 of 1 slot of main: others may slow it down. One worker a device"):
                leases.append(await guard.acquire("main", who=f"reward {number}", deadline=1, share=1 / 3))
        assert [lease.slots for lease in leases] == [(0,)] * 3, "one device is filled before the next one is touched"
        assert (await guard.acquire("main", who="actor", deadline=1)).slots == (1,)
        with pytest.raises(DeadlineExceeded):
            await guard.acquire("main", who="critic", deadline=1)

    guarded(test, main=2)


def test_closing_tells_everyone_who_waits() -> None:
    async def test(guard: ResourceGuard) -> None:
        lease = await guard.acquire("main", 1, who="rollout", deadline=1)
        waiting = asyncio.ensure_future(guard.acquire("main", 1, who="actor", deadline=3600))
        await settled()
        guard.close()
        with pytest.raises(RunStopped, match="actor waited for 1 slot of main, but the guard was closed"):
            await waiting
        with pytest.raises(RunStopped, match="the guard is closed"):
            await guard.acquire("main", 1, who="actor", deadline=3600)
        lease.release()

    assert guarded(test, main=1) == 0


def test_who_gives_up_makes_room_for_those_behind() -> None:
    async def test(guard: ResourceGuard) -> None:
        await guard.acquire("main", 1, who="rollout", deadline=1)
        large = asyncio.ensure_future(guard.acquire("main", 4, who="actor", deadline=3600))
        await settled()
        small = asyncio.ensure_future(guard.acquire("main", 1, who="ref", deadline=3600))
        await settled()
        large.cancel()
        assert (await small).slots == (1,)

    assert guarded(test, main=4) == 0


def test_who_is_cancelled_in_the_very_moment_it_is_served_keeps_nothing() -> None:
    async def test(guard: ResourceGuard) -> None:
        lease = await guard.acquire("main", 1, who="rollout", deadline=1)
        waiting = asyncio.ensure_future(guard.acquire("main", 1, who="actor", deadline=3600))
        await settled()
        lease.release()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert guard.snapshot()[0].free == 1

    guarded(test, main=1)


# Deadlocks.


def test_a_ring_of_holders_over_two_pools_is_refused_up_front() -> None:
    async def test(guard: ResourceGuard) -> None:
        await guard.acquire("train", 2, who="actor", deadline=1)
        lease = await guard.acquire("serve", 2, who="rollout", deadline=1)
        waiting = asyncio.ensure_future(guard.acquire("serve", 1, who="actor", deadline=3600))
        await settled()
        with pytest.raises(Deadlock) as caught:
            await guard.acquire("train", 2, who="rollout", deadline=3600)
        assert str(caught.value) == (
            "rollout asked for 2 slots of train and would wait for ever: rollout waits for 2 slots of train, held by actor; "
            "actor waits for 1 slot of serve, held by rollout. Give something back first, or let everyone acquire in the same order"
        )
        lease.release()
        assert (await waiting).slots == (0,)

    assert guarded(test, train=2, serve=2) == 0


def test_waiting_for_oneself_is_refused() -> None:
    async def test(guard: ResourceGuard) -> None:
        await guard.acquire("main", 6, who="rollout", deadline=1)
        with pytest.raises(Deadlock, match=r"would wait for ever: rollout waits for 4 slots of main, held by rollout\."):
            await guard.acquire("main", 4, who="rollout", deadline=3600)

    assert guarded(test, main=8) == 0


def test_two_who_each_want_the_part_of_the_other_are_both_named() -> None:
    """It holds a part itself, but what it lacks is the other's."""

    async def test(guard: ResourceGuard) -> None:
        await guard.acquire("main", 2, who="actor", deadline=1)
        half = await guard.acquire("main", 2, who="critic", deadline=1)
        waiting = asyncio.ensure_future(guard.acquire("main", 2, who="actor", deadline=3600))
        await settled()
        ring = "critic waits for 2 slots of main, held by actor; actor waits for 2 slots of main, held by critic"
        with pytest.raises(Deadlock, match=ring):
            await guard.acquire("main", 2, who="critic", deadline=3600)
        half.release()
        await waiting

    assert guarded(test, main=4) == 0


def test_a_ring_that_goes_through_the_queue_is_seen() -> None:
    """The critic asks for little that is free, but behind the actor, who waits for what the critic holds."""

    async def test(guard: ResourceGuard) -> None:
        await guard.acquire("main", 4, who="critic", deadline=1)
        large = asyncio.ensure_future(guard.acquire("main", 8, who="actor", deadline=3600))
        await settled()
        with pytest.raises(
            Deadlock, match="critic waits for 1 slot of main, behind actor; actor waits for 8 slots of main, held by critic"
        ):
            await guard.acquire("main", 1, who="critic", deadline=3600)
        large.cancel()

    assert guarded(test, main=8) == 0


def test_a_ring_of_three_names_all_three() -> None:
    async def test(guard: ResourceGuard) -> None:
        for who, pool in (("a", "x"), ("b", "y"), ("c", "z")):
            await guard.acquire(pool, 1, who=who, deadline=1)
        waiting = []
        for who, pool in (("a", "y"), ("b", "z")):
            waiting.append(asyncio.ensure_future(guard.acquire(pool, 1, who=who, deadline=3600)))
            await settled()
        with pytest.raises(Deadlock) as caught:
            await guard.acquire("x", 1, who="c", deadline=3600)
        assert [sentence.split(" waits")[0] for sentence in caught.value.fields["cycle"]] == ["c", "a", "b"]
        for task in waiting:
            task.cancel()

    assert guarded(test, x=1, y=1, z=1) == 0


def test_no_deadlock_where_somebody_else_can_give_back_enough() -> None:
    """The actor and the critic hold and want, but the reward workers hold enough and wait for nothing."""

    async def test(guard: ResourceGuard) -> None:
        actor = await guard.acquire("main", 2, who="actor", deadline=1)
        critic = await guard.acquire("other", 1, who="critic", deadline=1)
        reward = await guard.acquire("main", 2, who="reward", deadline=1)
        later(10, reward.release)
        waiting = asyncio.ensure_future(guard.acquire("main", 2, who="critic", deadline=100))
        await settled()
        later(20, critic.release)
        with await guard.acquire("other", 1, who="actor", deadline=100):
            assert (await waiting).slots == (2, 3)
        actor.release()

    assert guarded(test, main=4, other=1) == 20


def test_a_borrower_that_waits_for_what_it_has_borrowed_is_refused() -> None:
    async def test(guard: ResourceGuard) -> None:
        generation = await guard.acquire("main", 4, who="rollout", deadline=1)
        await generation.borrow(3, who="actor", deadline=1)
        with pytest.raises(Deadlock, match=r"ever: actor waits for 2 slots of main, held by rollout and lent to actor\."):
            await guard.acquire("main", 2, who="actor", deadline=3600)

    assert guarded(test, main=4) == 0


def test_a_borrower_may_wait_for_the_rest_of_its_lender() -> None:
    async def test(guard: ResourceGuard) -> None:
        generation = await guard.acquire("main", 4, who="rollout", deadline=1)
        await generation.borrow(2, who="actor", deadline=1)
        later(10, generation.release)
        assert (await guard.acquire("main", 2, who="actor", deadline=60)).slots == (2, 3)

    assert guarded(test, main=4) == 10


# Whatever happens.

BUDGETS = {"main": 4, "other": 2, "memory": 10.0}

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["main", "main", "other", "memory"]),
        st.sampled_from([1, 2, 3, 4, 5]),
        st.sampled_from([None, None, None, 0.5, 0.25]),
        st.sampled_from([0.0, 1.0, 7.0]),
        st.sampled_from([1.0, 5.0, 50.0]),
        st.sampled_from(["release", "release", "borrow", "cancel", "fail", "more"]),
    ),
    min_size=1,
    max_size=6,
)


Step = tuple[str, int, float | None, float, float, str]


class Parties:
    """Parties that acquire, borrow, nest, fail, and are cancelled at random moments; after every move the books are checked."""

    def __init__(self, seed: int, patience: float | None = None) -> None:
        self.backend, self.chance, self.patience = SimulatedBackend(limit=1e7), random.Random(seed), patience
        self.guard = ResourceGuard(self.backend, warn=lambda text: None)
        self.guard.add_slots("main", 4)
        self.guard.add_slots("other", 2)
        self.guard.add_amount("memory", 10.0)
        self.waits: list[tuple[float, float, float]] = []
        """How long each lasted, and how long it may last, from and to."""
        self.expired = 0

    def check(self) -> None:
        for status in self.guard.snapshot():
            used: dict[int, Fraction] = {}
            direct = [row for row in status.holders if not row.lent_by]
            for row in direct:
                for slot in row.slots:
                    used[slot] = used.get(slot, Fraction(0)) + Fraction(row.amount).limit_denominator(1000) / len(row.slots)
            assert all(total <= 1 for total in used.values())
            assert sum(row.amount for row in direct) + status.free == pytest.approx(BUDGETS[status.name])
            assert status.free >= 0

    async def acquire(self, who: str, step: Step) -> Lease | None:
        """None when it was told why not."""
        pool, amount, share, _, deadline, _ = step
        deadline, started = self.patience or deadline, self.backend.time()
        try:
            lease = await self.guard.acquire(pool, amount, who=who, deadline=deadline, share=share if pool != "memory" else None)
        except DeadlineExceeded:
            self.expired += 1
            self.waits.append((self.backend.time() - started, deadline, deadline))
        except (ResourceError, Deadlock):
            self.waits.append((self.backend.time() - started, 0, 0))
        else:
            self.waits.append((self.backend.time() - started, 0, deadline))
            return lease
        finally:
            self.check()
        return None

    async def use(self, who: str, lease: Lease, hold: float, then: str) -> None:
        if then != "borrow":
            await asyncio.sleep(hold)
            return
        with await lease.borrow(1, who=f"{who}'s guest", deadline=1):
            self.check()
            if self.chance.random() < 0.3:
                lease.release()
            await asyncio.sleep(hold)

    async def party(self, who: str, steps: list[Step]) -> None:
        held: list[Lease] = []
        try:
            for step in steps:
                await asyncio.sleep(self.chance.choice([0, 0, 0.5, 3]))
                lease = await self.acquire(who, step)
                if lease is None:
                    continue
                held.append(lease)
                await self.use(who, lease, step[3], step[5])
                if step[5] == "fail":
                    return
                if step[5] != "more":
                    held.pop().release()
                self.check()
        finally:
            for lease in held:
                lease.release()
            self.check()

    async def meet(self, parties: list[list[Step]]) -> None:
        tasks = [asyncio.ensure_future(self.party(f"party {number}", steps)) for number, steps in enumerate(parties)]
        for task, steps in zip(tasks, parties, strict=True):
            if any(step[-1] == "cancel" for step in steps):
                later(self.chance.choice([0, 0.5, 1, 2, 3.5]), task.cancel)
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert ended is None or isinstance(ended, asyncio.CancelledError), ended
        for status in self.guard.snapshot():
            assert (status.holders, status.waiting, status.free) == ((), (), BUDGETS[status.name])


@given(parties=st.lists(STEPS, min_size=1, max_size=6), seed=st.integers(0, 2**32))
@settings(max_examples=150)
def test_never_over_budget_never_lost_and_everyone_is_served_or_told_in_time(parties: list[list[Step]], seed: int) -> None:
    world = Parties(seed)
    world.backend.run(world.meet(parties))
    assert [wait for wait in world.waits if not wait[1] - 1e-6 <= wait[0] <= wait[2] + 1e-6] == []


@given(parties=st.lists(STEPS, min_size=2, max_size=6), seed=st.integers(0, 2**32))
@settings(max_examples=100)
def test_with_all_the_patience_everyone_is_served_unless_refused_up_front(parties: list[list[Step]], seed: int) -> None:
    """So every deadlock was seen before it began."""
    world = Parties(seed, patience=1e5)
    world.backend.run(world.meet(parties))
    assert world.expired == 0
    assert max((wait[0] for wait in world.waits), default=0) < 1000


@given(requests=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=8))
@settings(max_examples=100)
def test_first_come_first_served_whatever_the_sizes(requests: list[tuple[int, int, int]]) -> None:
    """Served in the order in which they came, and all served: everyone gives back in the end."""
    served: dict[int, float] = {}

    async def test(guard: ResourceGuard) -> None:
        async def use(number: int, amount: int, hold: int) -> None:
            with await guard.acquire("main", amount, who=f"user {number}", deadline=1000) as lease:
                served[number] = lease.since
                await asyncio.sleep(hold)

        users = []
        for number, (amount, pause, hold) in enumerate(requests):
            users.append(asyncio.ensure_future(use(number, amount, hold)))
            await asyncio.sleep(pause)
        await asyncio.gather(*users)

    guarded(test, main=4)
    times = [served[number] for number in range(len(requests))]
    assert times == sorted(times)
