"""A real HTTP server on loopback that speaks OpenAI's chat completions and fails as it is told to."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """One scripted reply: an answer's text, or a status, a raw body, a refusal, a delay."""

    text: str = "Please plan my week."
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: str | None = None
    refusal: str | None = None
    finish_reason: str = "stop"
    delay: float = 0.0
    code: str | None = None

    def body(self) -> bytes:
        """The reply as a server would send it."""
        if self.raw is not None:
            return self.raw.encode()
        if self.status != 200:
            error = {"message": f"scripted {self.status}", "type": "scripted", "code": self.code}
            return json.dumps({"error": error}).encode()
        message = {"role": "assistant", "content": None if self.refusal else self.text, "refusal": self.refusal}
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "scripted"}
        return json.dumps({**answer, "choices": [choice], "usage": usage}).encode()


@dataclass
class LLMServer:
    """The running server: where it is, what it was asked, what it says next."""

    base_url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    script: list[Reply] = field(default_factory=list)
    otherwise: Callable[[dict[str, Any]], Reply] = field(default=lambda request: Reply())


@contextmanager
def llm_server() -> Iterator[LLMServer]:
    """Yield a server that sends `script` reply by reply, and then whatever `otherwise` makes of a request."""
    state, lock = LLMServer(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.requests.append(request)
                state.authorizations.append(self.headers["Authorization"])
                state.times.append(time.monotonic())
                reply = state.script.pop(0) if state.script else state.otherwise(request)
            time.sleep(reply.delay)
            body = reply.body()
            try:
                self.send_response(reply.status)
                for name, value in {"Content-Type": "application/json", **reply.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client gave up, as a slow reply means it to

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.base_url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
