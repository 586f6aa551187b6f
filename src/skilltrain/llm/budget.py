"""What requests cost, and the most that a run may use: that is reserved before a request, what it took booked after."""

import threading
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.llm.answers import Answer, AnswerError, Completion, Request, Usage
from skilltrain.llm.settings import BudgetConfig, OpenAIConfig, Prices, ServerConfig

# OpenAI's list prices in dollars per million tokens, as published in 2025; a batch costs half.
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
_MOST_PER_MESSAGE = 32


def prices_of(config: ServerConfig) -> Prices | None:
    """Dollars per million tokens; None where neither the recipe nor we know them."""
    if config.prices is not None or not config.is_openai or config.model not in LIST_PRICES:
        return config.prices
    prompt, completion = LIST_PRICES[config.model]
    share = 0.5 if isinstance(config, OpenAIConfig) and config.mode == "batch" else 1.0
    return Prices(prompt=prompt * share, completion=completion * share)


def most_of(request: Request, max_tokens: int) -> Usage:
    """The most that one try of `request` can take: a token per byte read, as in every tokenizer, and all that fits."""
    num_bytes = sum(
        len(one["content"].encode(errors="replace")) + _MOST_PER_MESSAGE
        for one in request.messages()
    )
    return Usage(num_bytes + _MOST_PER_MESSAGE, max_tokens)


def usage_of(answer: Answer, most: Usage) -> Usage:
    """What an answer took; the most that it can have taken where the server did not say."""
    if isinstance(answer, Completion):
        return Usage(answer.num_prompt_tokens or most.prompt, answer.num_completion_tokens)
    return most if answer.kind == "malformed" else Usage()


class Budget:
    """Tokens used and reserved, counted over all threads; `section` is the recipe's, for messages.

    Requests must reserve in a fixed order, for the first one that does not fit ends the run: then what is sent depends
    on no server's speed.
    """

    def __init__(self, limits: BudgetConfig, prices: Prices | None, section: str = "llm") -> None:
        if limits.max_dollars is not None and prices is None:
            what = f"{section}.budget.max_dollars needs the price of a token"
            raise SkilltrainError(what, fix=f"set {section}.prices, dollars per million tokens")
        self._limits, self._prices, self.section = limits, prices, section
        self._changed = threading.Condition()
        self.used, self.reserved = Usage(), Usage()
        self.is_spent = False

    def reserve(self, most: Usage) -> bool:
        """Set `most` aside. False where it does not fit: for now or, where nothing is under way, for good."""
        with self._changed:
            if not self.is_spent and self._fits(self.used + self.reserved + most):
                self.reserved += most
                return True
            self.is_spent |= self.reserved == Usage()
            return False

    def wait_to_reserve(self, most: Usage) -> bool:
        """As `reserve`, but waits until what is under way is booked. False: it does not fit for good."""
        with self._changed:
            while not self.reserve(most):
                if self.is_spent:
                    return False
                self._changed.wait()
        return True

    def settle(self, most: Usage, used: Usage) -> None:
        """Book what a request took for which `most` was reserved."""
        with self._changed:
            self.reserved -= most
            self.used += used
            self._changed.notify_all()

    def price(self, usage: Usage) -> float | None:
        """Dollars for so many tokens; None where no price is known."""
        prices = self._prices
        return (
            prices and (usage.prompt * prices.prompt + usage.completion * prices.completion) / 1e6
        )

    def account(self, usage: Usage) -> dict[str, Any]:
        """Tokens and dollars as a stage's summary shows them."""
        dollars = self.price(usage)
        counts = {"num_prompt_tokens": usage.prompt, "num_completion_tokens": usage.completion}
        return {**counts, "dollars": None if dollars is None else round(dollars, 6)}

    def _fits(self, usage: Usage) -> bool:
        max_tokens, max_dollars = self._limits.max_tokens, self._limits.max_dollars
        within_dollars = max_dollars is None or (self.price(usage) or 0) <= max_dollars
        return (max_tokens is None or usage.total <= max_tokens) and within_dollars

    def __str__(self) -> str:
        shown = ("{:,} tokens", self._limits.max_tokens), ("${:,g}", self._limits.max_dollars)
        return " and ".join(words.format(limit) for words, limit in shown if limit is not None)


def over_budget(budget: Budget) -> AnswerError:
    """What becomes of a request that the budget does not hold."""
    return AnswerError("budget", f"not sent: the budget of {budget} is used up")
