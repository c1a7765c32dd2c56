from __future__ import annotations

import ast
import math
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolemesh.observe import METRICS, Metrics, describe, metrics_reference


def recorded(name, values, weights=None):
    metrics = Metrics()
    for index, value in enumerate(values):
        metrics.mean(name, value, 1.0 if weights is None else weights[index])
    return metrics


def test_C06_metrics_of_all_ranks_survive_the_merge():
    ranks = [recorded("x", [value]) for value in (1, 2, 3, 4)]
    total = Metrics()
    for rank in ranks:
        total.merge(rank)
    assert total.reduce() == {"x": 2.5}
    assert [rank.reduce()["x"] for rank in ranks] == [1, 2, 3, 4]


def test_H06_logged_value_is_not_that_of_rank_zero():
    assert recorded("x", [0]).merge(recorded("x", [1])).reduce() == {"x": 0.5}


def test_H07_uneven_windows_are_weighted_by_their_counts():
    # 4 tokens of mean 1 and 2 tokens of mean 4: (4 * 1 + 2 * 4) / 6 = 2, where the mean of the means would be 2.5.
    assert recorded("x", [1, 4], weights=[4, 2]).reduce() == {"x": 2.0}


@given(st.lists(st.tuples(st.integers(-100, 100), st.integers(1, 50)), min_size=1, max_size=20), st.integers(0, 20))
def test_merging_pieces_equals_recording_in_one_place(values, cut):
    def record(pairs):
        metrics = Metrics()
        for value, weight in pairs:
            metrics.mean("mean", value, weight)
            metrics.sum("sum", value)
            metrics.max("max", value)
            metrics.min("min", value)
            metrics.last("last", value)
        return metrics

    # Integers below 2**53 add without rounding, so the results are equal and not merely close.
    assert record(values[:cut]).merge(record(values[cut:])).reduce() == record(values).reduce()


def test_reductions():
    metrics = Metrics()
    for value in (3.0, 1.0, 2.0):
        metrics.sum("sum", value)
        metrics.max("max", value)
        metrics.min("min", value)
        metrics.last("last", value)
    assert metrics.reduce() == {"sum": 6.0, "max": 3.0, "min": 1.0, "last": 2.0}


def test_another_reduction_of_the_same_name_is_refused():
    metrics = recorded("x", [1])
    with pytest.raises(ValueError, match=r"'x' is reduced by mean, and now sum"):
        metrics.sum("x", 1)
    other = Metrics()
    other.max("x", 1)
    with pytest.raises(ValueError, match=r"'x' is reduced by mean, and now max"):
        metrics.merge(other)


def test_weight_zero_gives_no_entry_and_negative_weights_are_refused():
    metrics = Metrics()
    metrics.mean("x", math.nan, weight=0)
    assert metrics.reduce() == {}
    with pytest.raises(ValueError, match="0 or more"):
        metrics.mean("x", 1, weight=-1)
    with pytest.raises(ValueError, match="0 or more"):
        metrics.mean("x", 1, weight=math.nan)


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_not_a_number_is_never_lost(values):
    metrics = Metrics()
    for value in values:
        metrics.max("max", value)
        metrics.min("min", value)
    assert all(math.isnan(value) for value in metrics.reduce().values())


def test_metrics_travel_between_processes():
    metrics = recorded("loss", [1, 3], weights=[1, 3])
    copy = pickle.loads(pickle.dumps(metrics)).merge(recorded("loss", [8.5], weights=[4]))
    assert copy.reduce() == {"loss": 5.5}
    assert metrics.reduce() == {"loss": 2.5}


def test_describe_finds_names_and_patterns():
    assert describe("reward/mean") is METRICS["reward/mean"]
    assert describe("time/actor/update") is METRICS["time/<role>/<call>"]
    assert describe("time/actor") is None
    assert describe("data/removed/too_long") is METRICS["data/removed/<reason>"]
    assert describe("data/removed/too/long/a/name") is None


def test_table_holds_the_contract_of_the_run_directory():
    contract = (
        "step reward/mean reward/std response_length/mean time/step time/actor/update throughput/tokens_per_second "
        "policy/ratio_first_minibatch_max_deviation rollout/logprob_gap_max weights/version samples/trained samples/lost "
        "samples/masked bottleneck/role bottleneck/reason"
    )
    assert [name for name in contract.split() if describe(name) is None] == []


def test_reference_page_is_generated_from_the_table():
    page = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
    assert page.read_text() == metrics_reference(), "run `make docs`"


def recorded_names():
    """Every name given to a `Metrics` in the source; what a program fills in reads `<any>`."""
    for path in sorted((Path(__file__).parents[2] / "src" / "rolemesh").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            if node.func.attr in ("mean", "sum", "max", "min", "last") and "metrics" in ast.unparse(node.func.value):
                name = node.args[0]
                parts = name.values if isinstance(name, ast.JoinedStr) else [name]
                yield path.name, "".join(part.value if isinstance(part, ast.Constant) else "<any>" for part in parts)


def test_every_recorded_metric_is_in_the_table():
    shapes = [re.sub(r"<\w+>", "<any>", name) for name in METRICS]

    def pattern(name):
        return "(<any>|[^/]+)".join(map(re.escape, name.split("<any>")))

    def is_known(name):
        return any(re.fullmatch(pattern(name), shape) or re.fullmatch(pattern(shape), name) for shape in shapes)

    assert [(file, name) for file, name in recorded_names() if not is_known(name)] == []
