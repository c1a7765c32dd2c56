"""Rewards: built-in verifiers, a user's own functions, and the scorer that applies them. Called by the reward role and by sessions."""

from rolemesh.rewards.builtin import REWARDS
from rolemesh.rewards.check import check_rewards
from rolemesh.rewards.declare import reward_function
from rolemesh.rewards.outcome import Outcome, concat_scored, outcome_columns, top_errors
from rolemesh.rewards.scorer import RewardError, RewardScorer

__all__ = [
    "REWARDS",
    "Outcome",
    "RewardError",
    "RewardScorer",
    "check_rewards",
    "concat_scored",
    "outcome_columns",
    "reward_function",
    "top_errors",
]
