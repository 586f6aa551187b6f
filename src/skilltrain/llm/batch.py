"""The Batch API: requests go up in a file and their answers come back within a day, at half the price.

A batch is noted on disk before it is waited for, with the id of its file even before it is created. A run that was
killed finds the note, waits for that batch, and submits none of its requests again.
"""

import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import DATABASE, Answers, BatchNote
from skilltrain.llm.budget import Budget, estimate_prompt, most_of
from skilltrain.llm.client import (
    ENDPOINT,
    Server,
    body_of,
    is_passing,
    over_budget,
    read_answer,
    usage_of,
    wait_before_retry,
)
from skilltrain.llm.protocol import Answer, CompletionError, Request, Usage
from skilltrain.llm.settings import OpenAIConfig
from skilltrain.terminal import log, say

ResultT = TypeVar("ResultT")

MAX_FILE_BYTES = 190_000_000  # OpenAI takes 200 MB
_ENDED = ("completed", "failed", "expired", "cancelled")


class BatchLLM:
    """A chat model behind a server with a Batch API."""

    def __init__(self, config: OpenAIConfig, answers: Answers, budget: Budget) -> None:
        if config.cache is None:
            raise SkilltrainError("llm.mode=batch notes its batches in the cache's folder", fix="set llm.cache")
        self.config, self.answers, self.budget = config, answers, budget
        self.model = config.model

    def complete_all(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """See the protocol LLM. Batches that an earlier run left under way are taken up first."""
        return _BatchRun(self).answers(requests)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request whose answer is under way, and what is reserved for it."""

    position: int
    most: Usage
    num_prompt_tokens: int


class _BatchRun:
    """One `complete_all`."""

    def __init__(self, llm: BatchLLM) -> None:
        self._config, self._answers, self._budget = llm.config, llm.answers, llm.budget
        self._server = BatchServer(llm.config, llm.budget)
        self._waiting: dict[str, list[_Waiting]] = {}
        self._chunk: dict[str, bytes] = {}  # key → line, of requests not yet sent
        self._open: dict[str, BatchNote] = {}  # by file, the batches that we wait for
        noted = llm.answers.batches(llm.config.base_url)
        self._note_of = {key: note for note in noted for key in note.keys}
        self._shown = ""

    def answers(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """(position, answer) of every request, batch by batch."""
        num_bytes = 0
        for position, request in enumerate(requests):
            most = most_of(request, self._config.max_tokens)
            while not self._budget.reserve(most) and not self._budget.is_spent:
                yield from self._next_answers()
            if self._budget.is_spent:
                yield position, over_budget(self._budget)
                continue
            key = self._answers.key(request)
            if (known := self._answers.get(key)) is not None:
                self._budget.settle(most, usage_of(known, most))
                yield position, known
                continue
            self._join(key, request)
            self._waiting.setdefault(key, []).append(_Waiting(position, most, estimate_prompt(request.messages)))
            num_bytes += len(self._chunk.get(key, b""))
            if len(self._chunk) >= self._config.batch.max_requests or num_bytes > MAX_FILE_BYTES:
                while len(self._open) >= self._config.batch.max_open:
                    yield from self._collected()
                self._submit()
                num_bytes = 0
        while self._waiting:
            yield from self._next_answers()

    def _join(self, key: str, request: Request) -> None:
        """Wait for the batch that holds a request already, or put it into the next one."""
        if (note := self._note_of.get(key)) is not None:
            if note.file_id not in self._open:
                self._wait_for(note, is_new=False)
        elif key not in self._waiting:
            line = {"custom_id": key, "method": "POST", "url": ENDPOINT, "body": body_of(request, self._config)}
            self._chunk[key] = (json.dumps(line, ensure_ascii=False) + "\n").encode()

    def _next_answers(self) -> Iterator[tuple[int, Answer]]:
        """Send what is gathered, then wait for one batch to end."""
        if self._chunk and len(self._open) < self._config.batch.max_open:
            self._submit()
        if self._open:
            yield from self._collected()

    def _submit(self) -> None:
        """Send the gathered requests as a batch."""
        note = BatchNote(self._server.upload(b"".join(self._chunk.values())), tuple(self._chunk))
        self._answers.note_batch(self._config.base_url, note)
        self._chunk = {}
        self._wait_for(note, is_new=True)

    def _wait_for(self, note: BatchNote, is_new: bool) -> None:
        """Wait for a batch; where its id is not known, the run was killed before it was noted, or is about to be."""
        if note.batch_id is None:
            try:
                batch_id = self._server.create(note.file_id, look_first=not is_new)
            except _BatchRefusedError:
                self._answers.forget_batch(self._config.base_url, note)
                raise
            note = replace(note, batch_id=batch_id)
            self._answers.note_batch(self._config.base_url, note)
        self._note_of |= dict.fromkeys(note.keys, note)
        self._open[note.file_id] = note
        say(f"batch {note.batch_id}: {'submitted' if is_new else 'taken up again'}, {len(note.keys):,} requests")

    def _collected(self) -> Iterator[tuple[int, Answer]]:
        """Wait until one of the open batches has ended; its answers, every request of it accounted for."""
        note, batch = self._ended()
        if batch.status == "failed":
            self._answers.forget_batch(self._config.base_url, note)
            raise self._server.refusal(batch)
        expired = CompletionError("expired", f"its batch is {batch.status}; a new run asks for such requests again")
        missing = CompletionError("failed", "the batch's files hold no answer to it")
        found: dict[str, Answer] = dict.fromkeys(note.keys, missing if batch.status == "completed" else expired)
        for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
            for record in self._server.results(file_id):
                key = str(record.get("custom_id"))
                if key in found:
                    found[key] = _answer_of(record, self._waiting.get(key, []))
                    self._answers.put(key, found[key])
        for key, answer in found.items():
            for waiting in self._waiting.pop(key, ()):
                self._budget.settle(waiting.most, usage_of(answer, waiting.most))
                yield waiting.position, answer
        self._answers.forget_batch(self._config.base_url, note)
        del self._open[note.file_id]
        self._note_of = {key: other for key, other in self._note_of.items() if other.file_id != note.file_id}

    def _ended(self) -> tuple[BatchNote, Any]:
        """One of the open batches, when it has ended; polled ever more rarely."""
        seconds = self._config.batch.poll_seconds
        while True:
            for note in self._open.values():
                batch = self._server.look(str(note.batch_id))
                counts = batch.request_counts
                num_done = (counts.completed or 0) + (counts.failed or 0) if counts else 0
                shown = f"batch {batch.id}: {batch.status}, {num_done:,} of {len(note.keys):,}"
                if shown != self._shown:
                    say(shown)
                self._shown = shown
                if batch.status in _ENDED:
                    return note, batch
            time.sleep(seconds * random.uniform(0.9, 1.1))
            seconds = min(1.5 * seconds, self._config.batch.max_poll_seconds)


def _answer_of(record: dict[str, Any], waiting: list[_Waiting]) -> Answer:
    """The answer in a line of an output or an error file."""
    response, error = record.get("response") or {}, record.get("error")
    status, body = response.get("status_code"), response.get("body")
    if error is None and status == 200:
        try:
            return read_answer(json.dumps(body), waiting[0].num_prompt_tokens if waiting else 0)
        except CompletionError as malformed:
            return malformed
    error = error or (body.get("error") if isinstance(body, dict) else None)
    error = error if isinstance(error, dict) else {"message": str(error or "no reason given")}
    reason = " ".join(str(error.get("message") or error.get("code")).split())[:300]
    kind = "expired" if error.get("code") == "batch_expired" else "failed"
    return CompletionError(kind, reason if status is None else f"{reason} (status {status})")


class _BatchRefusedError(SkilltrainError):
    """The server said that it makes no such batch; there is none to come back to."""


class BatchServer:
    """The questions of the Batch API. All raise SkilltrainError where the server does not do as it is asked."""

    def __init__(self, config: OpenAIConfig, budget: Budget) -> None:
        self._config, self._server = config, Server(config, budget)
        self._client = self._server.client.with_options(max_retries=config.max_retries)

    def upload(self, lines: bytes) -> str:
        """The id of a new file of requests."""
        file = ("skilltrain.jsonl", lines)
        return self._ask("upload a batch", lambda: _id_of(self._client.files.create(file=file, purpose="batch")))

    def create(self, file_id: str, look_first: bool) -> str:
        """The id of the batch over a file. A try that broke off may have made it: look before trying again."""
        import openai

        batches = self._server.client.batches
        for num_tries in itertools.count(1):
            if look_first and (found := self._find(file_id)) is not None:
                return found
            try:
                return _id_of(batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h"))
            except (openai.OpenAIError, ValueError) as error:
                fault, may_pass = self._fault("create a batch", error), is_passing(error)
                if isinstance(error, openai.APIStatusError) and not may_pass:
                    raise _BatchRefusedError(fault.what, where=self._config.base_url) from None
                if num_tries > self._config.max_retries or not may_pass:
                    raise fault from None
                seconds = wait_before_retry(error, num_tries)
            time.sleep(min(seconds, self._config.max_retry_wait))
            look_first = True
        raise AssertionError

    def _find(self, file_id: str) -> str | None:
        """The id of the batch over a file, if the server has one."""

        def look() -> str | None:
            batches = self._client.batches.list(limit=100)  # fetches further pages as it goes
            return next((batch.id for batch in batches if batch.input_file_id == file_id), None)

        return self._ask("list the batches", look)

    def look(self, batch_id: str) -> Any:
        """A batch as it stands now."""

        def look() -> Any:
            batch = self._client.batches.retrieve(batch_id)
            if not isinstance(batch.status, str):
                raise ValueError("the reply is no batch")
            return batch

        return self._ask("look at a batch", look)

    def results(self, file_id: str) -> Iterator[dict[str, Any]]:
        """The readable lines of an output or an error file."""
        content = self._ask("fetch a batch's answers", lambda: self._client.files.content(file_id).read())
        num_broken = 0
        for line in filter(str.strip, self._server.blot(content.decode(errors="replace")).split("\n")):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield record
            else:
                num_broken += 1
        if num_broken:
            log.warning("batch file %s: %d lines cannot be read", file_id, num_broken)

    def refusal(self, batch: Any) -> SkilltrainError:
        """Why the server took no request of a batch."""
        faults = (batch.errors.data if batch.errors else None) or []
        reason = "no reason given"
        if faults:
            reason = f"{faults[0].message or faults[0].code}" + (f" (line {faults[0].line})" if faults[0].line else "")
        what = f"the server refused batch {batch.id}: {self._server.blot(reason)}"
        fix = "for a limit on queued tokens, lower llm.batch.max_requests or llm.batch.max_open"
        return SkilltrainError(what, where=self._config.base_url, fix=fix)

    def _ask(self, what: str, function: Callable[[], ResultT]) -> ResultT:
        """The server's answer to a question that may be repeated. Raises SkilltrainError where there is none."""
        import openai

        try:
            return function()
        except (openai.OpenAIError, ValueError, AttributeError) as error:  # the last two: a reply of another shape
            raise self._fault(what, error) from None

    def _fault(self, what: str, error: Exception) -> SkilltrainError:
        import openai

        fix = "run again: batches under way are taken up, none is submitted twice"
        if isinstance(error, openai.NotFoundError):
            fix = f"no Batch API: llm.mode=live; a batch that is gone: delete {DATABASE} in llm.cache"
            failure = CompletionError("failed", self._server.blot(str(error)))
        else:
            failure = self._server.explain(error)
        if isinstance(failure, SkilltrainError):
            return failure
        return SkilltrainError(f"cannot {what}: {failure.reason}", where=self._config.base_url, fix=fix)


def _id_of(reply: Any) -> str:
    """The id of a file or a batch that a server made. Raises ValueError where it names none."""
    if not isinstance(found := getattr(reply, "id", None), str):
        raise ValueError("the reply holds no id")
    return found
