"""Publication: the actor's weights go to other workers, each by its route (`plan/routes.py`).

Through shared memory, all at once; whoever reads waits for the header of each bucket:

    controller        actor                        takers on its node
    publish --------> wipes all headers
    fill -----------> packs 0, 1, 2, ...
    load -----------------------------------------> unpack 0, 1, 2, ... into the engine    ... last: "version n is held"

Through the object store, bucket by bucket:

    publish --------> manifest
    pack 0 ---------> packs 0
    load 0 ---------------------------------------> unpack 0 into the engine
    pack 1 ---------> packs 1   (meanwhile)
    load 1 ---------------------------------------> ...

From disk it goes the same way, but `pack` writes a file of the bucket, and `load` reads that (`weights/disk.py`). Before anything is
loaded each of those that will read shows that it sees the folder: the actor leaves a token there, and they look for it.

Every arrow is a call with a deadline that names the worker it waits for. Workers in a process with an actor worker read its weights where
they lie, in one call. A publication that fails leaves its takers refusing; the next one begins anew with all that have not confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rolemesh.errors import ConfigError, DeadlineExceeded, Problem, StaleWeights, WorkerDied
from rolemesh.names import ACTOR, ROLLOUT
from rolemesh.plan.routes import Place, Route, handed_on, weight_format, weight_route
from rolemesh.roles.rollout_manager import RolloutManager
from rolemesh.runtime import Process, together

if TYPE_CHECKING:
    from rolemesh.training.session import Session
    from rolemesh.weights import Content, WeightManifest


class Publisher:
    """Brings weights to groups of takers (`roles/taker.py`), and knows who has confirmed which version."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._confirmed: dict[tuple[str, str], int] = {}
        """By role and name of the process, which a replaced worker does not share with the one before."""
        self._have_base: set[str] = set()
        """Processes of rollout workers that have the actor's own weights, without its adapter."""

    @cached_property
    def _folder(self) -> str:
        """Of this run, for weights on disk; empty where none go there."""
        folder = self._session.config.trainer.publish_folder
        return "" if folder is None else str(folder.expanduser().absolute() / f"rolemesh-{self._session.run_id}")

    async def open(self) -> None:
        """Make the folder for weights on disk, if some go there, and have everybody who will read them look into it. Raises ConfigError
        with all that do not see it, or cannot write there."""
        session, groups = self._session, self._session.groups
        if not self._folder or ACTOR not in groups:
            return
        readers = [(role, rank) for role in (ROLLOUT, *handed_on(session.config)) for rank in self._ranks_by("disk", role)]
        if not readers:
            return
        session.backend.entrust(session.run_id, self._folder)
        try:
            Path(self._folder).mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(problems=[_unseen("the controller must be able to make folders in it", error)]) from error
        deadline = session.config.deadlines.create
        token, wrong = await self._alone(ACTOR, 0, "leave_token", deadline, self._folder)
        if wrong:
            raise ConfigError(problems=[_unseen(f"{self._where(ACTOR, 0)} must be able to write into it", wrong)])
        found = await together(self._alone(role, rank, "find_token", deadline, self._folder, token) for role, rank in readers)
        problems = [
            _unseen(f"{self._where(role, rank)} must see what {self._where(ACTOR, 0)} has written there", wrong)
            for (role, rank), wrong in zip(readers, found, strict=True)
            if wrong
        ]
        if problems:
            raise ConfigError(problems=problems)

    def _ranks_by(self, route: Route, role: str) -> list[int]:
        return [rank for rank, way in enumerate(self.routes(role)) if way == route] if role in self._session.groups else []

    async def _alone(self, role: str, rank: int, method: str, deadline: float, *args: Any) -> Any:
        """What one rank answers."""
        answers = await self._session.groups[role].call(method, *args, ranks=[rank], deadline=deadline)
        return answers[0]

    def _where(self, role: str, rank: int) -> str:
        return f"{role} rank {rank} on node {self._session.groups[role].processes[rank].node}"

    def without(self, role: str, version: int) -> list[int]:
        """Ranks that have not confirmed the version: all at first, and a worker that was replaced."""
        processes = self._session.groups[role].processes
        return [rank for rank, process in enumerate(processes) if self._confirmed.get((role, process.spec.name)) != version]

    async def give(self, role: str, version: int) -> None:
        """The actor's present weights, under this version, to all workers of a role that have not confirmed it. A manager does without
        those that die or are late. Raises StaleWeights when one holds another version afterwards, and what calls of groups raise."""
        group = self._session.groups[role]
        if isinstance(group, RolloutManager):
            await group.serve(partial(self._give, role, version))
        else:
            await self._give(role, version, range(group.world_size))

    async def _give(self, role: str, version: int, wanted: Sequence[int]) -> dict[int, int]:
        """To these ranks."""
        group = self._session.groups[role]
        ranks = [rank for rank in self.without(role, version) if rank in wanted]
        for rank in ranks:
            self._confirmed.pop((role, group.processes[rank].spec.name), None)
        routes, held = self.routes(role), dict[int, int]()
        for route, content in sorted({(routes[rank], self._content(role, rank, routes[rank])) for rank in ranks}):
            mine = [rank for rank in ranks if (routes[rank], self._content(role, rank, routes[rank])) == (route, content)]
            held |= await self._by(route, role, version, content, mine)
        for rank, found in sorted(held.items()):
            if found != version:
                raise StaleWeights(where=f"{role} rank {rank}", holds=found, asked=version)
            self._confirmed[role, group.processes[rank].spec.name] = version
        return dict.fromkeys(wanted, version)

    def routes(self, role: str) -> list[Route]:
        """The route to each rank of a role, with where it is now."""
        actors = list(map(_place, self._session.groups[ACTOR].processes))
        names = {actor.process for actor in actors}
        shared = "processes" not in self._session.backend.lacks
        processes = self._session.groups[role].processes
        disk = self._session.config.trainer.publish_folder is not None
        return [weight_route(_place(process), actors[0], names, shared_memory=shared, disk=disk) for process in processes]

    def _content(self, role: str, rank: int, route: Route) -> Content:
        if self._session.config.trainer.publish == "merged" or role != ROLLOUT or route == "process":
            return "merged"
        return "adapter" if self._session.groups[role].processes[rank].spec.name in self._have_base else "base"

    async def _by(self, route: Route, role: str, version: int, content: Content, ranks: Sequence[int]) -> dict[int, int]:
        if route == "process":
            return await self._read(role, version, ranks)
        dtype, shared = weight_format(self._session.config, route) if role == ROLLOUT else "float32", route == "shared_memory"
        folder = self._folder if route == "disk" else ""
        manifest = await self._session.groups[ACTOR].publish(version, content=content, dtype=dtype, shared=shared, folder=folder)
        held = await (self._share if shared else self._stream)(role, manifest, ranks)
        if content == "base":
            self._have_base |= {self._session.groups[role].processes[rank].spec.name for rank in ranks}
        return held

    async def _share(self, role: str, manifest: WeightManifest, ranks: Sequence[int]) -> dict[int, int]:
        """Written and read at the same time. Each ends soon when the other does, so both are awaited; the actor's error is the cause."""
        version = manifest.version
        work = self._session.groups[ACTOR].fill(version), self._load(role, ranks, version, manifest=manifest)
        filled, held = await asyncio.gather(*work, return_exceptions=True)
        for outcome in (filled, held):
            if isinstance(outcome, BaseException):
                raise outcome
        return cast("dict[int, int]", held)

    async def _stream(self, role: str, manifest: WeightManifest, ranks: Sequence[int]) -> dict[int, int]:
        """Bucket by bucket, as objects or by files; while one is loaded, the next is packed."""
        actor, version, count = self._session.groups[ACTOR], manifest.version, len(manifest.buckets)
        _, bucket = await actor.pack(version, 0)
        held = dict[int, int]()
        for number in range(count):
            work: list[Any] = [self._load(role, ranks, version, number, None if number else manifest, bucket)]
            if number + 1 < count:
                work.append(actor.pack(version, number + 1))
            held, *packed = await together(work)
            if packed:
                _, bucket = packed[0]
        return held

    async def _read(self, role: str, version: int, ranks: Sequence[int]) -> dict[int, int]:
        """Each in its own process. Where weights are spread over the actor's ranks, all have to take part."""
        actor, group = self._session.groups[ACTOR], self._session.groups[role]
        reading = {group.processes[rank].spec.name for rank in ranks}
        others = [rank for rank, process in enumerate(actor.processes) if process.spec.name not in reading]
        work: list[Any] = [self._load(role, ranks, version)]
        if others:
            work.append(actor.call("give_parts", ranks=others))
        try:
            held: dict[int, int] = (await together(work))[0]
        except (WorkerDied, DeadlineExceeded):
            await actor.abort()  # its ranks may wait for one that is gone
            raise
        return held

    async def _load(self, role: str, ranks: Sequence[int], *args: Any, **kwargs: Any) -> dict[int, Any]:
        return dict(zip(ranks, await self._session.groups[role].call("load_weights", *args, ranks=ranks, **kwargs), strict=True))


def _unseen(need: str, found: object) -> Problem:
    found = f"{type(found).__name__}: {found}" if isinstance(found, Exception) else found
    remedy = "Name a folder of a file system that is mounted at the same place on all nodes, or leave the option out"
    return Problem(subject="trainer.publish_folder", need=need, free=str(found), remedy=remedy)


def _place(process: Process) -> Place:
    return Place(process.spec.name, process.node)
