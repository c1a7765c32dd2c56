"""Starting and ending the processes of a pool, with a backend whose starts and kills do as they are told."""

import asyncio
from dataclasses import dataclass, field

import pytest
from runtime_workers import Adder

from rolemesh.errors import ResourceError, RolemeshError
from rolemesh.plan.schema import Inventory, NodeInfo
from rolemesh.protocols.backend import Process, ProcessSpec
from rolemesh.runtime import Bundle, LocalBackend, Pool, SimulatedBackend, WorkerGroup


@dataclass(eq=False)
class Obedient(LocalBackend):
    """Fails, delays and records as told."""

    failing_starts: int = 0
    start_seconds: float = 0.0
    failing_kills: set[int] = field(default_factory=set)
    killed: list[int] = field(default_factory=list)
    cancelled: int = 0
    released: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    async def spawn(self, spec: ProcessSpec, deadline: float) -> Process:
        try:
            await asyncio.sleep(self.start_seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failing_starts:
            self.failing_starts -= 1
            raise ResourceError.one("process", "room")
        return await super().spawn(spec, deadline)

    async def kill(self, process: Process) -> None:
        self.killed.append(process.spec.bundle)
        if process.spec.bundle in self.failing_kills:
            raise RolemeshError(text=f"cannot kill {process.spec.bundle}")
        await super().kill(process)

    async def release_pool(self, name: str) -> None:
        self.released.append(name)


def pool_of(backend: Obedient, bundles: int) -> Pool:
    node = NodeInfo(name="local", cpus=8, memory_bytes=0, gpus=0)
    return Pool(backend, "pool", [Bundle(node=0, cpus=1, gpus=0)] * bundles, [node])


async def test_a_failed_start_is_tried_again() -> None:
    pool = pool_of(Obedient(failing_starts=1), 1)
    with pytest.raises(ResourceError):
        await pool.process(0, 10)
    assert (await pool.process(0, 10)).spec.bundle == 0


async def test_a_waiter_that_gives_up_does_not_end_the_start_for_another() -> None:
    pool = pool_of(Obedient(start_seconds=0.05), 1)
    impatient, patient = (asyncio.ensure_future(pool.process(0, 10)) for _ in range(2))
    await asyncio.sleep(0.01)
    impatient.cancel()
    assert (await patient).spec.bundle == 0
    assert impatient.cancelled()


async def test_closing_ends_starts_under_way() -> None:
    backend = Obedient(start_seconds=60)
    pool = pool_of(backend, 2)
    waiting = [asyncio.ensure_future(pool.process(bundle, 90)) for bundle in range(2)]
    await asyncio.sleep(0.01)
    await pool.close()
    assert (backend.cancelled, backend.killed, backend.released) == (2, [], ["pool"])
    assert all(isinstance(error, asyncio.CancelledError) for error in await asyncio.gather(*waiting, return_exceptions=True))


async def test_one_failing_kill_does_not_spare_the_others() -> None:
    backend = Obedient(failing_kills={0})
    pool = pool_of(backend, 3)
    for bundle in range(3):
        await pool.process(bundle, 10)
    with pytest.raises(RolemeshError, match="cannot kill 0"):
        await pool.close()
    assert (backend.killed, backend.released) == ([0, 1, 2], ["pool"])
    await pool.close()
    assert backend.killed == [0, 1, 2], "closed is closed"


class Losing(LocalBackend):
    """Its nodes can be taken away."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.there = [NodeInfo(name=name, cpus=8, memory_bytes=1 << 30) for name in names]

    async def inventory(self) -> Inventory:
        return Inventory(nodes=tuple(self.there), origin="test")


async def test_S18_a_place_whose_node_is_lost_moves_to_a_spare_of_its_kind_and_the_group_goes_on() -> None:
    backend = Losing("a", "b", "c")
    nodes = (await backend.inventory()).nodes
    kinds = [(0, 1.0), (1, 1.0), (0, 1.0), (2, 2.0), (1, 1.0), (2, 1.0)]  # two places in use, then spares
    bundles = [Bundle(node=node, cpus=cpus, gpus=0) for node, cpus in kinds]
    pool = Pool(backend, "spared", bundles, nodes, spares=[3, 4, 5])
    await pool.create(5)
    group = WorkerGroup("adders", Adder, pool, [0, 1])
    await group.create()
    await group.init()
    await group.replace(0)
    assert group.processes[0].spec.bundle == 0  # its node is there
    backend.there = [nodes[0], nodes[2]]
    await group.replace(1)
    assert group.processes[1].spec.bundle == 5  # 3 is of another kind, and the node of 4 is lost too
    assert pool.bundles[1] == bundles[5]
    assert await group.double([1, 2]) == [2, 4]
    backend.there = [nodes[0]]
    with pytest.raises(ResourceError, match=r"pool spared: place 1 needs another: its node c is gone; found 2 spare, none of its kind"):
        await group.replace(1)
    await pool.close()


@pytest.mark.parametrize(
    "make", [LocalBackend, lambda: SimulatedBackend([NodeInfo(name="a", cpus=2, memory_bytes=1)])], ids=["local", "simulated"]
)
def test_shares_of_a_cpu_that_sum_up_to_it_fit(make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "rolemesh.runtime.local.local_inventory", lambda: Inventory(nodes=(NodeInfo(name="a", cpus=2, memory_bytes=1),), origin="test")
    )
    backend = make()

    async def main() -> None:
        node = (await backend.inventory()).nodes[0]
        for number in range(5):  # 2 - (0.4 + 0.4 + 0.4 + 0.4) is less than 0.4 in binary numbers
            await backend.create_pool(f"p{number}", [Bundle(node=0, cpus=0.4, gpus=0)], [node], deadline=1)
        with pytest.raises(ResourceError, match=r"CPU.* 0\.4"):
            await backend.create_pool("more", [Bundle(node=0, cpus=0.4, gpus=0)], [node], deadline=1)

    backend.run(main())
