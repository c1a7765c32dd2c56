"""Every kind of plan that cannot work, through the command line: exit code, the right subject, and within a second."""

from __future__ import annotations

import time

import pytest

from rolemesh.cli import inspecting
from rolemesh.errors import ConfigError, ResourceError
from rolemesh.plan import build_plan, parse_nodes
from rolemesh.plan.schema import Plan

OWN = "roles.judge={worker: 'my_pkg.workers:Judge', tensor_parallel: %d}"

CASES = {
    "too few GPUs on a node though the sum fits": (3, "2x4", ["pools.main={nodes: [8], gpus: 1}"], "pool main", "GPU: needs 8, free 4"),
    "too few CPUs on a node though the sum fits": (
        3,
        "2x4:8c",
        ["pools.main={nodes: [4], gpus: 1, cpus: 3}"],
        "pool main",
        "CPU: needs 12, free 8",
    ),
    "wrong accelerator type": (
        3,
        "2x8:A100",
        ["pools.main={nodes: [8], gpus: 1, accelerator_type: H100}"],
        "pools.main.accelerator_type",
        "pool main needs 1 node with accelerators of type H100",
    ),
    "unknown accelerator type": (
        3,
        "2x8",
        ["pools.main={gpus: 1, accelerator_type: H100}"],
        "pools.main.accelerator_type",
        "found 0 of 2 (an unknown type on 2 nodes)",
    ),
    "missing label": (
        3,
        "1x8,1x8:team=blue",
        ["pools.main={gpus: 1, labels: {team: red}}"],
        "pools.main.labels",
        "found 0 of 2 (no label team on 1 node, team=blue on 1 node)",
    ),
    "too few nodes with the label": (
        3,
        "1x8,1x8:team=red",
        ["pools.main={nodes: [8, 8], gpus: 1, labels: {team: red}}"],
        "pools.main.labels",
        "pool main needs 2 nodes with the label team=red; found 1 of 2",
    ),
    "missing custom resource": (
        3,
        "2x8:4*teem",
        ["pools.main={nodes: [1], gpus: 1, resources: {team: 1}}"],
        "pools.main.resources",
        "Did you mean 'teem'?",
    ),
    "too little of a custom resource": (
        3,
        "2x8:4*NPU",
        ["pools.main={nodes: [8], resources: {NPU: 1}}"],
        "pool main",
        "NPU: needs 8, free 4",
    ),
    "tensor parallelism across nodes": (
        3,
        "2x8",
        ["pools.main.gpus=1", OWN % 16],
        "roles.judge.tensor_parallel",
        "16 slots of pool main on one node",
    ),
    "tensor parallelism that does not divide a node": (
        2,
        "1x8",
        ["pools.main={nodes: [7], gpus: 1}", OWN % 2],
        "roles.judge.tensor_parallel",
        "Nearest valid instead of 7 slots: 6 or 8",
    ),
    "tensor parallelism of more than the pool": (
        2,
        "1x8",
        ["pools.main={nodes: [1], gpus: 1}", OWN % 2],
        "roles.judge.tensor_parallel",
        "found pools.main.nodes=[1]",
    ),
    "tensor parallelism that the engine cannot do": (
        2,
        "1x8",
        ["pools.main.gpus=1", "roles.rollout.tensor_parallel=2"],
        "roles.rollout.tensor_parallel",
        "must be 1 for rollout",
    ),
    "tensor parallelism that cannot share the heads": (
        3,
        "1x8",
        ["pools.main.gpus=1", "roles.actor.tensor_parallel=8"],
        "roles.actor.tensor_parallel",
        "Valid are 1, 2, 4",
    ),
    "workers that are no multiple": (2, "1x8", ["pools.main.gpus=1", OWN % 2, "roles.judge.workers=3"], "roles.judge.workers", "2 or 4"),
    "tensor parallelism on shared devices": (
        2,
        "1x8",
        ["pools.main={gpus: 1, share: 2}", OWN % 2],
        "roles.judge.tensor_parallel",
        "needs whole devices",
    ),
    "share that is not 1/k": (2, "1x8", ["pools.main={gpus: 1, share: 2.5}"], "pools.main.share", "pools.main.share=2 or 3"),
    "share as a fraction": (2, "1x8", ["pools.main={gpus: 1, share: 0.4}"], "pools.main.share", "pools.main.share=2 or 3"),
    "part of a GPU": (2, "1x8", ["pools.main.gpus=0.3"], "pools.main.gpus", "pools.main.gpus=1 with pools.main.share=3 or 4"),
    "GPUs as a resource": (2, "1x8", ["pools.main.resources={GPU: 1}"], "pools.main.resources", "Set pools.main.gpus instead"),
    "spare slots where there are no slots": (
        2,
        "1x8",
        ["pools={main: {gpus: 1}, score: {capacity_factor: 1.5}}", "roles.reward.pool=score"],
        "pools.score.capacity_factor",
        "must be 1 for a pool that only reward uses",
    ),
    "share of no device": (2, "1x8", ["pools.main.share=2"], "pools.main.share", "found pools.main.gpus=0"),
    "node count too small": (3, "2x8", ["pools.main={nodes: [1, 1, 1], gpus: 1}"], "pool main", "nodes: needs 3"),
    "memory of a device": (
        3,
        "1x1:T4",
        ["pools.main={nodes: [1], gpus: 1}", "rollout.slots=100000"],
        "pool main on node node-0",
        "GPU memory: a slot needs about",
    ),
    "memory of a shared device": (
        3,
        "1x1:T4",
        ["pools.main={nodes: [40], gpus: 1, share: 40, cpus: 0.1}", "data.max_response_tokens=1000"],
        "pool main on node node-0",
        "on 1/40 GPU",
    ),
    "memory of a host": (3, "1x0:4c:1G", ["pools.main.nodes=[4]"], "node node-0", "memory: its processes need about"),
    "more workers than slots": (3, "1x8", ["pools.main={nodes: [4], gpus: 1}", "roles.rollout.workers=5"], "roles.rollout.workers", "4"),
    "spare slots that do not fit": (
        3,
        "1x8",
        ["pools.main={nodes: [8], gpus: 1, capacity_factor: 1.25}"],
        "pools.main.capacity_factor",
        "1.25 of 8 slots needs 2 spare slots, 0 fit; GPU: needs 1, free 0",
    ),
    "spare slots of a pool that derives its size": (
        3,
        "1x1",
        ["pools.main={gpus: 1, capacity_factor: 1.2}"],
        "pools.main.capacity_factor",
        "1.2 of 1 slot needs 1 spare slot, 0 fit",
    ),
}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", CASES)
def test_infeasible_plans_name_their_subject_within_a_second(recipe, capsys, monkeypatch, name):
    code, nodes, overrides, subject, text = CASES[name]
    shown: list[Plan] = []

    def remember(*arguments, **more) -> Plan:
        shown.append(build_plan(*arguments, **more))
        return shown[-1]

    monkeypatch.setattr(inspecting, "build_plan", remember)
    began = time.process_time()
    try:
        found = inspecting.plan([recipe, *overrides], [nodes], as_json=False)
        problems = shown[0].problems
    except ConfigError as error:
        found, problems = error.exit_code, error.problems
    assert time.process_time() - began < 1
    assert found == code
    assert subject in [problem.subject for problem in problems], problems
    assert text in " ".join(str(problem) for problem in problems if problem.subject == subject)
    assert all(problem.remedy for problem in problems)
    if code == ResourceError.exit_code:
        assert subject in capsys.readouterr().out


def test_names_of_nodes_are_read(recipe):
    inventory = parse_nodes(["2x8:64c:512G:H100:team=red:4*NPU", "1x0:2c"])
    first, _, last = inventory.nodes
    assert (first.cpus, first.memory_bytes, first.gpu_type, first.gpu_memory_bytes) == (64, 512 * 2**30, "H100", 80 * 2**30)
    assert (first.labels, first.resources, first.npus) == ({"team": "red"}, {"NPU": 4}, 4)
    assert (last.name, last.cpus, last.gpus, last.gpu_memory_bytes, last.npus) == ("node-2", 2, 0, 0, 0)
    assert inventory.origin == "--nodes 2x8:64c:512G:H100:team=red:4*NPU --nodes 1x0:2c"
    for wrong in ("2x8:h", "2x8:64", "2x8:=red", "2x8:x*NPU", "1x0:H100"):
        with pytest.raises(ConfigError, match="--nodes"):
            parse_nodes(wrong)
