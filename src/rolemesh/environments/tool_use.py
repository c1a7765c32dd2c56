"""The environment `tools`: the model calls functions until it writes a turn without a call, which is its answer. Rewards judge that."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from rolemesh.environments.parsers import BadCall, Parser, ToolCall
from rolemesh.environments.tools import CallRefused, Tool, unknown_tool
from rolemesh.environments.waiting import part
from rolemesh.protocols.environment import Message, Start, Step, Turn


class ToolEnvironment:
    """One episode with tools. A subclass can begin differently, or reward turns.

    The calls of a turn run side by side and are answered in their order. A call that cannot be read, names no tool or does not fit it,
    and what a tool raises, is told to the model, except for a ConnectionError or TimeoutError (of a service): that is not the model's
    doing, and ends the episode without a reward."""

    def __init__(self, *, tools: Mapping[str, Tool], parser: Parser) -> None:
        self.tools, self.parser = tools, parser

    async def reset(self, start: Start) -> Sequence[Message]:
        """Nothing to tell: with `data.chat` the tools stand in the prompt, else the prompt has to say what there is."""
        return ()

    async def step(self, turn: Turn) -> Step:
        """Answer the calls of the turn, or end."""
        calls = self.parser(turn.text)
        if not calls:
            return Step(done=True)
        counts = Counter[str](tool_calls=len(calls), tool_errors=0, malformed_calls=0)
        results = await asyncio.gather(*(self._answer(call, counts) for call in calls))
        names = [call.name if isinstance(call, ToolCall) and call.name in self.tools else "unknown" for call in calls]
        return Step(messages=[Message(content=result, name=name) for result, name in zip(results, names, strict=True)], counts=counts)

    async def close(self) -> None:
        """Nothing to give back."""

    async def _answer(self, call: ToolCall | BadCall, counts: Counter[str]) -> str:
        if isinstance(call, BadCall):
            counts["malformed_calls"] += 1
            return f"error: {call.why}"
        tool = self.tools.get(call.name)
        try:
            if tool is None:
                raise unknown_tool(call.name, self.tools)
            with part(f"tool {call.name}"):
                result = await tool(call)
            counts.update(result.counts)
            return result.text
        except CallRefused as error:
            counts["malformed_calls"] += 1
            return f"error: {error}"
        except (ConnectionError, TimeoutError) as error:
            raise RuntimeError(f"tool {call.name}: {type(error).__name__}: {error}") from error
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool may raise anything; what is made for command lines exits
            counts["tool_errors"] += 1
            return f"error: {type(error).__name__}: {error}"
