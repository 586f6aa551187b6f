"""Limits on the HTTP server's connections, and a log that cannot end the server."""

import asyncio
import logging
import traceback
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from skilltrain.terminal import say
from skilltrain.texts import one_line

_SECONDS = 20  # for a request to arrive, and for a client to go on reading an answer
_MAX_CONNECTIONS = 1000
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class LineHandler(logging.Handler):
    """Prints a log record as one line, without its traceback; a repeated line is printed once. Never raises."""

    _last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record, unless it says that a client has closed its connection."""
        with suppress(Exception):
            line = record.getMessage()
            error = record.exc_info[1] if record.exc_info else None
            if error is not None:
                line += f": {type(error).__name__}: {error}"
                for frame, number in [*traceback.walk_tb(error.__traceback__)][-1:]:
                    line += f" ({frame.f_code.co_filename}:{number})"
            if line != self._last and not isinstance(error, ClientDisconnect):
                self._last = line
                say(one_line(line))


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 that refuses connections above `limit_concurrency`; uvicorn refuses their requests alone."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or answer 503 and close it."""
        super().connection_made(transport)
        if self.limit_concurrency and len(self.connections) > self.limit_concurrency:
            self.logger.error("%d connections are open: more get 503", self.limit_concurrency)
            transport.write(_FULL)
            transport.close()


class LimitedServer(uvicorn.Server):
    """A server that drops slow clients.

    A request, head and body, must arrive within `_SECONDS` of the connection or of the last answer. A client that stops
    reading an answer is dropped after the same time.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._seconds: dict[Any, int] = {}  # waited for (connection, its last request)

    async def on_tick(self, counter: int) -> bool:
        """Count for how long each client has been waited for."""
        if counter % 10 == 0:  # once a second
            connections: set[Any] = self.server_state.connections
            waiting = [(c, c.cycle) for c in connections if _is_waiting(c.cycle, c.flow)]
            self._seconds = {pair: self._seconds.get(pair, 0) + 1 for pair in waiting}
            for (connection, _), seconds in self._seconds.items():
                if seconds > _SECONDS:
                    connection.transport.abort()
        return await super().on_tick(counter)


def _is_waiting(request: RequestResponseCycle | None, flow: FlowControl) -> bool:
    """Return whether the client has to act: to send its request, or to read the answer."""
    is_answering = request is not None and not (request.more_body or request.response_complete)
    return flow.write_paused or not is_answering


def max_connections() -> int:
    """Return half of the file descriptors that this process may open, at most 1,000; the rest is for the router."""
    try:
        from resource import RLIMIT_NOFILE, getrlimit
    except ImportError:  # Windows has no such limit
        return _MAX_CONNECTIONS
    return min(getrlimit(RLIMIT_NOFILE)[0] // 2, _MAX_CONNECTIONS)


def new_http_server(app: ASGIApp) -> uvicorn.Server:
    """Return a server for `app` that holds these limits."""
    limit = max_connections()
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        log_config=None,
        log_level="error",  # what a client does wrong is not logged
        limit_concurrency=limit,
        backlog=limit // 4,  # the loop accepts so many before it closes what exceeds the limit
        timeout_graceful_shutdown=_SECONDS,
    )
    return LimitedServer(config)
