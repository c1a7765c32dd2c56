"""Held-out evaluation, for the loop and for `rolemesh eval`."""

from __future__ import annotations

import numpy as np

from rolemesh.data import EvalSet
from rolemesh.training.session import Session

SEED_OFFSET = 1_000_003
"""Evaluation samples use other random numbers than training."""


async def held_out(session: Session, eval_set: EvalSet, version: int) -> dict[str, float]:
    """Greedy answers to the held-out prompts by weight `version`, scored like training's.

    `eval/accuracy` is the share of all prompts whose reward is full (the sum of the positive weights); a failed score counts as wrong,
    and is counted in `eval/failed`. `eval/reward_mean` is over scored prompts.
    """
    prompts = session.store(eval_set.batch())
    seed = session.config.seed + SEED_OFFSET
    written = await session.groups["rollout"].generate(prompts, version=version, temperature=0.0, seed=seed)
    scored = await session.groups["reward"].score(prompts.join(written))
    rewards = np.asarray((await session.read(scored, ["reward"])).scalars("reward"), dtype=np.float64)
    full = sum(max(entry.weight, 0.0) for entry in session.config.reward)
    scored_rewards = rewards[np.isfinite(rewards)]
    return {
        "eval/accuracy": float((np.nan_to_num(rewards, nan=-np.inf) >= full - 1e-9).mean()),
        "eval/reward_mean": float(scored_rewards.mean()) if len(scored_rewards) else 0.0,
        "eval/samples": float(len(rewards)),
        "eval/failed": float(len(rewards) - len(scored_rewards)),
    }
