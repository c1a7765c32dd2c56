"""Models under training and beside it: `TrainEngine` (actor) gives log-probabilities and takes optimizer steps, `ValueEngine` (critic)
does so with values, `Scorer` (ref) only reads log-probabilities, `RewardEngine` (reward) only scores."""

from rolemesh.engines.train.engine import LossFunction, TrainEngine
from rolemesh.engines.train.groups import Groups
from rolemesh.engines.train.optimizer import OptimizerSettings
from rolemesh.engines.train.reward_engine import RewardEngine, load_reward_model
from rolemesh.engines.train.scorer import Scorer
from rolemesh.engines.train.value_engine import ValueEngine, ValueLossFunction
from rolemesh.engines.train.value_model import ValueModel, load_value_model, open_value_model

__all__ = [
    "Groups",
    "LossFunction",
    "OptimizerSettings",
    "RewardEngine",
    "Scorer",
    "TrainEngine",
    "ValueEngine",
    "ValueLossFunction",
    "ValueModel",
    "load_reward_model",
    "load_value_model",
    "open_value_model",
]
