"""How rewards become gradients: one algorithm a file, built from pure advantage, aggregation and loss functions.

The loop calls `create_algorithm` for the controller's half (`prepare`), the actor role for its own half (`loss`).
"""

from __future__ import annotations

from typing import Final, Protocol

from rolemesh.algorithms.advantages import group_advantages
from rolemesh.algorithms.aggregation import assign_minibatches, token_weights
from rolemesh.algorithms.grpo import Grpo
from rolemesh.config.schema import AlgorithmConfig, Config
from rolemesh.protocols.algorithm import Algorithm
from rolemesh.registry import resolve


class AlgorithmFactory(Protocol):
    """What `algorithm.name` names: a class or function that makes an algorithm."""

    def __call__(self, config: AlgorithmConfig, /, *, minibatches: int) -> Algorithm: ...


ALGORITHMS: Final[dict[str, AlgorithmFactory]] = {"grpo": Grpo}
"""Built-in algorithms by name."""


def create_algorithm(config: Config) -> Algorithm:
    """The algorithm that `config.algorithm.name` names, built in or by import path. Raises ConfigError for an unknown name."""
    factory: AlgorithmFactory = resolve(config.algorithm.name, ALGORITHMS, subject="algorithm.name")
    return factory(config.algorithm, minibatches=config.trainer.minibatches)


__all__ = ["ALGORITHMS", "AlgorithmFactory", "Grpo", "assign_minibatches", "create_algorithm", "group_advantages", "token_weights"]
