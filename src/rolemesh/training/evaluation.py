"""Held-out evaluation, for the loop and for `rolemesh eval`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rolemesh.data import EvalSet
from rolemesh.observe import metric_part
from rolemesh.rewards import full_reward
from rolemesh.training.session import Session

SEED_OFFSET = 1_000_003
"""Evaluation samples use other random numbers than training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample for pass@k."""

    samples: int
    """Answers to each prompt."""
    ks: tuple[int, ...]
    """Numbers of answers of which one must be right, from 1 to `samples`."""
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Rewards of held-out answers, one entry an answer."""

    draws: NDArray[np.int64]
    """Number of the prompt."""
    sources: NDArray[np.str_]
    rewards: NDArray[np.float64]
    """NaN for an answer that could not be scored."""
    right: NDArray[np.bool_]
    """The reward is full: the sum of the positive weights of the source's rewards. One that could not be scored is wrong."""

    def by_source(self) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """(`/SOURCE`, its rows) for each of several sources; nothing for a single one. With the whole in front: (empty text, all rows)."""
        yield "", np.ones(len(self.draws), dtype=np.bool_)
        sources = sorted(set(self.sources.tolist()))
        if len(sources) > 1:
            for source in sources:
                yield f"/{metric_part(source)}", self.sources == source


async def held_out(session: Session, eval_set: EvalSet, version: int) -> dict[str, float]:
    """Greedy answers to the held-out prompts by weight `version`, scored like training's.

    `eval/accuracy` is the share of all prompts whose reward is full; a failed score counts as wrong, and is counted in `eval/failed`.
    `eval/reward_mean` is over scored prompts. With several sources each of these also comes for every source, as `eval/accuracy/SOURCE`.
    """
    scored = await _score(session, eval_set, version, samples=1, temperature=0.0)
    found: dict[str, float] = {}
    for suffix, rows in scored.by_source():
        found[f"eval/accuracy{suffix}"] = float(scored.right[rows].mean())
        found |= _counts(scored, suffix, rows)
    return found


async def sampled(session: Session, eval_set: EvalSet, version: int, sampling: Sampling) -> dict[str, float]:
    """Several answers to each held-out prompt: `eval/pass@K`, the mean over prompts of `pass_at_k`, for each K that is asked for.

    Also `eval/reward_mean`, `eval/samples` and `eval/failed`, as of `held_out`, and all of these by source where there are several.
    """
    scored = await _score(session, eval_set, version, samples=sampling.samples, temperature=sampling.temperature)
    found: dict[str, float] = {}
    for suffix, rows in scored.by_source():
        draws, place = np.unique(scored.draws[rows], return_inverse=True)
        right = np.bincount(place, weights=scored.right[rows], minlength=len(draws))
        for k in sampling.ks:
            found[f"eval/pass@{k}{suffix}"] = float(np.mean([pass_at_k(sampling.samples, int(count), k) for count in right]))
        found |= _counts(scored, suffix, rows)
    return found


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k answers is right, estimated without bias from n answers of which c are right, for 1 <= k <= n.

    It is 1 - C(n - c, k) / C(n, k): all k from the wrong ones, drawn without putting back. Chen et al. 2021, arXiv 2107.03374.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


async def _score(session: Session, eval_set: EvalSet, version: int, *, samples: int, temperature: float) -> Scored:
    batch = eval_set.batch()
    prompts = session.store(batch).repeat(samples)
    seed = session.config.seed + SEED_OFFSET
    written = await session.groups["rollout"].generate(prompts, version=version, temperature=temperature, seed=seed)
    scored = await session.groups["reward"].score(prompts.join(written))
    numbers = await session.read(scored, ["reward"])
    draws, rewards = numbers.ids[:, 0], np.asarray(numbers.scalars("reward"), dtype=np.float64)
    source_of = dict(zip(batch.ids[:, 0].tolist(), batch.scalars("source"), strict=True))
    sources = [source_of[draw] for draw in draws.tolist()]
    full = np.asarray([full_reward(session.config.reward, source) for source in sources])
    right = np.nan_to_num(rewards, nan=-np.inf) >= full - 1e-9
    return Scored(draws=draws, sources=np.asarray(sources, dtype=np.str_), rewards=rewards, right=right)


def _counts(scored: Scored, suffix: str, rows: NDArray[np.bool_]) -> dict[str, float]:
    rewards = scored.rewards[rows]
    finite = rewards[np.isfinite(rewards)]
    return {
        f"eval/reward_mean{suffix}": float(finite.mean()) if len(finite) else 0.0,
        f"eval/samples{suffix}": float(len(rewards)),
        f"eval/failed{suffix}": float(len(rewards) - len(finite)),
    }
