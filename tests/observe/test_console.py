from __future__ import annotations

import io

import pytest
from rich.console import Console

from rolemesh.observe.console import TrainingDisplay
from rolemesh.observe.plots import bar, plot, shrink, sparkline


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def display(terminal, **options):
    console = Console(file=io.StringIO(), record=True, force_terminal=terminal, width=120)
    return TrainingDisplay("demo-1", console=console, clock=Clock(), **options), console


def row(reward, **more):
    times = {"time/step": 2.0, "time/rollout/generate": 1.5, "time/actor/update": 0.5}
    return {"reward/mean": reward, "reward/std": 0.25, "throughput/tokens_per_second": 4321.0, **times, **more}


def test_H10_bar_of_a_resumed_run_starts_at_its_step():
    shown, console = display(terminal=True)
    shown.start(128, first=96)
    shown.stop()
    text = console.export_text()
    assert "step 96 of 128" in text
    assert "█" * 30 + " " in text  # 96 of 128 is three quarters of 40 characters


def test_H10_resumed_run_says_so_where_there_is_no_terminal():
    shown, console = display(terminal=False)
    shown.start(128, first=96)
    assert console.export_text() == "resumed after step 96 of 128\n"


def test_steps_that_change_while_it_trains_are_shown():
    shown, console = display(terminal=False, line_every=0.0)
    shown.start(128)
    shown.step(1, row(0.5))
    shown.extend(2)
    shown.step(2, row(0.5))
    text = console.export_text()
    assert "step 1/128" in text
    assert "step 2/2" in text


def test_terminal_shows_curve_times_evaluations_and_notes():
    shown, console = display(terminal=True)
    shown.start(10)
    shown.evaluation(0, {"eval/accuracy": 0.125})
    for step in range(1, 6):
        shown._clock.now = 10.0 * step
        shown.step(step, row(step / 10))
    shown.evaluation(5, {"eval/accuracy": 0.5})
    shown.note("logger [x] is switched off")
    shown.phase("generate", "12 of 64 answers")
    shown._clock.now = 53.0
    shown.stop()
    shown.stop()
    text = console.export_text()
    assert "step 5 of 10  about 50 s left  generate 3 s 12 of 64 answers" in text
    assert "accuracy  0.125 (step 0) -> 0.500 (step 5)" in text
    assert "! logger [x] is switched off" in text
    assert "4,321 tokens/s" in text
    lines = {line.strip("│ ").split()[0]: line for line in text.splitlines() if "time" not in line and line.strip("│ ")}
    assert lines["rollout/generate"].count("█") == 18  # 75 % of 24
    assert "75%" in lines["rollout/generate"]
    assert lines["actor/update"].count("█") == 6


def test_without_a_terminal_lines_come_at_most_every_few_seconds_but_the_last_step_always():
    shown, console = display(terminal=False, line_every=5.0)
    shown.start(8)
    for step in range(1, 9):
        shown.step(step, row(step / 10))
        shown._clock.now += 2.0  # steps end at 0, 2, 4, ... 14 s; lines come at 0, 6 and 12 s, and for the last step
    lines = console.export_text().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/8", "step 4/8", "step 7/8", "step 8/8"]
    assert lines[0] == "step 1/8  reward 0.100  ± 0.250  2.00 s  4,321 tokens/s"


def test_without_a_terminal_notes_and_evaluations_always_come_and_phases_now_and_then():
    shown, console = display(terminal=False, line_every=5.0)
    for second in range(0, 12, 2):
        shown._clock.now = second
        shown.phase("load actor", f"{second} s")
    shown.start(7)
    shown.note("careful")
    shown.evaluation(0, {"eval/accuracy": 0.25, "reward/mean": 1.0})
    shown.stop()
    shown._clock.now = 100.0
    shown.phase("closing")
    shown.note("one more")
    lines = ["load actor 0 s", "load actor 6 s", "careful", "step 0/7  held out: accuracy 0.25", "one more"]
    assert console.export_text().splitlines() == lines


def test_terminal_shows_the_phases_of_the_start():
    shown, console = display(terminal=True)
    shown.phase("load actor")
    shown._clock.now = 61.0
    shown.stop()
    shown.phase("closing")
    assert "load actor 1:01" in console.export_text(clear=False)
    assert "closing" not in console.export_text()


@pytest.mark.parametrize("terminal", [True, False])
def test_finish_shows_the_rise_and_the_summary(terminal):
    shown, console = display(terminal)
    shown.start(4, first=2, history=[{"step": 0, "eval/accuracy": 0.0, "eval/reward_mean": -1.0}, {"step": 1, "reward/mean": 0.25}])
    shown.step(3, row(0.5))
    shown.step(4, row(0.75, **{"eval/accuracy": 1.0, "eval/reward_mean": 2.0}))
    shown.evaluation(4, {"eval/accuracy": 1.0, "eval/reward_mean": 2.0})
    shown.finish({"run": "runs/demo-1", "seconds": 12.3456})
    text = console.export_text()
    assert "held-out accuracy  0.000 (step 0) -> 1.000 (step 4)" in text
    assert "after  |" + "█" * 24 + "|" in text
    assert "before |" + " " * 24 + "|" in text
    assert "held-out reward    -1.000 (step 0) -> 2.000 (step 4)" in text
    # 0.5 lies half way up 7 steps: 3.5 is rounded to the even 4, above the lowest block that every column has.
    assert "training reward    0.250 -> 0.750  ▁▅█" in text
    assert "seconds            12.35" in text


def test_bar_and_plot():
    assert bar(0.5, 4) == "██  "
    assert bar(-1, 3) == "   "
    assert bar(2, 3) == "███"
    assert bar(1 / 8, 1) == "▏"
    assert sparkline([0, 1], 10) == "▁█"
    assert sparkline([], 10) == ""
    # Two rows have 16 eighths: the lowest value takes 1 of them, the highest all.
    assert plot([0, 1], 3, 2) == [" █ ", "▁█ "]
    # Half way is 7.5 of 15 steps, rounded to the even 8: 9 eighths, a full block and one eighth.
    assert plot([0, 0.5, 1], 3, 2) == [" ▁█", "▁██"]
    assert plot([], 2, 2) == ["  ", "  "]
    assert plot([5, 5], 2, 1) == ["▄▄"]
    assert plot([float("nan"), 0, 1], 2, 1) == ["▁█"]


def test_shrink_keeps_the_mean_of_even_windows():
    assert shrink([1, 3, 5, 7], 2) == [2, 6]
    assert shrink([1, 3], 5) == [1, 3]
    assert len(shrink(list(range(101)), 60)) == 60
