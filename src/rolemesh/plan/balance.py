"""Roles that are out of proportion, from predicted stage times, and what would be better. Called by `build.py`; never refuses anything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from rolemesh.config.schema import Config
from rolemesh.names import ACTOR, CRITIC, REWARD, ROLLOUT
from rolemesh.plan.ledger import many
from rolemesh.plan.schema import Stage

LEAST_SECONDS: Final = 2.0
"""Shorter stages are no reason to change anything."""
REWARD_SHARE: Final = 0.2
"""Part of a step that scoring may take before it is pointed out."""
CRITIC_RATIO: Final = 1.5
"""How much longer than the actor beside it a critic may take."""
GAIN: Final = 0.15
"""Part of a step that another division of slots must save to be worth a word."""


def balance_hints(config: Config, stages: Sequence[Stage], seconds_per_step: float) -> Iterator[str]:
    """One sentence for each role that makes others wait: what it takes, and what would be in proportion."""
    by_call = {(stage.role, stage.call): stage for stage in stages}
    yield from _reward(config, by_call, seconds_per_step)
    yield from _critic(config, by_call)
    yield from _rollout(config, by_call, seconds_per_step)


def _reward(config: Config, stages: dict[tuple[str, str], Stage], step: float) -> Iterator[str]:
    stage = stages.get((REWARD, "score"))
    if stage is None or stage.seconds < max(LEAST_SECONDS, REWARD_SHARE * step):
        return
    rest = max(step - stage.seconds, LEAST_SECONDS)
    wanted = math.ceil(stage.workers * stage.seconds / (REWARD_SHARE * rest))
    if wanted > stage.workers:
        more = f"roles.reward.workers={wanted} would be in proportion, or more of roles.reward.processes if functions wait"
        if REWARD not in config.process_roles:
            more = f"{wanted} slots of pool {config.roles[REWARD].pool} would be in proportion"
        now = f"{seconds(stage.seconds)} of a step of {seconds(step)} with {many(stage.workers, 'worker')}"
        yield f"reward: scoring takes about {now}; {more}"


def _critic(config: Config, stages: dict[tuple[str, str], Stage]) -> Iterator[str]:
    actor, critic = stages.get((ACTOR, "update")), stages.get((CRITIC, "update"))
    if actor is None or critic is None or config.roles[ACTOR].pool == config.roles[CRITIC].pool:
        return
    slow, fast = (critic, actor) if critic.seconds > actor.seconds else (actor, critic)
    if slow.seconds >= LEAST_SECONDS and slow.seconds > CRITIC_RATIO * fast.seconds:
        total, work = slow.workers + fast.workers, slow.workers * slow.seconds + fast.workers * fast.seconds
        wanted = min(total - 1, max(1, round(total * slow.workers * slow.seconds / work)))
        if wanted > slow.workers:
            yield (
                f"{slow.role}: its update takes about {seconds(slow.seconds)} with {many(slow.workers, 'worker')} while {fast.role} is "
                f"done after {seconds(fast.seconds)} with {fast.workers}; {wanted} and {total - wanted} would be in proportion"
            )


def _rollout(config: Config, stages: dict[tuple[str, str], Stage], step: float) -> Iterator[str]:
    """Generation and training follow each other, so with pools of their own n = g + u slots are best divided as the square roots of
    the work: g / u = sqrt(W_g / W_u) minimises W_g / g + W_u / u."""
    make, train = stages.get((ROLLOUT, "generate")), stages.get((ACTOR, "update"))
    if make is None or train is None or step < LEAST_SECONDS:
        return
    if config.roles[ROLLOUT].pool == config.roles[ACTOR].pool:
        if make.workers < train.workers and make.seconds > step / 2:
            few = f"with {many(make.workers, 'worker')} where the pool has slots for {train.workers}"
            yield f"rollout: generation takes about {seconds(make.seconds)} of {seconds(step)} {few}; set roles.rollout.workers=auto"
        return
    total, work = make.workers + train.workers, (make.workers * make.seconds, train.workers * train.seconds)
    best = min(range(1, total), key=lambda count: work[0] / count + work[1] / (total - count))
    saved = make.seconds + train.seconds - work[0] / best - work[1] / (total - best)
    if saved > GAIN * step and best != make.workers:
        yield (
            f"rollout: {make.workers} of {total} slots generate for about {seconds(make.seconds)}, {train.workers} train for "
            f"{seconds(train.seconds)}; {best} and {total - best} would make a step about {round(100 * saved / step)} % shorter"
        )


def seconds(value: float) -> str:
    """`0.3 s`, `12 s` or `4 min`."""
    if value < 10:
        return f"{value:.2g} s"
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min"
