"""Where the endpoint listens: how many connections there may be, and what is logged of those that speak no HTTP. Called by `server.py`.

A connection is an open file of this process, which is the run's controller: when no more can be opened, the run ends. So connections
beyond a number are closed at once, whoever they are from.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from typing import Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rolemesh.errors import ConfigError

MOST_CONNECTIONS: Final = 1024
BACKLOG: Final = 64
"""Connections that are accepted in one turn of the loop, before any of them is counted."""
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

NO_HTTP = (HttpProcessingError, web.RequestPayloadError)
"""Answered with status 400. Anybody can cause these, most without the token, so that they must not fill the log of a run."""
log = logging.getLogger("rolemesh.serving")
log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], NO_HTTP)))


def most_connections(answers: int) -> int:
    """Enough for twice the answers that may be under way, but no more than half of the files that this process may have open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(MOST_CONNECTIONS, 2 * answers)
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files // 2 - BACKLOG))


class _Full(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writing = cast(asyncio.Transport, transport)
        writing.write(FULL)
        writing.close()


async def listen(server: web.Server, host: str, port: int, most: int) -> asyncio.Server:
    """Have `server` speak on at most about so many connections. Raises OSError when the address cannot be had."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: server() if len(server.connections) < most else _Full(), host, port, backlog=BACKLOG)


def check_address(host: str, port: int) -> None:
    """Raise ConfigError, as a run does that is to listen there, if the address cannot be had now."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server: what has just ended is in nobody's way
                trial.bind(address)
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    need = f"it must be possible to listen on {host}:{port}"
    remedy = "Set rollout.serve.port=0 for any free port, or rollout.serve.host to an address of this machine"
    return ConfigError.one("rollout.serve", need, str(error), remedy)
