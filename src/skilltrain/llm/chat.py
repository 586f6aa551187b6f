"""OpenAI's chat completions on the wire: what is sent, what an answer says, what a failure means for the run."""

import json
import os
import time
from typing import Any, Final

from skilltrain.errors import SkilltrainError
from skilltrain.llm.budget import counted
from skilltrain.llm.pace import retry_after
from skilltrain.llm.protocol import Completion, CompletionError, Request
from skilltrain.llm.settings import OpenAIConfig

ENDPOINT: Final = "/v1/chat/completions"
_SECRET_CHARS = 8  # a shorter key, such as "none", is no secret, and common words must not be blotted out


class Key:
    """A server's key, from the environment; shown nowhere, not even by a server that sends it back."""

    def __init__(self, config: OpenAIConfig) -> None:
        self._config = config
        self._value = os.environ.get(config.api_key_env, "").strip()

    @property
    def for_client(self) -> str:
        """What the openai package is given: it refuses an empty key, and servers without keys ignore this one.

        Raises SkilltrainError where the server is OpenAI's own and there is no key; an estimate needs none.
        """
        if self._config.is_openai and not self._value:
            fix = f"set {self._config.api_key_env}, or use another llm"
            raise SkilltrainError(f"no key for {self._config.base_url}", fix=fix)
        return self._value or "none"

    def blot(self, text: str) -> str:
        """`text` without the key."""
        return text.replace(self._value, "[key]") if len(self._value) >= _SECRET_CHARS else text


def body_of(request: Request, config: OpenAIConfig) -> dict[str, Any]:
    """The body of a request."""
    body: dict[str, Any] = {
        "model": config.model,
        "messages": [{"role": message.role, "content": message.content} for message in request.messages],
        "seed": request.seed,
        "max_completion_tokens" if config.is_openai else "max_tokens": config.max_tokens,
    }
    return body if config.temperature is None else body | {"temperature": config.temperature}


def read_answer(text: str, num_prompt_tokens: int) -> Completion:
    """The body of a server's answer as a Completion. Raises CompletionError where it is none."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise CompletionError("malformed", f"the server's reply is not JSON: {error}") from None
    return completion_of(body, num_prompt_tokens)


def completion_of(body: Any, num_prompt_tokens: int) -> Completion:
    """A decoded answer as a Completion, with tokens counted. Raises CompletionError where it is none."""
    try:
        choice = body["choices"][0]
        text, refusal = choice["message"].get("content"), choice["message"].get("refusal")
        finish_reason, usage = choice.get("finish_reason") or "stop", body.get("usage")
    except (KeyError, TypeError, IndexError, AttributeError):
        raise CompletionError("malformed", "the server's reply holds no choices[0].message") from None
    if refusal or finish_reason == "content_filter":
        finish_reason, text = "refusal", refusal or text
    if not isinstance(text, str | None) or not isinstance(finish_reason, str):
        raise CompletionError("malformed", "the reply's content is not text")
    reported: dict[str, Any] = usage if isinstance(usage, dict) else {}
    num_prompt, num_completion = (reported.get(f"{part}_tokens", 0) for part in ("prompt", "completion"))
    return counted(Completion(text or "", finish_reason, num_prompt, num_completion), num_prompt_tokens)


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


def explain(error: Exception, config: OpenAIConfig, key: Key, was_answered: bool) -> SkilltrainError | CompletionError:
    """What to raise for a client's error: for all requests or for this one; the key never stands in it."""
    import openai

    reason = " ".join(key.blot(str(error) or "timed out").split())[:300]
    url, variable = config.base_url, config.api_key_env
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        return SkilltrainError(f"the key was refused: {reason}", where=url, fix=f"set {variable} to a valid key")
    if isinstance(error, openai.NotFoundError):
        what = f"no model '{config.model}' here: {reason}"
        return SkilltrainError(what, where=url, fix="check llm.model, llm.base_url and llm.mode")
    if isinstance(error, openai.RateLimitError) and error.code == "insufficient_quota":
        return SkilltrainError("the account has no credit left", where=url, fix="top it up, then run again")
    if isinstance(error, openai.APIConnectionError) and not may_have_cost(error) and not was_answered:
        return SkilltrainError(f"no server answers: {reason}", where=url, fix="start it, or correct llm.base_url")
    return CompletionError("failed", reason)
