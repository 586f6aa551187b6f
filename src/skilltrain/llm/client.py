"""An OpenAI-compatible server asked live: many requests at once, tried again where that helps, within a budget."""

import itertools
import json
import os
import queue
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, TypeVar

import openai

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import Answers
from skilltrain.llm.budget import Budget, estimate_prompt, estimate_tokens, most_of, reported_tokens
from skilltrain.llm.protocol import Answer, Completion, CompletionError, Request, Usage
from skilltrain.llm.settings import OpenAIConfig, ServerConfig, SmolLM2Config

ItemT = TypeVar("ItemT")
ReplyT = TypeVar("ReplyT")

_SECRET_CHARS = 8  # a shorter key, such as "none", is no secret, and common words must not be blotted out
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 120.0
_MAX_FAILURES = 20  # in a row; more end the run
_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.S)
_UNPAIRED = re.compile("[\ud800-\udfff]")  # surrogates, which no file takes
_MALFORMED = (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError)


class Server:
    """A server: its key, which appears nowhere else, its pace, and what its failures mean."""

    def __init__(self, config: ServerConfig, budget: Budget) -> None:
        self.config, self.budget = config, budget
        self._key = os.environ.get(config.api_key_env, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            fault = "a key has no line breaks, and ASCII letters only"
            raise SkilltrainError(f"the environment variable {config.api_key_env} holds no key: {fault}")
        self._pace = threading.Lock()
        self._free_at = 0.0

    @cached_property
    def client(self) -> openai.OpenAI:
        """openai's client. Raises SkilltrainError where the server is OpenAI's own and no key is set.

        It repeats nothing by itself: a try that broke off may have been charged, so each one is paid from the budget.
        """
        if self.config.is_openai and not self._key:
            fix = f"set {self.config.api_key_env}, or name another base_url"
            raise SkilltrainError(f"no key for {self.config.base_url}", fix=fix)
        key = self._key or "none"  # openai refuses an empty key
        return openai.OpenAI(api_key=key, base_url=self.config.base_url, timeout=self.config.timeout, max_retries=0)

    def blot(self, text: str) -> str:
        """`text` without the key, which some servers send back."""
        return text.replace(self._key, "[key]") if len(self._key) >= _SECRET_CHARS else text

    def ask(self, send: Callable[[], tuple[ReplyT, Usage]], most: Usage) -> ReplyT:
        """The reply that `send` gives, with what it took, after as many tries as the settings allow.

        `most` is reserved for the first try. Raises CompletionError where the reply is malformed or the budget holds no
        further try, and the last try's openai error where all failed.
        """
        for num_tries in itertools.count(1):
            used = most  # until something else is known
            try:
                self._take_turn()
                reply, used = send()
                return reply
            except openai.OpenAIError as error:
                used = most if _may_have_cost(error) else Usage()
                if num_tries > self.config.max_retries or not is_passing(error):
                    raise
                seconds = _wait_before_retry(error, num_tries)
            finally:
                self.budget.settle(most, used)
            time.sleep(seconds)
            if most != Usage() and not self.budget.wait_to_reserve(most):
                raise over_budget(self.budget)
        raise AssertionError

    def _take_turn(self) -> None:
        """Wait until the next request may go out."""
        if self.config.requests_per_minute is None:
            return
        with self._pace:
            start = max(time.monotonic(), self._free_at)
            self._free_at = start + 60 / self.config.requests_per_minute
        time.sleep(max(0.0, start - time.monotonic()))

    def explain(self, error: Exception) -> SkilltrainError | CompletionError:
        """What to raise for a client's error: for all requests or for this one; the key is not in it."""
        reason = " ".join(self.blot(str(error) or "timed out").split())[:300]
        section = self.config.section
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            what, fix = f"the key was refused: {reason}", f"set {self.config.api_key_env} to a valid key"
        elif isinstance(error, openai.NotFoundError):
            what, fix = (
                f"no model '{self.config.model}' here: {reason}",
                f"check {section}.model and {section}.base_url",
            )
        elif _is_without_credit(error):
            what, fix = "the account has no credit left", "top it up, then run again"
        elif isinstance(error, openai.APIConnectionError) and not _may_have_cost(error):
            what, fix = f"no server answers: {reason}", f"start it, or correct {section}.base_url"
        else:
            return CompletionError("failed", reason)
        return SkilltrainError(what, where=self.config.base_url, fix=fix)


def _is_without_credit(error: Exception) -> bool:
    return isinstance(error, openai.RateLimitError) and error.code == "insufficient_quota"


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, openai.APIStatusError):
        return not _is_without_credit(error) and (error.status_code in (408, 409, 429) or error.status_code >= 500)
    return isinstance(error, openai.APIConnectionError)


def _may_have_cost(error: Exception) -> bool:
    """Whether the server may have answered, and charged, without our seeing it: it was reached and gave no status."""
    was_reached = type(error.__cause__).__name__ not in ("ConnectError", "ConnectTimeout", "PoolTimeout")
    return isinstance(error, openai.APIConnectionError) and was_reached


def _wait_before_retry(error: Exception, num_tries: int) -> float:
    """The seconds that a refusing server asks for, else 0.5, 1, 2, …, less a random part of a half; at most 120."""
    response = getattr(error, "response", None)
    header = response.headers.get("retry-after", "") if response is not None else ""
    doubled = _FIRST_WAIT * 2.0 ** min(num_tries - 1, 10) * random.uniform(0.5, 1.0)
    return min(float(header) if re.fullmatch(r"\d+(\.\d+)?", header) else doubled, _LONGEST_WAIT)


def over_budget(budget: Budget) -> CompletionError:
    """What becomes of a request that the budget does not hold."""
    return CompletionError("budget", f"not sent: the budget of {budget} is used up")


def in_threads(work: Callable[[ItemT], ReplyT], items: Iterable[ItemT], num_threads: int) -> Iterator[ReplyT]:
    """Yield `work(item)` of each item as it is done; items are taken one by one, in their order.

    After an error no item is begun; those under way come to their end and are yielded, then the error is raised.
    Threads are daemons, unlike those of ThreadPoolExecutor, so that Ctrl-C need not wait for a silent server.
    """
    todo, turn, stopped = iter(items), threading.Lock(), threading.Event()
    done: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        fault = None
        try:
            while not stopped.is_set():
                with turn:
                    item = next(todo)
                done.put((True, work(item)))
        except StopIteration:
            pass
        except BaseException as error:
            stopped.set()
            fault = error
        done.put((False, fault))

    for _ in range(num_threads):
        threading.Thread(target=run, daemon=True).start()
    num_running, fault = num_threads, None
    try:
        while num_running:
            is_reply, value = done.get()
            if is_reply:
                yield value
            else:
                num_running, fault = num_running - 1, fault or value
        if fault is not None:
            raise fault
    finally:
        stopped.set()


class LLM(ABC):
    """A chat model, with the answers that it has given before and what it has used and may use.

    An answer from the cache counts what it took when it was made.
    """

    def __init__(self, config: OpenAIConfig | SmolLM2Config, answers: Answers, budget: Budget) -> None:
        self.model, self.max_tokens = config.model, config.max_tokens
        self.answers, self.budget = answers, budget

    @abstractmethod
    def complete_all(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """Yield (position, answer) of every request as it comes; positions count from 0.

        Requests are taken one by one, as there is room for them. Raises SkilltrainError where no further request can
        succeed; what was answered until then is in the cache.
        """


class LiveLLM(LLM):
    """A chat model behind a server that answers while one waits."""

    def __init__(self, config: OpenAIConfig, answers: Answers, budget: Budget) -> None:
        super().__init__(config, answers, budget)
        self._config, self._server = config, Server(config, budget)
        self._num_failures = 0

    def complete_all(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """See LLM. Requests are sent in their order."""
        return in_threads(self._answer, self._reserved(requests), self._config.concurrency)

    def _reserved(self, requests: Iterable[Request]) -> Iterator[tuple[int, Request, Usage | None]]:
        """(position, request, what is reserved for it; None where the budget does not hold it), each in its turn."""
        for position, request in enumerate(requests):
            most = most_of(request, self.max_tokens)
            yield position, request, most if self.budget.wait_to_reserve(most) else None

    def _answer(self, turn: tuple[int, Request, Usage | None]) -> tuple[int, Answer]:
        """The kept answer, or the server's, which is then kept."""
        position, request, most = turn
        if most is None:
            return position, over_budget(self.budget)
        key = self.answers.key(request)
        answer = self.answers.get(key)
        if answer is not None:
            self.budget.settle(most, usage_of(answer, most))
        else:
            answer = self._ask(request, most)
            self.answers.put(key, answer)
        return position, answer

    def _ask(self, request: Request, most: Usage) -> Answer:
        """The server's answer. Raises SkilltrainError for a fault of all requests, and for too many in a row."""
        try:
            answer = self._server.ask(lambda: self._send(request), most)
            self._num_failures = 0
            return answer
        except CompletionError as fault:
            return fault
        except openai.OpenAIError as error:
            failure = self._server.explain(error)
        if isinstance(failure, SkilltrainError):
            raise failure  # after the handler: openai's own error may hold the key, and --debug would show it
        self._num_failures += 1
        if self._num_failures >= _MAX_FAILURES:
            what = f"{self._num_failures} requests in a row failed, the last with: {failure.reason}"
            fix = "answers so far are cached; run again later"
            raise SkilltrainError(what, where=self._config.base_url, fix=fix)
        return failure

    def _send(self, request: Request) -> tuple[Completion, Usage]:
        """The server's reply to one try, and what it took. Raises CompletionError where it is no completion."""
        completions = self._server.client.chat.completions.with_raw_response
        reply = completions.create(**body_of(request, self._config))
        completion = read_answer(self._server.blot(reply.text), estimate_prompt(request.messages))
        return completion, completion.usage


def usage_of(answer: Answer, most: Usage) -> Usage:
    """What an answer took; the most that it can have taken where the server did not say."""
    if isinstance(answer, Completion):
        return Usage(answer.num_prompt_tokens or most.prompt, answer.num_completion_tokens)
    return most if answer.kind == "malformed" else Usage()


def body_of(request: Request, config: OpenAIConfig) -> dict[str, Any]:
    """The body of a request to the chat completions."""
    body: dict[str, Any] = {
        "model": config.model,
        "messages": request.rows(),
        "seed": request.seed,
        "max_completion_tokens" if config.is_openai else "max_tokens": config.max_tokens,
    }
    return body if config.temperature is None else body | {"temperature": config.temperature}


def read_answer(text: str, num_prompt_tokens: int) -> Completion:
    """A reply's body as a Completion. Raises CompletionError where it is none.

    A `<think>` block before the answer is paid for and left out of the text. `num_prompt_tokens` is our estimate, for
    servers that report none.
    """
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        content, refusal = choice["message"].get("content"), choice["message"].get("refusal")
        finish_reason, usage = choice.get("finish_reason") or "stop", body.get("usage")
        if refusal or finish_reason == "content_filter":
            finish_reason, content = "refusal", refusal or content
        written = _UNPAIRED.sub("\ufffd", content or "")
    except _MALFORMED:
        raise CompletionError("malformed", "the server's reply is no chat completion") from None
    reported = usage if isinstance(usage, dict) else {}
    num_prompt = reported_tokens(reported.get("prompt_tokens"), num_prompt_tokens)
    num_completion = reported_tokens(reported.get("completion_tokens"), estimate_tokens(written))
    return Completion(_THOUGHTS.sub("", written), str(finish_reason), num_prompt, num_completion)
