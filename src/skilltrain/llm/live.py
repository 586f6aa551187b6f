"""A server asked live: many requests under way at once, at a rate that it bears, within a budget."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.llm.beside import run_beside
from skilltrain.llm.budget import Budget, counted, estimate_prompt, most_of
from skilltrain.llm.cache import Answers
from skilltrain.llm.chat import Key, body_of, explain, is_passing, may_have_cost, read_answer, wait_asked
from skilltrain.llm.pace import Pacer, back_off
from skilltrain.llm.protocol import Answer, Completion, CompletionError, Request, Usage
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
        self._llm, self._config, self._budget, self._emit = llm, llm.config, llm.budget, emit
        self._todo = enumerate(requests)
        self._turn, self._settled = asyncio.Lock(), asyncio.Event()
        self._num_failures = 0
        self._fatal: SkilltrainError | None = None
        self._client: Any = None

    async def run(self) -> None:
        """Answer all requests. Raises the first fault that every further request would meet."""
        import openai

        # Tries are counted, paced and paid here, so the client must not repeat any by itself.
        async with openai.AsyncOpenAI(
            api_key=self._llm.key.for_client, base_url=self._config.base_url,
            timeout=self._config.timeout, max_retries=0,
        ) as self._client:  # fmt: skip
            await asyncio.gather(*(self._work() for _ in range(self._config.concurrency)))
        if self._fatal is not None:
            raise self._fatal

    async def _work(self) -> None:
        for position, request in self._todo:
            if self._fatal is not None:
                return
            try:
                self._emit((position, await self._answer(request)))
            except SkilltrainError as error:
                self._fatal = self._fatal or error

    async def _answer(self, request: Request) -> Answer:
        """The kept answer, or the server's, which is then kept."""
        most = most_of(request, self._config.max_tokens)
        if not await self._reserve(most):
            return self._over_budget()
        key = self._llm.answers.key(request)
        known = self._llm.answers.get(key)
        if known is None:
            return await self._ask(request, key, most)
        known = counted(known, estimate_prompt(request.messages))
        self._settle(most, Usage(known.num_prompt_tokens, known.num_completion_tokens))
        return known

    async def _reserve(self, most: Usage) -> bool:
        """Whether the budget holds `most`; waits, in the order of the requests, for those under way to be booked."""
        async with self._turn:
            while not self._budget.reserve(most):
                if self._budget.is_spent:
                    return False
                self._settled.clear()
                await self._settled.wait()
        return True

    def _settle(self, most: Usage, used: Usage) -> None:
        self._budget.settle(most, used)
        self._settled.set()

    def _over_budget(self) -> CompletionError:
        return CompletionError("budget", f"not asked: the budget of {self._budget} was used up")

    async def _ask(self, request: Request, key: str, most: Usage) -> Answer:
        """The server's answer, after as many tries as the settings allow; `most` is reserved for the first."""
        import openai

        num_prompt_tokens = estimate_prompt(request.messages)
        num_tries = 1
        while True:
            used = Usage()
            try:
                await self._llm.pacer.turn(num_prompt_tokens + self._config.max_tokens)
                used = most  # until something else is known of it
                completion = read_answer(await self._send(request), num_prompt_tokens)
                used = Usage(completion.num_prompt_tokens, completion.num_completion_tokens)
                self._llm.answers.put(key, completion)
                return self._answered(completion)
            except CompletionError as malformed:
                return self._answered(malformed)
            except (openai.OpenAIError, TimeoutError) as error:
                used = most if may_have_cost(error) else Usage()
                failure = error
            finally:
                self._settle(most, used)
            if num_tries > self._config.max_retries or not is_passing(failure):
                return self._failed(failure)
            await self._wait(failure, num_tries)
            num_tries += 1
            if not await self._reserve(most):
                return self._over_budget()

    async def _send(self, request: Request) -> str:
        """The body of the server's reply, whatever it holds."""
        async with asyncio.timeout(self._config.timeout):  # the client's own limit is for each packet
            completions = self._client.chat.completions.with_raw_response
            reply = await completions.create(**body_of(request, self._config))
        return self._llm.key.blot(reply.text)

    async def _wait(self, error: Exception, num_tries: int) -> None:
        asked = wait_asked(error)
        seconds = min(asked or back_off(num_tries), self._config.max_retry_wait)
        if asked:
            self._llm.pacer.hold(seconds)
        await asyncio.sleep(seconds)

    def _answered(self, answer: Completion | CompletionError) -> Answer:
        self._num_failures, self._llm.was_answered = 0, True
        return answer

    def _failed(self, error: Exception) -> CompletionError:
        """The failure of one request. Raises SkilltrainError if it is all requests', or one too many in a row."""
        failure = explain(error, self._config, self._llm.key, self._llm.was_answered)
        if isinstance(failure, SkilltrainError):
            raise failure
        self._num_failures += 1
        if self._num_failures >= self._config.max_failures:
            what = f"{self._num_failures} requests in a row failed, the last with: {failure.reason}"
            fix = "answers so far are cached; run again later"
            raise SkilltrainError(what, where=self._config.base_url, fix=fix)
        return failure
