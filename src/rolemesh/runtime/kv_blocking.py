"""The KV store for synchronous code: what a worker uses. See `runtime/kv_store.py` for what each call does."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from rolemesh.protocols.store import KvEntry, StoreLink, Version
from rolemesh.runtime.kv_store import KvLease, KvStore

T = TypeVar("T")
DRIVE_SECONDS: Final = 60.0
"""How much later than its own deadline a request of a worker ends in any case."""


class BlockingKvStore:
    """The same for synchronous code in a worker: `put`, `get`, `compare_and_set`, `look`, `delete`, `list`, `lease` and `give_back`,
    `close`.

    Where workers share the controller's thread (local and simulated backends), a `get` of a key that is not there yet raises at once,
    because nobody could put it while the worker waits.
    """

    def __init__(self, link: StoreLink, *, owner: str, namespace: str = "", group: str = "", generation: int = 0) -> None:
        self._link, self.generation = link, generation
        self._store = KvStore(link, owner=owner, namespace=namespace, group=group, generation=generation)

    def _drive(self, work: Coroutine[Any, Any, T], deadline: float = 0.0) -> T:
        return self._link.drive(work, deadline + DRIVE_SECONDS)

    def put(self, key: str, value: Any, *, lease: KvLease | None = None) -> Version:
        return self._drive(self._store.put(key, value, lease=lease))

    def compare_and_set(self, key: str, value: Any, expected: Version | None, *, lease: KvLease | None = None) -> bool:
        return self._drive(self._store.compare_and_set(key, value, expected, lease=lease))

    def get(self, key: str, deadline: float) -> Any:
        return self._drive(self._store.get(key, deadline), deadline)

    def look(self, key: str) -> KvEntry | None:
        return self._drive(self._store.look(key))

    def delete(self, key: str) -> bool:
        return self._drive(self._store.delete(key))

    def list(self, prefix: str = "") -> dict[str, Any]:
        return self._drive(self._store.list(prefix))

    def lease(self, seconds: float) -> KvLease:
        return self._drive(self._store.lease(seconds))

    def give_back(self, lease: KvLease) -> None:
        self._drive(lease.close())

    def close(self) -> None:
        self._drive(self._store.close())
