"""The book-keeper of a run: what happened goes to the metrics, events, trace and samples of the run directory and to the display.

Phases tell it what they do; worker groups report every call to `observe`. It decides nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, cast

from rolemesh.config.schema import Config
from rolemesh.observe import EventLog, JsonlSink, Metrics, MetricValue, RunDirectory, Sink, Span, Stage, Tracer, create_sinks
from rolemesh.runtime import CallRecord

COMPARED: Final = (
    "policy/ratio_first_minibatch_max_deviation",
    "policy/ratio_first_minibatch_mean_deviation",
    "rollout/logprob_gap_max",
)
"""What is 0 in a step that trains nothing."""


class Display(Protocol):
    """What the terminal shows of a run; `observe.console.TrainingDisplay` is the real one."""

    def start(self, total: int, first: int = 0, history: Iterable[Mapping[str, MetricValue]] = ()) -> None: ...
    def extend(self, total: int) -> None: ...
    def phase(self, name: str, detail: str = "") -> None: ...
    def step(self, step: int, values: Mapping[str, MetricValue]) -> None: ...
    def evaluation(self, step: int, values: Mapping[str, MetricValue]) -> None: ...
    def note(self, text: str) -> None: ...
    def stop(self) -> None: ...
    def finish(self, summary: Mapping[str, object]) -> None: ...


class Recorder:
    """Collects one step at a time. `metrics` is the accumulator of the step under way."""

    def __init__(self, directory: RunDirectory, config: Config, display: Display) -> None:
        self.metrics = Metrics()
        self.display = display
        self.events = EventLog(directory.events)
        self.phase = "starting"
        self.step = 0
        self._sinks: list[Sink] = [JsonlSink(directory.metrics), *create_sinks(config.trainer.sinks, directory.path, self.events)]
        self._tracer = Tracer(directory.trace)
        self._times: dict[str, float] = defaultdict(float)
        self._began = 0.0
        self.row: dict[str, MetricValue] = {}
        self._skipped = self._policy_untouched = False
        self._total = 1

    # -- what happens ---------------------------------------------------------------------------------------------------------

    def observe(self, record: CallRecord) -> None:
        """Take in a finished call of a group: its time, metrics and spans. Its time is that of its slowest rank at work; waiting for
        other roles of the same process does not count."""
        self._times[f"{record.group}/{record.method}"] += record.busy
        self.metrics.merge(record.metrics)
        self._tracer.write([*record.spans, self._controller_span(f"{record.group}.{record.method}", record.ended - record.started)])

    def _controller_span(self, name: str, seconds: float) -> Span:
        now = time.time()
        return Span(name=name, start=now - seconds, end=now, process="controller", track="calls")

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a piece of the controller's own work."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._times[f"controller/{name}"] += seconds
        self._tracer.write([self._controller_span(name, seconds)])

    def announce(self, stage: str, subject: str, kind: str) -> None:
        """Something of the start or the end, for the event log and the display."""
        self.events.write(cast(Stage, stage), subject, kind)
        self.display.phase(stage, f"{subject}: {kind}")

    def note(self, text: str) -> None:
        """A warning that the user should see."""
        self.events.write("run", "controller", "warning", level="warning", message=text)
        self.display.note(text)

    # -- steps ----------------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        self.step, self.phase = step, "step"
        self._skipped = self._policy_untouched = False
        self._begin()

    def _begin(self) -> None:
        self.metrics = Metrics()
        self._times.clear()
        self._began = time.perf_counter()

    def no_signal(self, policy: str) -> None:
        """No group of the step has any spread in its rewards."""
        self._skipped = self._policy_untouched = policy == "skip_step"
        text = f"step {self.step}: no group has any spread in its rewards ({policy})"
        self.events.write("run", "algorithm", "no_signal", level="warning", message=text)
        self.display.note(text)

    def critic_alone(self) -> None:
        """The critic warms up: the step does not touch the policy."""
        self._policy_untouched = True
        self.metrics.last("step/critic_alone", 1)

    def end_step(self, step: int, *, tokens: int, version: int, removed: Mapping[str, int]) -> None:
        """Write the step's row."""
        seconds = time.perf_counter() - self._began
        row: dict[str, MetricValue] = dict(self.metrics.reduce())
        slowest = max(self._times, key=lambda call: self._times[call])
        role, _, call = slowest.partition("/")
        row |= {f"time/{call}": spent for call, spent in self._times.items()}
        row |= {f"data/removed/{reason}": count for reason, count in removed.items()}
        row |= {
            "time/step": seconds,
            "throughput/tokens_per_second": tokens / seconds,
            "weights/version": version,
            "step/skipped": int(self._skipped),
            "bottleneck/role": role,
            "bottleneck/reason": f"{call}: {self._times[slowest] / seconds:.0%} of the step",
        }
        if self._policy_untouched:  # nothing was trained, so nothing was compared
            row |= dict.fromkeys(COMPARED, 0.0)
        self.row = row
        self._write(step, row)
        self.display.step(step, row)

    def _write(self, step: int, row: Mapping[str, MetricValue]) -> None:
        for sink in self._sinks:
            sink.write(step, row)

    # -- stages beside the steps ----------------------------------------------------------------------------------------------

    def begin_stage(self, name: str, total: int) -> None:
        """Supervised steps, an evaluation or a save begins."""
        self.phase = name
        self.display.phase(name)
        self._begin()
        self._total = total

    def end_stage(self, name: str, report: str) -> None:
        self.events.write("run", "controller", f"{name} done", message=report)
        self.display.note(report)

    def sft_step(self, step: int) -> None:
        """One supervised step is done: a row of its own, without reward."""
        row: dict[str, MetricValue] = {**self.metrics.reduce(), "sft/step": step, "time/step": time.perf_counter() - self._began}
        self._write(self.step, row)
        self.display.phase("sft", f"{step}/{self._total} loss {row.get('sft/loss', float('nan')):.3f}")
        self._begin()

    def evaluation(self, step: int, values: Mapping[str, MetricValue]) -> None:
        self._write(step, values)
        self.events.write("run", "eval", "evaluated", step=step, **{name.replace("/", "_"): value for name, value in values.items()})
        self.display.evaluation(step, values)

    def saved(self, step: int, folder: Path, values: Mapping[str, MetricValue]) -> None:
        """A checkpoint is complete: a row of its own, maybe after those of later steps."""
        self._write(step, values)
        self.events.write("save", str(folder), "saved", step=step, **{name.partition("/")[2]: value for name, value in values.items()})

    def save_failed(self, step: int, why: str) -> None:
        text = f"the checkpoint of step {step} was not written; the one before it stays. {why}"
        self.events.write("save", f"step {step}", "failed", level="warning", message=text)
        self.display.note(text)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._tracer.close()
        self.events.close()
