"""The Batch API: requests go up in a file and their answers come back within a day, at half the price.

A batch is noted on disk before it is created: a run that was killed finds the note and submits no request again.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import Answer, AnswerError, Answers, Request, Usage, read_answer
from skilltrain.llm.budget import Budget, most_of, over_budget, usage_of
from skilltrain.llm.client import LLM, Server, ServerError
from skilltrain.llm.settings import OpenAIConfig
from skilltrain.terminal import say

ReplyT = TypeVar("ReplyT")

ENDPOINT = "/v1/chat/completions"
_MAX_FILE_BYTES = 190_000_000  # OpenAI takes 200 MB
_ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A request of the next batch: its line, its positions among all requests, and what is reserved for each."""

    line: bytes
    positions: list[int]
    most: Usage


class BatchLLM(LLM):
    """A chat model behind a server with a Batch API; one batch is under way at a time."""

    def __init__(self, config: OpenAIConfig, answers: Answers, budget: Budget) -> None:
        if config.cache is None:
            raise SkilltrainError(
                "llm.mode=batch notes its batches in the cache's folder", fix="set llm.cache"
            )
        super().__init__(config, answers, budget)
        self._config, self._server, self._url = config, Server(config, budget), config.base_url

    def complete_all(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """See LLM. A batch that an earlier run left under way is waited for as soon as one of its requests comes."""
        left_behind = self.answers.batches(self._url)
        file_of = {key: file_id for file_id, keys in left_behind.items() for key in keys}
        chunk: dict[str, _Wanted] = {}
        num_bytes = 0
        for position, request in enumerate(requests):
            most, key = most_of(request, self.max_tokens), self.answers.key(request)
            is_full = len(chunk) >= self._config.batch_size or num_bytes > _MAX_FILE_BYTES
            if is_full or not self.budget.reserve(most):
                yield from self._complete(chunk)
                chunk, num_bytes = {}, 0
                if not self.budget.reserve(most):
                    yield position, over_budget(self.budget)
                    continue
            if keys := left_behind.pop(file_of.get(key, ""), None):
                self._fetch(file_of[key], keys)
            if (known := self.answers.get(key)) is not None:
                self.budget.settle(most, usage_of(known, most))
                yield position, known
            elif key in chunk:
                chunk[key].positions.append(position)
            else:
                line = {
                    "custom_id": key,
                    "method": "POST",
                    "url": ENDPOINT,
                    "body": request.body(self._config),
                }
                chunk[key] = _Wanted(
                    (json.dumps(line, ensure_ascii=False) + "\n").encode(), [position], most
                )
                num_bytes += len(chunk[key].line)
        yield from self._complete(chunk)

    def _complete(self, chunk: dict[str, _Wanted]) -> Iterator[tuple[int, Answer]]:
        """Submit a batch; its answers when it has ended, every request of it accounted for."""
        if not chunk:
            return
        file = "skilltrain.jsonl", b"".join(wanted.line for wanted in chunk.values())
        upload = self._server.client.files.create
        file_id = self._call(
            "upload a batch", lambda: _text(upload(file=file, purpose="batch"), "id")
        )
        self.answers.note_batch(self._url, file_id, [*chunk])
        for key, answer in self._fetch(file_id, [*chunk]).items():
            for position in chunk[key].positions:
                self.budget.settle(chunk[key].most, usage_of(answer, chunk[key].most))
                yield position, answer

    def _fetch(self, file_id: str, keys: Sequence[str]) -> dict[str, Answer]:
        """What became of every request of a batch, when it has ended; the cache then has the answers."""
        batch = self._ended(file_id, len(keys))
        if batch.status == "failed":
            self.answers.forget_batch(self._url, file_id)
            reason = "no reason given"
            if faults := (batch.errors.data if batch.errors else None):
                line = f" (line {faults[0].line})" if faults[0].line else ""
                reason = f"{faults[0].message or faults[0].code}{line}"
            what = f"the server refused batch {batch.id}: {self._server.blot(reason)}"
            fix = "for a limit on queued tokens, lower llm.batch_size"
            raise SkilltrainError(what, where=self._url, fix=fix)
        without = AnswerError(
            "expired", f"its batch is {batch.status}; a new run asks for such requests again"
        )
        if batch.status == "completed":
            without = AnswerError("failed", "the batch's files hold no answer to it")
        found: dict[str, Answer] = dict.fromkeys(keys, without)
        content = self._server.client.files.content
        for file in filter(None, (batch.output_file_id, batch.error_file_id)):
            lines = self._call("fetch a batch's answers", lambda file=file: content(file).read())
            for line in self._server.blot(lines.decode(errors="replace")).split("\n"):
                try:
                    record = json.loads(line)
                except ValueError:
                    continue  # the request that it answers is then one without an answer
                if isinstance(record, dict) and (key := str(record.get("custom_id"))) in found:
                    found[key] = _answer_of(record)
                    self.answers.put(key, found[key])
        self.answers.forget_batch(self._url, file_id)
        return found

    def _ended(self, file_id: str, num_requests: int) -> Any:
        """The batch over a file, made if need be, when it has ended; one that is refused leaves no note behind."""
        batches = self._server.client.batches

        def begin() -> str:
            for batch in batches.list(
                limit=100
            ):  # an earlier run, or a try that broke off, may have made it
                if batch.input_file_id == file_id:
                    return batch.id
            return _text(
                batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h"),
                "id",
            )

        def look() -> tuple[Any, str]:
            batch = batches.retrieve(batch_id)
            return batch, _text(batch, "status")

        batch_id = self._call(
            "create a batch", begin, lambda: self.answers.forget_batch(self._url, file_id)
        )
        shown = ""
        while True:
            batch, status = self._call("look at a batch", look)
            counts = batch.request_counts
            num_done = (counts.completed or 0) + (counts.failed or 0) if counts else 0
            now = f"batch {batch_id}: {status}, {num_done:,} of {num_requests:,}"
            if now != shown:
                say(now)
            if status in _ENDED:
                return batch
            shown = now
            time.sleep(self._config.poll_seconds)

    def _call(
        self, what: str, call: Callable[[], ReplyT], refused: Callable[[], None] = lambda: None
    ) -> ReplyT:
        """The server's reply to a call that may be repeated, or SkilltrainError; `refused`: it never will be taken."""
        fix = "run again: batches under way are taken up, none is submitted twice"
        try:
            return self._server.ask(lambda: (call(), Usage()), Usage())
        except ServerError as fault:
            if fault.is_refused:
                refused()
            if fault.status == 404:
                fix = "no Batch API: llm.mode=live"
            elif fault.ends_run is not None:
                raise fault.ends_run from None
            reason = fault.reason
        except (ValueError, AttributeError) as error:  # a reply of another shape
            reason = self._server.blot(str(error))
        raise SkilltrainError(f"cannot {what}: {reason}", where=self._url, fix=fix)


def _text(reply: object, name: str) -> str:
    """The text in a field of a reply. Raises ValueError where there is none."""
    if not isinstance(text := getattr(reply, name, None), str):
        raise ValueError(f"the reply holds no {name}")
    return text


def _answer_of(record: dict[str, Any]) -> Answer:
    """The answer in a line of an output or an error file."""
    response, error = record.get("response") or {}, record.get("error")
    status, body = response.get("status_code"), response.get("body")
    if error is None and status == 200:
        try:
            return read_answer(json.dumps(body), 0)
        except AnswerError as malformed:
            return malformed
    error = error or (body.get("error") if isinstance(body, dict) else None)
    error = error if isinstance(error, dict) else {"message": str(error or "no reason given")}
    reason = " ".join(str(error.get("message") or error.get("code")).split())[:300]
    kind = "expired" if error.get("code") == "batch_expired" else "failed"
    return AnswerError(kind, reason if status is None else f"{reason} (status {status})")
