"""Environments of the tests of the rollout role."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from rolemesh.protocols.environment import Message, Start, Step, Turn


class Echo:
    """Three turns; tells the model how long what it wrote is, after a wait of any length, and earns the same."""

    def __init__(self, *, latency: float = 0.0) -> None:
        self.latency = latency

    async def reset(self, start: Start) -> Sequence[Message]:
        return [Message(content=str(start.seed % 7))]

    async def step(self, turn: Turn) -> Step:
        await asyncio.sleep(random.random() * self.latency)
        length = len(turn.token_ids)
        told = [] if turn.number == 3 else [Message(content=f"{length} {turn.text}")]
        return Step(messages=told, reward=float(length), done=turn.number == 3)

    async def close(self) -> None:
        pass


class Broken(Echo):
    async def step(self, turn: Turn) -> Step:
        raise ConnectionError("nobody at port 80")
