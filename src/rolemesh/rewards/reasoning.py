"""The verifier `reasoning_gym`: the task's own scorer judges the answer. The reward side's home of `reasoning_gym`."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib import import_module
from typing import Any

from rolemesh.protocols.reward import Sample
from rolemesh.rewards.declare import reward_function


def _prepare() -> None:
    import_module("reasoning_gym")  # seconds


@reward_function(needs=("task.task", "task.entry"), prepare=_prepare)
def reasoning_gym(sample: Sample, *, tag: str | None = None) -> float:
    """Score of the task's own scorer, 0 to 1. Some tasks give wrong answers partial credit: set `threshold: 1.0` for right or wrong.

    The answer is the whole response without white space at its ends, or with `tag` the inside of the last ``<tag>...</tag>`` (0 if
    there is none). Reads `task`, `options` and `entry` of `Sample.task`. Raises ValueError for a sample without them.
    """
    missing = [key for key in ("task", "entry") if key not in sample.task]
    if missing:
        raise ValueError(f"Sample.task lacks {' and '.join(missing)}; it has {', '.join(sample.task) or 'nothing'}")
    answer = sample.final.strip() if tag is None else _tagged(sample.final, tag)
    if answer is None:
        return 0.0
    entry = sample.task["entry"]
    scorer = _scorer(str(sample.task["task"]), json.dumps(sample.task.get("options") or {}, sort_keys=True))
    try:
        return float(scorer.score_answer(answer, entry))
    except Exception:
        # Some scorers raise on text that they cannot read; then the answer is wrong. If they fail on the reference too, they are broken.
        gold = entry.get("answer")
        if gold is not None and scorer.score_answer(gold, entry) > 0:
            return 0.0
        raise


@lru_cache(maxsize=128)
def _scorer(task: str, options: str) -> Any:
    """The dataset of a task with its options, which some scorers depend on. Building one may read word lists, so it is kept."""
    from reasoning_gym import create_dataset

    return create_dataset(task, seed=0, **json.loads(options))


def _tagged(response: str, tag: str) -> str | None:
    found: list[str] = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", response, re.DOTALL)
    return found[-1].strip() if found else None
