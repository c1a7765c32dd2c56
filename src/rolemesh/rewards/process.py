"""A scoring process: takes samples from the pool, one after another, and answers. `nursery.py` makes it, `pool.py` feeds and ends it.

Functions run in the main thread, so that a user's own `signal.alarm` works. Asynchronous functions share one event loop, which runs
while any of them is under way; the pool never sends the other kind meanwhile.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from rolemesh.rewards.functions import ScoringFunctions, awaited
from rolemesh.rewards.system import be_first_to_go, die_with, own_resident_bytes
from rolemesh.rewards.wire import CHUNK, Inbox, frame
from rolemesh.rewards.work import Answer, Work, load_sample


class ScoringProcess:
    """The life of the process after it was set up."""

    def __init__(self, stream: socket.socket, functions: ScoringFunctions) -> None:
        self._stream, self._functions = stream, functions
        self._inbox = Inbox()
        self._loop = asyncio.Runner()
        self._ended = False

    def serve(self) -> None:
        """Until the pool closes the stream."""
        self._stream.sendall(frame({"ready": os.getpid()}))
        while not self._ended and (message := self._inbox.next_from(self._stream)) is not None:
            if self._functions.is_async(message["part"]):
                self._loop.run(self._serve_async(message))
            else:
                self._reply(message["id"], self._functions.answer(_work(message), lambda result: self._loop.run(awaited(result))))
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that a function left running must not hit the next sample

    async def _serve_async(self, first: Mapping[str, Any]) -> None:
        """Answer messages side by side until none is under way."""
        loop = asyncio.get_running_loop()
        under_way: set[asyncio.Task[None]] = set()

        def begin(messages: Iterable[Mapping[str, Any]]) -> None:
            under_way.update(asyncio.ensure_future(self._answer_async(message)) for message in messages)

        def arrive() -> None:
            data = self._stream.recv(CHUNK)
            self._ended = not data
            self._inbox.feed(data)
            begin(self._inbox.take())

        begin([first, *self._inbox.take()])
        loop.add_reader(self._stream, arrive)
        try:
            while under_way and not self._ended:
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                under_way -= done
        finally:
            loop.remove_reader(self._stream)

    async def _answer_async(self, message: Mapping[str, Any]) -> None:
        self._reply(message["id"], await self._functions.answer_async(_work(message)))

    def _reply(self, number: int, answer: Answer) -> None:
        self._stream.sendall(frame({"id": number, "held": own_resident_bytes(), **asdict(answer)}))


def _work(message: Mapping[str, Any]) -> Work:
    return Work(part=message["part"], sample=load_sample(message["sample"]))


def live(stream: socket.socket, functions: ScoringFunctions, parent: int) -> NoReturn:
    """Be a scoring process from here on: leader of a process group of its own, ended with its parent."""
    code = 1
    try:
        os.setsid()
        die_with(parent)
        be_first_to_go()
        faulthandler.enable()
        ScoringProcess(stream, functions).serve()
        code = 0
    except BrokenPipeError:
        code = 0  # the pool is gone
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # never back into what was running where this was forked, nor its exit handlers
