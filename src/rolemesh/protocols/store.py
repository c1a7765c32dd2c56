"""The seam between the clients of a run's KV store and its server: what they say to each other, and the way between them.

`runtime/kv_store.py` is the client, `runtime/kv_server.py` the server; the way is an actor on Ray and a plain call in one process.
Instants never travel, only durations: each side has a clock of its own.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from rolemesh.errors import RolemeshError

T = TypeVar("T")

Version = tuple[int, int]
"""(life of the store, number of the write in it). Later writes of a key have higher versions, across restarts too."""

Operation = Literal["put", "get", "delete", "list", "changes", "lease", "keep", "release", "fence", "publish", "heard", "stay", "waits"]


class StoreGone(Exception):
    """The server does not answer at the moment. A signal from a link to its client, which tries again until its own deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A key with its value, as its owner remembers it and tells it again to a store that has restarted."""

    namespace: str
    key: str
    value: Any
    version: Version
    group: str = ""
    generation: int = 0
    lease: str = ""
    deleted: bool = False
    """The owner's last word on the key was to delete it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEntry:
    """A key as it is now. `owner` is who wrote it last."""

    key: str
    value: Any
    version: Version
    owner: str
    group: str = ""
    generation: int = 0
    lease: str = ""
    client: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Answer to a read. Without an entry it says what else there is."""

    entry: KvEntry | None
    looks: int
    nearest: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    """Namespaces that have the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvChange:
    """A key that was written, deleted, or went away with its lease."""

    key: str
    kind: Literal["put", "deleted", "expired"]
    value: Any
    version: Version
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What happened since a cursor. With `whole`, it is all there is now, because the cursor is of another life or too old."""

    cursor: Version
    items: tuple[KvChange, ...]
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitStatistic:
    """Who waited for what: how often, how long (seconds in all and at most), and how often in vain. Numbers in keys are `*`."""

    namespace: str
    waiter: str
    key: str
    count: int
    seconds: float
    longest: float
    expired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWait:
    """A read that waits now, for `seconds` so far and at most `remaining` more."""

    namespace: str
    waiter: str
    key: str
    seconds: float
    remaining: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The waits of a store: those over, longest first, and those under way. A restart of the store begins anew."""

    over: tuple[WaitStatistic, ...]
    now: tuple[OpenWait, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """One question. `id` is the same when it is asked again after an answer got lost, so that a write counts once."""

    do: Operation
    id: str
    client: str
    owner: str
    """Name of the client for messages: a role and rank, or the controller."""
    incarnation: int
    """The life of the store that the client has told its facts to; another one answers "restarted" and does nothing."""
    namespace: str
    key: str = ""
    """Also a prefix of keys, or the id of a lease."""
    value: Any = None
    expected: Version | None = None
    conditional: bool = False
    """`put` only if the key's version is `expected` (None: if the key is absent)."""
    group: str = ""
    generation: int = 0
    lease: str = ""
    seconds: float = 0.0
    """How long the server may wait before it answers, or how long a lease lasts."""
    patience: float = 0.0
    """How long the client goes on waiting in all; after `seconds` it asks again."""
    looks: int = 0
    waited: float = 0.0
    """Of a wait that goes on: how often the server has looked, and for how long."""
    cursor: Version = (0, 0)
    facts: tuple[Fact, ...] = ()
    leases: Mapping[str, float] | None = None
    fences: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswer:
    """`value` is for the operation; an answer of another incarnation than asked for has none."""

    incarnation: int
    value: Any = None
    error: RolemeshError | None = None


class StoreLink(Protocol):
    """The way to the store of one run. Travels to workers as an argument, except where everything is one process."""

    run: str

    async def ask(self, request: StoreRequest, deadline: float) -> StoreAnswer:
        """Raises StoreGone when the server is gone, or says nothing for `deadline` seconds."""
        ...

    def drive(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """Run the client's work to its end from synchronous code in a worker. Raises DeadlineExceeded."""
        ...

    async def restart(self, deadline: float) -> None:
        """End the server, if there is one, and start an empty one in a new life. Only where it was started."""
        ...

    async def stop(self) -> None:
        """End the server. Only where it was started."""
        ...
