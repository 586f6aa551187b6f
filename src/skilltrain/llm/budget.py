"""What requests take, before they are sent and after: tokens, dollars, and the most that a run may use.

The budget cannot be overshot: before a request is sent, the most that it can take is reserved, and what it did take is
booked when it is answered. A text has at most one token a UTF-8 byte, in every tokenizer in use.
"""

from collections.abc import Sequence

from skilltrain.errors import SkilltrainError
from skilltrain.llm.protocol import Completion, Message, Request, Usage
from skilltrain.llm.settings import BudgetConfig, OpenAIConfig, Prices

# OpenAI's list prices in dollars for a million tokens, as published in 2025; a batch costs half.
LIST_PRICES = {
    "gpt-4o-mini": Prices(prompt=0.15, completion=0.60),
    "gpt-4o": Prices(prompt=2.50, completion=10.00),
    "gpt-4.1": Prices(prompt=2.00, completion=8.00),
    "gpt-4.1-mini": Prices(prompt=0.40, completion=1.60),
    "gpt-4.1-nano": Prices(prompt=0.10, completion=0.40),
}
BATCH_DISCOUNT = 0.5
_TOKENS_PER_MESSAGE = 4  # role and separators, an OpenAI chat format's
_MOST_PER_MESSAGE = 32
# No model reads or writes so much in one request: a larger figure is none.
_MOST_TOKENS = 2**21


def prices_of(config: OpenAIConfig) -> Prices | None:
    """Dollars for a million tokens in the mode of `config`; None where neither the recipe nor we know them."""
    if config.prices is not None or not config.is_openai or config.model not in LIST_PRICES:
        return config.prices
    prices = LIST_PRICES[config.model]
    if config.mode == "live":
        return prices
    return Prices(prompt=prices.prompt * BATCH_DISCOUNT, completion=prices.completion * BATCH_DISCOUNT)


def dollars_of(usage: Usage, prices: Prices | None) -> float | None:
    """The price of so many tokens; None where no price is known."""
    if prices is None:
        return None
    return (usage.prompt * prices.prompt + usage.completion * prices.completion) / 1e6


def estimate_tokens(text: str) -> int:
    """About how many tokens a text has: four ASCII letters one, as one Chinese character is about three quarters."""
    num_bytes = len(text.encode(errors="replace"))
    num_ascii = num_bytes if num_bytes == len(text) else len(text.encode("ascii", "ignore"))
    return -(-num_ascii // 4) - (num_ascii - num_bytes) // 4


def estimate_prompt(messages: Sequence[Message]) -> int:
    """About how many tokens a server reads."""
    return sum(estimate_tokens(message.content) + _TOKENS_PER_MESSAGE for message in messages)


def most_of(request: Request, max_tokens: int) -> Usage:
    """The most that one try of `request` can take: a token a byte read, and the longest answer written."""
    num_bytes = sum(len(m.content.encode(errors="replace")) + _MOST_PER_MESSAGE for m in request.messages)
    return Usage(num_bytes + _MOST_PER_MESSAGE, max_tokens)


def counted(completion: Completion, num_prompt_tokens: int) -> Completion:
    """`completion` with the larger of what the server reported and what we estimate, prompt and answer each."""
    return Completion(
        completion.text, completion.finish_reason,
        max(plausible(completion.num_prompt_tokens), num_prompt_tokens),
        max(plausible(completion.num_completion_tokens), estimate_tokens(completion.text)),
    )  # fmt: skip


def plausible(count: object) -> int:
    """A server's figure, or 0 where it is no number of tokens."""
    if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= _MOST_TOKENS:
        return count
    return 0


class Budget:
    """Keeps account of tokens used and reserved. Requests must come in a fixed order, for the first not to fit ends it.

    Then the outcome depends on no server's speed: a request is asked if what was used by those before it, and the most
    that it can take itself, are within the limits.
    """

    def __init__(self, limits: BudgetConfig, prices: Prices | None) -> None:
        if limits.max_dollars is not None and prices is None:
            what = "llm.budget.max_dollars needs to know what tokens cost"
            raise SkilltrainError(what, fix="set llm.prices.prompt and llm.prices.completion, dollars a million tokens")
        self._limits, self._prices = limits, prices
        self.used = Usage()
        self.reserved = Usage()
        self.is_spent = False

    @property
    def dollars(self) -> float | None:
        """What the tokens used cost; None where no price is known."""
        return dollars_of(self.used, self._prices)

    def reserve(self, most: Usage) -> bool:
        """Set `most` aside; False where it does not fit, for now or, where nothing is under way, for good."""
        if not self.is_spent and self._fits(self.used + self.reserved + most):
            self.reserved += most
            return True
        self.is_spent |= self.reserved == Usage()
        return False

    def _fits(self, usage: Usage) -> bool:
        max_tokens, dollars, max_dollars = self._limits.max_tokens, self.price(usage), self._limits.max_dollars
        within_dollars = max_dollars is None or dollars is None or dollars <= max_dollars
        return (max_tokens is None or usage.total <= max_tokens) and within_dollars

    def settle(self, most: Usage, used: Usage) -> None:
        """Book what a request took for which `most` was reserved."""
        self.reserved -= most
        self.used += used

    def price(self, usage: Usage) -> float | None:
        """Dollars for so many tokens; None where no price is known."""
        return dollars_of(usage, self._prices)

    def __str__(self) -> str:
        limits = [f"{self._limits.max_tokens:,} tokens" if self._limits.max_tokens is not None else ""]
        limits += [f"${self._limits.max_dollars:,g}" if self._limits.max_dollars is not None else ""]
        return " and ".join(filter(None, limits))
