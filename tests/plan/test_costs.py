"""Predicted stage times by their formulas, and the hints that follow from them. Expected numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolemesh.config import Config, ModelFacts
from rolemesh.plan import Plan, build_plan, parse_nodes
from rolemesh.plan.balance import balance_hints, seconds
from rolemesh.plan.costs import step_seconds
from rolemesh.plan.devices import DEVICE_TYPES, device_type
from rolemesh.plan.schema import Stage

# 7 billion parameters in round numbers: 32 layers of 200 million, and 32,000 x 4,096 twice for embedding and output.
LAYERS, HIDDEN, VOCAB = 32, 4096, 32_000
FACTS = ModelFacts(
    family="llama", layers=LAYERS, hidden=HIDDEN, heads=32, kv_heads=8, head_dim=128, intermediate=11_008, vocab=VOCAB, tied=False,
    parameters=LAYERS * 200_000_000 + 2 * VOCAB * HIDDEN,
)  # fmt: skip
BASE = {
    "model": {"dtype": "bfloat16"},
    "data": {"max_prompt_tokens": 500, "max_response_tokens": 1500},
    "algorithm": {"group_size": 8},
    "rollout": {"slots": 64},
    "trainer": {"prompts_per_step": 64, "minibatches": 2, "micro_batch_tokens": 16_000},
    "pools": {"main": {"gpus": 1}},
}


def plan(nodes: str = "1x8:H100", facts: ModelFacts = FACTS, **more) -> Plan:
    return build_plan(Config.model_validate({**BASE, **more}), parse_nodes(nodes), facts)


def stage(found: Plan, role: str, call: str) -> Stage:
    (only,) = [stage for stage in found.stages if (stage.role, stage.call) == (role, call)]
    return only


def test_generation_is_bound_by_memory_bandwidth():
    made = stage(plan(), "rollout", "generate")
    # 512 answers on 8 workers are 64 each, all side by side: 1,500 steps. Each reads the layers and the output layer (2 bytes a number)
    # and the cache of 64 rows, on average 500 + 750 tokens of 2 x 32 x 8 x 128 numbers. Before, 8 prompts of 500 tokens in passes of 1,024.
    passes = 1500 + 8 * 500 / 1024
    weights = (LAYERS * 200e6 + VOCAB * HIDDEN) * 2
    cache = 1500 * 64 * 1250 * (2 * 32 * 8 * 128 * 2)
    assert made.bytes == pytest.approx(8 * (passes * weights + cache))
    assert made.bound == "memory"
    assert made.seconds == pytest.approx((passes * weights + cache) / (3350e9 * 0.6))


def test_training_is_bound_by_compute():
    trained = stage(plan(), "actor", "update")
    # 512 rows of 2,000 tokens; forward 2 x 6.4e9 a token, 4 x 32 x 4,096 for each pair of a token and an earlier one; three times that
    # with backward; the output layer for 1,500 tokens, once more for being computed again.
    body = 512 * (2 * 6.4e9 * 2000 + 4 * 32 * 32 * 128 * 2000**2 / 2)
    head = 512 * 2 * VOCAB * HIDDEN * 1500
    assert trained.flops == pytest.approx(3 * body + 4 * head)
    assert trained.bound == "compute"
    assert trained.seconds == pytest.approx((3 * body + 4 * head) / 8 / (989e12 * 0.4))


def test_reference_and_critic_cost_a_forward_pass_each():
    roles = {name: {} for name in ("actor", "rollout", "ref", "critic", "reward")}
    found = plan(roles=roles)
    body = 512 * (2 * 6.4e9 * 2000 + 4 * 32 * 32 * 128 * 2000**2 / 2)
    assert stage(found, "ref", "logprobs").flops == pytest.approx(body + 512 * 2 * VOCAB * HIDDEN * 1500)
    assert stage(found, "critic", "values").flops == pytest.approx(body)
    assert stage(found, "critic", "update").flops == pytest.approx(3 * body)
    # Values and reference share the slots, so they take turns; rewards are scored meanwhile and are done before.
    times = {(entry.role, entry.call): entry.seconds for entry in found.stages}
    by_hand = sum(times.values()) - times["reward", "score"]
    assert found.seconds_per_step == pytest.approx(by_hand)


def test_pools_of_their_own_work_side_by_side():
    stages = [
        Stage(role=role, call=call, workers=1, seconds=time, flops=0, bytes=0, bound="compute")
        for role, call, time in [
            ("rollout", "generate", 8.0), ("reward", "score", 1.0), ("ref", "logprobs", 2.0), ("critic", "values", 3.0),
            ("actor", "update", 5.0), ("critic", "update", 4.0), ("actor", "publish", 0.5),
        ]
    ]  # fmt: skip
    together = dict.fromkeys(("rollout", "ref", "critic", "actor"), "main")  # rewards have processes of their own
    assert step_seconds(stages, together) == 8 + (2 + 3) + (5 + 4) + 0.5
    assert step_seconds(stages, {**together, "critic": "values"}) == 8 + 3 + 5 + 0.5
    assert step_seconds(stages, {**together, "reward": "main"}) == 8 + (1 + 2 + 3) + (5 + 4) + 0.5
    assert step_seconds(stages, {**together, "reward": "elsewhere"}) == 8 + (2 + 3) + (5 + 4) + 0.5
    assert step_seconds([], together) == 0


def test_more_workers_and_faster_devices_are_faster():
    one, two = plan("1x8:H100"), plan("2x8:H100")
    assert stage(two, "actor", "update").seconds == pytest.approx(stage(one, "actor", "update").seconds / 2)
    assert stage(plan("1x8:A100"), "actor", "update").seconds == pytest.approx(stage(one, "actor", "update").seconds * 989 / 312)
    half = plan("1x8:H100", model={"dtype": "float32"})
    assert stage(half, "actor", "update").seconds == pytest.approx(stage(one, "actor", "update").seconds * 989 / 67)
    # The slowest kind of device decides, because ranks wait for each other.
    assert stage(plan("1x8:H100,1x8:A100"), "actor", "update").seconds == pytest.approx(stage(plan("2x8:A100"), "actor", "update").seconds)
    assert stage(plan("1x8:unheard-of-X1".replace("unheard-of-X1", "X1")), "actor", "update").seconds > 0


def test_a_mixture_computes_with_few_and_reads_all_of_its_parameters():
    sparse = replace(FACTS, active_parameters=FACTS.parameters - LAYERS * 150_000_000)
    dense, mixed = plan(), plan(facts=sparse)
    assert stage(mixed, "actor", "update").flops < stage(dense, "actor", "update").flops / 2
    assert stage(mixed, "rollout", "generate").bytes == stage(dense, "rollout", "generate").bytes


def test_tiny_models_wait_for_launches():
    tiny = replace(FACTS, layers=2, hidden=8, heads=2, kv_heads=2, head_dim=4, intermediate=16, vocab=10, parameters=1000)
    made = stage(plan("1x0:8c", facts=tiny, pools={"main": {"nodes": [1]}}, data={"max_prompt_tokens": 8, "max_response_tokens": 10}),
                 "rollout", "generate")  # fmt: skip
    # 512 answers in slots of 64 are 8 rounds of 10 steps; 64 prompts of 8 tokens fit one pass. Two layers of half a millisecond.
    assert made.bound == "overhead"
    assert made.seconds == pytest.approx((80 + 1) * 2 * 0.5e-3)


def test_rewards_by_kind_and_processes():
    roles = {"actor": {}, "rollout": {}, "reward": {"workers": 2, "processes": 4}}
    found = plan(roles=roles, reward=[{"name": "math_verify"}, {"name": "rewards:score"}])
    assert stage(found, "reward", "score").seconds == pytest.approx(512 * (3e-3 + 10e-3) / 8)


def test_device_table_knows_the_names_of_drivers():
    assert [device_type(name).name for name in ("NVIDIA H200", "Tesla T4", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-80GB", "A10G")] == [
        "H200", "T4", "A100-40G", "A100-80G", "A10G",
    ]  # fmt: skip
    assert device_type("Matrox G200") is None
    assert all(device.bfloat16 >= device.float32 for device in DEVICE_TYPES)


# -- hints


def hints(config: dict, step: float, *stages: tuple[str, str, int, float]) -> list[str]:
    made = [
        Stage(role=role, call=call, workers=workers, seconds=time, flops=0, bytes=0, bound="compute")
        for role, call, workers, time in stages
    ]
    return list(balance_hints(Config.model_validate(config), made, step))


SPLIT = {
    "pools": {"main": {}, "gen": {}, "values": {}},
    "roles": {"actor": {}, "rollout": {"pool": "gen"}, "critic": {"pool": "values"}, "reward": {}},
}


def test_S17_slow_rewards_are_pointed_out_with_a_number_of_workers():
    (hint,) = hints({}, 30.0, ("reward", "score", 2, 20.0), ("rollout", "generate", 8, 5.0), ("actor", "update", 8, 5.0))
    # 2 workers for 20 s are 40 worker-seconds; a fifth of the other 10 s is 2 s, so 20 workers.
    assert "roles.reward.workers=20" in hint
    assert hints({}, 100.0, ("reward", "score", 2, 19.0), ("rollout", "generate", 8, 81.0)) == []
    assert hints({}, 3.0, ("reward", "score", 2, 1.9), ("rollout", "generate", 8, 1.1)) == []  # too short to matter


def test_S17_a_slow_critic_is_pointed_out():
    (hint,) = hints(SPLIT, 40.0, ("critic", "update", 2, 20.0), ("actor", "update", 6, 5.0))
    # 40 and 30 worker-seconds on 8 slots: 4.6 and 3.4.
    assert hint.startswith("critic: ")
    assert "5 and 3 would be in proportion" in hint
    assert hints(SPLIT, 40.0, ("critic", "update", 4, 7.0), ("actor", "update", 4, 5.0)) == []
    together = {"pools": {"main": {}}, "roles": {name: {} for name in ("actor", "rollout", "critic", "reward")}}
    assert hints(together, 40.0, ("critic", "update", 2, 20.0), ("actor", "update", 6, 5.0)) == []


def test_S17_another_division_between_rollout_and_actor_is_pointed_out():
    # 64 and 4 worker-seconds on 10 slots: the square roots are as 4 to 1, so 8 and 2 slots: 8 + 2 = 10 s instead of 32 + 0.5.
    (hint,) = hints(SPLIT, 32.5, ("rollout", "generate", 2, 32.0), ("actor", "update", 8, 0.5))
    assert "8 and 2 would make a step about 69 % shorter" in hint
    assert hints(SPLIT, 10.0, ("rollout", "generate", 8, 8.0), ("actor", "update", 2, 2.0)) == []
    few = hints({}, 40.0, ("rollout", "generate", 2, 30.0), ("actor", "update", 8, 10.0))
    assert len(few) == 1
    assert few[0].endswith("with 2 workers where the pool has slots for 8; set roles.rollout.workers=auto")


def test_hints_are_warnings_of_the_plan():
    roles = {"actor": {"pool": "main"}, "rollout": {"pool": "gen"}, "reward": {"pool": "main"}}
    pools = {"main": {"nodes": [7], "gpus": 1}, "gen": {"nodes": [1], "gpus": 1}}
    assert any(warning.startswith("rollout: 1 of 8 slots generate") for warning in plan(pools=pools, roles=roles).warnings)


def test_times_are_readable():
    assert [seconds(value) for value in (0.034, 1.24, 14.2, 119, 240)] == ["0.034 s", "1.2 s", "14 s", "119 s", "4 min"]
