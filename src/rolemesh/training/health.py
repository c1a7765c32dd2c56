"""Signs of a run that goes wrong without failing: said on the screen and in the event log, and ended where going on is pointless."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rolemesh.errors import RunStopped
from rolemesh.names import ACTOR, CRITIC
from rolemesh.observe import MetricValue
from rolemesh.training.run import TrainingRun

NONFINITE_STEPS: Final = 3
"""Steps in a row without a finite gradient after which a run ends."""
UNSCORED_STEPS: Final = 3
"""Steps in a row without a single reward after which a run ends."""
FAULTS: Final = ("error", "timeout", "not_finite")
MANY_FAULTS: Final = 0.25
"""Share of answers whose scoring went wrong above which it is said."""
ADVICE: Final = {
    "error": "`reward_error` in the run's samples says what went wrong",
    "timeout": "raise `deadline` of the entry, or make the function faster",
    "not_finite": "a score that is NaN or infinite is none: look at what the function divides by, or at the weights of the reward model",
    "abstained": "a function without a `return` gives None for everything",
    "environment": "`reward_error` in the run's samples says what the environment failed with",
}
"""What to do about answers without a reward, by their status."""
FLAT_GROUPS: Final = 0.5
"""Share of groups without any spread in their rewards above which most of a step's work teaches nothing."""
SHORT: Final = 8
"""Tokens. Answers up to here may well be the same by chance, once a policy is sure of them."""
RATIO: Final = 1e-4
"""Largest |ratio - 1| before the first weight change in float32, where trainer and engine compute the same probabilities: what the run
directory promises."""
ROUNDING: Final = 2e-5
"""Mean |ratio - 1| that rounding explains.

It makes an error of about 2 r M in a log-probability, with M the largest logit and r the relative error of the last hidden state, 2e-7 to
1e-6 in float32 with some tens of layers. (Measured: a mean of 2e-6 with 24 layers and M = 4, 2e-5 with M = 10.) For rare tokens r is many
times larger, in whichever order sums are formed: few of them may be above `RATIO` while the mean is far below this.
"""
REPEAT_EVERY: Final = 20
"""Steps between repetitions of the same warning."""


def check(run: TrainingRun) -> None:
    """Look at the step just recorded. Raises RunStopped when several steps in a row had no finite gradient, or no reward."""
    row = run.recorder.row
    lost = _nonfinite(row)
    run.nonfinite_steps = run.nonfinite_steps + 1 if lost else 0
    if run.nonfinite_steps >= NONFINITE_STEPS:
        raise RunStopped(
            f"step {run.progress.step}: the last {run.nonfinite_steps} steps had a loss or gradient that is not finite; none was "
            "applied. Lower trainer.learning_rate (or algorithm.critic_learning_rate), or look at the rewards and samples of these steps"
        )
    unscored = _unscored(row)
    run.unscored_steps = run.unscored_steps + 1 if unscored else 0
    if run.unscored_steps >= UNSCORED_STEPS:
        raise RunStopped(
            f"step {run.progress.step}: none of the answers of the last {run.unscored_steps} steps has a reward ({_statuses(row)}), so "
            f"there is nothing to learn from{_advice(row)}"
        )
    for kind, text in _signs(run, row):
        if run.progress.step - run.warned.get(kind, -REPEAT_EVERY) >= REPEAT_EVERY:
            run.warned[kind] = run.progress.step
            run.recorder.note(f"step {run.progress.step}: {text}")


def _nonfinite(row: dict[str, MetricValue]) -> bool:
    return any(float(row.get(f"{role}/steps_skipped_nonfinite", 0)) > 0 for role in (ACTOR, CRITIC))


def _unscored(row: dict[str, MetricValue]) -> bool:
    return float(row["reward/failed"]) == float(row["samples/drawn"])


def _counts(row: dict[str, MetricValue], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): float(value) for name, value in row.items() if name.startswith(prefix) and value}


def _statuses(row: dict[str, MetricValue]) -> str:
    """What became of the scores of a step, and which entries gave none, from its metrics: `abstained 32; without a score of exact`."""
    statuses = ", ".join(f"{status} {count:g}" for status, count in _counts(row, "reward/status/").items())
    entries = ", ".join(_counts(row, "reward/unscored/"))
    return statuses + (f"; without a score of {entries}" if entries else "")


def _advice(row: dict[str, MetricValue]) -> str:
    return "".join(f". {status}: {ADVICE[status]}" for status in _counts(row, "reward/status/") if status in ADVICE)


def _signs(run: TrainingRun, row: dict[str, MetricValue]) -> Iterator[tuple[str, str]]:
    if _nonfinite(row):
        yield "nonfinite", "an optimizer step had a loss or gradient that is not finite and was left out"
    if _unscored(row):
        yield "unscored", f"no answer has a reward ({_statuses(row)}), so nothing was trained{_advice(row)}"
    elif sum(float(row.get(f"reward/status/{status}", 0)) for status in FAULTS) > MANY_FAULTS * float(row["samples/drawn"]):
        yield "failed", f"scoring went wrong for many answers ({_statuses(row)}), which are left out{_advice(row)}"
    flat = float(row.get("reward/zero_spread_groups", 0))
    if flat > FLAT_GROUPS:
        yield (
            "flat",
            f"{flat:.0%} of the groups have equal rewards throughout and teach nothing; a larger algorithm.group_size "
            f"(now {run.config.algorithm.group_size}) or prompts of other difficulty would help",
        )
    identical, temperature = float(row.get("samples/identical_groups", 0)), run.config.rollout.temperature
    if identical == run.config.trainer.prompts_per_step and temperature > 0 and "identical" not in run.warned:  # once a run
        yield (
            "identical",
            f"the {run.config.algorithm.group_size} answers to each of the {identical:g} prompts are the same token for token, at "
            f"temperature {temperature:g}: the engine's sampler or its seeds may be at fault, or settings that leave one "
            "token to choose (rollout.top_k, rollout.top_p), or the policy has collapsed. Compare the answers in the run's samples",
        )
    mean, largest = (float(row.get(f"policy/ratio_first_minibatch_{what}_deviation", 0.0)) for what in ("mean", "max"))
    if largest > RATIO and run.config.model.dtype == "float32":
        means = "trainer and engine disagree on the probabilities of the same tokens"
        if mean <= ROUNDING:
            means = "with so small a mean it is few tokens, which the rounding of rare ones explains where it does not come back often"
        yield (
            "ratio",
            f"before any weight change the policy ratio is off by {mean:.1e} on average and {largest:.1e} at most (expected below "
            f"{RATIO:.0e}): {means}",
        )
