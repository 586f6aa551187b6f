"""Settings of an OpenAI-compatible server, and of the section `llm:` of a recipe.

Notes:
    - For a ValueError, pydantic prints the value. A value that may be or hold a key or a password
      therefore raises SkilltrainError.
    - The keys of many services start with `sk`.
"""

import urllib.parse
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from skilltrain.config import Config
from skilltrain.errors import SkilltrainError

_URL_HINT = "give a URL such as http://localhost:8000/v1"


class Prices(Config):
    """Prices of tokens, in dollars per million."""

    prompt: float = Field(ge=0, description="dollars per million tokens read")
    completion: float = Field(
        ge=0, description="dollars per million tokens written, 0 for embeddings"
    )


class BudgetConfig(Config):
    """Limits of a run. They are checked before each request.

    Requests that are under way when a limit is reached are finished. Therefore up to `concurrency`
    requests may exceed it.
    """

    max_tokens: int | None = Field(
        default=None, ge=1, description="tokens read and written; null: no limit"
    )
    max_dollars: float | None = Field(
        default=None, gt=0, description="dollars, by the known prices; null: no limit"
    )


class ServerConfig(Config):
    """Settings of an OpenAI-compatible server.

    Attributes:
        section: Name of the recipe's section with these settings, for errors.
    """

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
    concurrency: int = Field(default=8, ge=1, le=1000, description="requests under way at once")
    prices: Prices | None = Field(
        default=None, description="prices of tokens; null: OpenAI's list prices, if known"
    )
    budget: BudgetConfig = Field(
        default=BudgetConfig(),
        description="limits of a run, exceeded by `concurrency` requests at most",
    )

    @property
    def is_openai(self) -> bool:
        """Whether this is OpenAI's own server."""
        return urllib.parse.urlsplit(self.base_url).hostname == "api.openai.com"

    @field_validator("api_key_env")
    @classmethod
    def _check_variable_name(cls, value: str) -> str:
        """Check that `api_key_env` is the name of a variable, and not the key itself.

        pydantic would print the value of a ValueError. The value may be a key, so the error is a
        SkilltrainError.
        """
        without_underscores = value.replace("_", "a")  # `isalnum` refuses `_`
        is_name = without_underscores.isalnum() and not value[0].isdigit()
        # The keys of many services start with `sk`, such as `sk-…` of OpenAI.
        may_be_key = value.startswith("sk")
        if may_be_key or not is_name:
            raise SkilltrainError(
                "invalid-setting",
                "api_key_env must name an environment variable",
                fix="never write a key in a recipe",
            )
        return value

    @field_validator("base_url")
    @classmethod
    def _check_base_url(cls, value: str) -> str:
        """Check the address of a server, and return it without a slash at its end.

        For example, `http://localhost:8000/v1/` becomes `http://localhost:8000/v1`.
        """
        try:
            url = urllib.parse.urlsplit(value)
            # Reading `url.port` raises ValueError for a port that is no number.
            is_url = url.scheme in ("http", "https") and url.hostname and url.port != 0
        except ValueError as error:  # malformed port or IPv6
            raise ValueError(_URL_HINT) from error
        # A recipe is saved with every run, so it must not hold a password.
        if url.username or url.password or url.query:
            raise SkilltrainError(
                "invalid-setting",
                "base_url must hold no user, password or query",
                fix="use api_key_env for the key",
            )
        if not is_url or " " in value:
            raise ValueError(_URL_HINT)
        return value.rstrip("/")


class LLMConfig(ServerConfig):
    """Settings of a chat model behind OpenAI, Ollama, llama.cpp, vLLM or a compatible server."""

    section: ClassVar[str] = "llm"
    kind: Literal["openai"] = "openai"
    model: str = Field(
        default="gpt-4o-mini", min_length=1, description="the server's name of the model"
    )
    temperature: float | None = Field(default=1.0, ge=0, le=2, description="null: the server's own")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="share of nucleus sampling; null: the server's own"
    )
    max_tokens: int = Field(default=1024, ge=1, description="longest answer, in tokens")
    cache: Path | None = Field(
        default=Path("~/.cache/skilltrain/llm"),
        description="folder of answers of all runs (two runs at once may pay twice); null: none",
    )
