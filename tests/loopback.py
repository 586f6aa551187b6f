"""HTTP servers on a free port of this machine."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Quiet(BaseHTTPRequestHandler):
    """A handler that logs nothing and keeps connections open."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the body comes 40 ms after the headers

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that was killed, or has read enough, resets its connection


@contextmanager
def serving(handler: type[Quiet]) -> Iterator[str]:
    """Yield the address of a server that runs until the block ends."""
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
