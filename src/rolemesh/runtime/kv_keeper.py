"""Who keeps the KV store of a run alive: the one who started it starts it anew when it is gone. Its clients tell it everything again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

from rolemesh.errors import RolemeshError
from rolemesh.protocols.store import StoreGone
from rolemesh.runtime.beside import beside
from rolemesh.runtime.kv_store import KvStore

EVERY_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 10.0
"""How long the store may take for an answer before it counts as gone."""
RESTART_SECONDS: Final = 60.0


def kept_alive(store: KvStore, told: Callable[[str], None], *, every: float = EVERY_SECONDS) -> AbstractAsyncContextManager[None]:
    """Look after the store meanwhile: one that is gone, or silent for 10 s, is replaced by an empty one in a new life.

    Only for the client of the process that started the store. `told` hears in a sentence what was found and done.
    """
    return beside(_keep(store, told, every), told, f"the KV store of {store.link.run} is not looked after")


async def _keep(store: KvStore, told: Callable[[str], None], every: float) -> None:
    while True:
        await asyncio.sleep(every)
        try:
            await store.ping(SILENCE_SECONDS)
        except StoreGone as gone:
            try:
                await store.link.restart(RESTART_SECONDS)
                told(f"the KV store of {store.link.run} was gone ({gone}) and was started anew; clients tell it again what they know")
            except RolemeshError as error:  # the next round tries again; meanwhile clients wait within their own deadlines
                told(f"the KV store of {store.link.run} is gone ({gone}) and did not start anew: {error}")
