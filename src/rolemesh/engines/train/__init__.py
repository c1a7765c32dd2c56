"""The training engine: a model replica that gives log-probabilities and takes optimizer steps. Used by the actor role."""

from rolemesh.engines.train.engine import LossFunction, TrainEngine
from rolemesh.engines.train.optimizer import OptimizerSettings
from rolemesh.engines.train.sft import sft_loss

__all__ = ["LossFunction", "OptimizerSettings", "TrainEngine", "sft_loss"]
