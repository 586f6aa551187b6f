"""The Batch API: requests go up in a file and their answers come back within a day, at half the price.

A batch is noted on disk before it is waited for, with the id of its file even before it is created. A run that was
killed finds the note, goes on waiting for that very batch, and submits none of its requests again.
"""

import random
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.llm.batch_files import MAX_FILE_BYTES, BatchNote, Chunk, Journal
from skilltrain.llm.batch_server import BatchRefusedError, BatchServer
from skilltrain.llm.budget import Budget, counted, estimate_prompt, most_of
from skilltrain.llm.cache import Answers
from skilltrain.llm.chat import body_of
from skilltrain.llm.protocol import Answer, Completion, CompletionError, Request, Usage
from skilltrain.llm.server import Key
from skilltrain.llm.settings import OpenAIConfig
from skilltrain.terminal import say

_ENDED = ("completed", "failed", "expired", "cancelled")


class BatchLLM:
    """An OpenAI-compatible server with a Batch API."""

    def __init__(self, config: OpenAIConfig, answers: Answers, budget: Budget) -> None:
        if config.cache is None:
            raise SkilltrainError("llm.mode=batch notes its batches in the cache's folder", fix="set llm.cache")
        self.config, self.answers, self.budget = config, answers, budget
        self.model = config.model
        self.key = Key(config)
        self.journal = Journal(config.cache.expanduser() / "batches")

    def complete_all(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """See the protocol LLM. Batches that an earlier run left under way are taken up first."""
        return _BatchRun(self).answers(requests)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request whose answer is under way: its position, and what is reserved for it."""

    position: int
    most: Usage


class _BatchRun:
    """One `complete_all`."""

    def __init__(self, llm: BatchLLM) -> None:
        self._llm, self._config, self._budget, self._journal = llm, llm.config, llm.budget, llm.journal
        self._server = BatchServer(llm.config, llm.key)
        self._waiting: dict[str, list[_Waiting]] = {}
        self._num_prompt_tokens: dict[str, int] = {}
        self._chunk = Chunk()
        self._open: dict[str, BatchNote] = {}  # those with answers that we wait for, by the names of their notes
        self._note_of = self._notes_by_key()
        self._shown: dict[str, tuple[str, int]] = {}

    def _notes_by_key(self) -> dict[str, BatchNote]:
        return {key: note for note in self._journal.notes(self._config.base_url) for key in note.keys}

    def answers(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """(position, answer) of every request, batch by batch."""
        for position, request in enumerate(requests):
            most = most_of(request, self._config.max_tokens)
            while not self._budget.reserve(most) and not self._budget.is_spent:
                yield from self._next_answers()
            if self._budget.is_spent:
                reason = f"not asked: the budget of {self._budget} was used up"
                yield position, CompletionError("budget", reason)
                continue
            yield from self._take(position, request, most)
            if len(self._chunk.keys) >= self._config.batch.max_requests or self._chunk.num_bytes > MAX_FILE_BYTES:
                while len(self._open) >= self._config.batch.max_open:
                    yield from self._collected()
                yield from self._submitted()
        while self._waiting:
            yield from self._next_answers()

    def _take(self, position: int, request: Request, most: Usage) -> Iterator[tuple[int, Answer]]:
        """The kept answer to a request; else the request joins the batch that holds it already, or the next one."""
        key, num_prompt_tokens = self._llm.answers.key(request), estimate_prompt(request.messages)
        if (known := self._llm.answers.get(key)) is not None:
            known = counted(known, num_prompt_tokens)
            self._budget.settle(most, Usage(known.num_prompt_tokens, known.num_completion_tokens))
            yield position, known
            return
        if key in self._note_of:
            self._take_up(key)
        elif key not in self._waiting:
            self._chunk.add(key, body_of(request, self._config))
        self._waiting.setdefault(key, []).append(_Waiting(position, most))
        self._num_prompt_tokens[key] = num_prompt_tokens

    def _next_answers(self) -> Iterator[tuple[int, Answer]]:
        """Send what is gathered, then wait for one batch to end."""
        if self._chunk.keys and len(self._open) < self._config.batch.max_open:
            yield from self._submitted()
        if self._open:
            yield from self._collected()

    def _submitted(self) -> Iterator[tuple[int, Answer]]:
        """Send the gathered requests as a batch, but for those that another process has sent meanwhile.

        Yields the answers which that process has brought home already.
        """
        found: dict[str, Completion] = {}
        with self._journal.locked():
            found = {key: known for key in self._chunk.keys if (known := self._llm.answers.get(key)) is not None}
            self._send(found)
        for key, known in found.items():
            yield from self._given(key, counted(known, self._num_prompt_tokens[key]))

    def _send(self, found: Collection[str]) -> None:
        """Submit the gathered requests but for those in `found` or under way; to be called under the journal's lock."""
        self._note_of |= self._notes_by_key()
        for note in {n.file_name: n for key in self._chunk.keys if (n := self._note_of.get(key))}.values():
            self._attend(note)
        chunk, self._chunk = self._chunk.without(self._note_of.keys() | found), Chunk()
        if not chunk.keys:
            return
        file_id = self._server.upload(chunk.lines())
        note = self._created(self._journal.write(BatchNote(self._config.base_url, tuple(chunk.keys), file_id)))
        self._note_of |= dict.fromkeys(note.keys, note)
        self._open[note.file_name] = note
        say(f"batch {note.batch_id}: submitted, {len(note.keys):,} requests")

    def _created(self, note: BatchNote) -> BatchNote:
        """A note with the id of the batch that is created over its file; where the server refuses, the note goes."""
        try:
            return self._journal.created(note, self._server.create(note.input_file_id))
        except BatchRefusedError:
            self._journal.remove(note)
            raise

    def _take_up(self, key: str) -> None:
        """Wait for the batch that holds `key` already."""
        if self._note_of[key].batch_id is not None:
            self._attend(self._note_of[key])
            return
        with self._journal.locked():  # whoever was creating it has done so now, or is dead
            self._note_of |= self._notes_by_key()
            self._attend(self._note_of[key])

    def _attend(self, note: BatchNote) -> None:
        """Wait for a batch that another run, or another process, has submitted."""
        if note.file_name in self._open:
            return
        if note.batch_id is None:  # its run was killed while it created the batch, or had no time to note it
            found = self._server.find(note.input_file_id)
            note = self._journal.created(note, found) if found else self._created(note)
            self._note_of |= dict.fromkeys(note.keys, note)
        self._open[note.file_name] = note
        say(f"batch {note.batch_id}: taken up again, {len(note.keys):,} requests")

    def _collected(self) -> Iterator[tuple[int, Answer]]:
        """Wait until one of the open batches has ended; its answers, every request of it accounted for."""
        note, batch = self._ended()
        if batch.status == "failed":
            self._journal.remove(note)
            raise self._server.refusal(batch)
        keys = set(note.keys)
        for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
            for key, answer in self._server.results(file_id, self._num_prompt_tokens):
                if key in keys:
                    keys.remove(key)
                    if isinstance(answer, Completion):
                        self._llm.answers.put(key, answer)
                    yield from self._given(key, answer)
        for key in keys:
            expired = CompletionError("expired", f"its batch is {batch.status}; a new run asks for such ones alone")
            missing = CompletionError("failed", "the batch's files hold no answer to it")
            yield from self._given(key, missing if batch.status == "completed" else expired)
        self._journal.remove(note)
        del self._open[note.file_name]
        self._note_of = {key: other for key, other in self._note_of.items() if other.file_name != note.file_name}

    def _ended(self) -> tuple[BatchNote, Any]:
        """One of the open batches, when it has ended; looked at ever more rarely."""
        seconds = self._config.batch.poll_seconds
        while True:
            for note in self._open.values():
                batch = self._server.look(str(note.batch_id))
                self._show(batch)
                if batch.status in _ENDED:
                    return note, batch
            time.sleep(seconds * random.uniform(0.9, 1.1))
            seconds = min(1.5 * seconds, self._config.batch.max_poll_seconds)

    def _show(self, batch: Any) -> None:
        """Say how far a batch is, at each change of state and each tenth of the way."""
        counts = batch.request_counts
        done, total = ((counts.completed or 0) + (counts.failed or 0), counts.total or 0) if counts else (0, 0)
        shown = (str(batch.status), 10 * done // max(1, total))
        if self._shown.get(batch.id) != shown:
            self._shown[batch.id] = shown
            say(f"batch {batch.id}: {batch.status}, {done:,} of {total:,}")

    def _given(self, key: str, answer: Answer) -> Iterator[tuple[int, Answer]]:
        """Book an answer and give it to all who wait for it."""
        used = Usage()
        if isinstance(answer, Completion):
            used = Usage(answer.num_prompt_tokens, answer.num_completion_tokens)
        for waiting in self._waiting.pop(key, ()):
            unclear = isinstance(answer, CompletionError) and answer.kind == "malformed"
            self._budget.settle(waiting.most, waiting.most if unclear else used)
            yield waiting.position, answer
