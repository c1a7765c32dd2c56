from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest

from rolemesh.errors import ConfigError
from rolemesh.observe import EventLog, JsonLines, JsonlSink, create_sinks, read_json_lines, write_text
from rolemesh.observe.sinks import TensorBoardSink


@pytest.fixture
def log(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        yield log


def test_write_text_replaces_as_a_whole_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "config.yaml"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half a \ud800")
    assert path.read_text() == "old"
    write_text(path, "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("config.yaml", "new")]


def test_json_lines_are_readable_at_once_and_a_cut_line_is_dropped(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert read_json_lines(path) == []
    with JsonLines(path) as lines:
        lines.write({"a": 1})
        assert read_json_lines(path) == [{"a": 1}]
    path.write_bytes(path.read_bytes() + b'{"a": 2, "b"')
    assert read_json_lines(path) == [{"a": 1}]
    with JsonLines(path) as lines:
        lines.write({"a": 3})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": 3}]


def test_json_lines_without_any_line_end_start_anew(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"x" * 200_000)
    with JsonLines(path) as lines:
        lines.write({"a": 1})
    assert read_json_lines(path) == [{"a": 1}]


def test_json_lines_take_any_details(tmp_path):
    record = {"nan": math.nan, "path": tmp_path, "rank": np.int64(3), "loss": np.float32(0.5), "sizes": (1, 2), "ok": True, "none": None}
    with JsonLines(tmp_path / "lines.jsonl") as lines:
        lines.write(record)
    assert read_json_lines(tmp_path / "lines.jsonl") == [
        {"nan": "nan", "path": str(tmp_path), "rank": 3, "loss": 0.5, "sizes": [1, 2], "ok": True, "none": None}
    ]


def test_event_has_time_stage_subject_and_kind(tmp_path):
    with EventLog(tmp_path / "events.jsonl", clock=lambda: 12.5) as log:
        written = log.write("recover", "rollout rank 1", "worker_died", node="n0", exit_code=-9)
    expected = {"time": 12.5, "stage": "recover", "subject": "rollout rank 1", "kind": "worker_died", "node": "n0", "exit_code": -9}
    assert read_json_lines(tmp_path / "events.jsonl") == [written] == [expected]


def test_event_refuses_unknown_stages_and_another_time(tmp_path, log):
    with pytest.raises(ValueError, match=r"stage must be one of prepare, .*; got 'training'"):
        log.write("training", "actor", "started")
    with pytest.raises(ValueError, match="time"):
        log.write("run", "actor", "started", time=3)
    assert read_json_lines(tmp_path / "events.jsonl") == []


def test_jsonl_sink_leaves_out_what_is_not_finite_and_says_so(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"reward/mean": 0.5, "bottleneck/role": "actor", "samples/lost": 0})
    sink.write(2, {"actor/grad_norm": math.nan, "policy/loss": -math.inf, "reward/mean": 1.0})
    sink.close()
    assert read_json_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward/mean": 0.5, "bottleneck/role": "actor", "samples/lost": 0},
        {"step": 2, "reward/mean": 1.0, "metrics/nonfinite": 2},
    ]


class FailingSink:
    """Fails at step 3."""

    calls = []

    def __init__(self, folder):
        pass

    def write(self, step, values):
        self.calls.append(step)
        if step == 3:
            raise ConnectionError("tracker is away")

    def close(self):
        raise AssertionError("a sink that is switched off is not used again")


def cannot_start(folder):
    raise OSError("no such project")


def test_H01_a_logger_that_fails_is_switched_off_with_one_warning(tmp_path, log):
    (sink,) = create_sinks([f"{__name__}:FailingSink"], tmp_path, log)
    local = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        for each in (local, sink):
            each.write(step, {"reward/mean": step / 10})
    sink.close()
    local.close()
    assert FailingSink.calls == [1, 2, 3]
    assert [row["step"] for row in read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    (event,) = read_json_lines(tmp_path / "events.jsonl")
    assert (event["stage"], event["kind"], event["level"]) == ("run", "sink_failed", "warning")
    assert event["message"] == (f"logger {__name__}:FailingSink failed at step 3 and is switched off: ConnectionError: tracker is away")


def test_sinks_that_cannot_be_made_are_refused_before_the_run(tmp_path, log):
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        create_sinks(["tensorbord"], tmp_path, log)
    with pytest.raises(ConfigError, match="OSError: no such project"):
        create_sinks([f"{__name__}:cannot_start"], tmp_path, log)


def test_tensorboard_that_is_missing_is_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(ConfigError, match=r"pip install 'rolemesh\[tensorboard\]'"):
        TensorBoardSink(tmp_path)


def test_tensorboard_gets_the_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    sink = TensorBoardSink(tmp_path)
    sink.write(1, {"reward/mean": 0.25, "bottleneck/role": "actor", "policy/loss": math.nan})
    sink.write(2, {"reward/mean": 0.5})
    sink.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, make_ndarray(event.tensor_proto).item()) for event in read.Tensors("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert set(read.Tags()["tensors"]) == {"reward/mean", "metrics/nonfinite"}
