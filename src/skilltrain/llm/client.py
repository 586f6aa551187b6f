"""An OpenAI-compatible server asked live: many requests at once, tried again where that helps, within a budget."""

import itertools
import json
import os
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import Answers
from skilltrain.llm.budget import Budget, estimate_prompt, estimate_tokens, most_of, reported_tokens
from skilltrain.llm.protocol import Answer, Completion, CompletionError, Request, Usage
from skilltrain.llm.settings import OpenAIConfig, ServerConfig

if TYPE_CHECKING:
    import openai

ItemT = TypeVar("ItemT")
ReplyT = TypeVar("ReplyT")

ENDPOINT: Final = "/v1/chat/completions"
_SECRET_CHARS = 8  # a shorter key, such as "none", is no secret, and common words must not be blotted out
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0
_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.S)
_UNPAIRED = re.compile("[\ud800-\udfff]")  # surrogates, which no file takes


class Server:
    """A server: its key, which appears nowhere else, its pace, and what its failures mean."""

    def __init__(self, config: ServerConfig, budget: Budget) -> None:
        self.config, self.budget = config, budget
        self._key = os.environ.get(config.api_key_env, "").strip()
        self._was_answered = False
        self._pace = threading.Lock()
        self._free_at = 0.0

    @cached_property
    def client(self) -> "openai.OpenAI":
        """openai's client. Raises SkilltrainError where the server is OpenAI's own and no key is set.

        It repeats nothing by itself: a try that broke off may have been charged, so each one is paid from the budget.
        """
        import openai

        if self.config.is_openai and not self._key:
            fix = f"set {self.config.api_key_env}, or name another base_url"
            raise SkilltrainError(f"no key for {self.config.base_url}", fix=fix)
        key = self._key or "none"  # openai refuses an empty key
        return openai.OpenAI(api_key=key, base_url=self.config.base_url, timeout=self.config.timeout, max_retries=0)

    def blot(self, text: str) -> str:
        """`text` without the key, which some servers send back."""
        return text.replace(self._key, "[key]") if len(self._key) >= _SECRET_CHARS else text

    def ask(self, send: Callable[[], tuple[ReplyT, Usage]], most: Usage, num_tokens: int) -> ReplyT:
        """The reply that `send` gives, with what it took, after as many tries as the settings allow.

        `most` is reserved for the first try. Raises CompletionError where the reply is malformed or the budget holds no
        further try, and the last try's openai error where all failed.
        """
        import openai

        for num_tries in itertools.count(1):
            used = Usage()
            try:
                self._take_turn(num_tokens)
                used = most  # until something else is known
                reply, used = send()
                self._was_answered = True
                return reply
            except openai.OpenAIError as error:
                used = most if may_have_cost(error) else Usage()
                if num_tries > self.config.max_retries or not is_passing(error):
                    raise
                seconds = wait_before_retry(error, num_tries)
            finally:
                self.budget.settle(most, used)
            time.sleep(min(seconds, self.config.max_retry_wait))
            if not self.budget.wait_to_reserve(most):
                raise over_budget(self.budget)
        raise AssertionError

    def _take_turn(self, num_tokens: int) -> None:
        """Wait until a request of so many tokens may go out."""
        requests, tokens = self.config.requests_per_minute, self.config.tokens_per_minute
        interval = max(60 / requests if requests else 0.0, 60 * num_tokens / tokens if tokens else 0.0)
        with self._pace:
            start = max(time.monotonic(), self._free_at)
            self._free_at = start + interval
        time.sleep(max(0.0, start - time.monotonic()))

    def explain(self, error: Exception) -> SkilltrainError | CompletionError:
        """What to raise for a client's error: for all requests or for this one; the key is not in it."""
        import openai

        reason = " ".join(self.blot(str(error) or "timed out").split())[:300]
        url, section = self.config.base_url, self.config.section
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            fix = f"set {self.config.api_key_env} to a valid key"
            return SkilltrainError(f"the key was refused: {reason}", where=url, fix=fix)
        if isinstance(error, openai.NotFoundError):
            fix = f"check {section}.model and {section}.base_url"
            return SkilltrainError(f"no model '{self.config.model}' here: {reason}", where=url, fix=fix)
        if is_without_credit(error):
            return SkilltrainError("the account has no credit left", where=url, fix="top it up, then run again")
        if isinstance(error, openai.APIConnectionError) and not may_have_cost(error) and not self._was_answered:
            fix = f"start it, or correct {section}.base_url"
            return SkilltrainError(f"no server answers: {reason}", where=url, fix=fix)
        return CompletionError("failed", reason)


def is_without_credit(error: Exception) -> bool:
    """Whether the account is empty, which waiting does not mend."""
    import openai

    return isinstance(error, openai.RateLimitError) and error.code == "insufficient_quota"


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    import openai

    if isinstance(error, openai.APIStatusError):
        return not is_without_credit(error) and (error.status_code in (408, 409, 429) or error.status_code >= 500)
    return isinstance(error, openai.APIConnectionError)


def may_have_cost(error: Exception) -> bool:
    """Whether the server may have answered, and charged, without our seeing it: it was reached and gave no status."""
    import openai

    was_reached = type(error.__cause__).__name__ not in ("ConnectError", "ConnectTimeout", "PoolTimeout")
    return isinstance(error, openai.APIConnectionError) and was_reached


def wait_before_retry(error: Exception, num_tries: int) -> float:
    """The seconds that a refusing server asks for, else 0.5, 1, 2, … up to 60, less a random part of up to a half."""
    response = getattr(error, "response", None)
    header = response.headers.get("retry-after", "") if response is not None else ""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(num_tries - 1, 30)) * random.uniform(0.5, 1.0)


def over_budget(budget: Budget) -> CompletionError:
    """What becomes of a request that the budget does not hold."""
    return CompletionError("budget", f"not sent: the budget of {budget} is used up")


def in_threads(work: Callable[[ItemT], ReplyT], items: Iterable[ItemT], num_threads: int) -> Iterator[ReplyT]:
    """Yield `work(item)` of each item as it is done; items are taken one by one, in their order.

    After an error no item is begun; those under way come to their end and are yielded, then the error is raised.
    Threads are daemons, unlike those of ThreadPoolExecutor, so that Ctrl-C need not wait for a silent server.
    """
    todo, turn, stopped = iter(items), threading.Lock(), threading.Event()
    done: queue.SimpleQueue[Future[ReplyT] | None] = queue.SimpleQueue()

    def run() -> None:
        while not stopped.is_set():
            future: Future[ReplyT] = Future()
            try:
                with turn:
                    item = next(todo)
                future.set_result(work(item))
            except StopIteration:
                break
            except BaseException as error:
                stopped.set()
                future.set_exception(error)
            done.put(future)
        done.put(None)

    for _ in range(num_threads):
        threading.Thread(target=run, daemon=True).start()
    num_running, fault = num_threads, None
    try:
        while num_running:
            future = done.get()
            if future is None:
                num_running -= 1
            elif error := future.exception():
                fault = fault or error
            else:
                yield future.result()
        if fault is not None:
            raise fault
    finally:
        stopped.set()


class LiveLLM:
    """A chat model behind a server that answers while one waits."""

    def __init__(self, config: OpenAIConfig, answers: Answers, budget: Budget) -> None:
        self.config, self.answers, self.budget = config, answers, budget
        self.model = config.model
        self._server = Server(config, budget)
        self._num_failures = 0

    def complete_all(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """See the protocol LLM. Requests are sent in their order."""
        return in_threads(self._answer, self._reserved(requests), self.config.concurrency)

    def _reserved(self, requests: Iterable[Request]) -> Iterator[tuple[int, Request, bool]]:
        """(position, request, whether the budget holds it), each when its turn has come."""
        for position, request in enumerate(requests):
            yield position, request, self.budget.wait_to_reserve(most_of(request, self.config.max_tokens))

    def _answer(self, turn: tuple[int, Request, bool]) -> tuple[int, Answer]:
        """The kept answer, or the server's, which is then kept."""
        position, request, is_reserved = turn
        if not is_reserved:
            return position, over_budget(self.budget)
        most, key = most_of(request, self.config.max_tokens), self.answers.key(request)
        answer = self.answers.get(key)
        if answer is not None:
            self.budget.settle(most, usage_of(answer, most))
            return position, answer
        answer = self._ask(request, most)
        self.answers.put(key, answer)
        return position, answer

    def _ask(self, request: Request, most: Usage) -> Answer:
        """The server's answer. Raises SkilltrainError for a fault of all requests, and for too many in a row."""
        import openai

        num_tokens = estimate_prompt(request.messages) + self.config.max_tokens
        try:
            answer = self._server.ask(lambda: self._send(request), most, num_tokens)
            self._num_failures = 0
            return answer
        except CompletionError as fault:
            return fault
        except openai.OpenAIError as error:
            failure = self._server.explain(error)
        if isinstance(failure, SkilltrainError):
            raise failure from None  # openai's own error may hold the key, and --debug would show it
        self._num_failures += 1
        if self._num_failures >= self.config.max_failures:
            what = f"{self._num_failures} requests in a row failed, the last with: {failure.reason}"
            fix = "answers so far are cached; run again later"
            raise SkilltrainError(what, where=self.config.base_url, fix=fix) from None
        return failure

    def _send(self, request: Request) -> tuple[Completion, Usage]:
        """The server's reply to one try, and what it took. Raises CompletionError where it is no completion."""
        completions = self._server.client.chat.completions.with_raw_response
        reply = completions.create(**body_of(request, self.config))
        completion = read_answer(self._server.blot(reply.text), estimate_prompt(request.messages))
        return completion, completion.usage


def usage_of(answer: Answer, most: Usage) -> Usage:
    """What an answer took; of a malformed one nothing is known but the most that it can have taken."""
    if isinstance(answer, Completion):
        return answer.usage
    return most if answer.kind == "malformed" else Usage()


def body_of(request: Request, config: OpenAIConfig) -> dict[str, Any]:
    """The body of a request to the chat completions."""
    body: dict[str, Any] = {
        "model": config.model,
        "messages": [{"role": message.role, "content": message.content} for message in request.messages],
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
    except (ValueError, RecursionError) as error:
        raise CompletionError("malformed", f"the server's reply is not JSON: {error}") from None
    try:
        choice = body["choices"][0]
        content, refusal = choice["message"].get("content"), choice["message"].get("refusal")
        finish_reason, usage = choice.get("finish_reason") or "stop", body.get("usage")
    except (KeyError, TypeError, IndexError, AttributeError):
        raise CompletionError("malformed", "the server's reply holds no choices[0].message") from None
    if refusal or finish_reason == "content_filter":
        finish_reason, content = "refusal", refusal or content
    if not isinstance(content, str | None) or not isinstance(finish_reason, str):
        raise CompletionError("malformed", "the reply's content is not text")
    reported = usage if isinstance(usage, dict) else {}
    written = _UNPAIRED.sub("\ufffd", content or "")
    num_prompt = reported_tokens(reported.get("prompt_tokens"), num_prompt_tokens)
    num_completion = reported_tokens(reported.get("completion_tokens"), estimate_tokens(written))
    return Completion(_THOUGHTS.sub("", written), finish_reason, num_prompt, num_completion)
