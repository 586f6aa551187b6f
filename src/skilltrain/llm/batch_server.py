"""A server's Batch API, question by question: each is repeated where that is harmless, and failures are explained."""

import io
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, TypeVar

from skilltrain.errors import SkilltrainError
from skilltrain.llm.batch_files import read_result
from skilltrain.llm.chat import ENDPOINT
from skilltrain.llm.pace import back_off
from skilltrain.llm.protocol import Answer
from skilltrain.llm.server import Key, explain, is_passing
from skilltrain.llm.settings import OpenAIConfig
from skilltrain.terminal import log

ResultT = TypeVar("ResultT")


class BatchRefusedError(SkilltrainError):
    """The server said that it makes no such batch; there is none to come back to."""


class BatchServer:
    """Uploads, creates, looks and fetches. All raise SkilltrainError where the server does not do as it is asked."""

    def __init__(self, config: OpenAIConfig, key: Key) -> None:
        import openai

        self._config, self._key = config, key
        self._client = openai.OpenAI(
            api_key=key.for_client, base_url=config.base_url, timeout=config.timeout, max_retries=config.max_retries
        )

    def upload(self, lines: IO[bytes]) -> str:
        """The id of a new file of requests."""
        file = ("skilltrain.jsonl", lines)
        return self._ask("upload a batch", lambda: _id_of(self._client.files.create(file=file, purpose="batch")))

    def create(self, input_file_id: str) -> str:
        """The id of a new batch over a file. A try that broke off may have made it: look before trying again."""
        import openai

        batches = self._client.with_options(max_retries=0).batches
        num_tries = 1
        while True:
            try:
                made = batches.create(input_file_id=input_file_id, endpoint=ENDPOINT, completion_window="24h")
                return _id_of(made)
            except (openai.OpenAIError, ValueError) as error:
                fault = self._fault("create a batch", error)
                if isinstance(error, openai.APIStatusError) and not is_passing(error):
                    raise BatchRefusedError(fault.what, where=self._config.base_url) from None
                if num_tries > self._config.max_retries or not is_passing(error):
                    raise fault from None
            time.sleep(min(back_off(num_tries), self._config.max_retry_wait))
            num_tries += 1
            if (found := self.find(input_file_id)) is not None:
                return found

    def find(self, input_file_id: str) -> str | None:
        """The id of the batch over a file, if the server has one."""

        def look() -> str | None:
            batches = self._client.batches.list(limit=100)  # asks for further pages as it goes
            return next((batch.id for batch in batches if batch.input_file_id == input_file_id), None)

        return self._ask("list the batches", look)

    def look(self, batch_id: str) -> Any:
        """A batch as it stands now."""

        def look() -> Any:
            batch = self._client.batches.retrieve(batch_id)
            if not isinstance(batch.status, str):
                raise ValueError("the reply is no batch")
            return batch

        return self._ask("look at a batch", look)

    def results(self, file_id: str, num_prompt_tokens: Mapping[str, int]) -> Iterator[tuple[str, Answer]]:
        """(custom id, answer) of every readable line of an output or an error file."""
        text = self._ask("fetch a batch's answers", lambda: self._client.files.content(file_id).read())
        num_broken = 0
        for line in io.BytesIO(self._key.blot(text.decode(errors="replace")).encode()):
            result = read_result(line, num_prompt_tokens)
            num_broken += result is None
            if result is not None:
                yield result
        if num_broken:
            log.warning("batch file %s: %d line(s) that are no answer", file_id, num_broken)

    def refusal(self, batch: Any) -> SkilltrainError:
        """Why the server took no request of a batch."""
        faults = (batch.errors.data if batch.errors else None) or []
        fault = faults[0] if faults else None
        where = f" (line {fault.line})" if fault and fault.line else ""
        reason = self._key.blot(f"{fault.message or fault.code}{where}" if fault else "no reason given")
        fix = "for a limit on queued tokens, lower llm.batch.max_requests or llm.batch.max_open"
        return SkilltrainError(f"the server refused batch {batch.id}: {reason}", where=self._config.base_url, fix=fix)

    def _ask(self, what: str, function: Callable[[], ResultT]) -> ResultT:
        """The server's answer to a question that may be repeated. Raises SkilltrainError where there is none."""
        import openai

        try:
            return function()
        except (openai.OpenAIError, ValueError, AttributeError) as error:  # the last two: a reply of another shape
            raise self._fault(what, error) from None

    def _fault(self, what: str, error: Exception) -> SkilltrainError:
        import openai

        if isinstance(error, openai.NotFoundError):
            reason = self._key.blot(str(error))
            fix = "no Batch API: llm.mode=live; a batch that is gone: delete its note in batches/ of llm.cache"
            return SkilltrainError(f"cannot {what}: {reason}", where=self._config.base_url, fix=fix)
        failure = explain(error, self._config, self._key, was_answered=False)
        if isinstance(failure, SkilltrainError):
            return failure
        fix = "run again: batches under way are taken up, none is submitted twice"
        return SkilltrainError(f"cannot {what}: {failure.reason}", where=self._config.base_url, fix=fix)


def _id_of(reply: Any) -> str:
    """The id of a file or a batch that a server made. Raises ValueError where it names none."""
    if not isinstance(found := getattr(reply, "id", None), str):
        raise ValueError("the reply holds no id")
    return found
