from __future__ import annotations

import json
import pickle

import pytest

from rolemesh.observe import Span, SpanRecorder, Tracer


def span(name, start, end, process="actor 0", track="main", **args):
    return Span(name=name, start=start, end=end, process=process, track=track, args=args)


def events(path, phase="X"):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == phase]


def test_file_is_valid_after_every_write_and_only_grows_at_its_end(tmp_path):
    path = tmp_path / "trace.json"
    with Tracer(path) as tracer:
        assert json.loads(path.read_text()) == {"traceEvents": []}
        tracer.write([])
        for count in range(1, 4):
            before = path.read_bytes().removesuffix(b"\n]}\n")
            tracer.write([span(f"call {count}", count, count + 0.5)])
            assert [event["name"] for event in events(path)] == [f"call {number}" for number in range(1, count + 1)]
            assert path.read_bytes().startswith(before)


def test_times_are_microseconds_and_rows_have_names(tmp_path):
    with Tracer(tmp_path / "trace.json") as tracer:
        tracer.write(
            [span("update", 2.0, 3.5, step=7), span("generate", 2.0, 2.25, process="rollout 0"), span("poll", 0, 1, track="control")]
        )
    drawn = events(tmp_path / "trace.json")
    assert [(event["name"], event["ts"], event["dur"]) for event in drawn] == [
        ("update", 2_000_000, 1_500_000),
        ("generate", 2_000_000, 250_000),
        ("poll", 0, 1_000_000),
    ]
    assert drawn[0]["args"] == {"step": 7}
    named = events(tmp_path / "trace.json", "M")
    processes = {event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"}
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in named if event["name"] == "thread_name"}
    assert [processes[event["pid"]] for event in drawn] == ["actor 0", "rollout 0", "actor 0"]
    assert [tracks[event["pid"], event["tid"]] for event in drawn] == ["main", "main", "control"]


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 20])
def test_a_file_that_a_crash_cut_is_continued(tmp_path, cut):
    path = tmp_path / "trace.json"
    with Tracer(path) as tracer:
        tracer.write([span("first", 1, 2), span("second", 2, 3)])
    path.write_bytes(path.read_bytes()[: -cut or None])
    with Tracer(path) as again:
        json.loads(path.read_text())
        again.write([span("third", 3, 4), span("elsewhere", 3, 4, process="actor 1")])
    names = [event["name"] for event in events(path)]
    # The tail "\n]}\n" has 4 bytes: cutting more of the file takes the last event with it.
    assert names == ["first", *(["second"] if cut <= 4 else []), "third", "elsewhere"]
    pids = {event["name"]: event["pid"] for event in events(path)}
    assert pids["third"] == pids["first"] != pids["elsewhere"]
    processes = [event["args"]["name"] for event in events(path, "M") if event["name"] == "process_name"]
    assert processes == ["actor 0", "actor 1"]


def test_an_empty_file_of_a_crashed_start_is_taken(tmp_path):
    path = tmp_path / "trace.json"
    path.touch()
    with Tracer(path) as tracer:
        tracer.write([span("first", 1, 2)])
    assert [event["name"] for event in events(path)] == ["first"]


def test_recorder_keeps_spans_until_drained():
    times = iter([1.0, 2.0, 2.5, 4.0])
    recorder = SpanRecorder("actor 0", clock=lambda: next(times))
    with recorder.span("outer", step=1), recorder.span("inner") as args:
        args["tokens"] = 12
    assert pickle.loads(pickle.dumps(recorder.drain())) == [span("inner", 2.0, 2.5, tokens=12), span("outer", 1.0, 4.0, step=1)]
    assert recorder.drain() == []


def test_recorder_keeps_what_raised_and_survives_a_clock_set_back():
    times = iter([5.0, 1.0])
    recorder = SpanRecorder("actor 0", clock=lambda: next(times))
    with pytest.raises(KeyError), recorder.span("update"):
        raise KeyError("x")
    assert recorder.drain() == [span("update", 5.0, 5.0, error="KeyError")]
