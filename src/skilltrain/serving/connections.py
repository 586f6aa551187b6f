"""An HTTP server that survives too many, slow and broken connections, and its log handler."""

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

# asyncio may accept a whole backlog of connections before LimitedProtocol closes any of them. The
# backlog is small, so that this exceeds the limit only by a quarter.
_CONNECTIONS_PER_BACKLOG_ENTRY = 4
_MAX_WAITING_SECONDS = 20  # for a request to arrive, and for a client to go on reading a response
_MAX_CONNECTIONS = 1000
_TICKS_PER_SECOND = 10  # of uvicorn's main loop
_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class LineHandler(logging.Handler):
    """Prints each log record as one line, without a traceback. Never raises.

    A line that equals the last one is not printed again.
    """

    _last_line = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless its line equals the last one or a client closed its connection."""
        with suppress(Exception):  # the server must not fail because a line cannot be printed
            line = record.getMessage()
            # `exc_info` has the class, the error and the traceback.
            error = record.exc_info[1] if record.exc_info else None
            # A client that closes its connection is no fault of the server.
            if isinstance(error, ClientDisconnect):
                return
            if error is not None:
                line += f": {type(error).__name__}: {error}{_error_position(error)}"
            if line != self._last_line:
                self._last_line = line
                say(one_line(line))


def _error_position(error: BaseException) -> str:
    """Return file and line that raised an error, in brackets; an empty string if unknown."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    if not frames:
        return ""
    # The last frame is the innermost call, which raised the error.
    frame, line_number = frames[-1]
    return f" ({frame.f_code.co_filename}:{line_number})"


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 that closes connections above `limit_concurrency`.

    uvicorn itself keeps such connections open and refuses only their requests.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or answer 503 and close it."""
        super().connection_made(transport)
        if self.limit_concurrency and len(self.connections) > self.limit_concurrency:
            self.logger.error("%d connections are open: more get 503", self.limit_concurrency)
            # The client gets this answer even before it sends a request.
            transport.write(_UNAVAILABLE)
            transport.close()


class LimitedServer(uvicorn.Server):
    """A server that drops slow clients.

    A whole request, head and body, must arrive within `_MAX_WAITING_SECONDS` of the connection or
    of the last response. A client that stops reading a response is dropped after the same time.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        # Seconds that the server has waited for a client, by (connection, its last request).
        self._waiting_seconds: dict[Any, int] = {}

    async def on_tick(self, counter: int) -> bool:
        """Drop slow clients once a second."""
        if counter % _TICKS_PER_SECOND == 0:
            self._drop_slow_clients()
        return await super().on_tick(counter)

    def _drop_slow_clients(self) -> None:
        """Count one more second for each client that keeps the server waiting. Drop slow ones.

        uvicorn keeps its open connections in `server_state`. This method is called once a second.
        """
        connections: set[Any] = self.server_state.connections
        waiting_seconds: dict[Any, int] = {}
        for connection in connections:
            # uvicorn calls the last request of a connection, with its response, a cycle.
            request = connection.cycle
            if not _is_waiting(request, connection.flow):
                continue
            key = (connection, request)  # with a new request, the count begins again
            waiting_seconds[key] = self._waiting_seconds.get(key, 0) + 1
            if waiting_seconds[key] > _MAX_WAITING_SECONDS:
                connection.transport.abort()
        # Clients that no longer keep the server waiting are forgotten.
        self._waiting_seconds = waiting_seconds


def _is_waiting(request: RequestResponseCycle | None, flow: FlowControl) -> bool:
    """Return whether the server waits for the client to send its request or read the response.

    Args:
        request: Last request of the connection with its response. None: there was no request yet.
        flow: State of the connection. Writing is paused while the client does not read.
    """
    if flow.write_paused or request is None:
        return True
    # The body is not complete, or the next request has not come yet.
    return request.more_body or request.response_complete


def max_connections() -> int:
    """Return half the number of files that this process may open, but at most 1,000.

    Each connection is an open file. The router itself needs some files too.
    """
    try:
        from resource import RLIMIT_NOFILE, getrlimit
    except ImportError:  # Windows has no such limit
        return _MAX_CONNECTIONS
    return min(getrlimit(RLIMIT_NOFILE)[0] // 2, _MAX_CONNECTIONS)


def new_http_server(app: ASGIApp) -> uvicorn.Server:
    """Create an HTTP/1.1 server that limits open connections and drops slow clients.

    Args:
        app: Application that answers the requests.
    """
    limit = max_connections()
    backlog = limit // _CONNECTIONS_PER_BACKLOG_ENTRY
    # `LimitedProtocol` and `LimitedServer` do what uvicorn's own limits leave out.
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",  # no WebSockets
        log_config=None,  # `LineHandler` prints the log
        log_level="error",  # mistakes of clients are not logged
        limit_concurrency=limit,
        backlog=backlog,  # connections that wait to be accepted
        timeout_graceful_shutdown=_MAX_WAITING_SECONDS,  # for clients that still read a response
    )
    return LimitedServer(config)
