"""Which worker class serves a role. The other table, role -> pool, is the `roles` section of the config.

A user adds a role of his own with `roles.NAME.worker: my_pkg.workers:Class`, or replaces the worker of a built-in one the same way.
"""

from __future__ import annotations

from typing import Final

from rolemesh import names, registry
from rolemesh.config.schema import Config
from rolemesh.errors import ConfigError
from rolemesh.roles.actor import ActorWorker
from rolemesh.roles.reward import RewardWorker
from rolemesh.roles.rollout import RolloutWorker
from rolemesh.runtime import Worker

ROLE_WORKERS: Final[dict[str, type[Worker]]] = {
    names.ACTOR: ActorWorker,
    names.ROLLOUT: RolloutWorker,
    names.REWARD: RewardWorker,
}


def worker_class(role: str, config: Config) -> type[Worker]:
    """The worker class of a role. Raises ConfigError when the role has none or names something that is no Worker."""
    own = config.roles[role].worker
    if own is None:
        return ROLE_WORKERS[role]
    found = registry.resolve(own, {}, subject=f"roles.{role}.worker")
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise ConfigError.one(f"roles.{role}.worker", "must name a subclass of rolemesh.runtime.Worker", repr(own))
    return found
