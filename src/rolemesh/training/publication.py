"""Publication: the actor's weights go to other workers, each by its route (`plan/routes.py`), bucket by bucket.

    controller        actor                        takers
    publish 0 ------> packs 0 into the ring
    load 0 -------------------------------------> unpack 0 into the engine
    publish 1 ------> packs 1   (meanwhile)
    load 1 -------------------------------------> ...
    publish 2 ------> packs 2, where 0 was        ... last: "version n is held"

Every arrow is a call with a deadline that names the worker it waits for. Workers in a process with an actor worker read its weights where
they lie, in one call. A publication that fails leaves its takers refusing; the next one begins anew with all that have not confirmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rolemesh.errors import DeadlineExceeded, StaleWeights, WorkerDied
from rolemesh.names import ACTOR
from rolemesh.plan.routes import Place, Route, weight_route
from rolemesh.roles.rollout_manager import RolloutManager
from rolemesh.runtime import Process, together

if TYPE_CHECKING:
    from rolemesh.training.session import Session


class Publisher:
    """Brings weights to groups of takers (`roles/taker.py`), and knows who has confirmed which version."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._confirmed: dict[tuple[str, str], int] = {}
        """By role and name of the process, which a replaced worker does not share with the one before."""

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
        routes = self.routes(role)
        held = await self._stream(role, version, {rank: routes[rank] for rank in ranks if routes[rank] != "process"})
        held |= await self._read(role, version, [rank for rank in ranks if routes[rank] == "process"])
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
        return [weight_route(_place(process), actors[0], names, shared_memory=shared) for process in processes]

    async def _stream(self, role: str, version: int, routes: dict[int, Route]) -> dict[int, int]:
        """Bucket by bucket; while one is loaded, the next is packed."""
        if not routes:
            return {}
        actor = self._session.groups[ACTOR]
        by_route = {route: [rank for rank in routes if routes[rank] == route] for route in ("shared_memory", "object_store")}
        ways = {"shared": bool(by_route["shared_memory"]), "stored": bool(by_route["object_store"])}
        manifest, bucket = await actor.publish(version, 0, **ways)
        count, held = len(manifest.buckets), dict[int, int]()
        for number in range(count):
            first = manifest if number == 0 else None
            blocks: dict[str, Any] = {"shared_memory": None, "object_store": bucket}
            loads = ((by_route[route], block) for route, block in blocks.items() if by_route[route])
            work: list[Any] = [self._load(role, ranks, version, number, first, block) for ranks, block in loads]
            if number + 1 < count:
                work.append(actor.publish(version, number + 1, **ways))
            done = await together(work)
            if number + 1 < count:
                _, bucket = done.pop()
        for answers in done:
            held |= answers
        return held

    async def _read(self, role: str, version: int, ranks: Sequence[int]) -> dict[int, int]:
        """Each in its own process. Where weights are spread over the actor's ranks, all have to take part."""
        if not ranks:
            return {}
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

    async def _load(self, role: str, ranks: Sequence[int], *args: Any) -> dict[int, Any]:
        return dict(zip(ranks, await self._session.groups[role].call("load_weights", *args, ranks=ranks), strict=True))


def _place(process: Process) -> Place:
    return Place(process.spec.name, process.node)
