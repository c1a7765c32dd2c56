"""Where the rows of metrics go: the file of the run directory, and loggers that the user asked for (`trainer.sinks`).

The file is the record of the run and its failures end the run. Everything else is a convenience: it is guarded, and a logger that
raises is switched off with a warning while the run goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from rolemesh import registry
from rolemesh.errors import ConfigError, Problem
from rolemesh.observe.events import EventLog
from rolemesh.observe.files import JsonLines

MetricValue = float | int | str
NONFINITE: Final = "metrics/nonfinite"


class Sink(Protocol):
    """Takes rows, several of a step (docs/reference/metrics.md).

    Made from the run's folder: a user's own sink is a callable `(folder: Path) -> Sink`."""

    def write(self, step: int, values: Mapping[str, MetricValue]) -> None:
        """Take a row. Texts occur among the values (`bottleneck/role`)."""
        ...

    def close(self) -> None:
        """Flush and let go. Called once."""
        ...


def finite(values: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
    """The row without the values that are not finite, which are counted in `metrics/nonfinite` instead of being written."""
    kept = {name: value for name, value in values.items() if isinstance(value, str) or math.isfinite(value)}
    dropped = len(values) - len(kept)
    return {**kept, NONFINITE: dropped} if dropped else kept


class JsonlSink:
    """`metrics.jsonl`: one JSON object a row, `step` first. What is not finite is left out and counted, see `finite`."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def write(self, step: int, values: Mapping[str, MetricValue]) -> None:
        self._lines.write({"step": step, **finite(values)})

    def close(self) -> None:
        self._lines.close()


class TensorBoardSink:
    """Event files of TensorBoard in `tensorboard/` of the run directory. Needs the extra `rolemesh[tensorboard]`."""

    def __init__(self, folder: Path) -> None:
        self._writer = _tensorboard_writer("trainer.sinks")(str(folder / "tensorboard"))

    def write(self, step: int, values: Mapping[str, MetricValue]) -> None:
        for name, value in finite(values).items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _tensorboard_writer(subject: str) -> Any:
    """TensorBoard's class. Raises ConfigError, naming `subject`, where it is not installed."""
    try:
        from tensorboard.summary import Writer
    except ImportError as error:
        remedy = "Install it with `pip install 'rolemesh[tensorboard]'`, or take it off the list"
        found = f"{type(error).__name__}: {error}"
        raise ConfigError.one(subject, "`tensorboard` needs the package tensorboard", found, remedy) from error
    return Writer


class GuardedSink:
    """Keeps the failures of another sink away from the run: the first one becomes a warning event, and the sink is not used again."""

    def __init__(self, name: str, sink: Sink, events: EventLog) -> None:
        self._name = name
        self._sink: Sink | None = sink
        self._events = events

    def write(self, step: int, values: Mapping[str, MetricValue]) -> None:
        self._guard(lambda sink: sink.write(step, values), f"at step {step}")

    def close(self) -> None:
        self._guard(lambda sink: sink.close(), "on closing")

    def _guard(self, action: Callable[[Sink], None], when: str) -> None:
        if self._sink is None:
            return
        try:
            action(self._sink)
        except Exception as error:  # noqa: BLE001 - code of others must not end the run
            self._sink = None
            message = f"logger {self._name} failed {when} and is switched off: {type(error).__name__}: {error}"
            self._events.write("run", f"sink {self._name}", "sink_failed", level="warning", message=message)


BUILTIN_SINKS: Final[dict[str, Callable[[Path], Sink]]] = {"tensorboard": TensorBoardSink}


def check_sinks(names: Sequence[str]) -> None:
    """Raise ConfigError with every entry of `trainer.sinks` that is unknown or cannot be called. Makes none."""
    problems: list[Problem] = []
    for number, name in enumerate(names):
        subject = f"trainer.sinks.{number}"
        try:
            factory = registry.resolve(name, BUILTIN_SINKS, subject=subject)
            registry.check_call(factory, [Path()], {}, subject=subject, name=name, called=f"{name}(folder)")
            if factory is TensorBoardSink:
                _tensorboard_writer(subject)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems=problems)


def create_sinks(names: Sequence[str], folder: Path, events: EventLog) -> list[GuardedSink]:
    """The sinks of `trainer.sinks`, guarded. Raises ConfigError when one is unknown or cannot be made: nothing has started yet."""
    return [GuardedSink(name, _create(name, folder), events) for name in names]


def _create(name: str, folder: Path) -> Sink:
    factory: Callable[[Path], Sink] = registry.resolve(name, BUILTIN_SINKS, subject="trainer.sinks")
    try:
        return factory(folder)
    except ConfigError:
        raise
    except Exception as error:
        need, found = f"{name!r} must make a sink from the run directory", f"{type(error).__name__}: {error}"
        raise ConfigError.one("trainer.sinks", need, found, "Mend it, or take it off the list") from error
