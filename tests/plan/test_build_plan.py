"""Placement, CPU shares and problems of whole plans; expected numbers worked out by hand."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolemesh.config import Config, ModelFacts, load_config
from rolemesh.plan import Inventory, NodeInfo, Plan, build_plan, parse_nodes
from rolemesh.plan.placement import _first_fit

FACTS = ModelFacts(
    family="llama", layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocab=10, tied=False, parameters=1000
)


@pytest.fixture
def plan(tmp_path):
    empty = tmp_path / "empty.yaml"
    empty.write_text("", encoding="utf-8")

    def run(nodes: str | Inventory, *overrides: str) -> Plan:
        inventory = parse_nodes(nodes) if isinstance(nodes, str) else nodes
        return build_plan(load_config(empty, overrides), inventory, FACTS)

    return run


def counts(plan: Plan, role: str) -> dict[int, int]:
    return dict(Counter(worker.node for worker in plan.of_role(role)))


def slots(plan: Plan, pool: str) -> dict[int, int]:
    return dict(Counter(slot.node for slot in plan.pools[pool].slots))


def check_invariants(plan: Plan) -> None:
    """No node gives more than it has; ranks and slots ascend with the nodes; colocated workers agree with their slot."""
    cpus, gpus = Counter(), Counter()
    for name, pool in plan.pools.items():
        assert [slot.index for slot in pool.slots] == list(range(len(pool.slots)))
        assert [slot.node for slot in pool.slots] == sorted(slot.node for slot in pool.slots)
        for node, run in itertools.groupby(pool.slots, key=lambda slot: slot.node):
            assert [slot.local_index for slot in run] == list(range(slots(plan, name)[node]))
        for slot in pool.slots:
            cpus[slot.node] += slot.cpus
            gpus[slot.node] += slot.gpus
    for worker in plan.workers:
        if worker.slot is None:
            cpus[worker.node] += worker.cpus
        else:
            slot = plan.pools[worker.pool].slots[worker.slot]
            assert (worker.rank, worker.node, worker.cpus, worker.gpus) == (slot.index, slot.node, slot.cpus, slot.gpus)
        assert worker.cpus > 0
    for role in {worker.role for worker in plan.workers}:
        assert [worker.rank for worker in plan.of_role(role)] == list(range(len(plan.of_role(role))))
        assert [worker.node for worker in plan.of_role(role)] == sorted(worker.node for worker in plan.of_role(role))
    for node, info in enumerate(plan.nodes):
        assert cpus[node] <= (info.cpus if info.free_cpus is None else info.free_cpus) + 1e-6
        assert gpus[node] <= (info.gpus if info.free_gpus is None else info.free_gpus)


def test_two_cores_get_two_slots_and_a_reward_process(plan):
    found = plan("1x0:2c")
    assert found.problems == ()
    assert [(worker.role, worker.rank, worker.slot) for worker in found.workers] == [
        ("actor", 0, 0),
        ("actor", 1, 1),
        ("rollout", 0, 0),
        ("rollout", 1, 1),
        ("reward", 0, None),
    ]
    # Three processes on two CPUs: 2 / 3, rounded down.
    assert {worker.cpus for worker in found.workers} == {0.66}
    assert found.derived["processes"] == 3
    assert found.derived["cpus"] == 1.98
    assert "3 processes share 2 CPUs (0.66 each" in found.warnings[0]
    assert "2 processes share 1 CPU (0.5 each" in plan("1x0:1c").warnings[0]


@pytest.mark.parametrize(
    ("cpus", "slot_count", "rewards"),
    [
        (1, 1, 1),
        (2, 2, 1),
        (4, 4, 1),
        (7, 7, 1),
        (8, 4, 1),  # 70 % of 8 is 5.6, less one reward process
        (10, 6, 1),
        (16, 8, 2),  # 11.2 - 2 = 9.2, at most 8
        (64, 8, 8),
        (128, 8, 8),
    ],
)
def test_sizes_derived_from_cpus(plan, cpus, slot_count, rewards):
    found = plan(f"1x0:{cpus}c")
    assert (len(found.of_role("actor")), len(found.of_role("rollout")), len(found.of_role("reward"))) == (slot_count, slot_count, rewards)
    assert found.problems == ()
    if cpus >= 8:
        assert found.warnings == ()
        assert {worker.cpus for worker in found.workers} == {1.0}
        assert found.derived["cpus"] <= 0.7 * cpus
    check_invariants(found)


def test_A10_neighbour_ranks_share_a_node(plan):
    found = plan("2x4", "pools.main.gpus=1")
    assert [worker.node for worker in found.of_role("actor")] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [slot.local_index for slot in found.pools["main"].slots] == [0, 1, 2, 3, 0, 1, 2, 3]
    check_invariants(found)


@pytest.mark.parametrize(
    ("nodes", "entries", "expected"),
    [
        ("2x8", "[8, 8]", {0: 8, 1: 8}),
        ("2x8", "[4, 2]", {0: 4, 1: 2}),
        ("2x8", "[2, 4]", {0: 2, 1: 4}),
        ("1x4,1x8", "[8, 4]", {0: 4, 1: 8}),
        ("1x8,1x4", "[4, 8]", {0: 8, 1: 4}),  # 4 first on node 0 would leave no node for 8
        ("3x8", "[8, 0, 4]", {0: 8, 2: 4}),
        ("1x2,1x4,1x8", "[2, 4, 8]", {0: 2, 1: 4, 2: 8}),
    ],
)
def test_explicit_pools_on_gpus(plan, nodes, entries, expected):
    found = plan(nodes, f"pools.main.nodes={entries}", "pools.main.gpus=1")
    assert found.problems == ()
    assert slots(found, "main") == expected
    check_invariants(found)


@given(entries=st.lists(st.integers(1, 4), min_size=1, max_size=4), caps=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_largest_first_finds_an_assignment_whenever_there_is_one(entries, caps):
    order = sorted(range(len(entries)), key=lambda entry: -entries[entry])
    found = _first_fit(entries, order, caps)
    possible = any(
        all(caps[node] >= entry for node, entry in zip(nodes, entries, strict=True))
        for nodes in itertools.permutations(range(len(caps)), len(entries))
    )
    assert (found is not None) == possible
    if found is not None:
        assert sorted(found.values()) == list(range(len(entries)))
        assert all(caps[node] >= entries[entry] for node, entry in found.items())


def test_pools_lie_beside_each_other(plan):
    found = plan("2x8", "pools.main={nodes: [6], gpus: 1}", "pools.gen={nodes: [4], gpus: 1}", "roles.rollout.pool=gen")
    assert slots(found, "main") == {0: 6}
    assert slots(found, "gen") == {1: 4}
    found = plan("2x8", "pools.main={nodes: [4], gpus: 1}", "pools.gen={nodes: [4], gpus: 1}", "roles.rollout.pool=gen")
    assert slots(found, "gen") == {0: 4}


def test_auto_pools_share_gpus_fairly(plan):
    split = ("pools.main.gpus=1", "pools.gen.gpus=1", "roles.rollout.pool=gen")
    found = plan("2x8", *split)
    assert (slots(found, "main"), slots(found, "gen")) == ({0: 4, 1: 4}, {0: 4, 1: 4})
    found = plan("2x1", *split)
    assert (slots(found, "main"), slots(found, "gen")) == ({0: 1}, {1: 1})
    found = plan("1x12", "pools.main.gpus=1", "pools.gen.gpus=2", "roles.rollout.pool=gen")
    assert (slots(found, "main"), slots(found, "gen")) == ({0: 6}, {0: 3})
    found = plan("2x8", *split, "pools.main.nodes=[8]")
    assert (slots(found, "main"), slots(found, "gen")) == ({0: 8}, {1: 8})
    check_invariants(found)


def test_auto_pools_share_cpus_fairly(plan):
    split = ("pools.gen={}", "roles.rollout.pool=gen")
    assert [len(plan("1x0:2c", *split).pools[name].slots) for name in ("main", "gen")] == [1, 1]
    assert [len(plan("1x0:1c", *split).pools[name].slots) for name in ("main", "gen")] == [1, 1]
    assert [len(plan("1x0:5c", *split).pools[name].slots) for name in ("main", "gen")] == [3, 2]
    assert [len(plan("1x0:64c", *split).pools[name].slots) for name in ("main", "gen")] == [4, 4]
    found = plan("1x0:2c", "pools={a: {}, b: {}, c: {}}", "roles={actor: {pool: a}, rollout: {pool: b}, reward: {pool: c}}")
    assert [len(found.pools[name].slots) for name in "abc"] == [1, 1, 0]
    assert len(found.of_role("reward")) == 1
    assert found.problems == ()


def test_auto_pools_give_no_more_slots_than_their_roles_ask_for(plan):
    found = plan("1x8", "pools.main.gpus=1", "roles.actor.workers=2", "roles.rollout.workers=3")
    assert len(found.pools["main"].slots) == 3
    assert (len(found.of_role("actor")), len(found.of_role("rollout"))) == (2, 3)
    assert found.warnings == ("5 of 8 free GPUs are in no pool",)


def test_explicit_workers_take_the_first_slots(plan):
    found = plan("2x4", "pools.main={nodes: [4, 4], gpus: 1}", "roles.actor.workers=2", "roles.rollout.workers=5")
    assert [worker.slot for worker in found.of_role("actor")] == [0, 1]
    assert counts(found, "rollout") == {0: 4, 1: 1}
    assert "pool main: 3 of 8 slots hold no worker" in found.warnings


def test_A07_more_workers_than_the_pool_has_slots(plan):
    (problem,) = plan("1x0:2c", "pools.main.nodes=[1]", "roles.actor.workers=2").problems
    assert problem.subject == "roles.actor.workers"
    assert problem.need == "2 workers need 2 places in pool main"
    assert problem.free == "1 places"
    assert "Lower roles.actor.workers to 1" in problem.remedy


def test_A01_cpus_that_do_not_fit_name_pool_numbers_holder_and_setting(plan):
    (problem,) = plan("1x2:2c", "pools.main={nodes: [2], gpus: 1, cpus: 3}").problems
    assert problem.subject == "pool main"
    assert problem.need.startswith("CPU: needs 6, free 2")
    assert "GPU" not in problem.need.split("(")[0]
    assert "Lower pools.main.cpus (now 3) to 1 or less" in problem.remedy
    (problem,) = plan("1x2:2c", "pools.main={gpus: 1, cpus: 3}").problems
    assert problem.need.startswith("CPU: needs 3, free 2")
    busy = Inventory(nodes=(NodeInfo(name="n", cpus=8.0, memory_bytes=2**40, gpus=2, free_cpus=2.0),), origin="ray cluster")
    (problem,) = plan(busy, "pools.main={nodes: [2], gpus: 1, cpus: 3}").problems
    assert problem.need.startswith("CPU: needs 6, free 2")
    assert "held by others outside this run 6 CPUs" in problem.free


def test_A02_the_resource_that_does_not_fit_is_named_with_the_largest_node(plan):
    (problem,) = plan("1x4:8c,1x8:16c", "pools.main={nodes: [1], gpus: 6, cpus: 60}").problems
    assert problem.need.startswith("CPU: needs 60, free 16 (1 slot of 60 CPUs and 6 GPUs")
    assert problem.free == "largest node node-1: 16 of 16 CPUs and 8 of 8 GPUs free"
    (problem,) = plan("1x4,1x8", "pools.main={nodes: [9], gpus: 1}").problems
    assert problem.need.startswith("GPU: needs 9, free 8")
    assert "at most 8" in problem.remedy
    (problem,) = plan("1x4:8c", "pools.main={nodes: [5], gpus: 1, cpus: 2}").problems
    assert problem.need.startswith("GPU: needs 5, free 4; CPU: needs 10, free 8")


def test_sum_fits_but_no_node_does(plan):
    (problem,) = plan("2x4", "pools.main={nodes: [8], gpus: 1}").problems
    assert problem.need.startswith("GPU: needs 8, free 4")
    (problem,) = plan("1x8,1x4", "pools.main={nodes: [8, 8], gpus: 1}").problems
    assert problem.free.startswith("largest node left node-1")
    (problem,) = plan("2x8", "pools.main={nodes: [1, 1, 1], gpus: 1}").problems
    assert problem.need.startswith("nodes: needs 3")
    assert problem.free == "2 nodes"


def test_what_other_pools_hold_is_said(plan):
    found = plan("1x8", "pools.main={nodes: [6], gpus: 1}", "pools.gen={nodes: [4], gpus: 1}", "roles.rollout.pool=gen")
    (problem,) = found.problems
    assert problem.subject == "pool gen"
    assert problem.need.startswith("GPU: needs 4, free 2")
    assert "pool main" in problem.free
    assert "6 GPUs" in problem.free


def test_all_problems_at_once(plan):
    found = plan(
        "1x0:16c",
        "pools={a: {nodes: [32]}, b: {gpus: 1}, c: {nodes: [1]}}",
        "roles={actor: {pool: a}, rollout: {pool: b}, reward: {pool: c, workers: 2}, ref: {pool: d}}",
    )
    assert {problem.subject for problem in found.problems} == {"pool a", "pool b", "roles.reward.workers", "roles.ref.pool"}
    assert all(problem.remedy for problem in found.problems)


def test_an_unknown_pool_of_rollout_workers_on_vllm_is_told_like_any_other(plan):
    found = plan("1x0:16c", "rollout.engine=vllm", "roles.rollout.pool=nowhere")
    assert [problem.subject for problem in found.problems] == ["roles.rollout.pool"]


def test_S27_oversubscription_is_refused_from_eight_cores_on(plan):
    (problem,) = plan("1x0:8c", "pools.main.nodes=[9]").problems
    assert problem.need.startswith("CPU: needs 9, free 8")
    (problem,) = plan("1x0:8c", "pools.main.nodes=[8]").problems
    assert problem.subject == "roles.reward"
    assert problem.need.startswith("CPU: needs 1, free 0")
    assert "pool main 8 CPUs" in problem.free
    assert plan("1x0:8c", "pools.main.nodes=[7]").problems == ()


def test_S27_a_small_machine_only_warns_and_shares(plan):
    found = plan("1x0:4c", "pools.main.nodes=[6]")
    assert found.problems == ()
    assert found.warnings
    assert {worker.cpus for worker in found.workers} == {0.57}  # 4 / 7 = 0.571...
    check_invariants(found)
    found = plan("1x0:4c", "pools.main={nodes: [2], cpus: 1.5}")  # typed sizes stay, the reward process gets the rest
    assert [worker.cpus for worker in found.of_role("reward")] == [1.0]
    assert {slot.cpus for slot in found.pools["main"].slots} == {1.5}
    found = plan("1x0:2c", "pools.main={nodes: [1], cpus: 1.5}")
    assert [worker.cpus for worker in found.of_role("reward")] == [0.5]
    (problem,) = plan("1x0:2c", "pools.main={nodes: [2], cpus: 1.5}").problems
    assert problem.need.startswith("CPU: needs 3, free 2")
    (problem,) = plan("1x0:2c", "pools.main={nodes: [2], cpus: 1}").problems
    assert problem.subject == "roles.reward"


def test_a_share_of_a_cpu_has_a_lower_end(plan):
    laptop = Inventory(nodes=(NodeInfo(name="laptop", cpus=2.0, memory_bytes=2**40),), origin="test")
    assert plan(laptop, "pools.main.nodes=[19]").problems == ()  # 20 processes of 0.1
    assert [problem.subject for problem in plan(laptop, "pools.main.nodes=[20]").problems] == ["roles.reward"]
    (problem,) = plan(laptop, "pools.main.nodes=[64]").problems
    assert problem.need.startswith("CPU: needs 6.4, free 2")
    assert "at most 20" in problem.remedy


def test_gpu_slots_get_cpus_from_what_the_node_has(plan):
    assert {slot.cpus for slot in plan("1x8:64c", "pools.main.gpus=1").pools["main"].slots} == {4.0}
    # 0.7 * 24 = 16.8, less 3 reward processes, over 8 slots: 1.725
    assert {slot.cpus for slot in plan("1x8:24c", "pools.main.gpus=1").pools["main"].slots} == {1.0}
    # 8 CPUs, one of them for the reward process, over 8 slots: 0.875 rounded down
    found = plan("1x8:8c", "pools.main.gpus=1")
    assert {slot.cpus for slot in found.pools["main"].slots} == {0.87}
    assert found.problems == ()
    assert found.warnings
    check_invariants(found)


def test_reward_processes_follow_their_pool(plan):
    found = plan("3x8", "pools.main={nodes: [8, 8], gpus: 1}", "roles.reward.workers=5")
    assert counts(found, "reward") == {0: 3, 1: 2}
    assert {worker.slot for worker in found.of_role("reward")} == {None}
    found = plan("1x8:64c,1x8:16c", "pools.main.gpus=1")
    assert counts(found, "reward") == {0: 8, 1: 2}
    found = plan("1x0:2c", "roles.reward={workers: 2, cpus: 0.5}", "pools.main.nodes=[1]")
    assert [worker.cpus for worker in found.of_role("reward")] == [0.5, 0.5]
    assert found.of_role("actor")[0].cpus == 1.0


def test_a_pool_of_reward_processes_has_no_slots(plan):
    found = plan("2x8", "pools.main.gpus=1", "pools.score.nodes=[0, 6]", "roles.reward.pool=score")
    assert counts(found, "reward") == {1: 6}
    assert found.pools["score"].slots == ()
    found = plan("2x8", "pools.main.gpus=1", "pools.score={nodes: [4], cpus: 2}", "roles.reward={pool: score, workers: 3}")
    assert [worker.cpus for worker in found.of_role("reward")] == [2.0] * 3
    (problem,) = plan("2x8", "pools.main.gpus=1", "pools.score.nodes=[4]", "roles.reward={pool: score, workers: 6}").problems
    assert problem.subject == "roles.reward.workers"
    found = plan("2x8:16c", "pools.main.gpus=1", "pools.score={}", "roles.reward.pool=score")
    assert counts(found, "reward") == {0: 2, 1: 2}


def test_too_many_reward_processes(plan):
    (problem,) = plan("1x0:8c", "pools.main.nodes=[4]", "roles.reward.workers=6").problems
    assert problem.subject == "roles.reward"
    assert problem.need.startswith("CPU: needs 6, free 4")


def test_local_backend_has_one_place(plan):
    found = plan("1x0:16c", "backend=local")
    assert Counter(worker.role for worker in found.workers) == {"actor": 1, "rollout": 1, "reward": 1}
    found = plan("1x0:4c", "backend=local", "pools.main.nodes=[2]")
    assert Counter(worker.role for worker in found.workers) == {"actor": 1, "rollout": 2, "reward": 1}


def test_own_roles_live_in_slots(plan):
    found = plan("1x0:2c", "roles.judge.worker=my_pkg:Judge")
    assert [(worker.rank, worker.slot) for worker in found.of_role("judge")] == [(0, 0), (1, 1)]


def test_H17_derived_sizes(plan):
    found = plan(
        "1x0:2c",
        "trainer={steps: 10, prompts_per_step: 12, minibatches: 3, epochs: 2}",
        "algorithm.group_size=4",
        "data.size=30",
        "pools.main.nodes=[2]",
    )
    assert found.derived == {
        "samples_per_step": 48,
        "rows_per_minibatch": 16,
        "optimizer_steps_per_step": 6,
        "optimizer_steps": 60,
        "samples": 480,
        "steps_per_epoch": 2.5,
        "parameters": 1000,
        "workers": 5,
        "processes": 3,
        "cpus": 1.98,
        "gpus": 0,
    }
    assert "steps_per_epoch" not in plan("1x0:2c", "data.train=x.jsonl").derived


def test_more_ranks_than_rows_is_pointed_out(plan):
    found = plan("2x8", "pools.main.gpus=1", "trainer.prompts_per_step=2", "algorithm.group_size=4")
    assert any("16 workers share mini-batches of 8 rows" in warning for warning in found.warnings)


def test_options_without_effect_are_pointed_out(plan):
    def idle(nodes: str, *overrides: str) -> list[str]:
        return [warning.split()[0] for warning in plan(nodes, *given, *overrides).warnings if "has no effect" in warning]

    given = ("model.lora.rank=8", "trainer.publish=adapter", "trainer.sharding=fsdp", "trainer.offload=true", "trainer.publish_folder=x")
    one = ("roles.actor.workers=1", "roles.rollout.workers=1")
    assert idle("1x0:4c", *one) == ["trainer.publish=adapter", "trainer.publish_folder", "trainer.sharding=fsdp", "trainer.offload"]
    pools = "pools={a: {gpus: 1, nodes: [2]}, b: {gpus: 1, nodes: [2]}}"
    assert idle("1x8", pools, "roles={actor: {pool: a}, rollout: {pool: b}, reward: {pool: b}}") == []


def test_no_nodes_and_unreadable_models_are_problems(plan):
    found = plan(Inventory(nodes=(), origin="ray cluster"))
    assert [problem.subject for problem in found.problems] == ["inventory"]
    config = Config.model_validate({"model": {"path": "nowhere"}})
    assert [problem.subject for problem in build_plan(config, parse_nodes("1x0:2c")).problems] == ["model.path"]


def test_plan_is_pure_and_repeatable(plan):
    assert plan("3x4,2x8", "pools.main.gpus=1") == plan("3x4,2x8", "pools.main.gpus=1")


nodes = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 8), st.integers(1, 40)), min_size=1, max_size=3)
pool = st.fixed_dictionaries(
    {"nodes": st.just("auto") | st.lists(st.integers(0, 9), max_size=3), "gpus": st.integers(0, 2)},
    optional={"cpus": st.sampled_from([0.5, 1.0, 3.0])},
)
workers = st.just("auto") | st.integers(1, 9)


@settings(max_examples=200, deadline=None)
@given(nodes=nodes, a=pool, b=pool, actor=workers, reward=workers, homes=st.tuples(*[st.sampled_from("ab")] * 3))
def test_no_plan_overcommits_and_every_role_is_placed_or_a_problem(nodes, a, b, actor, reward, homes):
    config = Config.model_validate(
        {
            "pools": {"a": a, "b": b},
            "roles": {
                "actor": {"pool": homes[0], "workers": actor},
                "rollout": {"pool": homes[1]},
                "reward": {"pool": homes[2], "workers": reward},
            },
        }
    )
    found = build_plan(config, parse_nodes(",".join(f"{count}x{gpus}:{cpus}c" for count, gpus, cpus in nodes)), FACTS)
    check_invariants(found)
    if not found.problems:
        assert all(found.of_role(role) for role in config.roles)
        assert actor == "auto" or len(found.of_role("actor")) == actor
        assert reward == "auto" or len(found.of_role("reward")) == reward


def test_the_local_backend_says_that_it_bounds_no_rewards():
    config = load_config("demo", ["backend=local", "pools.main.nodes=[1]"])
    (warning,) = [text for text in build_plan(config, parse_nodes("1x0:4c")).warnings if "deadlines" in text]
    assert "do not hold" in warning
    assert not [text for text in build_plan(load_config("demo"), parse_nodes("1x0:4c")).warnings if "deadlines" in text]
