"""Splitting and merging pools, with groups over the parts."""

import pytest
from runtime_workers import Adder

from rolemesh.errors import ResourceError
from rolemesh.plan import parse_nodes
from rolemesh.runtime import Backend, Bundle, LocalBackend, Pool, WorkerGroup, merge, split


async def pool_of(backend: Backend, name: str, slots: int) -> Pool:
    pool = await Pool.of_slots(backend, name, [slots], cpus=0.25)
    await pool.create(30)
    return pool


def test_groups_over_parts_and_over_the_whole_share_the_processes(backend: Backend) -> None:
    async def main() -> None:
        pool = await pool_of(backend, "cut", 3)
        first, second = split(pool, [2, 1])
        groups = [WorkerGroup("first", Adder, first, [0, 1]), WorkerGroup("second", Adder, second, [0])]
        for group in groups:
            await group.create()
            await group.init()
        whole = WorkerGroup("whole", Adder, merge("again", [second, first]), [0, 1, 2])
        await whole.create()
        await whole.init()
        names = [process.spec.name for process in whole.processes]
        assert names == [process.spec.name for group in reversed(groups) for process in group.processes]
        assert await whole.double([1, 2, 3]) == [2, 4, 6]
        if "processes" not in backend.lacks:
            before = [entry["pid"] for entry in await whole.who()]
            await whole.replace(1)  # place 0 of `first`
            after = [entry["pid"] for entry in await whole.who()]
            assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
            assert (await groups[0].who())[0]["pid"] == after[1]
        await pool.close()

    backend.run(main())


def test_a_merged_pool_numbers_the_nodes_of_both() -> None:
    a, b, c = parse_nodes("3x4").nodes
    backend = LocalBackend()
    left = Pool(backend, "left", [Bundle(node=0, cpus=1, gpus=0), Bundle(node=1, cpus=1, gpus=0)], [a, b])
    right = Pool(backend, "right", [Bundle(node=0, cpus=2, gpus=1), Bundle(node=1, cpus=2, gpus=1)], [b, c])
    both = merge("both", [left, right])
    assert [node.name for node in both.nodes] == [a.name, b.name, c.name]
    assert [(bundle.node, bundle.cpus, bundle.gpus) for bundle in both.bundles] == [(0, 1, 0), (1, 1, 0), (1, 2, 1), (2, 2, 1)]
    assert [bundle.node for bundle in split(both, [1, 3])[1].bundles] == [1, 1, 2]


def test_parts_that_do_not_fit_are_refused() -> None:
    (node,) = parse_nodes("1x4").nodes
    pool = Pool(LocalBackend(), "pool", [Bundle(node=0, cpus=1, gpus=0)] * 4, [node])
    for sizes, found in (([2, 1], "parts of 2, 1"), ([4, 0], "parts of 4, 0"), ([], "parts of nothing")):
        with pytest.raises(ResourceError, match=rf"pool pool: parts of at least one place that add up to its 4; found {found}"):
            split(pool, sizes)
    with pytest.raises(ResourceError, match="with 8 places, 4 of them different"):
        merge("twice", [pool, pool])
    with pytest.raises(ResourceError, match="2 pools of 2 backends"):
        merge("foreign", [pool, Pool(LocalBackend(), "other", pool.bundles, [node])])
    with pytest.raises(ResourceError, match="0 pools"):
        merge("nothing", [])
