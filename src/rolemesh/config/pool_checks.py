"""Rules of the sections `pools` and `roles`, as far as they do not depend on the machine. Called by `checks.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from rolemesh.config.schema import Config, PoolConfig, RoleConfig
from rolemesh.errors import Problem
from rolemesh.names import ACTOR, BUILTIN_ROLES, CRITIC, REF, REWARD, ROLLOUT
from rolemesh.registry import did_you_mean

REQUIRED_ROLES: Final = (ACTOR, ROLLOUT, REWARD)


def check_pools(config: Config) -> Iterator[Problem]:
    if not config.pools:
        yield Problem(subject="pools", need="at least one pool is needed", free="none", remedy="Write pools={main: {}}")
    used = {role.pool for role in config.roles.values()}
    for name, pool in config.pools.items():
        if name not in used:
            yield Problem(
                subject=f"pools.{name}",
                need="unused pool: no role names it",
                free=f"roles use {', '.join(sorted(used)) or 'none'}",
                remedy=f"Take it out, or set roles.<role>.pool={name}",
            )
        if pool.nodes != "auto" and sum(pool.nodes) == 0:
            yield Problem(
                subject=f"pools.{name}.nodes",
                need="must hold at least one slot",
                free=str(list(pool.nodes)),
                remedy="Write for example [2] for one node with two slots, or auto",
            )
        yield from _devices(name, pool)
        if pool.capacity_factor > 1 and not config.slot_roles(name):
            yield Problem(
                subject=f"pools.{name}.capacity_factor",
                need=f"must be 1 for a pool that only {REWARD} uses: it has no slots, and so no spare ones",
                free=f"{pool.capacity_factor:g}",
                remedy=f"Set pools.{name}.capacity_factor=1",
            )


def _devices(name: str, pool: PoolConfig) -> Iterator[Problem]:
    """Whole devices, or 1/k of one."""
    for resource in pool.resources:
        if resource in ("CPU", "GPU"):
            yield Problem(
                subject=f"pools.{name}.resources",
                need=f"is an option of its own: pools.{name}.{resource.lower()}s",
                free=resource,
                remedy=f"Set pools.{name}.{resource.lower()}s instead",
            )
    if pool.gpus != int(pool.gpus):
        whole = f"; or whole ones: pools.{name}.gpus={math.ceil(pool.gpus)}"
        part = f"pools.{name}.gpus=1 with pools.{name}.share={_shares_near(1 / pool.gpus)}" if pool.gpus < 1 else ""
        yield Problem(
            subject=f"pools.{name}.gpus",
            need="must be a whole number; a part of a GPU is 1/share of it",
            free=f"{pool.gpus:g}",
            remedy=f"Nearest valid: {part}{whole}" if part else f"Nearest valid: {math.floor(pool.gpus)} or {math.ceil(pool.gpus)}",
        )
    elif pool.share != int(pool.share):
        near = _shares_near(1 / pool.share if pool.share < 1 else pool.share)
        yield Problem(
            subject=f"pools.{name}.share",
            need="must be a whole number: a slot has a whole device or 1/share of one",
            free=f"{pool.share:g}",
            remedy=f"Nearest valid: pools.{name}.share={near}",
        )
    elif pool.share > 1:
        yield from _shared(name, pool)


def _shares_near(value: float) -> str:
    """The whole numbers around a share: `2 or 3` for 2.5, `2` for 2."""
    below, above = max(1, math.floor(value + 1e-9)), max(1, math.ceil(value - 1e-9))
    return f"{below}" if below == above else f"{below} or {above}"


def _shared(name: str, pool: PoolConfig) -> Iterator[Problem]:
    counts = [pool.gpus, *pool.resources.values()] if pool.gpus else list(pool.resources.values())
    if 1 not in counts or pool.gpus > 1:
        yield Problem(
            subject=f"pools.{name}.share",
            need=f"needs one device a slot, of which {pool.share:g} slots then have a part each",
            free=f"pools.{name}.gpus={pool.gpus:g}",
            remedy=f"Set pools.{name}.gpus=1, or pools.{name}.share=1",
        )


def missing_role(config: Config, name: str, need: str, otherwise: str = "") -> Problem:
    """The problem that a role is not there which something needs."""
    remedy = f"Add roles.{name}.pool={next(iter(config.pools), 'main')}{otherwise}"
    return Problem(subject=f"roles.{name}", need=need, free=f"roles {', '.join(config.roles) or 'none'}", remedy=remedy)


def check_roles(config: Config) -> Iterator[Problem]:
    for name in REQUIRED_ROLES:
        if name not in config.roles:
            yield missing_role(config, name, "this role is required")
    for name, role in config.roles.items():
        if name not in BUILTIN_ROLES and role.worker is None:
            yield Problem(
                subject=f"roles.{name}",
                need=f"must be one of {', '.join(BUILTIN_ROLES)}, or give its own worker class",
                free=repr(name),
                remedy=f"{did_you_mean(name, BUILTIN_ROLES)}For a role of your own set roles.{name}.worker=my_pkg.module:MyWorker",
            )
        if role.pool not in config.pools:
            yield Problem(
                subject=f"roles.{name}.pool",
                need=f"must name a pool: {', '.join(config.pools)}",
                free=repr(role.pool),
                remedy=f"{did_you_mean(role.pool, config.pools)}Add the pool, or name one that exists",
            )
        if role.cpus is not None and name not in config.process_roles:
            yield Problem(
                subject=f"roles.{name}.cpus",
                need=f"only {REWARD} without a model has processes of its own; {name} lives in the slots of its pool",
                free=str(role.cpus),
                remedy=f"Set pools.{role.pool}.cpus instead",
            )
        if role.processes is not None and name != REWARD:
            yield Problem(
                subject=f"roles.{name}.processes",
                need=f"only {REWARD} has scoring processes",
                free=str(role.processes),
                remedy=f"Set roles.{REWARD}.processes instead",
            )
        if config.backend == "local" and name in (ACTOR, CRITIC, REF) and role.workers != "auto" and role.workers > 1:
            yield Problem(
                subject=f"roles.{name}.workers",
                need="backend local runs one process, so this role has one worker",
                free=str(role.workers),
                remedy=f"Set roles.{name}.workers=auto, or backend=ray",
            )
        if role.tensor_parallel > 1:
            yield from _tensor_parallel(config, name, role)


def _tensor_parallel(config: Config, name: str, role: RoleConfig) -> Iterator[Problem]:
    subject, size = f"roles.{name}.tensor_parallel", role.tensor_parallel
    if name in BUILTIN_ROLES and name not in (ACTOR, CRITIC) and role.worker is None:
        if name in config.process_roles:
            need, remedy = f"must be 1 for {name}: functions have no model to divide", ""
        else:
            kept = "a reward model is kept whole" if name == REWARD else "its built-in engine keeps a whole model"
            need, remedy = f"must be 1 for {name}: {kept} in each worker", f", or name a worker class that can do it in roles.{name}.worker"
        yield Problem(subject=subject, need=need, free=str(size), remedy=f"Set {subject}=1{remedy}")
    if config.backend == "local":
        yield Problem(subject=subject, need="must be 1: backend local runs one process", free=str(size), remedy="Set backend=ray")
    if role.workers != "auto" and role.workers % size:
        near = multiples_near(role.workers, size)
        yield Problem(
            subject=f"roles.{name}.workers",
            need=f"must be a multiple of {subject} ({size})",
            free=str(role.workers),
            remedy=f"Nearest valid: roles.{name}.workers={near}, or auto",
        )
    pool = config.pools.get(role.pool)
    if pool is None:
        return
    uneven = [] if pool.nodes == "auto" else [count for count in pool.nodes if count % size]
    if uneven:
        yield Problem(
            subject=subject,
            need=f"{size} must divide the slots of each node of pool {role.pool}: ranks that share a model never lie on different nodes",
            free=f"pools.{role.pool}.nodes={list(pool.nodes)}",
            remedy=f"Nearest valid instead of {uneven[0]} slots: {multiples_near(uneven[0], size)}",
        )
    if pool.share > 1:
        yield Problem(
            subject=subject,
            need="needs whole devices: two ranks that share a model on one device would wait for each other",
            free=f"pools.{role.pool}.share={pool.share:g}",
            remedy=f"Set pools.{role.pool}.share=1, or {subject}=1",
        )


def multiples_near(value: int, size: int) -> str:
    below = value // size * size
    return f"{below} or {below + size}" if below else str(size)
