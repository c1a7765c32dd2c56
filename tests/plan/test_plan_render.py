"""The plan as JSON and as a picture."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from rolemesh.config import Config, ModelFacts
from rolemesh.plan import Helper, build_plan, parse_nodes, plan_json, plan_json_text, render_plan
from rolemesh.plan.render import ranges

FACTS = ModelFacts(
    family="llama", layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocab=10, tied=False, parameters=1000
)
GPUS = Config.model_validate({"pools": {"main": {"gpus": 1}}})


def drawn(plan) -> str:
    console = Console(file=io.StringIO(), width=140, force_terminal=False)
    render_plan(plan, console)
    return console.file.getvalue()


def test_json_has_the_promised_shape():
    plan = build_plan(Config.model_validate({"pools": {"main": {"nodes": [2, 1], "gpus": 1}}}), parse_nodes("2x4"), FACTS)
    data = json.loads(json.dumps(plan_json(plan)))
    assert {"pools", "workers", "memory", "problems", "nodes", "derived", "warnings"} <= set(data)
    assert data["workers"][2] == {"role": "actor", "rank": 2, "pool": "main", "node": "node-1", "slot": 2, "cpus": 4.0, "gpus": 1}
    assert data["workers"][-1]["role"] == "reward"
    assert data["workers"][-1]["slot"] is None
    assert data["pools"]["main"]["slots"][2] == {"index": 2, "node": "node-1", "local_index": 0, "cpus": 4.0, "gpus": 1}
    assert set(data["memory"]) == {"main", "main/reward"}
    assert [worker["weights"] for worker in data["workers"] if worker["role"] == "rollout"] == ["process"] * 3
    assert data["memory"]["main"]["total_bytes"] == plan.memory[0].total_bytes
    assert set(data["memory"]["main"]["phases"]) == {"generate", "update"}
    assert max(data["memory"]["main"]["phases"].values()) == data["memory"]["main"]["gpu_bytes"]
    assert data["problems"] == []
    bad = plan_json(build_plan(GPUS, parse_nodes("1x0:2c"), FACTS))
    assert set(bad["problems"][0]) == {"subject", "need", "free", "remedy"}


def test_H17_the_picture_shows_roles_pools_nodes_ranks_and_totals():
    text = drawn(build_plan(GPUS, parse_nodes("1x2,1x5"), FACTS))
    for part in ("actor", "rollout", "reward", "pool main", "node-0", "node-1", "rollout 2-6", "7 in all", "KV cache", "samples per step"):
        assert part in text
    assert "total in host memory" in text
    assert "at a time on GPU: generate" in text
    assert "actor 0 " in text  # node 0 is drawn slot by slot


def test_problems_and_warnings_are_drawn_in_full():
    plan = build_plan(GPUS, parse_nodes("1x0:2c"), FACTS)
    text = " ".join(drawn(plan).split())
    for problem in plan.problems:
        assert str(problem) in text
    crowded = build_plan(Config(), parse_nodes("1x0:2c"), FACTS)
    assert crowded.warnings[0] in " ".join(drawn(crowded).split())


def test_markup_in_names_is_left_alone():
    plan = build_plan(Config.model_validate({"model": {"path": "[red]x[/red]"}}), parse_nodes("1x0:2c"))
    assert "[red]x[/red]" in drawn(plan)


def test_ten_thousand_gpus_fit_on_a_screen_in_a_second():
    began = time.process_time()
    plan = build_plan(GPUS, parse_nodes("1250x8"), FACTS)
    planned = time.process_time() - began
    text = drawn(plan)
    assert len(plan.of_role("actor")) == 10_000
    assert plan.of_role("actor")[9_999].node == 1249
    assert "actor 0-9999" in text
    assert "node-0 … node-1249 (1250)" in text
    assert len(text.splitlines()) < 80
    assert len(plan_json(plan)["workers"]) == len(plan.workers)
    # About 0.3 s on this class of machine; a quadratic slip would take far longer.
    assert planned < 3


def test_equal_nodes_share_a_box_also_when_others_stand_between_them():
    pattern = ",".join(["1x8:team=red", "1x8:team=blue"] * 50)
    text = drawn(build_plan(GPUS, parse_nodes(pattern), FACTS))
    assert "node-0 … node-98 (50), each" in text
    assert "node-1 … node-99 (50), each" in text
    assert "actor 0-7, 16-23, 32-39, 48-55, 64-71, 80-87, … (352 more)" in text  # 50 x 8 less 6 x 8
    assert len(text.splitlines()) < 100
    few = drawn(build_plan(GPUS, parse_nodes("1x8,1x4,1x8"), FACTS))
    assert [few.index(f"node-{index} ─") for index in range(3)] == sorted(few.index(f"node-{index} ─") for index in range(3))


def test_spares_helpers_layouts_labels_and_stages_are_drawn():
    config = Config.model_validate(
        {
            "pools": {"main": {"gpus": 1, "labels": {"team": "red"}, "capacity_factor": 1.2, "resources": {"NPU": 0.5}}},
            "roles": {"actor": {}, "rollout": {}, "reward": {}, "judge": {"worker": "my:Judge", "tensor_parallel": 2}},
        }
    )
    text = drawn(build_plan(config, parse_nodes("1x12:H100:team=red:8*NPU"), FACTS, helpers=[Helper(name="store")]))
    for part in (
        "pool main, spare",
        "store",
        "(helper)",
        "10 = 5 x 2",
        "team=red",
        "6 of 8 NPU",
        "Predicted step of",
        "publish",
        "spare slots",
    ):
        assert part in text


def test_ways_of_weights_are_drawn_and_counted_once_a_node():
    """Two actor workers share slots with rollout workers; the others are on the first node, or on another one."""
    config = Config.model_validate(
        {
            "pools": {"main": {"nodes": [3]}, "far": {"nodes": [0, 1]}},
            "roles": {"actor": {"workers": 2}, "rollout": {}, "reward": {}},
            "trainer": {"bucket_mib": 2},
        }
    )
    plan = build_plan(config, parse_nodes("2x8"), FACTS)
    assert "weights reach rollout 0-1 in the actor's process; rollout 2 through shared memory in float32 (the actor's node)" in drawn(plan)
    assert plan_json(plan)["memory"]["node"]["total_bytes"] == 4 * 1000  # one file of all weights
    assert [worker.get("weight_format") for worker in plan_json(plan)["workers"] if worker["role"] == "rollout"] == [None, None, "float32"]
    far = config.model_copy(update={"roles": config.roles | {"rollout": config.roles["rollout"].model_copy(update={"pool": "far"})}})
    half = far.model_copy(update={"model": far.model.model_copy(update={"dtype": "bfloat16"})})
    for settings, width, words in ((far, 4, "float32"), (half, 2, "bfloat16")):
        found = build_plan(settings, parse_nodes("2x8"), FACTS)
        assert f"weights reach rollout 0 through the object store in {words}" in drawn(found)
        assert plan_json(found)["memory"]["node"]["total_bytes"] == 4 * width * 1000  # the model is smaller than a bucket
        large = build_plan(settings, parse_nodes("2x8"), replace(FACTS, parameters=10**7))
        assert plan_json(large)["memory"]["node"]["total_bytes"] == 4 * 2 * 2**20
    assert "through the object store in bfloat16 (another node than the actor's)" in drawn(found)
    adapter = half.model_copy(update={"trainer": half.trainer.model_copy(update={"publish": "adapter"})})
    assert "through the object store in float32" in drawn(build_plan(adapter, parse_nodes("2x8"), FACTS))
    files = config.model_copy(update={"trainer": config.trainer.model_copy(update={"publish_folder": Path("shared")})})
    on_disk = build_plan(files, parse_nodes("2x8"), FACTS)
    assert "in the actor's process; rollout 2 through files in float32 (trainer.publish_folder)" in drawn(on_disk)
    assert plan_json(on_disk)["memory"]["node"]["total_bytes"] == 2 * 4 * 1000  # one bucket that is written, and one that is read
    wide = files.model_copy(update={"pools": {**files.pools, "main": files.pools["main"].model_copy(update={"nodes": (5,)})}})
    assert plan_json(build_plan(wide, parse_nodes("2x8"), FACTS))["memory"]["node"]["total_bytes"] == 4 * 4 * 1000  # three readers
    local = config.model_copy(update={"backend": "local"})
    assert [worker.weights for worker in build_plan(local, parse_nodes("1x8"), FACTS).of_role("rollout")][1:] == ["process", "object_store"]


def test_json_as_text_is_the_same_data():
    plan = build_plan(GPUS, parse_nodes("2x8"), FACTS, helpers=[Helper(name="store")])
    lines = list(plan_json_text(plan))
    data = json.loads("\n".join(lines))
    assert data == json.loads(json.dumps(plan_json(plan)))
    assert data["helpers"] == [{"name": "store", "node": "node-0"}]
    assert data["placement_groups"] == [
        {"pool": "main", "node": f"node-{node}", "slots": list(range(8 * node, 8 * node + 8)), "processes": 8} for node in (0, 1)
    ]
    assert data["layouts"]["actor"] == {"pool": "main", "workers": 16, "tensor_parallel": 1, "data_parallel": 16}
    assert {"role", "call", "workers", "seconds", "flops", "bytes", "bound"} == set(data["stages"][0])


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([0, 2, 4, 6, 7], 2) == "0, 2, … (3 more)"
