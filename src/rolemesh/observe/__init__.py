"""What a run tells about itself: metrics, spans, events, sinks, the run directory, and the display in the terminal.

Workers record `Metrics` and spans and return them with their calls; the controller merges, writes and shows them. Nothing here
imports torch or Ray. The display is not among the names below, so that workers need not load what draws it:
`from rolemesh.observe.console import TrainingDisplay`.
"""

from rolemesh.observe.catalogue import METRICS, MetricInfo, describe, metric_part, metrics_reference
from rolemesh.observe.events import STAGES, Event, EventLog, Stage
from rolemesh.observe.files import JsonLines, read_json_lines, write_json, write_text
from rolemesh.observe.journal import Journal, read_journal
from rolemesh.observe.metrics import Metrics
from rolemesh.observe.run_dir import RunDirectory, find_run, list_runs
from rolemesh.observe.sinks import GuardedSink, JsonlSink, MetricValue, Sink, create_sinks
from rolemesh.observe.spans import Span, SpanRecorder, Tracer

__all__ = [
    "METRICS",
    "STAGES",
    "Event",
    "EventLog",
    "GuardedSink",
    "Journal",
    "JsonLines",
    "JsonlSink",
    "MetricInfo",
    "MetricValue",
    "Metrics",
    "RunDirectory",
    "Sink",
    "Span",
    "SpanRecorder",
    "Stage",
    "Tracer",
    "create_sinks",
    "describe",
    "find_run",
    "list_runs",
    "metric_part",
    "metrics_reference",
    "read_journal",
    "read_json_lines",
    "write_json",
    "write_text",
]
