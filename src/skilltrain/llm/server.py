"""An OpenAI-compatible server: its key, what its failures mean, and asking it again, at its pace, within a budget."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from skilltrain.errors import SkilltrainError
from skilltrain.llm.budget import Budget
from skilltrain.llm.pace import Pacer, back_off, retry_after
from skilltrain.llm.protocol import CompletionError, Usage
from skilltrain.llm.settings import ServerConfig

ReplyT = TypeVar("ReplyT")

_SECRET_CHARS = 8  # a shorter key, such as "none", is no secret, and common words must not be blotted out


class Key:
    """A server's key, from the environment; shown nowhere, not even by a server that sends it back."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._value = os.environ.get(config.api_key_env, "").strip()

    @property
    def for_client(self) -> str:
        """What the openai package is given: it refuses an empty key, and servers without keys ignore this one.

        Raises SkilltrainError where the server is OpenAI's own and there is no key; an estimate needs none.
        """
        if self._config.is_openai and not self._value:
            fix = f"set {self._config.api_key_env}, or name another base_url"
            raise SkilltrainError(f"no key for {self._config.base_url}", fix=fix)
        return self._value or "none"

    def blot(self, text: str) -> str:
        """`text` without the key."""
        return text.replace(self._value, "[key]") if len(self._value) >= _SECRET_CHARS else text


def wait_asked(error: Exception) -> float | None:
    """The seconds that a refusing server asks to wait, if it says so."""
    import openai

    if not isinstance(error, openai.APIStatusError):
        return None
    return retry_after(error.response.headers.get("retry-after"), time.time())


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    import openai

    if isinstance(error, openai.APIStatusError):
        no_credit = isinstance(error, openai.RateLimitError) and error.code == "insufficient_quota"
        return not no_credit and (error.status_code in (408, 409, 429) or error.status_code >= 500)
    return isinstance(error, openai.APIConnectionError | TimeoutError)


def may_have_cost(error: Exception) -> bool:
    """Whether the server may have answered, and charged, without our seeing it: it was reached and gave no status."""
    import openai

    # By name, for openai runs on either of two HTTP libraries.
    was_reached = type(error.__cause__).__name__ not in ("ConnectError", "ConnectTimeout", "PoolTimeout")
    return isinstance(error, openai.APIConnectionError | TimeoutError) and was_reached


def explain(error: Exception, config: ServerConfig, key: Key, was_answered: bool) -> SkilltrainError | CompletionError:
    """What to raise for a client's error: for all requests or for this one; the key never stands in it."""
    import openai

    reason = " ".join(key.blot(str(error) or "timed out").split())[:300]
    url, variable, section = config.base_url, config.api_key_env, config.section
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        return SkilltrainError(f"the key was refused: {reason}", where=url, fix=f"set {variable} to a valid key")
    if isinstance(error, openai.NotFoundError):
        what = f"no model '{config.model}' here: {reason}"
        return SkilltrainError(what, where=url, fix=f"check {section}.model and {section}.base_url")
    if isinstance(error, openai.RateLimitError) and error.code == "insufficient_quota":
        return SkilltrainError("the account has no credit left", where=url, fix="top it up, then run again")
    if isinstance(error, openai.APIConnectionError) and not may_have_cost(error) and not was_answered:
        return SkilltrainError(
            f"no server answers: {reason}", where=url, fix=f"start it, or correct {section}.base_url"
        )
    return CompletionError("failed", reason)


def open_client(config: ServerConfig, key: Key) -> Any:
    """openai's client, to be used with `async with`. Tries are counted, paced and paid here: it repeats none itself."""
    import openai

    return openai.AsyncOpenAI(api_key=key.for_client, base_url=config.base_url, timeout=config.timeout, max_retries=0)


class Asking:
    """Requests to one server, many under way at once, in one event loop."""

    def __init__(self, config: ServerConfig, pacer: Pacer, budget: Budget) -> None:
        self._config, self._pacer, self._budget = config, pacer, budget
        self._turn, self._settled = asyncio.Lock(), asyncio.Event()

    async def reserve(self, most: Usage) -> bool:
        """Whether the budget holds `most`; waits, in the order of the requests, for those under way to be booked."""
        async with self._turn:
            while not self._budget.reserve(most):
                if self._budget.is_spent:
                    return False
                self._settled.clear()
                await self._settled.wait()
        return True

    def settle(self, most: Usage, used: Usage) -> None:
        """Book what a request took for which `most` was reserved."""
        self._budget.settle(most, used)
        self._settled.set()

    def over_budget(self) -> CompletionError:
        """What becomes of a request for which `reserve` says no."""
        return CompletionError("budget", f"not asked: the budget of {self._budget} was used up")

    async def ask(self, send: Callable[[], Awaitable[tuple[ReplyT, Usage]]], most: Usage, num_tokens: int) -> ReplyT:
        """The server's reply, after as many tries as the settings allow; `most` is reserved for the first.

        `send` gives a reply with what it took. A CompletionError of its is raised here too, with `most` booked; so is
        one where the budget holds no further try. The failure of the last try is raised as openai has it.
        """
        import openai

        num_tries = 1
        while True:
            used = Usage()
            try:
                await self._pacer.turn(num_tokens)
                used = most  # until something else is known of it
                async with asyncio.timeout(self._config.timeout):  # the client's own limit is for each packet
                    reply, used = await send()
                return reply
            except (openai.OpenAIError, TimeoutError) as error:
                used = most if may_have_cost(error) else Usage()
                if num_tries > self._config.max_retries or not is_passing(error):
                    raise
                failure = error
            finally:
                self.settle(most, used)
            await self._wait(failure, num_tries)
            num_tries += 1
            if not await self.reserve(most):
                raise self.over_budget()

    async def _wait(self, error: Exception, num_tries: int) -> None:
        asked = wait_asked(error)
        seconds = min(asked or back_off(num_tries), self._config.max_retry_wait)
        if asked:
            self._pacer.hold(seconds)
        await asyncio.sleep(seconds)
