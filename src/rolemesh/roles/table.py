"""Which worker class serves a role. The other table, role -> pool, is the `roles` section of the config.

A user adds a role of his own with `roles.NAME.worker: my_pkg.workers:Class`, or replaces the worker of a built-in one the same way.
"""

from __future__ import annotations

from typing import Final

from rolemesh import names, registry
from rolemesh.config.schema import Config
from rolemesh.errors import ConfigError
from rolemesh.roles.actor import ActorWorker
from rolemesh.roles.critic import CriticWorker
from rolemesh.roles.ref import RefWorker, ShardedRefWorker, SharedRefWorker
from rolemesh.roles.reward import RewardWorker
from rolemesh.roles.rollout import RolloutWorker
from rolemesh.runtime import Worker
from rolemesh.runtime.worker import registered_methods

ROLE_WORKERS: Final[dict[str, type[Worker]]] = {
    names.ACTOR: ActorWorker,
    names.ROLLOUT: RolloutWorker,
    names.REWARD: RewardWorker,
    names.REF: RefWorker,
    names.CRITIC: CriticWorker,
}

REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    names.ACTOR: ("update", "publish", "save", "restore"),
    names.ROLLOUT: ("generate", "load_weights"),
    names.REWARD: ("score", "save_samples"),
    names.REF: ("logprobs", "load_weights", "save", "restore"),
    names.CRITIC: ("values", "estimate", "update", "load_backbone", "save", "restore"),
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
        return _ref_worker(config) if role == names.REF else ROLE_WORKERS[role]
    found = registry.resolve(own, {}, subject=f"roles.{role}.worker")
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise ConfigError.one(f"roles.{role}.worker", "must name a subclass of rolemesh.runtime.Worker", repr(own))
    required = (*REQUIRED.get(role, ()), *(("sleep", "wake") if config.trainer.offload and role in (names.ACTOR, names.CRITIC) else ()))
    missing = [method for method in required if method not in registered_methods(found)]
    if missing:
        base = ROLE_WORKERS[role]
        raise ConfigError.one(
            f"roles.{role}.worker",
            f"{own} must have the registered methods {', '.join(required)}",
            f"no {', '.join(missing)}",
            f"Derive it from {base.__module__}.{base.__name__}",
        )
    called = f"{found.__name__}(context, config=config)"
    registry.check_call(found, [None], {"config": config}, subject=f"roles.{role}.worker", name=own, called=called)
    return found


def _ref_worker(config: Config) -> type[RefWorker]:
    if config.ref_is_actor:
        return SharedRefWorker
    return RefWorker if config.trainer.sharding == "none" else ShardedRefWorker
