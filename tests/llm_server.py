"""A loopback server with OpenAI's chat completions and embeddings that fails as scripted."""

import base64
import hashlib
import json
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopback import Quiet, serving
from skilltrain.config import validate
from skilltrain.llm import LLM, LLMConfig

HONEST: Any = object()
KEY = "sk-secret-0123456789"


def honest_usage(request: dict[str, Any], text: str) -> dict[str, int]:
    """Count three bytes a token, which is more than the client estimates."""
    prompt = sum(
        math.ceil(len(message["content"].encode()) / 3) + 8 for message in request["messages"]
    )
    completion = math.ceil(len(text.encode()) / 3)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


@dataclass(frozen=True)
class Reply:
    """One scripted reply: an answer, an error status, a raw body, a refusal or a lost connection.

    It is sent `delay` seconds after `until` returns True. `cut` ends the connection within the
    body, `drop` before it.
    """

    text: str = "Please plan my week."
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: str | None = None
    refusal: str | None = None
    finish_reason: str = "stop"
    delay: float = 0.0
    until: Callable[[], bool] = lambda: True
    code: str | None = None
    usage: Any = HONEST
    cut: bool = False
    drop: bool = False

    def body(self, request: dict[str, Any]) -> bytes:
        """Return the body as a server would send it."""
        if self.raw is not None:
            return self.raw.encode()
        return json.dumps(self._error() if self.status != 200 else self._answer(request)).encode()

    def _error(self) -> dict[str, Any]:
        message = f"scripted {self.status}"
        return {"error": {"message": message, "type": "scripted", "code": self.code}}

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": None if self.refusal else self.text,
            "refusal": self.refusal,
        }
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        usage = honest_usage(request, self.text) if self.usage is HONEST else self.usage
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "scripted"}
        return {**answer, "choices": [choice], "usage": usage}


def vector_of(text: str, num_dimensions: int) -> list[float]:
    """Return a vector that depends only on the text; exact in float32, not of length 1."""
    return [byte - 127.5 for byte in hashlib.sha256(text.encode()).digest()[:num_dimensions]]


def vectors_body(
    vectors: Sequence[Sequence[float] | str], num_tokens: int, is_base64: bool = True
) -> str:
    """Return a reply of the embeddings API; its order is reversed, because none is promised."""
    data = []
    for index, vector in enumerate(vectors):
        embedding: Any = vector
        if is_base64 and not isinstance(vector, str):
            embedding = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return json.dumps({"object": "list", "data": data[::-1], "model": "scripted", "usage": usage})


def embeddings(request: dict[str, Any]) -> Reply:
    """Return the reply of an honest server to an embeddings request: three bytes a token."""
    texts = request["input"]
    num_tokens = sum(math.ceil(len(text.encode()) / 3) for text in texts)
    vectors = [vector_of(text, request.get("dimensions", 4)) for text in texts]
    return Reply(raw=vectors_body(vectors, num_tokens, request["encoding_format"] == "base64"))


@dataclass
class LLMServer:
    """The running server: its address, the requests it got, and its next replies.

    `requests` are all requests in their order, `answered` those whose answer was sent completely.
    """

    base_url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    answered: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    script: list[Reply] = field(default_factory=list)
    otherwise: Callable[[dict[str, Any]], Reply] = field(
        default=lambda request: (
            embeddings(request) if "input" in request else Reply(f"answer {request['seed']}")
        )
    )
    num_busy: int = 0
    most_busy: int = 0

    def reply_to(self, request: dict[str, Any]) -> Reply:
        """Return the next reply of the script, or the one that `otherwise` gives."""
        return self.script.pop(0) if self.script else self.otherwise(request)


def chat(server: LLMServer, cache: Path | None = None, **changed: Any) -> dict[str, Any]:
    """Return the section `llm` of a recipe: one request at a time, without retries."""
    return {
        "kind": "openai",
        "model": "scripted",
        "base_url": server.base_url,
        "cache": str(cache) if cache else None,
        "max_retries": 0,
        "concurrency": 1,
        **changed,
    }


def open_client(server: LLMServer, cache: Path | None = None, **changed: Any) -> LLM:
    """Return a client of the server that never retries."""
    values = chat(server, cache, **{"model": "m", "concurrency": 8, "timeout": 5.0, **changed})
    return LLM(validate(LLMConfig, values, "test"))


def assert_no_key(folder: Path) -> None:
    """Check that no file holds the key."""
    for file in folder.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


@contextmanager
def llm_server() -> Iterator[LLMServer]:
    """Yield a server that replies with `script` in order, then with what `otherwise` returns."""
    state = LLMServer()
    lock = threading.RLock()

    class Handler(Quiet):
        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, request: dict[str, Any]) -> None:
            with lock:
                state.requests.append(request)
                state.authorizations.append(self.headers["Authorization"])
                state.num_busy += 1
                state.most_busy = max(state.most_busy, state.num_busy)
                reply = state.reply_to(request)
            while not reply.until():
                time.sleep(0.01)
            time.sleep(reply.delay)
            is_sent = self.send(reply, reply.body(request))
            with lock:
                state.num_busy -= 1
                if is_sent and reply.status == 200:
                    state.answered.append(request)

        def send(self, reply: Reply, body: bytes) -> bool:
            self.close_connection = self.close_connection or reply.drop or reply.cut
            if reply.drop:
                return False
            try:
                self.send_response(reply.status)
                for name, value in {"Content-Type": "application/json", **reply.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if reply.cut else body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client gave up on a slow reply
                return False
            return not reply.cut

    with serving(Handler) as address:
        state.base_url = f"{address}/v1"
        yield state
