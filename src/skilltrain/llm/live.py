"""A server asked live: many requests under way at once, at a rate that it bears, within a budget."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.llm.beside import run_beside
from skilltrain.llm.budget import Budget, counted, estimate_prompt, most_of
from skilltrain.llm.cache import Answers
from skilltrain.llm.chat import body_of, read_answer
from skilltrain.llm.pace import Pacer
from skilltrain.llm.protocol import Answer, Completion, CompletionError, Request, Usage
from skilltrain.llm.server import Asking, Key, explain, open_client
from skilltrain.llm.settings import OpenAIConfig

Emit = Callable[[tuple[int, Answer]], None]


class LiveLLM:
    """An OpenAI-compatible server that answers while one waits."""

    def __init__(self, config: OpenAIConfig, answers: Answers, budget: Budget) -> None:
        self.config, self.answers, self.budget = config, answers, budget
        self.model = config.model
        self.key = Key(config)
        self.pacer = Pacer(config.requests_per_minute, config.tokens_per_minute)
        self.was_answered = False

    def complete_all(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """See the protocol LLM. Requests start in their order; a fault of all lets those under way come to an end."""

        async def work(emit: Emit) -> None:
            await _Session(self, requests, emit).run()

        return run_beside(work)


class _Session:
    """One `complete_all`, in one event loop."""

    def __init__(self, llm: LiveLLM, requests: Iterable[Request], emit: Emit) -> None:
        self._llm, self._config, self._emit = llm, llm.config, emit
        self._todo = enumerate(requests)
        self._asking = Asking(llm.config, llm.pacer, llm.budget)
        self._num_failures = 0
        self._fatal: Exception | None = None
        self._client: Any = None

    async def run(self) -> None:
        """Answer all requests. Raises the first fault that every further request would meet."""
        async with open_client(self._config, self._llm.key) as self._client:
            await asyncio.gather(*(self._work() for _ in range(self._config.concurrency)))
        if self._fatal is not None:
            raise self._fatal

    async def _work(self) -> None:
        try:
            for position, request in self._todo:
                if self._fatal is not None:
                    return
                self._emit((position, await self._answer(request)))
        except Exception as error:  # whatever it is, what is under way has been paid for and comes to its end
            self._fatal = self._fatal or error

    async def _answer(self, request: Request) -> Answer:
        """The kept answer, or the server's, which is then kept."""
        most = most_of(request, self._config.max_tokens)
        if not await self._asking.reserve(most):
            return self._asking.over_budget()
        key = self._llm.answers.key(request)
        known = self._llm.answers.get(key)
        if known is None:
            return await self._ask(request, key, most)
        known = counted(known, estimate_prompt(request.messages))
        self._asking.settle(most, Usage(known.num_prompt_tokens, known.num_completion_tokens))
        return known

    async def _ask(self, request: Request, key: str, most: Usage) -> Answer:
        """The server's answer, after as many tries as the settings allow; `most` is reserved for the first."""
        import openai

        num_tokens = estimate_prompt(request.messages) + self._config.max_tokens
        try:
            completion = await self._asking.ask(lambda: self._send(request), most, num_tokens)
        except CompletionError as fault:
            return self._answered(fault) if fault.kind == "malformed" else fault
        except (openai.OpenAIError, TimeoutError) as error:
            return self._failed(error)
        self._llm.answers.put(key, completion)
        return self._answered(completion)

    async def _send(self, request: Request) -> tuple[Completion, Usage]:
        """The server's reply to one try, and what it took. Raises CompletionError where it is none."""
        completions = self._client.chat.completions.with_raw_response
        reply = await completions.create(**body_of(request, self._config))
        completion = read_answer(self._llm.key.blot(reply.text), estimate_prompt(request.messages))
        return completion, Usage(completion.num_prompt_tokens, completion.num_completion_tokens)

    def _answered(self, answer: Completion | CompletionError) -> Answer:
        self._num_failures, self._llm.was_answered = 0, True
        return answer

    def _failed(self, error: Exception) -> CompletionError:
        """The failure of one request. Raises SkilltrainError if it is all requests', or one too many in a row."""
        failure = explain(error, self._config, self._llm.key, self._llm.was_answered)
        if isinstance(failure, SkilltrainError):
            raise failure from None  # openai's own error may hold the key, and --debug would show it
        self._num_failures += 1
        if self._num_failures >= self._config.max_failures:
            what = f"{self._num_failures} requests in a row failed, the last with: {failure.reason}"
            fix = "answers so far are cached; run again later"
            raise SkilltrainError(what, where=self._config.base_url, fix=fix) from None
        return failure
