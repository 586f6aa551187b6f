"""A real HTTP server on loopback that speaks OpenAI's chat completions, batches and embeddings, and fails as told."""

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
from email.parser import BytesParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from loopback import Quiet, serving
from skilltrain.config import validate
from skilltrain.llm import LLM, Completion, OpenAIConfig, Request, open_llm

HONEST: Any = object()
KEY = "sk-secret-0123456789"
ASK = ("", "Say hello.")


def honest_usage(request: dict[str, Any], text: str) -> dict[str, int]:
    """Three bytes a token: more than the client estimates, so that its figures are the server's."""
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
    """One scripted reply: an answer's text, or a status, a raw body, a refusal, a delay, a connection that breaks.

    It goes out `delay` seconds after `until` says yes.
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
    cut: bool = False  # the connection ends in the middle of the body
    drop: bool = False  # the connection ends without a word

    def content(self, request: dict[str, Any]) -> Any:
        """The decoded body as a server would send it."""
        if self.status != 200:
            return {
                "error": {
                    "message": f"scripted {self.status}",
                    "type": "scripted",
                    "code": self.code,
                }
            }
        message = {
            "role": "assistant",
            "content": None if self.refusal else self.text,
            "refusal": self.refusal,
        }
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        usage = honest_usage(request, self.text) if self.usage is HONEST else self.usage
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "scripted"}
        return {**answer, "choices": [choice], "usage": usage}

    def body(self, request: dict[str, Any]) -> bytes:
        """The body as a server would send it."""
        return (json.dumps(self.content(request)) if self.raw is None else self.raw).encode()


def vector_of(text: str, num_dimensions: int) -> list[float]:
    """Numbers that only the text decides; exact in float32, not of length 1."""
    return [byte - 127.5 for byte in hashlib.sha256(text.encode()).digest()[:num_dimensions]]


def vectors_body(
    vectors: Sequence[Sequence[float] | str], num_tokens: int, is_base64: bool = True
) -> str:
    """An answer of the embeddings API; the last vector comes first, for no order is promised."""
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
            if is_base64 and not isinstance(vector, str)
            else vector,
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return json.dumps({"object": "list", "data": data[::-1], "model": "scripted", "usage": usage})


def embeddings(request: dict[str, Any]) -> Reply:
    """What an honest server replies to an embeddings request: three bytes a token."""
    texts, num_dimensions = request["input"], request.get("dimensions", 4)
    num_tokens = sum(math.ceil(len(text.encode()) / 3) for text in texts)
    vectors = [vector_of(text, num_dimensions) for text in texts]
    return Reply(raw=vectors_body(vectors, num_tokens, request["encoding_format"] == "base64"))


@dataclass
class LLMServer:
    """The running server: where it is, what it was asked and has answered, what it says next.

    `requests` are chat and embeddings requests as they came in, `answered` those whose answer went out whole; those of
    batches stand in `batched`. `faults` maps an endpoint, as in `POST /batches`, to replies given instead of its own.
    """

    base_url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    answered: list[dict[str, Any]] = field(default_factory=list)
    batched: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    script: list[Reply] = field(default_factory=list)
    otherwise: Callable[[dict[str, Any]], Reply] = field(
        default=lambda request: (
            embeddings(request) if "input" in request else Reply(f"answer {request['seed']}")
        )
    )
    faults: dict[str, list[Reply]] = field(default_factory=dict)
    batch_steps: list[str] = field(
        default_factory=lambda: ["validating", "in_progress", "completed"]
    )
    leaves_out: Callable[[dict[str, Any]], bool] = field(default=lambda request: False)
    files: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    looks: dict[str, int] = field(default_factory=dict)
    num_busy: int = 0
    most_busy: int = 0

    def reply_to(self, request: dict[str, Any]) -> Reply:
        """The next reply of the script, or what `otherwise` makes of a request."""
        return self.script.pop(0) if self.script else self.otherwise(request)

    def upload(self, content: bytes) -> dict[str, Any]:
        """Keep a file."""
        file_id = f"file-{len(self.files)}"
        self.files[file_id] = content
        return {
            "id": file_id,
            "object": "file",
            "bytes": len(content),
            "created_at": 0,
            "filename": "f",
            "purpose": "batch",
            "status": "processed",
        }

    def create_batch(self, values: dict[str, Any]) -> dict[str, Any]:
        """A new batch over an uploaded file."""
        batch_id = f"batch-{len(self.batches)}"
        lines = self.files[values["input_file_id"]].decode().splitlines()
        self.batched += [json.loads(line)["body"] for line in lines]
        self.batches[batch_id] = {
            **values,
            "id": batch_id,
            "object": "batch",
            "created_at": 0,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "errors": None,
            "request_counts": {"completed": 0, "failed": 0, "total": len(lines)},
        }
        return self.batches[batch_id]

    def look_at_batch(self, batch_id: str) -> dict[str, Any]:
        """A batch, one step further than at the last look."""
        batch, step = self.batches[batch_id], self.looks.get(batch_id, 0)
        self.looks[batch_id] = step + 1
        batch["status"] = self.batch_steps[min(step, len(self.batch_steps) - 1)]
        if batch["status"] == "failed":
            batch["errors"] = {
                "object": "list",
                "data": [{"code": "bad_line", "message": "line is bad", "line": 2}],
            }
        if (
            batch["status"] in ("completed", "expired", "cancelled")
            and batch["output_file_id"] is None
        ):
            self._end(batch)
        return batch

    def _end(self, batch: dict[str, Any]) -> None:
        output, errors = [], []
        for line in self.files[batch["input_file_id"]].decode().splitlines():
            record = json.loads(line)
            request, result = (
                record["body"],
                {"id": "r", "custom_id": record["custom_id"], "error": None},
            )
            if self.leaves_out(request):
                if batch["status"] == "expired":
                    error = {"code": "batch_expired", "message": "not executed in time"}
                    errors.append(json.dumps({**result, "response": None, "error": error}))
                continue
            reply = self.reply_to(request)
            body = reply.content(request) if reply.raw is None else reply.raw
            response = {"status_code": reply.status, "request_id": "q", "body": body}
            (output if reply.status == 200 else errors).append(
                json.dumps({**result, "response": response})
            )
        output.reverse()  # no order is promised
        batch["output_file_id"] = self.upload("\n".join(output).encode())["id"] if output else None
        batch["error_file_id"] = self.upload("\n".join(errors).encode())["id"] if errors else None
        batch["request_counts"] |= {"completed": len(output), "failed": len(errors)}


def chat(server: LLMServer, cache: Path | None = None, **changed: Any) -> dict[str, Any]:
    """The `llm:` section of a recipe that asks the server, one request after the other, and tries nothing again."""
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
    """A client of the server that tries nothing again."""
    values = chat(server, cache, **{"model": "m", "concurrency": 8, "timeout": 5.0, **changed})
    return open_llm(validate(OpenAIConfig, values, "test"))


def ask(llm: LLM, *seeds: int) -> list[str]:
    """Texts, or what went wrong, of one request for each seed, by position."""
    found = dict(llm.complete_all(Request(*ASK, seed) for seed in seeds))
    assert sorted(found) == list(range(len(seeds)))
    return [
        answer.text if isinstance(answer, Completion) else answer.kind
        for _, answer in sorted(found.items())
    ]


def texts(*seeds: int) -> list[str]:
    """What the server of the fixture answers to these seeds."""
    return [f"answer {seed}" for seed in seeds]


def assert_no_key(folder: Path) -> None:
    """No file holds the key."""
    assert all(
        KEY.encode() not in file.read_bytes() for file in folder.rglob("*") if file.is_file()
    )


def _uploaded(content_type: str, body: bytes) -> bytes:
    """The file in a multipart form."""
    message = BytesParser().parsebytes(
        b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body
    )
    parts = {
        part.get_param("name", header="content-disposition"): part for part in message.get_payload()
    }  # type: ignore
    return parts["file"].get_payload(decode=True)  # type: ignore


@contextmanager
def llm_server() -> Iterator[LLMServer]:
    """Yield a server that sends `script` reply by reply, and then whatever `otherwise` makes of a request."""
    state, lock = LLMServer(), threading.RLock()

    class Handler(Quiet):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            endpoint = urlsplit(self.path).path.removeprefix("/v1")
            if endpoint in ("/chat/completions", "/embeddings"):
                self.answer(json.loads(body))
            elif endpoint == "/files":
                self.api(
                    f"POST {endpoint}",
                    lambda: state.upload(_uploaded(self.headers["Content-Type"], body)),
                )
            else:
                self.api(f"POST {endpoint}", lambda: state.create_batch(json.loads(body)))

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            kind, *rest = parts.path.removeprefix("/v1/").split("/")
            if kind == "files":
                self.api("GET /files", lambda: state.files[rest[0]])
            elif rest:
                self.api("GET /batches/id", lambda: state.look_at_batch(rest[0]))
            else:
                self.api("GET /batches", lambda: self.batches(parse_qs(parts.query)))

        def batches(self, query: dict[str, list[str]]) -> dict[str, Any]:
            """Pages of two, newest first."""
            found = list(state.batches.values())[::-1]
            if "after" in query:
                found = found[[batch["id"] for batch in found].index(query["after"][0]) + 1 :]
            return {"object": "list", "data": found[:2], "has_more": len(found) > 2}

        def api(self, name: str, answer: Callable[[], Any]) -> None:
            with lock:
                state.calls.append(name)
                fault = state.faults[name].pop(0) if state.faults.get(name) else None
                # A connection that breaks says nothing of what the server has done.
                found = answer() if fault is None or fault.drop else None
            reply = fault or Reply()
            body = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send(reply, reply.body({"messages": []}) if fault else body)

        def answer(self, request: dict[str, Any]) -> None:
            with lock:
                state.requests.append(request)
                state.authorizations.append(self.headers["Authorization"])
                state.times.append(time.monotonic())
                state.num_busy += 1
                state.most_busy = max(state.most_busy, state.num_busy)
                reply = state.reply_to(request)
            while not reply.until():
                time.sleep(0.01)
            time.sleep(reply.delay)
            went_out = self.send(reply, reply.body(request))
            with lock:
                state.num_busy -= 1
                if went_out and reply.status == 200:
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
                self.close_connection = True  # the client gave up, as a slow reply means it to
                return False
            return not reply.cut

    with serving(Handler) as address:
        state.base_url = f"{address}/v1"
        yield state
