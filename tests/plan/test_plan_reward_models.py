"""Where the reward lives when it has models: in slots, with their memory and time. Expected numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolemesh.config import Config, ModelFacts, read_model_facts
from rolemesh.plan import Plan, build_plan, needed_nodes, parse_nodes, plan_json
from rolemesh.plan.memory import CONTEXT_BYTES, SCORING_BYTES, SCORING_PROCESS_BYTES

FACTS = ModelFacts(
    family="llama", layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocab=10, tied=False, parameters=1000
)
SIZES = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 20,
}


@pytest.fixture
def plan(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))

    def make(nodes: str = "1x0:64c", **more) -> Plan:
        values = {
            "data": {"max_prompt_tokens": 6, "max_response_tokens": 4},
            "trainer": {"prompts_per_step": 4, "micro_batch_tokens": 50},
            "algorithm": {"group_size": 4},
            "reward": [{"name": "exact"}, {"model": {"path": str(tmp_path)}}],
        }
        make.config = Config.model_validate(values | more)
        return build_plan(make.config, parse_nodes(nodes), FACTS)

    return make


def lines(plan: Plan, pool: str, role: str) -> dict[str, tuple[int, bool]]:
    (entry,) = [entry for entry in plan.memory if entry.pool == pool]
    return {line.what: (line.bytes, line.on_gpu) for line in entry.lines if line.role == role}


SPLIT = {
    "pools": {"main": {"nodes": [2], "gpus": 1}, "judge": {"nodes": [3], "gpus": 1}},
    "roles": {"actor": {}, "rollout": {}, "reward": {"pool": "judge", "workers": 2}},
}


def test_beside_others_in_their_slots(plan, tmp_path: Path) -> None:
    made = plan(pools={"main": {"nodes": [2]}}, roles={"actor": {}, "rollout": {}, "reward": {"processes": 3}})
    assert made.problems == ()
    assert [(worker.rank, worker.slot) for worker in made.of_role("reward")] == [(0, 0), (1, 1)]
    assert made.derived["processes"] == 2
    parameters = read_model_facts(tmp_path).body_parameters
    assert lines(made, "main", "reward") == {
        "scoring processes": (SCORING_BYTES + 3 * SCORING_PROCESS_BYTES, False),
        "weights": (4 * parameters, False),
        "activations": (50 * (40 * 64 + 12 * 96), False),
    }
    assert {worker.cpus for worker in made.workers} == {4.0}, "one for itself and one for each scoring process"
    assert all(line.role != "reward" or line.what != "process" for entry in made.memory for line in entry.lines)


def test_on_devices_of_their_own(plan, tmp_path: Path) -> None:
    two = [{"model": {"path": str(tmp_path)}}, {"name": "again", "model": {"path": str(tmp_path), "dtype": "bfloat16"}}]
    made = plan("1x8", reward=two, **SPLIT)
    assert made.problems == ()
    assert [(worker.pool, worker.slot, worker.gpus) for worker in made.of_role("reward")] == [("judge", 0, 1.0), ("judge", 1, 1.0)]
    parameters = read_model_facts(tmp_path).body_parameters
    found = lines(made, "judge", "reward")
    assert found == {"weights": (6 * parameters, True), "activations": (50 * (40 * 64 + 12 * 96), True)}, "no functions, no processes"
    assert any("pool judge: 1 of 3 slots hold no worker" in warning for warning in made.warnings)
    need = CONTEXT_BYTES + sum(count for count, _ in found.values())
    assert plan_json(made)["memory"]["judge"]["phases"] == {"score": need}
    assert [node.gpus for node in needed_nodes(plan.config)] == [2, 3]
    beside = plan("1x8", reward=two, pools={"main": {"nodes": [2], "gpus": 1}}, trainer={"prompts_per_step": 4, "offload": True}).memory[0]
    scoring = {(line.role, line.what) for line in beside.phases["score"]}
    assert {role for role, _ in scoring} == {"", "rollout", "reward"}, "the actor sleeps while answers are scored"
    assert not scoring & {("rollout", "passes"), ("rollout", "sampling")}


def test_a_model_that_does_not_fit_its_device_is_refused(plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"hidden_size": 16384, "num_hidden_layers": 100}))
    device, host = plan("1x8:H100", **SPLIT).problems
    assert device.subject.startswith("pool judge")
    assert "weights of reward" in device.remedy
    assert "loading" in host.remedy, "on its way to the device it passes through the memory of the node"


def test_predicted_time_is_that_of_the_model_or_of_the_functions(plan) -> None:
    def stage(**more):
        (found,) = [stage for stage in plan("1x8:H100", **SPLIT, **more).stages if stage.role == "reward"]
        return found

    short, long = stage(), stage(data={"max_prompt_tokens": 8000, "max_response_tokens": 8000}, trainer={"prompts_per_step": 64})
    assert (short.bound, short.call, short.workers) == ("functions", "score", 2)
    assert short.flops > 0
    assert long.bound != "functions"
    slow = plan("1x8:H100", **SPLIT, trainer={"prompts_per_step": 10_000}, data={"max_prompt_tokens": 6, "max_response_tokens": 4})
    assert any("slots of pool judge would be in proportion" in warning for warning in slow.warnings)
    assert long.flops > 1000 * short.flops
    assert long.seconds > short.seconds


def test_in_shared_slots_the_reward_takes_turns(plan) -> None:
    roles = {"actor": {}, "rollout": {}, "ref": {}, "reward": {}}
    beside = {"pools": {"main": {"nodes": [2]}, "judge": {"nodes": [2]}}, "roles": roles | {"reward": {"pool": "judge"}}}
    together, apart = plan(pools={"main": {"nodes": [2]}}, roles=roles), plan(**beside)
    times = [stage.seconds for stage in together.stages if stage.call in ("score", "logprobs")]
    assert len(times) == 2
    assert together.seconds_per_step - apart.seconds_per_step == pytest.approx(min(times))


def test_a_model_that_cannot_be_read_is_a_problem(plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").unlink()
    (problem,) = plan(pools={"main": {"nodes": [2]}}).problems
    assert problem.subject == "reward.1.model.path"


def test_spare_slots_of_a_pool_that_rewards_have_alone(plan) -> None:
    pools = {"main": {"nodes": [2]}, "judge": {"nodes": [2], "capacity_factor": 1.5}}
    made = plan(pools=pools, roles={"actor": {}, "rollout": {}, "reward": {"pool": "judge"}})
    assert made.problems == ()
    assert len(made.pools["judge"].spares) == 1
