"""The memory estimate, line by line and against the nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolemesh.config import Config, ModelFacts
from rolemesh.plan import Inventory, NodeInfo, build_plan, parse_nodes
from rolemesh.plan.memory import (
    CONTEXT_BYTES,
    GPU_PROCESS_BYTES,
    PROCESS_BYTES,
    REWARD_PROCESS_BYTES,
    cache_shape,
    micro_batch_tokens,
    size,
)

GIB = 1024**3
FACTS = ModelFacts(
    family="llama", layers=3, hidden=8, heads=4, kv_heads=2, head_dim=5, intermediate=16, vocab=11, tied=False, parameters=1000
)
LARGE = replace(FACTS, parameters=10**9)


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
    # The widest of residual stream (8) and attention (4 x 5) counts for activations. The cache has a row more than its 7 slots, and
    # its 10 columns are rounded up to 16.
    assert lines(plan) == {
        ("", "process"): PROCESS_BYTES,
        ("actor", "weights"): 4 * 1000,
        ("actor", "gradients"): 4 * 1000,
        ("actor", "optimizer"): 8 * 1000,
        ("actor", "activations"): 50 * 3 * (58 * 20 + 16 * 16),
        ("actor", "logits"): 50 * 11 * 24,
        ("actor", "copy while saving"): 12 * 1000 // 2,
        ("rollout", "weights"): 4 * 1000,
        ("rollout", "fused copies"): (3 * 8 * (2 * 4 * 5 + 2 * 2 * 5 + 3 * 16) + 11 * 8) * 4,
        ("rollout", "KV cache"): 8 * 16 * 2 * 3 * 2 * 5 * 4,
        ("rollout", "sampling"): 7 * 11 * (20 + 4),
        ("rollout", "passes"): (1024 * (4 * 8 + 4 * 5 + 2 * 2 * 5 + 3 * 16) + 2 * 7 * 4 * 16) * 4,
    }
    assert lines(plan, 1) == {("reward", "process"): REWARD_PROCESS_BYTES, ("reward", "scoring processes"): (120 + 40) * 2**20}
    assert [(entry.pool, entry.process) for entry in plan.memory] == [("main", "slot"), ("main", "reward")]  # nothing is published


@pytest.mark.parametrize(("temperature", "fits"), [(0.005, False), (0.01, True), (2.0, True), (2.5, False)])
def test_vllm_has_temperatures_within_bounds(temperature: float, fits: bool):
    fit = replace(FACTS, head_dim=64)
    rollout = {"engine": "vllm", "temperature": temperature}
    found = build_plan(config(rollout=rollout), inventory(), fit).problems
    assert [problem.subject for problem in found] == ([] if fits else ["rollout.temperature"])
    assert build_plan(config(rollout=rollout | {"engine": "builtin"}), inventory(), fit).problems == ()


def test_rollout_workers_on_vllm_have_lines_of_their_own():
    fit = replace(FACTS, head_dim=32)
    plan = build_plan(config(rollout={"slots": 7, "engine": "vllm"}), inventory(), fit)
    found = {what: count for (role, what), count in lines(plan).items() if role == "rollout"}
    assert found == {
        "libraries": 350 * 2**20,
        "weights": 4 * 1000,
        "KV cache": (7 * 1 + 1) * 32 * 2 * 3 * 2 * 32 * 4,  # ten tokens need one block of 32, and one block is vLLM's own
        "sampling": 7 * 11 * (20 + 4),
        "passes": 4096 * (4 * 8 + (4 + 2 * 2) * 32 + 3 * 16) * 4,
        "packed head": 11 * 8 * 4,
    }
    assert plan.problems == ()
    (problem,) = build_plan(config(rollout={"engine": "vllm"}), inventory(), FACTS).problems
    assert (problem.subject, problem.free) == ("rollout.engine", "5 in tiny")
    devices = {"main": {"nodes": [2], "gpus": 1}}
    on_gpus = build_plan(config(rollout={"engine": "vllm"}, pools=devices), parse_nodes("1x2:8c"), FACTS)
    assert on_gpus.problems == (), "other sizes of a head are no matter there"
    assert ("rollout", "packed head") not in lines(on_gpus)


def test_rollout_workers_on_sglang_have_lines_of_their_own_and_need_devices_and_half_precision():
    devices = {"main": {"nodes": [2], "gpus": 1}}
    on_gpus = config(rollout={"slots": 7, "engine": "sglang"}, pools=devices, model={"dtype": "bfloat16"})
    plan = build_plan(on_gpus, parse_nodes("1x2:8c"), FACTS)
    assert {what: count for (role, what), count in lines(plan).items() if role == "rollout"} == {
        "libraries": 6 * 2**30,
        "weights": 2 * 1000,
        "KV cache": 7 * (10 + 8) * 2 * 3 * 2 * 5 * 2,  # ten tokens and eight to spare, in three layers of two heads of five
        "sampling": 7 * 11 * 40,
        "passes": 4096 * (4 * 8 + (4 + 2 * 2) * 5 + 3 * 16) * 2,
    }
    assert plan.problems == ()
    assert any("sglang has not run yet" in warning for warning in plan.warnings)
    on_cpus = build_plan(config(rollout={"engine": "sglang"}), inventory(), FACTS)
    found = {problem.subject: (problem.free, problem.remedy) for problem in on_cpus.problems}
    assert found["rollout.engine"] == ("pool main without", "Set rollout.engine=builtin, or on a machine with GPUs pools.main.gpus=1")
    assert found["model.dtype"] == ("float32", "Set model.dtype=bfloat16, or rollout.engine=builtin")
    assert not any("sglang" in warning for warning in build_plan(config(), inventory(), FACTS).warnings)


def test_critic_and_reference_have_formats_of_their_own():
    roles = {name: {} for name in ("actor", "rollout", "ref", "critic", "reward")}
    found = lines(build_plan(config(roles=roles, model={"dtype": "bfloat16"}), inventory(), FACTS))
    # The critic has no output layer (11 x 8 numbers) but a head of 8 numbers and a bias; it and the reference hold float32.
    body = 1000 - 11 * 8 + 8 + 1
    assert found["critic", "weights"] == 4 * body
    assert found["critic", "optimizer"] == 8 * body
    assert ("critic", "logits") not in found
    assert found["ref", "weights"] == 4 * 1000
    # 16 rows of 10 tokens over 2 ranks are 80 tokens, the option allows 50.
    assert found["ref", "activations"] == 50 * (40 * 20 + 12 * 16)
    assert ("ref", "optimizer") not in found


def test_an_adapter_alone_has_gradients_and_moments_and_the_reference_below_it_takes_nothing():
    roles = {name: {} for name in ("actor", "rollout", "ref", "critic", "reward")}
    plain = lines(build_plan(config(roles=roles), inventory(), FACTS))
    plan = build_plan(config(roles=roles, model={"lora": {"rank": 2}}), inventory(), FACTS)
    found = lines(plan)
    # Of each of three layers: queries 8 -> 20 and 20 -> 8, keys and values 8 -> 10, three of the MLP 8 -> 16 or back.
    adapter = 3 * 2 * (2 * (8 + 20) + 2 * (8 + 10) + 3 * (8 + 16))
    assert plan.derived["trained_parameters"] == adapter
    assert found["actor", "weights"] == 4 * (1000 + adapter)
    assert (found["actor", "gradients"], found["actor", "optimizer"]) == (4 * adapter, 8 * adapter)
    assert found["actor", "activations"] == 50 * 3 * (58 * 20 + 16 * 16 + 28 * 2)
    assert {line: count for line, count in found.items() if line[0] == "ref"} == {("ref", "weights"): 0}
    assert all(found[line] == plain[line] for line in plain if line[0] in ("critic", "rollout"))
    assert found["actor", "copy while saving"] == (4 * (1000 + adapter) + 8 * adapter) / 2
    apart = {**roles, "ref": {"pool": "other"}}
    own = build_plan(config(roles=apart, pools={"main": {"nodes": [2]}, "other": {"nodes": [1]}}, model={"lora": {}}), inventory(), FACTS)
    assert lines(own, 1)["ref", "weights"] == 4 * 1000


def test_a_warm_start_sends_float32_weights_to_reference_and_critic():
    roles = {name: {} for name in ("actor", "rollout", "reward")} | {name: {"pool": "other"} for name in ("ref", "critic")}
    apart = {"pools": {"main": {"nodes": [1]}, "other": {"nodes": [1]}}, "model": {"dtype": "bfloat16"}, "roles": roles}
    critic_apart = {"roles": {**roles, "ref": {}}}

    def shared(**more) -> dict[str, int]:
        memory = build_plan(config(**{**apart, **more}), inventory(), FACTS).memory
        return {line.what: line.bytes for slot in memory if slot.process == "node" for line in slot.lines}

    assert shared() == {}, "nothing is sent: the rollout workers live in the actor's process"
    assert shared(sft={}) == {"shared weights": 4 * 1000}
    assert shared(sft={}, **critic_apart) == {"shared weights": 4 * 1000}
    assert shared(sft={}, algorithm={"group_size": 4, "critic_path": "tiny"}, **critic_apart) == {}
    alone = {"roles": {**roles, "rollout": {"pool": "other"}}}
    assert shared(**alone) == {"shared weights": 2 * 1000}
    assert shared(sft={}, **alone) == {"shared weights": 4 * 1000}
    two = {"main": {"nodes": [1, 0]}, "other": {"nodes": [0, 1]}}
    nodes = Inventory(nodes=tuple(NodeInfo(name=name, cpus=2.0, memory_bytes=8 * GIB) for name in "nm"), origin="test")
    (memory,) = (slot for slot in build_plan(config(**{**apart, "pools": two, "sft": {}}), nodes, FACTS).memory if slot.process == "node")
    assert [(line.what, line.bytes) for line in memory.lines] == [("published weights", 4 * 4 * 1000)]


def test_models_that_sleep_take_memory_of_the_node():
    trainer = {"prompts_per_step": 4, "micro_batch_tokens": 50, "offload": True}
    here = lines(build_plan(config(trainer=trainer), inventory(), FACTS))
    assert ("actor", "asleep") not in here, "on a CPU they stay where they are"
    gpus = inventory(gpus=2, gpu_memory_bytes=80 * GIB)
    plan = build_plan(config(trainer=trainer, pools={"main": {"nodes": [2], "gpus": 1}}), gpus, FACTS)
    (asleep,) = [line for line in plan.memory[0].lines if line.what == "asleep"]
    assert (asleep.role, asleep.bytes, asleep.on_gpu) == ("actor", 12 * 1000, False)


# What stays on a device as long as it is awake, and what computing takes, by the lines of the first test; a critic has 921 parameters.
ACTOR_HELD, ACTOR_WORKS = 16 * 1000, 50 * 3 * (58 * 20 + 16 * 16) + 50 * 11 * 24
ROLLOUT_HELD, ROLLOUT_WORKS = 4 * 1000 + (1728 + 88) * 4 + 30720, 1848 + 495104
CRITIC_HELD, CRITIC_WORKS = 16 * 921, 50 * 3 * (58 * 20 + 16 * 16)
REF_HELD, REF_WORKS = 4 * 1000, 50 * (40 * 20 + 12 * 16) + 50 * 11 * 24


def on_device(**more):
    pools = {"pools": {"main": {"nodes": [2], "gpus": 1}}}
    return build_plan(config(**{**pools, **more}), inventory(gpus=2, gpu_memory_bytes=80 * GIB), FACTS).memory[0]


def test_a_device_holds_what_is_awake_and_what_one_role_computes_with():
    trainer = {"prompts_per_step": 4, "micro_batch_tokens": 50}
    found = on_device()
    held = CONTEXT_BYTES + ACTOR_HELD + ROLLOUT_HELD
    assert found.phase_bytes == {"generate": held + ROLLOUT_WORKS, "update": held + ACTOR_WORKS}
    assert found.gpu_bytes == held + ROLLOUT_WORKS
    asleep = on_device(trainer={**trainer, "offload": True})
    assert asleep.phase_bytes == {"generate": held - ACTOR_HELD + ROLLOUT_WORKS, "update": held + ACTOR_WORKS}
    assert asleep.gpu_bytes == held - ACTOR_HELD + ROLLOUT_WORKS
    assert asleep.host_bytes == found.host_bytes + 12 * 1000, "weights and moments; gradients are dropped"

    every = {name: {} for name in ("actor", "rollout", "ref", "critic", "reward")}
    held = CONTEXT_BYTES + ROLLOUT_HELD + REF_HELD
    found = on_device(roles=every, trainer={**trainer, "offload": True})
    assert found.phase_bytes == {
        "generate": held + ROLLOUT_WORKS,
        "score": held + CRITIC_HELD + CRITIC_WORKS,  # more than the reference works with
        "update": held + ACTOR_HELD + CRITIC_HELD + ACTOR_WORKS,
    }
    awake = on_device(roles=every)
    assert set(awake.phase_bytes.values()) == {
        held + ACTOR_HELD + CRITIC_HELD + works for works in (ROLLOUT_WORKS, CRITIC_WORKS, ACTOR_WORKS)
    }
    apart = {**every, "ref": {"pool": "other"}, "critic": {"pool": "other"}}
    pools = {"main": {"nodes": [2], "gpus": 1}, "other": {"nodes": [2], "gpus": 1}}
    plan = build_plan(config(roles=apart, pools=pools), inventory(gpus=4, gpu_memory_bytes=80 * GIB), FACTS)
    assert list(plan.memory[0].phases) == ["generate", "update"]
    other = CONTEXT_BYTES + REF_HELD + CRITIC_HELD + CRITIC_WORKS
    assert plan.memory[1].phase_bytes == {"score": other, "update": other}


def test_below_an_adapter_the_reference_keeps_the_actor_awake():
    trainer = {"prompts_per_step": 4, "micro_batch_tokens": 50, "offload": True}
    roles = {name: {} for name in ("actor", "rollout", "ref", "reward")}
    found = on_device(roles=roles, model={"lora": {"rank": 2}}, trainer=trainer).phase_bytes
    actor = 4 * (1000 + 984) + 4 * 984 + 8 * 984  # an adapter of rank 2 has 984 parameters, see above
    assert found["generate"] == CONTEXT_BYTES + ROLLOUT_HELD + ROLLOUT_WORKS
    assert found["score"] == CONTEXT_BYTES + ROLLOUT_HELD + actor


def test_a_device_without_room_names_each_option_with_which_it_would_need_less():
    """16e9 and 4e9 bytes of weights, gradients, moments and the rollout's weights; the rest is small, or of an option to lower."""

    def told(**more) -> str:
        pools = {"pools": {"main": {"nodes": [2], "gpus": 1}}}
        nodes = inventory(memory_bytes=900 * GIB, gpus=2, gpu_memory_bytes=4 * GIB)
        (problem,) = build_plan(config(**{**pools, **more}), nodes, LARGE).problems
        return f"{problem.need}; {problem.remedy}"

    trainer = {"prompts_per_step": 4, "micro_batch_tokens": 50}
    # 20e9 bytes and 600 MiB. Two shards have half of the actor's 16e9, but gather two of three layers and a layer's gradients: 4e9.
    # With an adapter of rank 16 (7872 parameters) 4e9 are left of them.
    found = told()
    assert "a slot needs about 19.2 GiB, most of all to generate" in found
    options = "15.5 GiB with trainer.sharding=fsdp, 8.0 GiB with model.lora.rank=16"
    assert found.endswith(f"optimizer of actor, 7.5 GiB each. It would need {options}")
    # With 3e8 slots of 11 logits and 24 bytes generation works with 73.8 GiB beside them; only there sleep helps.
    rollout = {"slots": 3 * 10**8}
    assert "with trainer.offload=true" in told(rollout=rollout)
    assert "offload" not in told(rollout=rollout, trainer={**trainer, "offload": True})
    # 8e6 tokens in one micro-batch of three layers: 150 GiB of activations; checkpointing leaves the inputs and one layer.
    long = {"data": {"max_prompt_tokens": 10**6, "max_response_tokens": 4}, "trainer": {**trainer, "micro_batch_tokens": 10**7}}
    assert "GiB with trainer.activation_checkpointing=true" in told(**long)
    long["trainer"]["activation_checkpointing"] = True
    assert "activation_checkpointing" not in told(**long)
    split = {"roles": {"actor": {"tensor_parallel": 2}, "rollout": {}, "reward": {}}}
    assert "lora" not in told(**split), "adapters are not split"


def test_bfloat16_halves_the_rollouts_weights_but_the_actor_keeps_float32_and_copies():
    found = lines(build_plan(config(model={"dtype": "bfloat16"}), inventory(), FACTS))
    assert found["actor", "weights"] == 4000
    assert found["actor", "bfloat16 copies"] == 2000
    assert found["actor", "gradients"] == 4000
    assert found["actor", "optimizer"] == 8000
    assert found["actor", "activations"] == 50 * 3 * (52 * 20 + 8 * 16)
    assert found["rollout", "weights"] == 2000
    assert found["rollout", "fused copies"] == (3 * 8 * (2 * 4 * 5 + 2 * 2 * 5 + 3 * 16) + 11 * 8) * 2
    assert found["rollout", "KV cache"] == 8 * 16 * 2 * 3 * 2 * 5 * 4  # CPUs keep it in float32; devices do not
    gpus = inventory(gpus=2, gpu_memory_bytes=2**35)
    found = lines(build_plan(config(model={"dtype": "bfloat16"}, pools={"main": {"nodes": [2], "gpus": 1}}), gpus, FACTS))
    assert found["rollout", "fused copies"] == (3 * 8 * (4 * 5 + 2 * 2 * 5 + 2 * 16) + 11 * 8) * 2
    assert found["rollout", "KV cache"] == 8 * 16 * 2 * 3 * 2 * 5 * 2


def test_sharded_and_split_models_are_held_in_parts():
    trainer = {"prompts_per_step": 4, "micro_batch_tokens": 50, "sharding": "fsdp", "activation_checkpointing": True}
    found = lines(build_plan(config(trainer=trainer, pools={"main": {"nodes": [4]}}), inventory(), FACTS))
    assert (found["actor", "weights"], found["actor", "gradients"], found["actor", "optimizer"]) == (1000, 1000, 2000)
    # Two times a third of the parameters with embedding and head of 11 x 8, and a third of gradients, in float32.
    assert found["actor", "gathered"] == 2 * 4 * (333 + 2 * 88) + 4 * 333
    # 16 rows of 10 tokens over 4 ranks: 40 tokens; of three layers the inputs, of one all that it keeps.
    assert found["actor", "activations"] == 40 * (4 * 3 * 20 + 58 * 20 + 16 * 16)
    with_ref = {"actor": {}, "rollout": {}, "reward": {}, "ref": {}}
    found = lines(build_plan(config(trainer=trainer, roles=with_ref, pools={"main": {"nodes": [4]}}), inventory(), FACTS))
    assert (found["ref", "weights"], found["ref", "gathered"]) == (1000, 2 * 4 * (333 + 2 * 88))
    split = {"actor": {"tensor_parallel": 2}, "rollout": {}, "reward": {}}
    found = lines(build_plan(config(roles=split, pools={"main": {"nodes": [4]}}), inventory(), FACTS))
    assert found["actor", "weights"] == 2000
    assert found["actor", "activations"] == 50 * 3 * (58 * 20 + 16 * 16)  # two rows of ranks: 80 tokens each, the option allows 50


def test_ranks_divide_the_copy_for_a_checkpoint_which_lies_in_host_memory():
    pools = {"main": {"nodes": [4]}}
    plan = build_plan(config(pools=pools), inventory(), FACTS)
    assert lines(plan)["actor", "copy while saving"] == 12 * 1000 // 4
    assert not any(line.on_gpu for line in plan.memory[0].lines if line.what == "copy while saving")
    waiting = build_plan(config(pools=pools, trainer={"async_save": False}), inventory(), FACTS)
    assert ("actor", "copy while saving") not in lines(waiting)


def test_scoring_processes_are_counted():
    roles = {"actor": {}, "rollout": {}, "reward": {"processes": 10}}
    assert lines(build_plan(config(roles=roles), inventory(), FACTS), 1)["reward", "scoring processes"] == (120 + 10 * 40) * 2**20
    local = build_plan(config(backend="local"), inventory(), FACTS)
    assert set(lines(local, 1)) == {("reward", "process")}


def test_logits_of_a_plain_head_are_held_in_chunks():
    facts = replace(FACTS, vocab=2**20)
    # 50 tokens of a million logits: the trainer holds 2**24 of them at a time; a model that scales its logits holds all.
    assert lines(build_plan(config(), inventory(), facts))["actor", "logits"] == 24 * 2**24
    assert lines(build_plan(config(), inventory(), replace(facts, plain_head=False)))["actor", "logits"] == 24 * 50 * 2**20


def test_deterministic_cache_and_short_contexts():
    assert cache_shape(config(), FACTS) == (7, 16)
    assert cache_shape(config(deterministic=True), FACTS) == (16, 16)
    assert cache_shape(config(data={"max_prompt_tokens": 30, "max_response_tokens": 4}), FACTS) == (7, 48)
    assert cache_shape(config(data={"max_prompt_tokens": 30, "max_response_tokens": 4}), replace(FACTS, context=32)) == (7, 32)


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
    need = 2 * PROCESS_BYTES + REWARD_PROCESS_BYTES + 160 * 2**20
    plan = build_plan(config(), inventory(memory_bytes=need), FACTS)  # all processes, nothing for the model
    (problem,) = plan.problems
    assert problem.subject == "node n"
    assert problem.need == "memory: its processes need about 1.6 GiB"  # 2 x 500, 450, 120 and 40 MiB, and less than 1 of the model
    assert problem.free == "1.6 GiB"
    big = build_plan(config(rollout={"slots": 10**9}), inventory(), FACTS)
    assert "pools fewer slots" in problem.remedy
    assert "KV cache of rollout" in big.problems[0].remedy
    assert "rollout.slots" in big.problems[0].remedy


def test_gpu_memory_counts_apart():
    gpu = config(pools={"main": {"nodes": [2], "gpus": 1}})
    plan = build_plan(gpu, inventory(gpus=2, gpu_memory_bytes=GIB), FACTS)
    assert plan.problems == ()
    # The weights pass through the process's own memory, those of actor and rollout after each other.
    copy = lines(plan)["actor", "copy while saving"]
    assert plan.memory[0].host_bytes == GPU_PROCESS_BYTES + 4 * 1000 + copy
    gpu_lines = CONTEXT_BYTES + sum(value for (role, _), value in lines(plan).items() if role) - copy
    assert sum(line.bytes for line in plan.memory[0].lines if line.on_gpu) == gpu_lines
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
