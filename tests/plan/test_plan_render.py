"""The plan as JSON and as a picture."""

from __future__ import annotations

import io
import json
import time

from rich.console import Console

from rolemesh.config import Config, ModelFacts
from rolemesh.plan import build_plan, parse_nodes, plan_json, render_plan
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
    assert set(data["memory"]) == {"main", "main/reward", "node"}
    assert data["memory"]["main"]["total_bytes"] == plan.memory[0].total_bytes
    assert data["problems"] == []
    bad = plan_json(build_plan(GPUS, parse_nodes("1x0:2c"), FACTS))
    assert set(bad["problems"][0]) == {"subject", "need", "free", "remedy"}


def test_H17_the_picture_shows_roles_pools_nodes_ranks_and_totals():
    text = drawn(build_plan(GPUS, parse_nodes("1x2,1x5"), FACTS))
    for part in ("actor", "rollout", "reward", "pool main", "node-0", "node-1", "rollout 2-6", "7 in all", "KV cache", "samples per step"):
        assert part in text
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


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([]) == ""
    assert ranges([3]) == "3"
