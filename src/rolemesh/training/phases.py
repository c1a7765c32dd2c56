"""The phases of a step, each a function of a `TrainingRun`. `loop.py` calls them in order; other loops may call them otherwise."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from rolemesh.batch import Batch, BatchRef
from rolemesh.data import sft_batch
from rolemesh.errors import RunStopped
from rolemesh.names import ACTOR, CRITIC, REF, REWARD, ROLLOUT
from rolemesh.observe import Metrics, metric_part
from rolemesh.plan.routes import handed_on
from rolemesh.runtime import together
from rolemesh.training import evaluation, health, saving, serving
from rolemesh.training.run import StepBatch, TrainingRun


async def warm_start(run: TrainingRun) -> None:
    """Supervised fine-tuning by the `sft` section; nothing without one, or when the run goes on from a checkpoint that has it behind."""
    sft = run.config.sft
    if sft is None or run.sft_prompts is None or run.progress.warm_started:
        return
    run.recorder.begin_stage("sft", sft.steps)
    actor = run.session.groups[ACTOR]
    async with run.session.holding("sft", ACTOR, REF, CRITIC):
        await actor.start_sft()
        for step in range(1, sft.steps + 1):
            batch = sft_batch(run.sft_prompts, sft.batch_size, run.session.tokenizer, run.config.data.max_response_tokens)
            await actor.sft_update(run.session.store(batch))
            run.recorder.sft_step(step)
        await actor.end_sft()
        await _hand_on(run)
    run.progress.warm_started = True
    run.recorder.end_stage("sft", str(run.sft_prompts.report))


async def _hand_on(run: TrainingRun) -> None:
    """What came out of the warm start is the reference, and the body of a critic that has no model of its own."""
    for role in handed_on(run.config):
        await run.session.publisher.give(role, run.progress.weight_version)


def draw(run: TrainingRun) -> BatchRef:
    """The next prompts, one row for each answer to be made."""
    with run.recorder.span("draw"):
        prompts = run.prompts.draw(run.config.trainer.prompts_per_step)
        run.recorder.metrics.sum("samples/drawn", len(prompts) * run.config.algorithm.group_size)
        if run.prompts.told_apart:
            for source, count in Counter(prompts.scalars("source")).items():
                run.recorder.metrics.sum(f"samples/drawn/{metric_part(source)}", count * run.config.algorithm.group_size)
        return run.session.store(prompts).repeat(run.config.algorithm.group_size)


async def generate(run: TrainingRun, prompts: BatchRef) -> BatchRef:
    """Sample an answer to every row with the current weights."""
    rollout = run.session.groups[ROLLOUT]
    async with run.session.holding("generate", ROLLOUT):
        written = await rollout.generate(
            prompts, version=run.progress.weight_version, temperature=run.config.rollout.temperature, seed=run.config.seed
        )
    return prompts.join(written)


async def score(run: TrainingRun, samples: BatchRef) -> BatchRef:
    """Reward every row and, where these roles are there, find its log-probabilities under the reference and the values of its states,
    all side by side. Rows that cannot be scored have no reward; training masks them and the step counts them."""
    groups = run.session.groups
    async with run.session.holding("score", REWARD, REF, CRITIC):
        calls = [groups[REWARD].score(samples)]
        if REF in groups:
            calls.append(groups[REF].logprobs(samples, temperature=run.config.rollout.temperature))
        if CRITIC in groups:
            calls.append(groups[CRITIC].values(samples))
        for written in await together(calls):
            samples = samples.join(written)
    return samples


async def advantages(run: TrainingRun, scored: BatchRef) -> StepBatch:
    """Rewards into advantages, token weights, mini-batches and the numbers of the whole step. With a critic its workers make the
    advantages of the tokens; here only numbers of rows are read."""
    groups = run.session.groups
    if CRITIC in groups:
        async with run.session.holding("advantages", CRITIC):
            scored = scored.join(await groups[CRITIC].estimate(scored, kl_coefficient=run.kl_coefficient))
    others = [*(("source",) if run.prompts.told_apart else ()), *(name for name in ("response_digest",) if name in scored.names)]
    reads = dict.fromkeys(("reward", *others, *run.algorithm.reads, *(("kl",) if REF in groups else ())))
    numbers = await run.session.read(scored, tuple(reads))
    with run.recorder.span("advantages"):
        prepared = run.algorithm.prepare(numbers, run.recorder.metrics)
        terms = run.algorithm.terms(prepared, run.recorder.metrics, kl_coefficient=run.kl_coefficient)
        _record_rewards(prepared, run.recorder.metrics)
        _record_identical(prepared, run.recorder.metrics)
        batch = scored.join(run.session.store(prepared.select(run.algorithm.writes)))
        return StepBatch(batch=batch, numbers=prepared, terms=terms)


def _record_rewards(batch: Batch, metrics: Metrics) -> None:
    rewards = np.asarray(batch.scalars("reward"), dtype=np.float64)
    lengths = np.asarray(batch.scalars("response_length"))
    valid = rewards[np.isfinite(rewards)]
    metrics.mean("reward/mean", valid.mean() if len(valid) else 0.0)
    metrics.mean("reward/std", valid.std() if len(valid) else 0.0)
    if len(valid):
        metrics.max("reward/max", valid.max())
        metrics.min("reward/min", valid.min())
    metrics.sum("reward/failed", len(rewards) - len(valid))
    metrics.mean("response_length/mean", lengths.mean())
    for source, reward in zip(batch.scalars("source"), rewards, strict=True) if "source" in batch.names else ():
        metrics.mean(f"reward/mean/{metric_part(source)}", reward, weight=np.isfinite(reward))


def _record_identical(batch: Batch, metrics: Metrics) -> None:
    """How many prompts have two answers or more that are all the same, and not short. Nothing where a rollout does not tell digests."""
    if "response_digest" not in batch.names:
        return
    groups = defaultdict[int, list[tuple[int, int]]](list)
    for draw, digest, length in zip(batch.ids[:, 0], batch.scalars("response_digest"), batch.scalars("response_length"), strict=True):
        groups[draw].append((digest, length))
    identical = (rows for rows in groups.values() if len(rows) > 1 and len(set(rows)) == 1 and rows[0][1] > health.SHORT)
    metrics.sum("samples/identical_groups", len(list(identical)))


async def update(run: TrainingRun, step: StepBatch) -> None:
    """Train on the step: all epochs and mini-batches in one call of the actor and, beside it, one of the critic. The policy's weights
    become a new version, unless the critic still warms up."""
    numbers = step.numbers
    weighted = int((np.asarray(numbers.scalars("token_weight")) > 0).sum())
    # Without a single reward there is nothing to train on, whatever the policy says about equal ones.
    policy = run.config.algorithm.no_signal if weighted or run.config.algorithm.no_signal == "stop" else "skip_step"
    skipped = False
    if not run.algorithm.has_signal(numbers):
        run.recorder.no_signal(policy)
        if policy == "stop":
            raise RunStopped(_no_signal_message(run))
        skipped = policy == "skip_step"
    _record_fate(run, trained=0 if skipped else weighted, skipped=weighted if skipped else 0, masked=len(numbers) - weighted)
    if skipped:
        return
    groups, cut = run.session.groups, {"minibatches": numbers.scalars("minibatch"), "count": run.config.trainer.minibatches}
    async with run.session.holding("update", ACTOR, CRITIC):
        calls = [groups[CRITIC].update(step.batch, **cut)] if CRITIC in groups else []
        if run.critic_warms_up:
            run.recorder.critic_alone()
        else:
            calls.append(groups[ACTOR].update(step.batch, **cut, temperature=run.config.rollout.temperature, terms=step.terms))
        await together(calls)
    run.progress.weight_version += not run.critic_warms_up


def _record_fate(run: TrainingRun, *, trained: int, skipped: int, masked: int) -> None:
    """What became of the samples that the step asked for; what none of these accounts for is lost."""
    metrics = run.recorder.metrics
    asked = run.config.trainer.prompts_per_step * run.config.algorithm.group_size
    metrics.last("samples/trained", trained)
    metrics.last("samples/skipped", skipped)
    metrics.last("samples/masked", masked)
    metrics.last("samples/lost", asked - trained - skipped - masked)


def _no_signal_message(run: TrainingRun) -> str:
    shares = run.recorder.metrics.reduce()
    right, wrong = shares.get("reward/all_right_groups", 0.0), shares.get("reward/all_wrong_groups", 0.0)
    return (
        f"step {run.progress.step + 1}: no group has any spread in its rewards ({right:.0%} of groups all right, {wrong:.0%} all "
        "wrong), so there is nothing to learn from. Use easier or harder prompts, a larger "
        "algorithm.group_size, or algorithm.no_signal: skip_step"
    )


async def publish(run: TrainingRun) -> None:
    """Give every rollout worker the actor's weights under the current version. Nothing to do for those that hold it already."""
    version, publisher = run.progress.weight_version, run.session.publisher
    if publisher.without(ROLLOUT, version):
        async with run.session.holding("publish", ACTOR, ROLLOUT):
            await publisher.give(ROLLOUT, version)


async def record(run: TrainingRun, done: StepBatch) -> None:
    """Write the step's row of metrics and, now and then, its samples. What the algorithm adapts from step to step moves on."""
    batch = done.batch
    if not run.critic_warms_up:
        adapted = run.algorithm.next_kl_coefficient(done.numbers, run.kl_coefficient)
        if adapted != run.kl_coefficient:
            run.progress.kl_coefficient = adapted
    serving.record(run)
    run.progress.step += 1
    run.cursor = run.prompts.state()  # from here on the step is not given up any more
    step = run.progress.step
    every = run.config.trainer.save_samples_every
    if step == 1 or run.is_due(every, step):
        await run.session.groups[REWARD].save_samples(batch, str(run.directory.samples.resolve() / f"step-{step:06d}.parquet"))
    run.recorder.end_step(step, tokens=int(batch.token_counts.sum()), version=run.progress.weight_version, removed=run.prompts.removed())
    health.check(run)


async def evaluate(run: TrainingRun) -> None:
    """Greedy answers to the held-out prompts, scored like training's."""
    run.recorder.begin_stage("eval", 1)
    async with run.session.holding("eval", ROLLOUT, REWARD):
        values = await evaluation.held_out(run.session, run.eval_set, run.progress.weight_version)
    if run.progress.first_accuracy is None:
        run.progress.first_accuracy = values["eval/accuracy"]
    run.progress.last_accuracy = values["eval/accuracy"]
    run.recorder.evaluation(run.progress.step, values)


async def save(run: TrainingRun) -> None:
    """Begin a checkpoint; it counts only when it is complete, beside the next steps or at the end of the run."""
    run.recorder.begin_stage("save", 1)
    async with run.session.holding("save", ACTOR, REF, CRITIC):
        await saving.begin(run)
