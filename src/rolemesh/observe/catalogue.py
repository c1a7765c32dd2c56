"""Every metric that rolemesh writes, declared once: the keys of `metrics.jsonl`, and the source of `docs/reference/metrics.md`.

A part in angle brackets stands for any text without a slash: `time/<role>/<call>` covers `time/actor/update`. User code may record
further names; they are written all the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """One key: its unit (`share` is a fraction of 1, `nat` a natural-log unit), its meaning and the role or part that produces it."""

    name: str
    unit: str
    meaning: str
    producer: str


def _declare(*rows: tuple[str, str, str, str]) -> dict[str, MetricInfo]:
    return {name: MetricInfo(name=name, unit=unit, producer=producer, meaning=meaning) for name, unit, producer, meaning in rows}


METRICS: Final[dict[str, MetricInfo]] = _declare(
    ("step", "count", "loop", "number of the step of training that the row is of, as above"),
    ("step/skipped", "count", "loop", "1 when the update of the step was left out because no group had any spread in its rewards"),
    ("reward/mean", "reward", "reward", "mean total reward of the samples that were scored"),
    ("reward/mean/<source>", "reward", "reward", "the same for each of several data sources (from 2 to 32 of them)"),
    ("reward/std", "reward", "reward", "standard deviation of the total reward over the samples that were scored"),
    ("reward/max", "reward", "reward", "largest total reward"),
    ("reward/min", "reward", "reward", "smallest total reward"),
    ("reward/failed", "samples", "reward", "samples without a reward: the function failed, timed out, gave no finite number or abstained"),
    ("reward/extra/<name>", "reward", "reward", "a number that reward functions returned beside the score, mean over the samples with it"),
    ("reward/status/<status>", "samples", "reward", "by outcome: `ok`, `error`, `timeout`, `not_finite`, `abstained`, `environment`"),
    ("reward/unscored/<name>", "samples", "reward", "samples to which this entry of `reward` gave no score, for whichever reason"),
    ("reward/process/samples_max", "samples", "reward", "samples scored by the busiest scoring process, over all calls and workers"),
    ("reward/process/samples_min", "samples", "reward", "samples scored by the least busy scoring process"),
    ("reward/process/replaced", "count", "reward", "scoring processes replaced: after a timeout or a crash, or because of their memory"),
    ("reward/seconds/mean", "s", "reward", "mean time that the functions took for one sample"),
    ("reward/seconds/max", "s", "reward", "longest time that a function took for one sample"),
    ("reward/model/cut", "samples", "reward", "answers that a reward model read without a part, by `reward.<n>.model.overlong`"),
    ("reward/zero_spread_groups", "share", "algorithm", "groups whose rewards are all equal and that therefore carry no signal"),
    ("reward/all_right_groups", "share", "algorithm", "groups without spread at the highest reward of the step, if that is above 0"),
    ("reward/all_wrong_groups", "share", "algorithm", "groups without spread at or below 0"),
    ("response_length/mean", "tokens", "rollout", "mean length of the sampled answers, the end token included, before anything is masked"),
    ("response_length/max", "tokens", "rollout", "longest answer"),
    ("response_length/min", "tokens", "rollout", "shortest answer"),
    ("response_length/cut_share", "share", "rollout", "answers that ended at a length limit, by the engine's finish reason"),
    ("environment/turns/mean", "count", "rollout", "mean number of turns of the model in an answer"),
    ("environment/turns/max", "count", "rollout", "most turns of an answer"),
    ("environment/observation_tokens", "tokens", "rollout", "mean number of tokens in an answer that the model did not write"),
    ("environment/observations_cut", "count", "rollout", "messages cut at `environment.max_observation_tokens`"),
    ("environment/failed", "samples", "rollout", "answers without a reward because their environment failed or was late"),
    ("environment/seconds/mean", "s", "rollout", "mean time that the environment took for an answer"),
    ("environment/seconds/max", "s", "rollout", "longest such time"),
    ("environment/engine_idle_seconds", "s", "rollout", "longest time an engine was idle as all its answers waited for the environment"),
    ("environment/tool_calls", "count", "rollout", "tool calls"),
    ("environment/malformed_calls", "count", "rollout", "of these, calls that cannot be read or do not fit their tool; the model was told"),
    ("environment/tool_errors", "count", "rollout", "of these, calls whose tool raised an error; the model was told"),
    ("environment/python_errors", "count", "rollout", "programs of the tool `python` that raised or crashed; the model was told"),
    ("environment/python_timeouts", "count", "rollout", "such programs that took too long; the model was told"),
    ("environment/python_outputs_cut", "count", "rollout", "such programs that printed too much; the model was told"),
    ("environment/<name>", "count", "rollout", "a number that an environment counts, summed over the answers"),
    ("advantage/max", "advantage", "algorithm", "largest advantage of a trained sample"),
    ("advantage/min", "advantage", "algorithm", "smallest advantage of a trained sample"),
    ("advantage/abs_mean", "advantage", "algorithm", "mean absolute advantage of the trained samples"),
    ("advantage/mean", "advantage", "algorithm", "mean advantage of the trained tokens before whitening; with a critic only"),
    ("advantage/std", "advantage", "algorithm", "spread of the advantages of the trained tokens before whitening; with a critic only"),
    ("eval/accuracy", "share", "loop", "held-out answers with full reward; one that could not be scored counts as wrong"),
    ("eval/reward_mean", "reward", "loop", "mean total reward of the held-out answers that were scored"),
    ("eval/samples", "samples", "loop", "held-out answers"),
    ("eval/failed", "samples", "loop", "held-out answers that could not be scored"),
    ("eval/accuracy/<source>", "share", "loop", "the same for each of several data sources; so with the three that follow"),
    ("eval/reward_mean/<source>", "reward", "loop", "mean total reward of the scored answers to this source"),
    ("eval/samples/<source>", "samples", "loop", "held-out answers to this source"),
    ("eval/failed/<source>", "samples", "loop", "of these, answers that could not be scored"),
    ("policy/loss", "loss", "actor", "mean loss of the policy for a unit of `token_weight`"),
    ("policy/ratio_mean", "ratio", "actor", "mean probability ratio of trainer to engine over the trained tokens"),
    ("policy/ratio_max_deviation", "ratio", "actor", "largest distance of a token's ratio from 1"),
    (
        "policy/ratio_first_minibatch_max_deviation",
        "ratio",
        "actor",
        "the same over the first mini-batch of the step, where trainer and engine hold the same weights: rounding, much for few tokens",
    ),
    (
        "policy/ratio_first_minibatch_mean_deviation",
        "ratio",
        "actor",
        "its mean over the tokens of that mini-batch: shows any mismatch between trainer and engine",
    ),
    ("policy/clip_low_share", "share", "actor", "trained tokens whose ratio fell below the lower clip while the loss wanted it lower"),
    ("policy/clip_high_share", "share", "actor", "trained tokens whose ratio rose above the upper clip while the loss wanted it higher"),
    ("policy/clip_dual_share", "share", "actor", "trained tokens held by `algorithm.dual_clip`"),
    ("policy/entropy", "nat", "actor", "mean entropy of the next-token distribution over the trained tokens"),
    ("policy/kl_engine", "nat", "actor", "estimate of the divergence between the engine's and the trainer's distribution"),
    (
        "policy/kl_ref",
        "nat",
        "ref",
        "divergence of the policy that sampled from the reference model, mean over the trained tokens, by `algorithm.kl_kind`",
    ),
    ("policy/kl_loss", "nat", "actor", "the same for the weights under training, where the divergence is part of the loss"),
    ("policy/kl_coefficient", "ratio", "algorithm", "weight of the divergence in this step"),
    ("actor/grad_norm", "norm", "actor", "global gradient norm before clipping"),
    ("critic/loss", "loss", "critic", "mean loss of the critic for a unit of `token_weight`"),
    ("critic/value_mean", "reward", "critic", "mean value of the states before the trained tokens"),
    ("critic/value_clip_share", "share", "critic", "trained tokens whose value moved by more than `algorithm.value_clip` in this step"),
    ("critic/return_mean", "reward", "algorithm", "mean return of the trained tokens: what their values should have been"),
    (
        "critic/explained_variance",
        "share",
        "algorithm",
        "share of the spread of returns that the values foresaw: 1 all of it, 0 none, below 0 worse than a constant",
    ),
    ("critic/grad_norm", "norm", "critic", "global gradient norm of the critic before clipping"),
    ("critic/learning_rate", "rate", "critic", "learning rate of the critic's last optimizer step"),
    ("critic/steps_skipped_nonfinite", "count", "critic", "optimizer steps of the critic left out because the gradient was not finite"),
    ("critic/steps_skipped_empty", "count", "critic", "optimizer steps of the critic left out because no token had a weight above 0"),
    ("critic/tokens_trained", "tokens", "critic", "tokens with a weight above 0 in the critic's loss, over all epochs"),
    ("actor/learning_rate", "rate", "actor", "learning rate of the last optimizer step"),
    ("actor/steps_skipped_nonfinite", "count", "actor", "optimizer steps left out because the gradient was not finite"),
    ("actor/steps_skipped_empty", "count", "actor", "optimizer steps left out because no token of the mini-batch had a weight above 0"),
    ("actor/tokens_trained", "tokens", "actor", "tokens with a weight above 0 in the loss, over all epochs"),
    ("rollout/requests/<replica>", "samples", "rollout", "prompts given to this one of several replicas, once for each answer asked for"),
    ("rollout/tokens/<replica>", "tokens", "rollout", "tokens that this one of several replicas answered with"),
    ("serve/requests/<replica>", "count", "rollout", "answers asked for from outside and begun by this replica since the last row"),
    ("serve/tokens/<replica>", "tokens", "rollout", "tokens that this replica answered such requests with"),
    ("serve/refused", "count", "rollout", "answers asked for from outside while too many were under way"),
    ("serve/moved", "count", "rollout", "such answers that began anew, since their replica was lost or its engine raised"),
    ("serve/given_up", "count", "rollout", "such answers that ended early: the client went or had what it wanted, or its deadline came"),
    ("rollout/logprob_gap_max", "nat", "actor", "largest gap of a token's log-probability between engine and trainer with equal weights"),
    ("weights/version", "count", "loop", "version of the policy at the end of the step; the answers of a row of samples name their own"),
    ("weights/bytes", "bytes", "actor", "bytes that were packed to publish weights to other processes, once for all that read the same"),
    ("samples/drawn", "samples", "loop", "answers that were asked for"),
    ("samples/trained", "samples", "loop", "answers with a weight above 0 in the loss"),
    ("samples/skipped", "samples", "loop", "answers of a step that was skipped because no group had any spread"),
    ("samples/masked", "samples", "loop", "answers that arrived and were left out of the loss, for instance without a reward"),
    ("samples/identical_groups", "prompts", "loop", "prompts whose answers, two or more of over 8 tokens, are the same token for token"),
    ("samples/lost", "samples", "loop", "answers that were asked for and are neither trained, skipped nor masked"),
    ("data/removed/<reason>", "prompts", "data", "prompts removed before training for this reason"),
    ("data/removed/<reason>/<source>", "prompts", "data", "the same for each of several data sources"),
    ("samples/drawn/<source>", "samples", "loop", "answers that were asked for, for each of several data sources (from 2 to 32 of them)"),
    ("sft/loss", "nat", "actor", "supervised fine-tuning: mean negative log-likelihood of a target token"),
    ("sft/grad_norm", "norm", "actor", "supervised fine-tuning: global gradient norm before clipping"),
    ("step/critic_alone", "count", "loop", "1 while the critic warms up: the step trains the critic and leaves the policy as it is"),
    ("sft/learning_rate", "rate", "actor", "supervised fine-tuning: learning rate of the step"),
    ("sft/steps_skipped_nonfinite", "count", "actor", "supervised fine-tuning: 1 when the gradient was not finite and the step left out"),
    ("sft/steps_skipped_empty", "count", "actor", "supervised fine-tuning: 1 when there were no target tokens and the step was left out"),
    ("sft/tokens_trained", "tokens", "actor", "supervised fine-tuning: target tokens of the step"),
    ("sft/step", "count", "loop", "number of the supervised step, from 1"),
    ("time/step", "s", "loop", "wall time of the whole step"),
    ("time/<role>/<call>", "s", "loop", "time of this call in the step at its slowest rank, without waits for other roles of its process"),
    (
        "memory/<role>/<what>",
        "bytes",
        "actor, critic, ref",
        "most that the largest rank's tensors took in the step: `weights`, `gradients` and `optimizer` on its device while it worked, "
        "`asleep` in host memory while others did (`trainer.offload`); of ref its `weights`, 0 when it is the actor without its adapter",
    ),
    ("checkpoint/stall_seconds", "s", "loop", "time that training waited for a checkpoint, in a row of its own with the step it is of"),
    ("checkpoint/seconds", "s", "loop", "time from the beginning of a save until its checkpoint was complete"),
    ("checkpoint/bytes", "bytes", "loop", "size of the checkpoint"),
    ("throughput/tokens_per_second", "tokens/s", "loop", "prompt and answer tokens of the step divided by the wall time of the step"),
    ("bottleneck/role", "text", "loop", "role that held the step back"),
    ("bottleneck/reason", "text", "loop", "call of that role with the largest own time, and how large it was"),
    ("metrics/nonfinite", "count", "sink", "values of this row that were not finite and were left out of it; absent when there were none"),
)

ROWS: Final[dict[str, tuple[str, str]]] = {
    "reward/mean": ("a step of training", "its number, from 1"),
    "sft/step": ("a supervised step, of the warm start or of `rolemesh sft`", "0"),
    "eval/accuracy": ("an evaluation", "the number of steps done: 0 before the first"),
    "checkpoint/seconds": ("a checkpoint", "the number of steps that it holds; the row may come after those of later steps"),
}
"""A key that only rows of one kind have -> what these are of, and what their `step` is."""


def metric_part(text: str) -> str:
    """A text, such as the name of a data source, as one part of a metric's name."""
    return text.replace("/", "_")


def describe(name: str) -> MetricInfo | None:
    """What the table says about a key, by itself or by a pattern; None for a name that is not in the table."""
    if name in METRICS:
        return METRICS[name]
    return next((info for shape, info in METRICS.items() if re.fullmatch(re.sub(r"<\w+>", "[^/]+", shape), name)), None)


def metrics_reference() -> str:
    """The Markdown page `docs/reference/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Rows and keys of `metrics.jsonl`. This page is generated from `rolemesh.observe.METRICS` by `make docs`.",
        "",
        "A row is one JSON object, and several may have the same `step`; what a row is of is told by the key that no other has:",
        "",
        "| a row of | has the key | and as `step` |",
        "|---|---|---|",
        *(f"| {kind} | `{key}` | {step} |" for key, (kind, step) in ROWS.items()),
        "",
        "A part in angle brackets stands for any text without a slash. A `share` is a fraction of 1, a `nat` the unit of natural",
        "logarithms. Values that are not finite are left out of the row and counted in `metrics/nonfinite`.",
        "",
        "| key | unit | from | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{info.name}` | {info.unit} | {info.producer} | {info.meaning} |" for info in METRICS.values()]
    return "\n".join(lines) + "\n"
