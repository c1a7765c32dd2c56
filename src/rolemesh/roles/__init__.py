"""The roles: where workers meet engines, algorithms, rewards and weights."""

from rolemesh.roles.table import ROLE_GROUPS, ROLE_WORKERS, worker_class

__all__ = ["ROLE_GROUPS", "ROLE_WORKERS", "worker_class"]
