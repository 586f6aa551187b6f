"""Clients of OpenAI-compatible servers. The package openai repeats failed requests.

Notes:
    - The errors of openai may hold the key. `from None` keeps them out of tracebacks.
    - Some servers repeat the key in an error or in an answer, so both are masked.
    - The threads of ThreadPool are daemons, so Ctrl-C does not wait for a silent server.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from multiprocessing.pool import ThreadPool
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import (
    AnswerCache,
    AnswerError,
    Completion,
    Request,
    read_completion,
)
from skilltrain.llm.budget import Budget
from skilltrain.llm.settings import LLMConfig, ServerConfig
from skilltrain.texts import one_line

if TYPE_CHECKING:
    import openai  # its import takes half a second, so it is imported where it is needed

ItemT = TypeVar("ItemT")
ReplyT = TypeVar("ReplyT")

_MIN_SECRET_CHARS = 8  # a shorter key, such as "none", is not secret and may be a common word
_MAX_REASON_CHARS = 300
_MAX_TEMPERATURE = 2.0  # of OpenAI's API
_MAX_FAILURES = 20  # consecutive failures that end the run
_CONNECTION_ERRORS = ("ConnectError", "ConnectTimeout")  # classes of httpx
# Settings that an answer depends on. They are part of the answer's key in the cache.
_ANSWER_SETTINGS = {"kind", "model", "base_url", "temperature", "max_tokens"}


class ServerError(AnswerError):
    """A request failed after all retries. `status` is None if the connection broke."""

    def __init__(self, reason: str, status: int | None) -> None:
        super().__init__("failed", reason)
        self.status = status


class Server:
    """A server and its key. The key is kept out of errors, logs and files."""

    def __init__(self, config: ServerConfig) -> None:
        """Read the key from the environment. Raises SkilltrainError if it is no possible key."""
        self.config = config
        self.budget = Budget(config)
        self._key = os.environ.get(config.api_key_env, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise SkilltrainError(
                "invalid-key",
                f"the environment variable {config.api_key_env} holds no key: "
                "a key has only printable ASCII characters",
            )

    @cached_property
    def client(self) -> "openai.OpenAI":
        """The client of the package openai.

        Raises:
            SkilltrainError: The server is OpenAI's own, and there is no key.
        """
        import openai

        if self.config.is_openai and not self._key:
            raise SkilltrainError(
                "missing-key",
                f"no key for {self.config.base_url}",
                fix=f"set {self.config.api_key_env}, or name another base_url",
            )
        return openai.OpenAI(
            api_key=self._key or "none",  # openai refuses an empty key
            base_url=self.config.base_url,
            timeout=self.config.timeout,
            max_retries=self.config.max_retries,
        )

    def call(self, send: Callable[["openai.OpenAI"], ReplyT]) -> ReplyT:
        """Send a request if the budget allows it, and return the reply.

        Args:
            send: Sends the request with a client of openai.

        Raises:
            AnswerError: The budget is used up, or all retries of the package openai failed.
            SkilltrainError: All other requests would fail too, for example with a wrong key.
        """
        import openai

        client = self.client
        self.budget.check()
        try:
            return send(client)
        except openai.OpenAIError as error:
            # `from None`, because the original error may hold the key.
            raise self._translate_error(error) from None

    def mask_key(self, text: str) -> str:
        """Replace the key in a server's text by `[key]`. Some servers quote the key in errors."""
        return text.replace(self._key, "[key]") if len(self._key) >= _MIN_SECRET_CHARS else text

    def _translate_error(self, error: "openai.OpenAIError") -> ServerError | SkilltrainError:
        """Return our error for an error of openai's client, without the key.

        Args:
            error: The error after all retries. Its `status_code` is the HTTP status.

        Returns:
            A ServerError if another request may succeed, otherwise a SkilltrainError.
        """
        reason = one_line(self.mask_key(str(error)))[:_MAX_REASON_CHARS]
        status = getattr(error, "status_code", None)
        section = self.config.section
        if status in (401, 403):  # unauthorized or forbidden
            code = "key-refused"
            problem = f"the key was refused: {reason}"
            fix = f"set {self.config.api_key_env} to a valid key"
        elif status == 404:
            code = "unknown-model"
            problem = f"no model '{self.config.model}' here: {reason}"
            fix = f"check {section}.model and {section}.base_url"
        # Status 429 usually means too many requests, but OpenAI uses it also for an empty account.
        elif status == 429 and getattr(error, "code", None) == "insufficient_quota":
            code = "no-credit"
            problem = "the account has no credit left"
            fix = "top it up, then run again"
        elif type(error.__cause__).__name__ in _CONNECTION_ERRORS:
            code = "server-unreachable"
            problem = f"no server answers: {reason}"
            fix = f"start it, or correct {section}.base_url"
        else:  # another request may succeed
            return ServerError(reason, status)
        return SkilltrainError(code, problem, where=self.config.base_url, fix=fix)


class LLM:
    """A chat model: its server, the cache of its answers and the budget of the run."""

    def __init__(self, config: LLMConfig) -> None:
        self.config = config
        self._server = Server(config)
        self.budget = self._server.budget
        self._cache = AnswerCache(config.cache)
        self._parameters = config.model_dump(mode="json", include=_ANSWER_SETTINGS)
        # Without top_p, the key of an answer is as in caches from before this setting existed.
        if config.top_p is not None:
            self._parameters["top_p"] = config.top_p
        self._num_failures = 0  # requests in a row that failed
        self._failures_lock = Lock()

    def recall(self, request: Request) -> Completion | None:
        """Return the cached answer to a request, if any."""
        return self._cache.get(request.key(self._parameters))

    def complete(self, request: Request) -> Completion:
        """Ask the server, cache the answer and return it. Threads may share an LLM.

        Raises:
            AnswerError: The budget is used up, or the request failed.
            SkilltrainError: Every request would fail, or too many failed in a row.
        """
        try:
            answer = self._ask(request)
        except ServerError as error:
            self._count_failure(error)  # raises SkilltrainError after too many failures
            raise
        # A success ends the row of failures.
        with self._failures_lock:
            self._num_failures = 0
        self.budget.count(answer.usage)
        self._cache.put(request.key(self._parameters), answer)
        return answer

    def _count_failure(self, error: ServerError) -> None:
        """Count a failed request. Raise SkilltrainError if too many failed in a row.

        So a run does not go through thousands of items while the server is broken.
        """
        with self._failures_lock:
            self._num_failures += 1
            num_failures = self._num_failures
        if num_failures >= _MAX_FAILURES:
            raise SkilltrainError(
                "server-failing",
                f"{num_failures} requests in a row failed, the last with: {error.reason}",
                where=self.config.base_url,
                fix="answers so far are cached; run again later",
            ) from None

    def _ask(self, request: Request) -> Completion:
        """Send a request, and return the answer without the API key."""
        config = self.config
        # OpenAI's newer models refuse `max_tokens`. Other servers may know only this name.
        limit_name = "max_completion_tokens" if config.is_openai else "max_tokens"
        body: dict[str, Any] = {
            "model": config.model,
            "messages": request.messages(),
            "seed": request.seed,
            limit_name: config.max_tokens,
        }
        # A setting that is None is left out, so the server uses its own value.
        body |= config.model_dump(include={"temperature", "top_p"}, exclude_none=True)
        if config.temperature is not None:
            # Later attempts may add some temperature, so that the model gives another answer.
            temperature = config.temperature + request.added_temperature
            body["temperature"] = min(temperature, _MAX_TEMPERATURE)

        try:
            reply = self._server.call(lambda client: client.chat.completions.create(**body))
        except (ValueError, RecursionError):
            reply = None  # the reply is not JSON
        answer = read_completion(reply, request)
        return replace(answer, text=self._server.mask_key(answer.text))


def in_threads(
    work: Callable[[ItemT], ReplyT], items: Sequence[ItemT], num_threads: int
) -> Iterator[ReplyT]:
    """Call a function on all items in threads, and yield the results as they are ready.

    Items are started in order. After an error no item is started, and the running items are
    finished. Then the error is raised.

    Args:
        work: The function, such as one that sends a request.
        items: Its arguments.
        num_threads: Largest number of items that run at the same time.
    """
    errors: list[Exception] = []

    def run(item: ItemT) -> list[ReplyT]:
        """Return the result in a list, or an empty list after an error."""
        try:
            # The pool hands out all items, so after an error the rest must do nothing.
            return [] if errors else [work(item)]
        except Exception as error:
            errors.append(error)
            return []

    # A thread reserves 8 MB of addresses, so start no more threads than there are items.
    # ThreadPool refuses 0.
    with ThreadPool(max(1, min(num_threads, len(items)))) as pool:
        for replies in pool.imap_unordered(run, items):
            yield from replies
    if errors:
        raise errors[0]
