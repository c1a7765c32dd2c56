"""What pools demand of their nodes, spare slots, shares of devices, tensor-parallel slots; splitting and merging. Numbers by hand."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.config import Config, ModelFacts
from rolemesh.errors import ConfigError
from rolemesh.plan import Helper, Inventory, NodeInfo, Plan, PoolPlan, Slot, build_plan, merge_pools, parse_nodes, split_pool
from rolemesh.plan.constraints import same_type
from rolemesh.plan.spares import spare_count

FACTS = ModelFacts(
    family="llama", layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocab=10, tied=False, parameters=1000
)


def plan(nodes: str | Inventory, helpers=(), **sections) -> Plan:
    inventory = parse_nodes(nodes) if isinstance(nodes, str) else nodes
    return build_plan(Config.model_validate(sections), inventory, FACTS, helpers=helpers)


def slots(found: Plan, pool: str = "main") -> dict[int, int]:
    return dict(Counter(slot.node for slot in found.pools[pool].slots))


def spares(found: Plan, pool: str = "main") -> dict[int, int]:
    return dict(Counter(slot.node for slot in found.pools[pool].spares))


def nodes_of(found: Plan, role: str) -> set[int]:
    return {worker.node for worker in found.of_role(role)}


# -- what the nodes must have


@pytest.mark.parametrize("pool", [{"gpus": 1, "labels": {"team": "red"}}, {"gpus": 1, "nodes": [4], "labels": {"team": "red"}}])
def test_I04_one_constraint_binds_slots_rewards_and_helpers(pool):
    helpers = [Helper(name="store"), Helper(name="guard", each_node=True)]
    found = plan("2x8,1x8:team=red,1x8", helpers=helpers, pools={"main": pool})
    assert found.problems == ()
    assert {node for role in ("actor", "rollout", "reward") for node in nodes_of(found, role)} == {2}
    assert [(helper.name, helper.node) for helper in found.helpers] == [("store", 2), ("guard", 2)]


def test_helpers_go_to_nodes_of_workers_only():
    helpers = [Helper(name="store"), Helper(name="guard", each_node=True)]
    found = plan("3x4", helpers=helpers, pools={"main": {"nodes": [4, 4], "gpus": 1}})
    assert [(helper.name, helper.node) for helper in found.helpers] == [("store", 0), ("guard", 0), ("guard", 1)]


def test_a_pool_of_reward_processes_is_bound_too():
    config = {"pools": {"main": {"gpus": 1}, "score": {"labels": {"kind": "cpu"}}}, "roles": {"actor": {}, "rollout": {}}}
    config["roles"]["reward"] = {"pool": "score"}
    found = plan("1x8,1x0:32c:kind=cpu", **config)
    assert nodes_of(found, "reward") == {1}
    assert nodes_of(found, "actor") == {0}
    (problem,) = plan("1x8,1x0:32c", **config).problems
    assert problem.subject == "pools.score.labels"
    config["pools"]["score"]["nodes"] = [3]
    assert nodes_of(plan("1x8,1x0:32c:kind=cpu", **config), "reward") == {1}


def test_custom_resources_choose_nodes_and_are_counted():
    pool = {"gpus": 1, "resources": {"team": 0.5}}
    found = plan("1x8,1x8:2*team", pools={"main": pool})
    assert slots(found) == {1: 4}  # 2 / 0.5
    assert found.derived["team"] == 2
    assert found.pools["main"].slots[0].resources == {"team": 0.5}
    assert nodes_of(found, "reward") == {1}


def test_other_accelerators_than_gpus():
    found = plan("2x0:64c:8*NPU", pools={"main": {"resources": {"NPU": 1}}})
    assert slots(found) == {0: 8, 1: 8}
    assert {slot.cpus for slot in found.pools["main"].slots} == {4.0}  # as a slot with a GPU
    assert found.derived["NPU"] == 16
    found = plan("1x0:64c:2*NPU", pools={"main": {"nodes": [4], "resources": {"NPU": 1}, "share": 2}})
    assert found.problems == ()
    assert found.pools["main"].slots[0].resources == {"NPU": 0.5}


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("h100", "H100", True),
        ("A100-80G", "NVIDIA A100-SXM4-80GB", True),
        ("A100-40G", "NVIDIA A100-SXM4-80GB", False),
        ("L4", "NVIDIA L40S", False),
        ("H100", "", False),
        ("", "H100", False),
    ],
)
def test_accelerator_types_as_drivers_and_clusters_name_them(wanted, found, same):
    assert same_type(wanted, found) == same


def test_A01_who_holds_what_is_said_by_name():
    held = {"job-7": {"CPU": 6.0, "GPU": 1.0}}
    node = NodeInfo(name="n", cpus=8.0, memory_bytes=2**40, gpus=2, free_cpus=2.0, free_gpus=1, holders=held)
    (problem,) = plan(Inventory(nodes=(node,), origin="ray cluster"), pools={"main": {"nodes": [2], "gpus": 1, "cpus": 1}}).problems
    assert problem.free.endswith("held by job-7 6 CPUs and 1 GPU")


def test_A05_a_limit_on_visible_devices_is_named():
    node = NodeInfo(name="n", cpus=8.0, memory_bytes=2**40, gpus=2, visible_devices="CUDA_VISIBLE_DEVICES=0,1")
    (problem,) = plan(Inventory(nodes=(node,), origin="ray cluster"), pools={"main": {"nodes": [8], "gpus": 1}}).problems
    assert "GPU: needs 8, free 2" in problem.need
    assert "CUDA_VISIBLE_DEVICES=0,1 is set there" in problem.free


# -- parts of devices


def test_slots_share_devices():
    found = plan("1x2", pools={"main": {"gpus": 1, "share": 2}})
    assert slots(found) == {0: 4}
    assert {slot.gpus for slot in found.pools["main"].slots} == {0.5}
    assert found.derived["gpus"] == 2
    assert len(plan("1x2", pools={"main": {"gpus": 1, "share": 3}}).pools["main"].slots) == 6


def test_a_device_in_parts_is_no_whole_device():
    roles = {"actor": {"pool": "a"}, "rollout": {"pool": "b"}, "reward": {"pool": "a"}}
    pools = {"a": {"nodes": [3], "gpus": 1, "share": 2}, "b": {"nodes": [2], "gpus": 1}}
    (problem,) = plan("1x3", roles=roles, pools=pools).problems  # 1.5 of 3 devices are taken, so one is whole
    assert problem.subject == "pool b"
    assert problem.need.startswith("GPU: needs 2, free 1")
    pools = {"a": {"nodes": [3], "gpus": 1, "share": 2}, "b": {"nodes": [1], "gpus": 1, "share": 2}}
    assert plan("1x2", roles=roles, pools=pools).problems == ()  # the second half of a device serves another pool
    pools["b"]["share"] = 3
    assert plan("1x2", roles=roles, pools=pools).problems[0].subject == "pool b"  # parts of different size do not mix
    pools["b"]["nodes"] = [3]
    assert plan("1x3", roles=roles, pools=pools).problems == ()


# -- tensor-parallel slots


def judged(size: int, **pool) -> dict:
    roles = {**{name: {} for name in ("actor", "rollout", "reward")}, "judge": {"worker": "my:Judge", "tensor_parallel": size}}
    return {"roles": roles, "pools": {"main": {"gpus": 1, **pool}}}


@pytest.mark.parametrize(("size", "expected"), [(2, {0: 8, 1: 6, 2: 2}), (3, {0: 6, 1: 6, 2: 3}), (4, {0: 8, 1: 4}), (8, {0: 8})])
def test_ranks_that_share_a_model_never_straddle_nodes(size, expected):
    found = plan("1x8,1x7,1x3", **judged(size))
    assert found.problems == ()
    assert slots(found) == expected
    judges = found.of_role("judge")
    for start in range(0, len(judges), size):
        assert len({worker.node for worker in judges[start : start + size]}) == 1
    layout = found.layouts["judge"]
    assert (layout.tensor_parallel, layout.data_parallel) == (size, sum(expected.values()) // size)
    assert found.layouts["actor"].data_parallel == sum(expected.values())


def test_tensor_parallel_slots_without_devices():
    assert slots(plan("1x0:64c", **judged(3, gpus=0))) == {0: 6}  # 8 at most, in threes
    assert slots(plan("1x0:64c", **judged(16, gpus=0))) == {0: 16}  # one copy of the model, whatever the most would be


# -- spares


@pytest.mark.parametrize(
    ("count", "factor", "expected"), [(10, 1.2, 2), (10, 1.0, 0), (4, 1.05, 1), (3, 1.1, 1), (8, 2.0, 8), (30, 1.1, 3)]
)
def test_number_of_spares(count, factor, expected):
    assert spare_count(count, factor) == expected


def test_S18_spares_lie_where_the_loss_of_a_node_leaves_them():
    found = plan("3x8", pools={"main": {"nodes": [5, 5], "gpus": 1, "capacity_factor": 1.2}})
    assert found.problems == ()
    assert (slots(found), spares(found)) == ({0: 5, 1: 5}, {2: 2})
    assert [slot.index for slot in found.pools["main"].spares] == [10, 11]
    assert len(found.of_role("actor")) == 10
    assert found.derived["spare_slots"] == 2
    assert found.derived["gpus"] == 12
    (group,) = [group for group in found.placement_groups() if group.node == 2]
    assert group.slots == (10, 11)
    assert any("2 spare slots for 10 in use (capacity_factor 1.2)" in warning and "1.5" in warning for warning in found.warnings)


def test_spares_go_beside_the_slots_when_there_is_no_other_node():
    found = plan("1x8", pools={"main": {"nodes": [5], "gpus": 1, "capacity_factor": 1.4}})
    assert (slots(found), spares(found)) == ({0: 5}, {0: 2})
    assert [slot.local_index for slot in found.pools["main"].spares] == [5, 6]
    assert any("takes spares on another node" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("nodes", "factor", "used", "spare"),
    [
        ("1x12", 1.2, {0: 10}, {0: 2}),
        ("2x8", 1.2, {0: 8, 1: 5}, {1: 3}),  # 13 + ceil(2.6) = 16
        ("2x8", 2.0, {0: 8}, {1: 8}),
        ("1x4", 1.05, {0: 3}, {0: 1}),
    ],
)
def test_pools_that_derive_their_size_keep_spares_back(nodes, factor, used, spare):
    found = plan(nodes, pools={"main": {"gpus": 1, "capacity_factor": factor}})
    assert (slots(found), spares(found)) == (used, spare)
    assert len(found.of_role("rollout")) == sum(used.values())


def test_enough_spares_for_a_node_need_no_advice_and_too_many_get_some():
    found = plan("3x4", pools={"main": {"nodes": [4, 4], "gpus": 1, "capacity_factor": 1.5}})
    assert not [warning for warning in found.warnings if "spare" in warning]
    found = plan("4x4", pools={"main": {"nodes": [4, 4], "gpus": 1, "capacity_factor": 2.0}})
    assert any("1.5 would do for that" in warning for warning in found.warnings)


def test_S18_spares_that_starve_another_pool_are_warned_of():
    roles = {"actor": {}, "rollout": {"pool": "gen"}, "reward": {}}
    pools = {"main": {"nodes": [4], "gpus": 1, "capacity_factor": 1.75}, "gen": {"gpus": 1}}
    found = plan("1x8", roles=roles, pools=pools)
    assert (spares(found), slots(found, "gen")) == ({0: 3}, {0: 1})
    expected = "pool gen gets 1 of 4 slots because spare slots of other pools take the rest; lower pools.main.capacity_factor"
    assert expected in found.warnings
    pools["main"]["capacity_factor"] = 1.0
    assert not [warning for warning in plan("1x8", roles=roles, pools=pools).warnings if "spare" in warning]
    pools["main"]["capacity_factor"] = 2.0  # now nothing is left for it: who holds it is in the message
    (problem,) = plan("1x8", roles=roles, pools=pools).problems
    assert problem.subject == "pool gen"
    assert "spares of pool main" in problem.free


# -- CPUs


def test_S27_reward_workers_grow_to_their_processes_where_the_reserve_allows():
    reward = {"actor": {}, "rollout": {}, "reward": {"workers": 2, "processes": 5}}
    found = plan("1x0:64c", roles=reward, pools={"main": {"nodes": [4]}})
    assert {worker.cpus for worker in found.of_role("reward")} == {6.0}  # one for each process and one for itself
    found = plan("1x0:16c", roles=reward, pools={"main": {"nodes": [4]}})
    assert {worker.cpus for worker in found.of_role("reward")} == {1.0}  # 4 + 12 would be more than 70 % of 16
    found = plan("1x8:64c", roles=reward, pools={"main": {"gpus": 1}})
    assert {worker.cpus for worker in found.of_role("reward")} == {6.0}
    assert {worker.cpus for worker in found.of_role("actor")} == {4.0}  # 44.8 less 12 leave 4.1 for each of 8 slots


# -- splitting and merging


def pool(name: str, *nodes: int, spare: tuple[int, ...] = (), **more) -> PoolPlan:
    sizes = {"cpus": 4.0, "gpus": 1, **more}
    seen: Counter[int] = Counter()
    made = []
    for index, node in enumerate((*nodes, *spare)):
        made.append(Slot(index=index, node=node, local_index=seen[node], **sizes))
        seen[node] += 1
    return PoolPlan(name=name, slots=tuple(made[: len(nodes)]), spares=tuple(made[len(nodes) :]))


def test_a_pool_is_split_in_order():
    parts = split_pool(pool("main", 0, 0, 0, 0, 1, 1, spare=(1,)), {"train": 4, "gen": 2})
    assert [(slot.index, slot.node, slot.local_index) for slot in parts["train"].slots] == [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 0, 3)]
    assert [(slot.index, slot.node, slot.local_index) for slot in parts["gen"].slots] == [(0, 1, 0), (1, 1, 1)]
    assert (parts["train"].spares, [(slot.index, slot.local_index) for slot in parts["gen"].spares]) == ((), [(2, 2)])
    assert parts["gen"] == pool("gen", 1, 1, spare=(1,))


@pytest.mark.parametrize("parts", [{}, {"a": 3}, {"a": 7}, {"a": 6, "b": 0}, {"a": -1, "b": 7}])
def test_parts_must_add_up(parts):
    with pytest.raises(ConfigError, match="add up to its 6 slots"):
        split_pool(pool("main", 0, 0, 0, 0, 1, 1), parts)


def test_a_split_keeps_slots_of_one_model_together():
    whole = pool("main", 0, 0, 0, 0, 1, 1)
    assert set(split_pool(whole, {"a": 2, "b": 4}, unit=2)) == {"a", "b"}
    with pytest.raises(ConfigError, match="runs of 2 slots on one node in part a"):
        split_pool(whole, {"a": 3, "b": 3}, unit=2)
    with pytest.raises(ConfigError, match=r"in part b: .*found slots 2 to 3 on nodes \[0, 1\]"):
        split_pool(pool("main", 0, 0, 0, 1, 1, 1), {"a": 2, "b": 4}, unit=2)


def test_merged_pools_are_in_the_order_of_their_nodes():
    merged = merge_pools("all", [pool("a", 1, 1, spare=(2,)), pool("b", 0, 1)])
    assert [(slot.index, slot.node, slot.local_index) for slot in merged.slots] == [(0, 0, 0), (1, 1, 0), (2, 1, 1), (3, 1, 2)]
    assert [(slot.index, slot.node, slot.local_index) for slot in merged.spares] == [(4, 2, 0)]
    assert merge_pools("main", list(split_pool(pool("main", 0, 0, 1, 1), {"a": 1, "b": 3}).values())) == pool("main", 0, 0, 1, 1)


@pytest.mark.parametrize("other", [{"cpus": 2.0}, {"gpus": 0.5}, {"resources": {"team": 1.0}}])
def test_slots_of_different_shape_do_not_merge(other):
    with pytest.raises(ConfigError, match="pools with equal slots"):
        merge_pools("all", [pool("a", 0), pool("b", 0, **other)])
    with pytest.raises(ConfigError, match="pools with equal slots"):
        merge_pools("all", [])


# -- whole plans


def test_A14_plans_travel_between_processes():
    found = plan("1x8:2*team", pools={"main": {"gpus": 1, "resources": {"team": 0.25}}})
    assert pickle.loads(pickle.dumps(found)) == found


shapes = st.fixed_dictionaries(
    {
        "nodes": st.just("auto") | st.lists(st.integers(0, 9), min_size=1, max_size=3),
        "gpus": st.integers(0, 2),
        "capacity_factor": st.sampled_from([1.0, 1.2, 2.0]),
    },
    optional={"resources": st.sampled_from([{"x": 0.5}, {"NPU": 1}]), "labels": st.just({"team": "red"})},
)


@settings(max_examples=150, deadline=None)
@given(a=shapes, b=shapes, share=st.sampled_from([1, 1, 2, 3]), parallel=st.sampled_from([1, 2, 3]), home=st.sampled_from("ab"))
def test_no_node_gives_more_than_it_has_whatever_the_pools_ask(a, b, share, parallel, home):
    if a["gpus"] == 1:
        a = {**a, "share": share}
    roles = {"actor": {"pool": "a"}, "rollout": {"pool": "b"}, "reward": {"pool": home}}
    roles["judge"] = {"pool": "b", "worker": "my:Judge", "tensor_parallel": parallel}
    found = plan("1x8:16c:4*NPU,1x4:12c:team=red:3*x,2x0:9c:team=red:5*NPU", pools={"a": a, "b": b}, roles=roles)
    taken: Counter[tuple[int, str]] = Counter()
    for name, entry in found.pools.items():
        for slot in (*entry.slots, *entry.spares):
            taken[slot.node, "CPU"] += slot.cpus
            taken[slot.node, "GPU"] += slot.gpus
            taken.update({(slot.node, key): amount for key, amount in slot.resources.items()})
            node = found.nodes[slot.node]
            assert (a if name == "a" else b).get("labels", {}).items() <= node.labels.items()
        assert [slot.index for slot in (*entry.slots, *entry.spares)] == list(range(len(entry.slots) + len(entry.spares)))
        places = [(slot.node, slot.local_index) for slot in (*entry.slots, *entry.spares)]
        assert len(set(places)) == len(places)
    for worker in found.workers:
        if worker.slot is None:
            taken[worker.node, "CPU"] += worker.cpus
    for (node, name), amount in taken.items():
        assert amount <= found.nodes[node].usable(name) + 1e-6
    if not found.problems:
        for name, entry in found.pools.items():
            assert len(entry.spares) == spare_count(len(entry.slots), (a if name == "a" else b)["capacity_factor"])
        explicit = b["nodes"] != "auto" and any(count % parallel for count in b["nodes"])
        for start in range(0, len(found.of_role("judge")), parallel) if not explicit else ():
            assert len({worker.node for worker in found.of_role("judge")[start : start + parallel]}) == 1
