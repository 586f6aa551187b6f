"""OpenAI's chat completions on the wire: what is sent, and what an answer says."""

import json
import re
from dataclasses import replace
from typing import Any, Final

from skilltrain.llm.budget import counted
from skilltrain.llm.protocol import Completion, CompletionError, Request
from skilltrain.llm.settings import OpenAIConfig

ENDPOINT: Final = "/v1/chat/completions"
_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.S)
_UNPAIRED = re.compile("[\ud800-\udfff]")  # surrogates, which no file takes


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
    """A decoded answer as a Completion, with tokens counted. Raises CompletionError where it is none.

    A `<think>` block that a server leaves before the answer is counted, and is no part of it.
    """
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
    found = counted(Completion(text or "", finish_reason, num_prompt, num_completion), num_prompt_tokens)
    return replace(found, text=_THOUGHTS.sub("", _UNPAIRED.sub("\ufffd", found.text)))
