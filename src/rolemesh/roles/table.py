"""Which worker class serves a role. The other table, role -> pool, is the `roles` section of the config.

A user adds a role of his own with `roles.NAME.worker: my_pkg.workers:Class`, or replaces the worker of a built-in one the same way.
"""

from __future__ import annotations

from typing import Any, Final

from rolemesh import names, registry
from rolemesh.config.schema import Config
from rolemesh.errors import ConfigError
from rolemesh.roles.rollout_manager import RolloutManager
from rolemesh.runtime import Worker, WorkerGroup
from rolemesh.runtime.worker import registered_methods

ROLE_WORKERS: Final[dict[str, str]] = {
    names.ACTOR: "rolemesh.roles.actor:ActorWorker",
    names.ROLLOUT: "rolemesh.roles.rollout:RolloutWorker",
    names.REWARD: "rolemesh.roles.reward:RewardWorker",
    names.REF: "rolemesh.roles.ref:RefWorker",
    names.CRITIC: "rolemesh.roles.critic:CriticWorker",
}
"""As import paths: a process loads what it serves, and the one that scores answers needs no torch."""

ROLE_GROUPS: Final[dict[str, type[WorkerGroup]]] = {names.ROLLOUT: RolloutManager}
"""What serves a role on the controller where that is more than a plain group."""

REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    names.ACTOR: ("update", "publish", "pack", "fill", "give_parts", "save", "restore"),
    names.ROLLOUT: ("generate", "load_weights"),
    names.REWARD: ("score", "save_samples"),
    names.REF: ("logprobs", "load_weights", "save", "restore"),
    names.CRITIC: ("values", "estimate", "update", "load_weights", "save", "restore"),
}
"""Registered methods that the phases call on a built-in role, whoever serves it."""


def worker_class(role: str, config: Config) -> type[Worker]:
    """The worker class of a role. Raises ConfigError when the role has none or names something that is no Worker."""
    own = config.roles[role].worker
    if own is None:
        if role not in ROLE_WORKERS:
            raise ConfigError.one(
                f"roles.{role}",
                f"a worker class; built-in ones serve {', '.join(ROLE_WORKERS)}",
                "none",
                f"Name one with roles.{role}.worker, or leave the role (and options that need it) out",
            )
        built_in: type[Worker] = registry.load(_built_in(role, config), subject=f"roles.{role}")
        return built_in
    found: Any = registry.resolve(own, {}, subject=f"roles.{role}.worker")
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise ConfigError.one(f"roles.{role}.worker", "must name a subclass of rolemesh.runtime.Worker", repr(own))
    required = (*REQUIRED.get(role, ()), *(("sleep", "wake") if config.trainer.offload and role in (names.ACTOR, names.CRITIC) else ()))
    missing = [method for method in required if method not in registered_methods(found)]
    if missing:
        raise ConfigError.one(
            f"roles.{role}.worker",
            f"{own} must have the registered methods {', '.join(required)}",
            f"no {', '.join(missing)}",
            f"Derive it from {_built_in(role, config).replace(':', '.')}",
        )
    called = f"{found.__name__}(context, config=config)"
    registry.check_call(found, [None], {"config": config}, subject=f"roles.{role}.worker", name=own, called=called)
    return found


def _built_in(role: str, config: Config) -> str:
    if role == names.ROLLOUT and config.environment is not None:
        return "rolemesh.roles.episodes:EpisodeWorker"
    if role == names.REWARD and config.reward_models:
        return "rolemesh.roles.reward_model:ModelRewardWorker"
    if role == names.REF and config.ref_is_actor:
        return "rolemesh.roles.ref:SharedRefWorker"
    if role == names.REF and config.trainer.sharding != "none":
        return "rolemesh.roles.ref:ShardedRefWorker"
    return ROLE_WORKERS[role]
