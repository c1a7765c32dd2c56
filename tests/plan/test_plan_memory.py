"""The memory estimate, line by line and against the nodes."""

from __future__ import annotations

from rolemesh.config import Config, ModelFacts
from rolemesh.plan import Inventory, NodeInfo, build_plan
from rolemesh.plan.memory import GPU_PROCESS_BYTES, PROCESS_BYTES, REWARD_PROCESS_BYTES, micro_batch_tokens, size

GIB = 1024**3
FACTS = ModelFacts(
    family="llama", layers=3, hidden=8, heads=4, kv_heads=2, head_dim=5, intermediate=16, vocab=11, tied=False, parameters=1000
)


def config(**more) -> Config:
    values = {
        "data": {"max_prompt_tokens": 6, "max_response_tokens": 4},
        "rollout": {"slots": 7},
        "trainer": {"prompts_per_step": 4, "micro_batch_tokens": 50},
        "algorithm": {"group_size": 4},
        "pools": {"main": {"nodes": [2]}},
    }
    return Config.model_validate({**values, **more})


def inventory(**more) -> Inventory:
    node = {"name": "n", "cpus": 4.0, "memory_bytes": 8 * GIB}
    return Inventory(nodes=(NodeInfo(**{**node, **more}),), origin="test")


def lines(plan, position: int = 0) -> dict[tuple[str, str], int]:
    return {(line.role, line.what): line.bytes for line in plan.memory[position].lines}


def test_every_line_by_its_formula():
    plan = build_plan(config(), inventory(), FACTS)
    assert lines(plan) == {
        ("", "process"): PROCESS_BYTES,
        ("actor", "weights"): 4 * 1000,
        ("actor", "gradients"): 4 * 1000,
        ("actor", "optimizer"): 8 * 1000,
        ("actor", "activations"): 50 * 3 * (14 * 8 + 4 * 16) * 4,
        ("actor", "logits"): 50 * 11 * 12,
        ("rollout", "weights"): 4 * 1000,
        ("rollout", "KV cache"): 7 * (6 + 4) * 2 * 3 * 2 * 5 * 4,
        ("rollout", "sampling"): 7 * 11 * 8,
    }
    assert lines(plan, 1) == {("reward", "process"): REWARD_PROCESS_BYTES}
    assert [(entry.pool, entry.process) for entry in plan.memory] == [("main", "slot"), ("main", "reward")]


def test_half_precision_halves_weights_and_cache_but_not_the_moments():
    found = lines(build_plan(config(model={"dtype": "bfloat16"}), inventory(), FACTS))
    assert found["actor", "weights"] == 2000
    assert found["actor", "optimizer"] == 8000
    assert found["rollout", "KV cache"] == 7 * 10 * 2 * 3 * 2 * 5 * 2


def test_tokens_of_a_micro_batch():
    # 16 rows of 10 tokens over 2 ranks are 80 tokens; the option allows 50.
    assert micro_batch_tokens(config(), 2) == 50
    # Over 8 ranks 2 rows, 20 tokens.
    assert micro_batch_tokens(config(), 8) == 20
    # A row is never cut: at least its length.
    assert micro_batch_tokens(config(trainer={"prompts_per_step": 4, "micro_batch_tokens": 1}), 2) == 10


def test_split_pools_hold_only_what_their_roles_need():
    split = config(pools={"main": {"nodes": [1]}, "gen": {"nodes": [1]}}, roles={"actor": {}, "rollout": {"pool": "gen"}, "reward": {}})
    plan = build_plan(split, inventory(), FACTS)
    assert {role for role, _ in lines(plan, 0)} == {"", "actor"}
    assert {role for role, _ in lines(plan, 1)} == {"", "rollout"}


def test_a_node_without_enough_memory_is_a_problem():
    need = 2 * PROCESS_BYTES + REWARD_PROCESS_BYTES
    plan = build_plan(config(), inventory(memory_bytes=need), FACTS)  # all processes, nothing for the model
    (problem,) = plan.problems
    assert problem.subject == "node n"
    assert problem.need == "memory: its processes need about 1.3 GiB"  # 2 x 500 MiB and 350 MiB
    assert problem.free == "1.3 GiB"
    big = build_plan(config(rollout={"slots": 10**9}), inventory(), FACTS)
    assert "pools fewer slots" in problem.remedy
    assert "KV cache of rollout" in big.problems[0].remedy
    assert "rollout.slots" in big.problems[0].remedy


def test_gpu_memory_counts_apart():
    gpu = config(pools={"main": {"nodes": [2], "gpus": 1}})
    plan = build_plan(gpu, inventory(gpus=2, gpu_memory_bytes=GIB), FACTS)
    assert plan.problems == ()
    assert plan.memory[0].host_bytes == GPU_PROCESS_BYTES
    assert plan.memory[0].gpu_bytes == sum(value for (role, _), value in lines(plan).items() if role)
    (problem,) = build_plan(gpu, inventory(gpus=2, gpu_memory_bytes=1000), FACTS).problems
    assert problem.subject == "pool main on node n"
    assert problem.need.startswith("GPU memory")
    unknown = build_plan(gpu, inventory(gpus=2, gpu_memory_bytes=0), FACTS)
    assert unknown.problems == ()


def test_equal_nodes_in_equal_trouble_are_told_once():
    many = Inventory(nodes=tuple(NodeInfo(name=f"n{i}", cpus=4.0, memory_bytes=1, gpus=1) for i in range(5)), origin="test")
    plan = build_plan(config(pools={"main": {"gpus": 1}}), many, FACTS)
    assert [problem.subject for problem in plan.problems] == ["node n0 (and 4 more)"]


def test_sizes_are_readable():
    assert [size(value) for value in (0, 1023, 1024, 1536 * 1024, 5 * GIB, 3000 * GIB)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "5.0 GiB",
        "2.9 TiB",
    ]
