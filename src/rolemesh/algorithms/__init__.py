"""How rewards become gradients: one algorithm a file, built from pure advantage, aggregation and loss functions.

The loop calls `create_algorithm` for the controller's half (`prepare`, `terms`), the actor role for its own half (`loss`), and the critic
role `create_actor_critic` for its (`estimate`, `value_loss`). The ref role needs `reference_columns` alone.
"""

from __future__ import annotations

from typing import Final, Protocol, cast

from rolemesh.algorithms.advantages import group_advantages
from rolemesh.algorithms.aggregation import assign_minibatches, token_weights
from rolemesh.algorithms.grpo import Grpo
from rolemesh.algorithms.kl import REFERENCE_READS, REFERENCE_WRITES, reference_columns
from rolemesh.algorithms.ppo import Ppo
from rolemesh.config.schema import AlgorithmConfig, Config
from rolemesh.errors import ConfigError, Problem
from rolemesh.names import CRITIC
from rolemesh.protocols.algorithm import ActorCritic, Algorithm
from rolemesh.registry import resolve


class AlgorithmFactory(Protocol):
    """What `algorithm.name` names: a class or function that makes an algorithm."""

    def __call__(self, config: AlgorithmConfig, /, *, minibatches: int) -> Algorithm: ...


PARTS: Final = (
    "needs", "kl_coefficient", "reads", "writes", "actor_reads", "prepare", "terms", "next_kl_coefficient", "has_signal", "loss"
)  # fmt: skip
"""What an algorithm must have, see `protocols.algorithm.Algorithm`."""
ALGORITHMS: Final[dict[str, AlgorithmFactory]] = {"grpo": Grpo, "ppo": Ppo}
"""Built-in algorithms by name."""


def create_algorithm(config: Config) -> Algorithm:
    """The algorithm that `config.algorithm.name` names, built in or by import path. Raises ConfigError when there is none of this name,
    or it cannot be made."""
    name = config.algorithm.name
    factory: AlgorithmFactory = resolve(name, ALGORITHMS, subject="algorithm.name")
    try:
        made = factory(config.algorithm, minibatches=config.trainer.minibatches)
    except ConfigError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError.one("algorithm.name", f"{name}(config, minibatches=...) must make an algorithm", found, "Mend it") from error
    lacking = [part for part in PARTS if not hasattr(made, part)]
    if lacking:
        remedy = "See rolemesh.protocols.algorithm.Algorithm, or derive it from rolemesh.algorithms.Grpo"
        raise ConfigError.one("algorithm.name", f"{name} must make an algorithm", f"one without {', '.join(lacking)}", remedy)
    return made


def check_needs(config: Config) -> None:
    """Raise ConfigError when the algorithm needs a role that is not there, or there is a critic that it does not know."""
    algorithm = create_algorithm(config)
    name, pool = config.algorithm.name, next(iter(config.pools), "main")
    problems = [
        Problem(
            subject=f"roles.{role}",
            need=f"algorithm {name} needs this role",
            free=f"roles {', '.join(config.roles)}",
            remedy=f"Add roles.{role}.pool={pool}",
        )
        for role in algorithm.needs
        if role not in config.roles
    ]
    if problems:
        raise ConfigError(problems=problems)
    if CRITIC in config.roles:
        create_actor_critic(config)


def create_actor_critic(config: Config) -> ActorCritic:
    """The same where a critic works. Raises ConfigError for an algorithm that has none."""
    algorithm = create_algorithm(config)
    if CRITIC not in algorithm.needs:
        raise ConfigError.one(
            "roles.critic",
            "the algorithm must be one with a critic",
            f"algorithm.name={config.algorithm.name}",
            "Take the role out, or set algorithm.name=ppo",
        )
    return cast(ActorCritic, algorithm)


__all__ = [
    "ALGORITHMS",
    "REFERENCE_READS",
    "REFERENCE_WRITES",
    "AlgorithmFactory",
    "Grpo",
    "Ppo",
    "assign_minibatches",
    "check_needs",
    "create_actor_critic",
    "create_algorithm",
    "group_advantages",
    "reference_columns",
    "token_weights",
]
