"""Prices of tokens, and the budget of a run."""

import threading
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import AnswerError, Usage
from skilltrain.llm.settings import Prices, ServerConfig

# OpenAI's list prices of 2025, in dollars per million tokens read and per million tokens written.
LIST_PRICES = {
    "gpt-4o-mini": (0.15, 0.60),
    "gpt-4o": (2.50, 10.00),
    "gpt-4.1": (2.00, 8.00),
    "gpt-4.1-mini": (0.40, 1.60),
    "gpt-4.1-nano": (0.10, 0.40),
    "text-embedding-3-small": (0.02, 0),
    "text-embedding-3-large": (0.13, 0),
    "text-embedding-ada-002": (0.10, 0),
}


class Budget:
    """Tokens that a run has used, with their prices and limits. Threads may share it."""

    def __init__(self, config: ServerConfig) -> None:
        """Find the prices of the model, in the settings or in OpenAI's price list.

        Args:
            config: Settings of the server, with its prices and the limits of the run.

        Raises:
            SkilltrainError: A limit in dollars is set, but the prices are not known.
        """
        self._section = config.section
        self.used = Usage()
        self._limits = config.budget
        self._lock = threading.Lock()
        self._prices = config.prices
        # Another server may offer a model of the same name at another price.
        if self._prices is None and config.is_openai and config.model in LIST_PRICES:
            prompt, completion = LIST_PRICES[config.model]
            self._prices = Prices(prompt=prompt, completion=completion)
        if self._prices is None and self._limits.max_dollars is not None:
            raise SkilltrainError(
                "missing-setting",
                f"{config.section}.budget.max_dollars needs the price of a token",
                fix=f"set {config.section}.prices, dollars per million tokens",
            )

    def count(self, usage: Usage) -> None:
        """Add the tokens of one request."""
        with self._lock:
            self.used += usage

    def check(self) -> None:
        """Raise AnswerError if a limit is reached. Requests under way may still exceed it."""
        max_tokens = self._limits.max_tokens
        max_dollars = self._limits.max_dollars
        dollars = self.price(self.used)
        # A limit of None means no limit.
        has_tokens = max_tokens is None or self.used.total < max_tokens
        has_dollars = max_dollars is None or dollars is None or dollars < max_dollars
        if not (has_tokens and has_dollars):
            raise AnswerError("budget", f"not sent: the budget of {self} is used up")

    def price(self, usage: Usage) -> float | None:
        """Return the price of tokens in dollars. None: the prices are not known."""
        if self._prices is None:
            return None
        prompt = usage.prompt * self._prices.prompt
        completion = usage.completion * self._prices.completion
        return (prompt + completion) / 1e6

    def account(self, usage: Usage) -> dict[str, Any]:
        """Return the numbers of tokens and dollars, by their names in the summary of a stage."""
        dollars = self.price(usage)
        return {
            "num_prompt_tokens": usage.prompt,
            "num_completion_tokens": usage.completion,
            "dollars": None if dollars is None else round(dollars, 6),
        }

    def describe(self, usage: Usage) -> str:
        """Return an estimate in words: its tokens, its price and the budget of the run.

        For example: "about 1,000 tokens read and 50 written, about $0.00018; budget $5".
        """
        dollars = self.price(usage)
        section = self._section
        price = f"price unknown ({section}.prices)" if dollars is None else f"about ${dollars:,.4g}"
        written = f" and {usage.completion:,} written" if usage.completion else ""
        limit = f"budget {self}" if str(self) else f"no budget is set ({section}.budget)"
        return f"about {usage.prompt:,} tokens read{written}, {price}; {limit}"

    def __str__(self) -> str:
        """Return the limits in words, such as `1,000 tokens and $5`, or "" without limits."""
        limits = self._limits
        tokens = f"{limits.max_tokens:,} tokens" if limits.max_tokens else ""
        dollars = f"${limits.max_dollars:,g}" if limits.max_dollars else ""
        return " and ".join(filter(None, (tokens, dollars)))
