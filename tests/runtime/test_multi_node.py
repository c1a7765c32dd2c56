"""Pools on a cluster of two nodes, which are two raylets on this machine with eight logical GPUs each."""

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from runtime_workers import Summer

import rolemesh
from rolemesh.errors import ResourceError, RolemeshError
from rolemesh.plan import Inventory, NodeInfo
from rolemesh.plan.inventory import network_interfaces
from rolemesh.runtime import Backend, Bundle, Pool, Worker, WorkerGroup, create_backend, register
from rolemesh.runtime.ray.holders import whole_devices

pytestmark = pytest.mark.ray
ODD = [str(number) for number in range(1, 16, 2)]
"""Devices of the second node."""


class Place(Worker):
    """Says where it really is."""

    @register(dispatch="all")
    def where(self) -> tuple[str, str, str, str]:
        node = ray.get_runtime_context().get_node_id()
        return node, os.environ["LOCAL_RANK"], os.environ.get("CUDA_VISIBLE_DEVICES", ""), self.context.device

    @register(dispatch="all")
    def variables(self) -> dict[str, str]:
        return dict(os.environ)


@pytest.fixture(scope="module")
def backend(raylets: Any) -> Iterator[Backend]:
    backend = create_backend(
        "ray", address=raylets.address, pythonpath=[str(Path(__file__).parent), str(Path(rolemesh.__file__).parents[1])]
    )
    backend.start()
    yield backend
    backend.stop()


def key(node: NodeInfo) -> str:
    return node.labels["ray.io/node-id"]


def group_nodes(name: str) -> list[str]:
    """The node of each bundle of a pool, by placement group and bundle, as Ray has placed it."""
    groups = {group["name"]: group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"}
    return [
        group["bundles_to_node_id"][index]
        for _, group in sorted(groups.items())
        if group["name"].startswith(f"{name}@")
        for index in sorted(group["bundles"])
    ]


async def places(
    backend: Backend, name: str, bundles: list[Bundle], nodes: Any, interface: str | None = None
) -> list[tuple[str, str, str, str]]:
    """Where real processes in these bundles find themselves."""
    pool = Pool(backend, name, bundles, nodes, interface=interface)
    await pool.create(deadline=20)
    group = WorkerGroup("place", Place, pool, bundles=range(len(bundles)))
    await group.create(deadline=300)
    found = await group.where()
    await pool.close()
    return found


async def node_when(backend: Backend, index: int, free_gpus: int) -> NodeInfo:
    """The node once Ray's head has heard from it that so many devices are free, which takes it a moment."""
    async with asyncio.timeout(60):
        while (node := (await backend.inventory()).nodes[index]).free_gpus != free_gpus:
            await asyncio.sleep(0.1)
    return node


def slots(counts: list[int], **share: Any) -> list[Bundle]:
    return [Bundle(node=node, **{"cpus": 1, "gpus": 1} | share) for node, count in enumerate(counts) for _ in range(count)]


def test_A11_nodes_come_in_numeric_order_with_what_they_have(backend: Backend) -> None:
    async def main() -> Inventory:
        inventory = await backend.inventory()
        return await backend.probe(inventory, [1], 30)

    inventory = backend.run(main())
    first, second = inventory.nodes
    assert [first.name, second.name] == ["worker-2", "worker-10"], "by number, though text and age of the head say otherwise"
    assert (first.cpus, first.gpus, first.free_gpus, first.gpu_type, first.labels["team"]) == (16, 8, 8, "H100", "red")
    assert (first.resources, second.resources, second.npus, second.free_resources) == ({"team": 2}, {"NPU": 4}, 4, {"NPU": 4})
    assert first.memory_bytes > 10**8
    assert (first.interfaces, first.visible_devices) == (None, None), "nothing ran there"
    assert second.interfaces == network_interfaces()
    assert second.visible_devices == f"CUDA_VISIBLE_DEVICES={','.join(ODD)}"
    assert 0 < second.free_memory_bytes <= second.memory_bytes


@pytest.mark.slow
def test_A10_places_0_to_7_are_on_one_node_in_twenty_of_twenty_launches(backend: Backend) -> None:
    async def main() -> None:
        nodes = (await backend.inventory()).nodes
        for launch in range(20):
            await backend.create_pool("launch", slots([8, 8]), nodes, 20)
            assert group_nodes("launch") == [key(nodes[0])] * 8 + [key(nodes[1])] * 8, launch
            await backend.release_pool("launch")

    backend.run(main())


@pytest.mark.slow
def test_A10_A13_A15_sixteen_ranks_have_places_and_devices(backend: Backend) -> None:
    async def main() -> None:
        nodes = (await backend.inventory()).nodes
        expected = [key(nodes[0])] * 8 + [key(nodes[1])] * 8
        found = await places(backend, "real", slots([8, 8]), nodes)
        assert [node for node, *_ in found] == expected
        assert [local for _, local, *_ in found] == [str(rank % 8) for rank in range(16)]
        assert sorted(device for _, _, device, _ in found[:8]) == [str(number) for number in range(8)], "A15: a device for each"
        # A13: the numbers of the machine's devices have gaps; a worker's own are counted from 0.
        assert sorted((device for _, _, device, _ in found[8:]), key=int) == ODD
        assert {own for *_, own in found} == {"cuda:0"}

    backend.run(main())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_A10_twenty_launches_with_sixteen_processes_each(backend: Backend) -> None:
    async def main() -> None:
        nodes = (await backend.inventory()).nodes
        for launch in range(20):
            found = await places(backend, f"launch-{launch}", slots([8, 8]), nodes)
            assert [node for node, *_ in found] == [key(nodes[0])] * 8 + [key(nodes[1])] * 8, launch

    backend.run(main())


@pytest.mark.slow
def test_uneven_pools_and_shared_devices(backend: Backend) -> None:
    """[4, 2] slots with a third of a device each: four on two devices of one node, two on one device of the other. Beside somebody who
    holds a part of a device, which no slot may land on while whole ones are asked for."""

    async def main() -> None:
        nodes = (await backend.inventory()).nodes
        await backend.create_pool("stranger", [Bundle(node=0, cpus=1, gpus=1 / 3)], nodes, 20)
        found = await places(backend, "thirds", slots([4, 2], gpus=1 / 3), nodes)
        assert [node for node, *_ in found] == [key(nodes[0])] * 4 + [key(nodes[1])] * 2
        devices = Counter(device for node, _, device, _ in found if node == key(nodes[0]))
        assert sorted(devices.values()) == [1, 3], "three fill a device, the fourth has a part of another"
        assert len({device for node, _, device, _ in found if node == key(nodes[1])}) == 1
        now = await node_when(backend, 0, free_gpus=7)
        assert now.holders["stranger"] == pytest.approx({"CPU": 1, "GPU": 1 / 3}, abs=1e-3)
        await backend.release_pool("stranger")

    backend.run(main())


def test_a_device_is_shared_by_exactly_as_many_as_asked_for(backend: Backend) -> None:
    """Six sixths: Ray counts in 1/10000 and rounds up, so that six of them would not fit."""

    async def main() -> None:
        nodes = (await backend.inventory()).nodes
        await backend.create_pool("sixths", slots([48], gpus=1 / 6, cpus=0.1), nodes, 20)
        await node_when(backend, 0, free_gpus=0)
        await backend.create_pool("other", slots([0, 24], gpus=1 / 6, cpus=0.1), nodes, 20)
        await node_when(backend, 1, free_gpus=4)
        for name in ("sixths", "other"):
            await backend.release_pool(name)

    backend.run(main())


def test_other_resources_reach_the_processes(backend: Backend) -> None:
    async def main() -> None:
        nodes = (await backend.inventory()).nodes
        bundles = [Bundle(node=1, cpus=1, gpus=0, resources={"NPU": 0.5})] * 4
        await backend.create_pool("npus", bundles, nodes, 20)
        now = await node_when(backend, 1, free_gpus=8)
        assert now.free_resources == {"NPU": 2}
        assert now.holders == {"npus": {"CPU": 4, "NPU": 2}}
        await backend.release_pool("npus")

    backend.run(main())


@pytest.mark.parametrize(
    ("total", "free", "pieces", "whole"),
    [
        (8, 8, [], 8),
        (8, 7.5, [0.5], 7),
        (8, 7, [0.5, 0.5], 7),  # on one device
        (8, 7.0001, [0.3333] * 3, 7),
        (8, 5, [0.75] * 4, 4),  # on four
        (8, 6, [], 6),  # held by tasks, which nobody lists
        (8, 5.5, [2], 5),
        (2, 0.5, [1, 0.5], 0),
    ],
)
def test_free_devices_are_whole_ones(total: float, free: float, pieces: list[float], whole: int) -> None:
    assert whole_devices(total, free, pieces) == whole


def test_A04_a_pool_without_room_ends_at_its_deadline_and_says_who_holds_what(backend: Backend) -> None:
    async def main() -> None:
        nodes = (await backend.inventory()).nodes
        await backend.create_pool("run-1/main", slots([5, 0]), nodes, 20)
        await node_when(backend, 0, free_gpus=3)
        began = time.monotonic()
        with pytest.raises(ResourceError) as caught:
            await backend.create_pool("run-2/main", slots([8, 8]), nodes, 3)
        assert 2 < time.monotonic() - began < 4
        (problem,) = caught.value.problems
        assert problem.subject == "pool run-2/main on node worker-2"
        assert problem.need == "wanted 8 CPUs and 8 GPUs"
        assert problem.free == "free 11 of 16 CPU, 3 of 8 GPU; held by run-1/main 5 CPUs and 5 GPUs"
        names = [group["name"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        assert names == ["run-1/main@0"]
        await backend.release_pool("run-1/main")

    backend.run(main())


def test_who_waits_is_told_too(backend: Backend) -> None:
    async def main() -> None:
        nodes = (await backend.inventory()).nodes
        waiting = asyncio.ensure_future(backend.create_pool("greedy/main", slots([9]), nodes, 60))
        await asyncio.sleep(1)
        assert (await backend.inventory()).pending == ("greedy/main waits for 9 CPUs and 9 GPUs",)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not [group for group in ray.util.placement_group_table().values() if group["state"] == "PENDING"], (
            "and is gone when cancelled"
        )

    backend.run(main())


def test_a_node_that_is_gone_is_named(backend: Backend) -> None:
    async def main() -> None:
        (first, _) = (await backend.inventory()).nodes
        lost = NodeInfo(name="worker-7", cpus=1, memory_bytes=1, labels={"ray.io/node-id": "0" * 56})
        with pytest.raises(ResourceError, match="node worker-7; found alive: worker-2, worker-10"):
            await backend.create_pool("run/main", [Bundle(node=1, cpus=1, gpus=0)], [first, lost], 20)

    backend.run(main())


def test_I04_helpers_and_probes_run_where_they_are_told(backend: Backend) -> None:
    """The store of a run lives on a node of its workers, not beside the driver; nothing is left elsewhere."""

    async def main() -> None:
        nodes = (await backend.inventory()).nodes
        for node in nodes:
            link = await backend.start_store(f"run-on-{node.name}", 30, node)
            (actor,) = [actor for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE"]
            assert actor["Address"]["NodeID"] == key(node)
            await link.stop()
            while [actor for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE"]:
                await asyncio.sleep(0.1)

    backend.run(main())


@pytest.mark.slow
def test_A19_ranks_meet_at_the_interface_that_was_asked_for(backend: Backend) -> None:
    """`lo` does what a second card does: another address than the one by which Ray knows the nodes."""

    async def main() -> None:
        nodes = (await backend.inventory()).nodes
        pool = Pool(backend, "cards", slots([1, 1], gpus=0), nodes, interface="lo")
        await pool.create(deadline=20)
        place = WorkerGroup("place", Place, pool, bundles=[0, 1])
        summer = WorkerGroup("summer", Summer, pool, bundles=[0, 1])
        await place.create(deadline=60)
        await summer.create(deadline=60)
        await summer.init()
        assert await summer.step(1.0) == [1.5, 1.5]
        for found in await place.variables():
            assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"], found["MASTER_ADDR"]) == ("lo", "lo", "127.0.0.1")
        assert [process.node for process in place.processes] == ["worker-2", "worker-10"]
        await pool.close()

    backend.run(main())


def test_A20_only_the_difference_of_the_environment_travels(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LARGE", "x" * 200_000)

    async def main() -> None:
        nodes = (await backend.inventory()).nodes
        pool = Pool(backend, "small", slots([1], gpus=0), nodes)
        await pool.create(deadline=20)
        group = WorkerGroup("place", Place, pool, bundles=[0])
        await group.create(deadline=60)
        (found,) = await group.variables()
        assert "LARGE" not in found
        assert found["OMP_NUM_THREADS"] == "1"
        await pool.close()

    backend.run(main())


def test_A21_a_node_that_lacks_a_module_is_named_with_it(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("from rolemesh.runtime import Worker\n\n\nclass Mine(Worker):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    async def main() -> None:
        nodes = (await backend.inventory()).nodes
        pool = Pool(backend, "small", slots([0, 1], gpus=0), nodes)
        await pool.create(deadline=20)
        with pytest.raises(RolemeshError, match=r"node worker-10 cannot import the module 'only_here'\. Nothing is uploaded") as caught:
            await WorkerGroup("mine", only_here.Mine, pool, bundles=[0]).create(deadline=60)
        assert caught.value.fields["group"] == "mine"
        await pool.close()

    backend.run(main())
    sys.modules.pop("only_here")


@pytest.mark.slow
def test_S18_a_rank_of_a_lost_node_goes_on_in_a_spare_slot(raylets: Any, backend: Backend) -> None:
    lost = raylets.add_node(num_cpus=2, node_name="worker-3", object_store_memory=100_000_000)
    raylets.wait_for_nodes()

    async def main() -> None:
        nodes = (await backend.inventory()).nodes
        where = {node.name: index for index, node in enumerate(nodes)}
        (third,) = [index for name, index in where.items() if name.startswith("worker-3")]
        others = [index for index in where.values() if index != third]
        bundles = [Bundle(node=node, cpus=1, gpus=0) for node in (others[0], third, others[1])]
        pool = Pool(backend, "spared", bundles, nodes, spares=[2])
        await pool.create(60)
        group = WorkerGroup("summers", Summer, pool, [0, 1])
        await group.create(60)
        await group.init()
        assert await group.step(1.0) == [1.5, 1.5]
        raylets.remove_node(lost)
        ends = time.monotonic() + 60
        while len((await backend.inventory()).nodes) == len(nodes):
            assert time.monotonic() < ends
            await asyncio.sleep(0.2)
        await group.replace(1, 60)
        await group.rejoin()
        assert await group.step(1.0) == [1.5, 1.5]
        assert group.processes[1].node == nodes[others[1]].name
        await pool.close()

    backend.run(main())
