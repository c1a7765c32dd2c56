"""Who did what from when to when, and the trace file (`trace.json`) that Perfetto and chrome://tracing draw.

Workers collect spans with a `SpanRecorder` and return them with their calls; the controller writes them with its `Tracer`.
File format: "Trace Event Format" of Chromium, complete events (ph X) and metadata events (ph M), times in microseconds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rolemesh.observe.files import Closing, plain

_HEAD: Final = b'{"traceEvents":['
_TAIL: Final = b"\n]}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work. Times are seconds since the epoch; `process` and `track` say in which rows of the trace it is drawn."""

    name: str
    start: float
    end: float
    process: str
    track: str = "main"
    args: Mapping[str, Any] = field(default_factory=dict)


class SpanRecorder:
    """Collects the spans of one process until they are drained. May be used from several threads."""

    def __init__(self, process: str, track: str = "main", *, clock: Callable[[], float] = time.time) -> None:
        self._process = process
        self._track = track
        self._clock = clock
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Record the block as a span, also when it raises (with the error's type). The yielded args may be added to in the block."""
        start = self._clock()
        try:
            yield args
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            end = max(start, self._clock())  # a wall clock may be set back
            span = Span(name=name, start=start, end=end, process=self._process, track=self._track, args=args)
            with self._lock:
                self._spans.append(span)

    def drain(self) -> list[Span]:
        """The spans finished since the last call."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans


class Tracer(Closing):
    """Appends spans to a trace file that is a complete JSON document after every write.

    Each write overwrites the closing bracket and puts it back behind the new events, so its cost does not grow with the file. An
    existing file is continued, as after a resume; what a crash in mid-write left at its end is cut off.
    """

    def __init__(self, path: Path) -> None:
        self._tracks: dict[tuple[str, str], tuple[int, int]] = {}
        self._processes: dict[str, int] = {}
        existing = path.read_bytes().split(b"\n") if path.exists() else []
        self._file = path.open("r+b" if existing else "w+b", buffering=0)
        self._end = len(_HEAD)
        self._empty = True
        if existing[:1] == [_HEAD]:
            self._continue(existing[1:])
        self._file.truncate(self._end)
        self._put(0, _HEAD if self._empty else b"")
        self._put(self._end, _TAIL)

    def write(self, spans: Iterable[Span]) -> None:
        """Append spans, and the names of processes and tracks seen for the first time."""
        events = [event for span in spans for event in self._events(span)]
        if not events:
            return
        lines = [json.dumps(plain(event), allow_nan=False).encode() for event in events]
        data = (b"\n" if self._empty else b",\n") + b",\n".join(lines)
        self._put(self._end, data + _TAIL)
        self._end += len(data)
        self._empty = False

    def close(self) -> None:
        self._file.close()

    def _put(self, offset: int, data: bytes) -> None:
        self._file.seek(offset)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def _events(self, span: Span) -> Iterator[dict[str, Any]]:
        if span.process not in self._processes:
            pid = self._processes[span.process] = len(self._processes) + 1
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": span.process}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        pid = self._processes[span.process]
        key = (span.process, span.track)
        if key not in self._tracks:
            tid = 1 + sum(process == span.process for process, _ in self._tracks)
            self._tracks[key] = (pid, tid)
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": span.track}}
        # Both ends are rounded the same way, so that a span inside another one stays inside.
        start, end = round(span.start * 1e6), round(span.end * 1e6)
        tid = self._tracks[key][1]
        yield {"ph": "X", "name": span.name, "ts": start, "dur": max(0, end - start), "pid": pid, "tid": tid, "args": dict(span.args)}

    def _continue(self, lines: list[bytes]) -> None:
        """Take up the numbers of processes and tracks, and the offset behind the last whole event, of an existing file."""
        names = {}
        for line in lines:
            try:
                event = json.loads(line.removesuffix(b","))
            except ValueError:  # the closing bracket, or what is left of a line
                break
            self._end += (1 if self._empty else 2) + len(line.removesuffix(b","))
            self._empty = False
            if event["name"] == "process_name":
                names[event["pid"]] = event["args"]["name"]
                self._processes[event["args"]["name"]] = event["pid"]
            elif event["name"] == "thread_name":
                self._tracks[names[event["pid"]], event["args"]["name"]] = (event["pid"], event["tid"])
