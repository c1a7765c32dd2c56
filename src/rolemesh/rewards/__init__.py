"""Rewards: built-in verifiers, a user's own functions, and the scorer that applies them. Called by the reward role and by sessions.

Names are imported when they are used: processes that only score, and a user's module that takes `reward_function` from here, need
neither Arrow nor the config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolemesh.lazy import lazy_names

if TYPE_CHECKING:
    from rolemesh.rewards.builtin import REWARDS
    from rolemesh.rewards.check import check_rewards, full_reward
    from rolemesh.rewards.declare import reward_function
    from rolemesh.rewards.inprocess import InProcess
    from rolemesh.rewards.outcome import Outcome, concat_scored, outcome_columns, top_errors
    from rolemesh.rewards.pool import ScoringPool
    from rolemesh.rewards.scorer import RewardError, RewardScorer

__all__ = [
    "REWARDS",
    "InProcess",
    "Outcome",
    "RewardError",
    "RewardScorer",
    "ScoringPool",
    "check_rewards",
    "concat_scored",
    "full_reward",
    "outcome_columns",
    "reward_function",
    "top_errors",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "builtin": ("REWARDS",),
            "check": ("check_rewards", "full_reward"),
            "declare": ("reward_function",),
            "inprocess": ("InProcess",),
            "outcome": ("Outcome", "concat_scored", "outcome_columns", "top_errors"),
            "pool": ("ScoringPool",),
            "scorer": ("RewardError", "RewardScorer"),
        },
    )
