"""Messages between the pool and its processes: JSON with its length in front, on private sockets. Nothing that is read can run."""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from typing import Any, Final

_LENGTH: Final = struct.Struct("!I")
CHUNK: Final = 1 << 18


def frame(message: Any) -> bytes:
    """Bytes of one message. Any text survives, lone surrogates as well, and so do NaN and infinities."""
    data = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _LENGTH.pack(len(data)) + data


class Inbox:
    """Puts messages together from the bytes of a stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._messages: deque[Any] = deque()

    def feed(self, data: bytes) -> None:
        """Take in what arrived. Raises ValueError when it is no message."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            self._messages.append(json.loads(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]

    def take(self) -> list[Any]:
        """The complete messages that have not been taken yet."""
        taken = list(self._messages)
        self._messages.clear()
        return taken

    def next_from(self, stream: socket.socket) -> Any:
        """The next message of a blocking stream; None at its end."""
        while not self._messages:
            data = stream.recv(CHUNK)
            if not data:
                return None
            self.feed(data)
        return self._messages.popleft()
