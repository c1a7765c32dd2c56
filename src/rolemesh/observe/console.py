"""The display of a training run in the terminal: where it is, whether the reward rises, and where the time goes.

The loop (`training/`) drives it: `start`, then `phase` and `step` and `evaluation` as they come, `note` for what a user should see,
`finish` or `stop` at the end. On a terminal it redraws itself in place; elsewhere it prints one compact line every few seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rolemesh.observe.plots import bar, plot, sparkline
from rolemesh.observe.sinks import MetricValue

Row = Mapping[str, MetricValue]

_PLOT_WIDTH: Final = 60
_PLOT_HEIGHT: Final = 5
_BAR_WIDTH: Final = 24
_CALLS_SHOWN: Final = 8
_NOTES_SHOWN: Final = 4
_REWARD: Final = "reward/mean"
_ACCURACY: Final = "eval/accuracy"
_EVAL_REWARD: Final = "eval/reward_mean"
_STEP_FORMS: Final = {_REWARD: "reward {:.3f}", "reward/std": "± {:.3f}", "time/step": "{:.2f} s"}
_FORMS: Final = {
    "throughput/tokens_per_second": "{:,.0f} tokens/s",
    "response_length/mean": "{:.1f} tokens an answer",
    "policy/entropy": "entropy {:.2f}",
}
"""The few numbers a reader looks for first, and how they are shown."""


class TrainingDisplay:
    """Progress of one run. Not thread safe, except that the terminal may redraw it at any time."""

    def __init__(
        self, title: str, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic, line_every: float = 5.0
    ) -> None:
        """`line_every`: least seconds between lines on steps and phases when the output is no terminal; notes, evaluations and
        the last step always come out."""
        self._title = title
        self._console = console or Console()
        self._clock = clock
        self._line_every = line_every
        self._live: Live | None = None
        self._stopped = False
        self._total = 0
        self._done = 0
        self._phase = ("starting", "")
        self._row: Row = {}
        self._rewards: dict[int, float] = {}
        self._evaluations: dict[int, Row] = {}
        self._notes: deque[str] = deque(maxlen=_NOTES_SHOWN)
        self._phase_since = clock()
        self._first_end: tuple[int, float] | None = None
        self._seconds_a_step = 0.0
        self._last_line = -float("inf")

    def start(self, total: int, first: int = 0, history: Iterable[Row] = ()) -> None:
        """Begin to show a run of `total` steps of which `first` are done (0, or the step of the checkpoint it is resumed from).

        `history` are earlier rows of `metrics.jsonl`, so that curves begin where the run began.
        """
        self._total, self._done = total, first
        for row in history:
            self._remember(int(row.get("step", 0)), row)
        self._draw()
        if self._live is None and first:
            self._line(f"resumed after step {first} of {total}")

    def extend(self, total: int) -> None:
        """The run is to have `total` steps from now on, more or fewer than before."""
        self._total = total

    def phase(self, name: str, detail: str = "") -> None:
        """Say what is being done now, and how far it is (`detail`, free text). The time shown runs while the name stays the same."""
        self._draw()
        if name != self._phase[0]:
            self._phase_since = self._clock()
        self._phase = (name, detail)
        if self._live is None and self._line_due():
            self._line(f"{name} {detail}".rstrip())

    def step(self, step: int, values: Row) -> None:
        """Show a finished step; `values` is its row of metrics."""
        self._done = step
        self._row = values
        self._measure_pace(step)
        self._remember(step, values)
        if self._live is None and (step == self._total or self._line_due()):
            self._line("  ".join([f"step {step}/{self._total}", *_shown(values, _STEP_FORMS), *_shown(values, _FORMS)]))

    def evaluation(self, step: int, values: Row) -> None:
        """Show an evaluation on held-out prompts; step 0 is before training."""
        self._remember(step, values)
        if self._live is None:
            pairs = [f"{name.removeprefix('eval/')} {_plain(value)}" for name, value in values.items() if name.startswith("eval/")]
            self._line(f"step {step}/{self._total}  held out: " + "  ".join(pairs))

    def note(self, text: str) -> None:
        """Show a warning or a piece of news; the last few stay visible."""
        self._notes.append(text)
        if self._live is None:
            self._line(text)

    def stop(self) -> None:
        """End the live display and leave its last state on the screen. Calling it again does nothing."""
        self._stopped = True
        if self._live is not None:
            self._live.stop()
            self._live = None

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Stop, then print the panel that sums the run up: the rise from the first to the last evaluation, and `summary` line by line."""
        self.stop()
        self._console.print(Panel(Group(*self._summary(summary)), title=Text(self._title), title_align="left", expand=False))

    def _draw(self) -> None:
        """Begin to draw, if there is a terminal to draw on and the display was not stopped."""
        if self._live is None and self._console.is_terminal and not self._stopped:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=2)
            self._live.start()

    def _line_due(self) -> bool:
        """True every few seconds, until the display is stopped."""
        due = not self._stopped and self._clock() - self._last_line >= self._line_every
        if due:
            self._last_line = self._clock()
        return due

    def _measure_pace(self, step: int) -> None:
        """Mean time of a step since the first one ended: the first waits for processes to warm up."""
        now = self._clock()
        if self._first_end is None:
            self._first_end = (step, now)
        elif step > self._first_end[0]:
            self._seconds_a_step = (now - self._first_end[1]) / (step - self._first_end[0])

    def _remember(self, step: int, row: Row) -> None:
        reward = row.get(_REWARD)
        if isinstance(reward, float | int):
            self._rewards[step] = float(reward)
        if any(name.startswith("eval/") for name in row):
            self._evaluations[step] = row

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    # What is drawn

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress()]
        if self._rewards:
            parts.append(self._curve())
        if self._evaluations:
            parts.append(Text(f"held out  {_history(list(self._evaluations.items()))}", style="green"))
        if self._row:
            parts.append(_times(self._row))
        parts += [Text(f"! {note}", style="yellow") for note in list(self._notes)]
        return Panel(Group(*parts), title=Text(self._title), title_align="left")

    def _progress(self) -> Text:
        text = Text()
        if self._total:
            text.append(bar(self._done / self._total, 40), style="cyan")
            text.append(f"  step {self._done} of {self._total}")
        if self._seconds_a_step and self._done < self._total:
            text.append(f"  about {_duration(self._seconds_a_step * (self._total - self._done))} left")
        name, detail = self._phase
        text.append(f"  {name} {_duration(self._clock() - self._phase_since)} {detail}", style="bold")
        return text

    def _curve(self) -> Table:
        """Reward of every step so far, with the scale at its left."""
        rewards = list(self._rewards.values())
        lines = plot(rewards, _PLOT_WIDTH, _PLOT_HEIGHT)
        scale = [f"{max(rewards):.2f}", *[""] * (_PLOT_HEIGHT - 2), f"{min(rewards):.2f}"]
        grid = Table.grid(padding=(0, 1))
        for number, (label, line) in enumerate(zip(scale, lines, strict=True)):
            grid.add_row("reward" if number == 0 else "", Text(label, style="dim"), Text(line, style="green"))
        grid.add_row("", Text("now", style="dim"), f"{rewards[-1]:.3f}  " + "  ".join(_shown(self._row, _FORMS)))
        return grid

    def _summary(self, summary: Mapping[str, Any]) -> Iterator[RenderableType]:
        for name, label in ((_ACCURACY, "held-out accuracy"), (_EVAL_REWARD, "held-out reward")):
            points = _points(list(self._evaluations.items()), name)
            if points:
                yield from _rise(label, points)
        if self._rewards:
            rewards = list(self._rewards.values())
            yield Text(f"{'training reward':<18} {rewards[0]:.3f} -> {rewards[-1]:.3f}  {sparkline(rewards, _PLOT_WIDTH)}")
        for key, value in summary.items():
            if key.startswith("eval/"):
                continue  # shown above, with its bars
            yield Text(f"{key:<18} {_plain(value)}")


def _points(evaluations: Sequence[tuple[int, Row]], name: str) -> list[tuple[int, float]]:
    return [(step, float(row[name])) for step, row in evaluations if name in row]


def _rise(label: str, points: Sequence[tuple[int, float]]) -> Iterator[Text]:
    """First and last evaluation, with bars for shares of 1."""
    (first_step, first), (last_step, last) = points[0], points[-1]
    style = "bold green" if last > first else "bold"
    yield Text(f"{label:<18} {first:.3f} (step {first_step}) -> {last:.3f} (step {last_step})", style=style)
    if all(0 <= value <= 1 for _, value in points):
        yield Text(f"{'':<18} before |{bar(first, _BAR_WIDTH)}|", style="dim")
        yield Text(f"{'':<18} after  |{bar(last, _BAR_WIDTH)}|", style="green")


def _history(evaluations: Sequence[tuple[int, Row]]) -> str:
    """Accuracy (or reward) by step: the first evaluation and the newest."""
    name = _ACCURACY if _points(evaluations, _ACCURACY) else _EVAL_REWARD
    points = _points(evaluations, name)
    shown = points if len(points) <= 6 else [points[0], *points[-5:]]
    texts = [f"{value:.3f} (step {step})" for step, value in shown]
    if len(shown) < len(points):
        texts.insert(1, "...")
    return f"{name.removeprefix('eval/')}  " + " -> ".join(texts)


def _times(row: Row) -> Table:
    """Calls of the last step by the time they took, as shares of the step."""
    table = Table.grid(padding=(0, 1))
    step_time = float(row.get("time/step", 0.0))
    calls = {name.removeprefix("time/"): float(value) for name, value in row.items() if name.startswith("time/") and name != "time/step"}
    longest = sorted(calls.items(), key=lambda item: -item[1])[:_CALLS_SHOWN]
    whole = step_time or max(calls.values(), default=0.0)
    table.add_row("step", Text(f"{step_time:.2f} s", justify="right"), Text(bar(1.0 if step_time else 0.0, _BAR_WIDTH), style="dim"))
    for name, seconds in longest:
        share = seconds / whole if whole else 0.0
        table.add_row(name, Text(f"{seconds:.2f} s", justify="right"), Text(bar(share, _BAR_WIDTH), style="cyan"), f"{share:.0%}")
    return table


def _shown(row: Row, forms: Mapping[str, str]) -> list[str]:
    return [form.format(row[name]) for name, form in forms.items() if name in row]


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    """Seconds as `4 s`, `3:05`, `1:02:03` or `1 day, 1:02:03`."""
    whole = int(seconds)
    return f"{whole} s" if whole < 60 else str(timedelta(seconds=whole)).lstrip("0:")
