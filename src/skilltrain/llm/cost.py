"""What asking a server will take, told before anybody is asked, and what it has taken."""

from collections.abc import Iterable, Mapping
from typing import Any

from skilltrain.llm.budget import Budget, estimate_prompt
from skilltrain.llm.chat_model import LLM
from skilltrain.llm.protocol import Request, Usage
from skilltrain.terminal import say


def cost_of(llm: LLM, requests: Iterable[Request], num_completion_tokens: int) -> dict[str, Any]:
    """What `complete_all` would ask for, at so many tokens an answer; asks nobody.

    Requests answered before cost nothing now; dollars are None where no price is known.
    """
    num_requests, num_answered, num_prompt_tokens = 0, 0, 0
    for request in requests:
        if llm.answers.get(llm.answers.key(request)):
            num_answered += 1
        else:
            num_requests += 1
            num_prompt_tokens += estimate_prompt(request.messages)
    usage = Usage(num_prompt_tokens, num_requests * num_completion_tokens)
    counts = {"model": llm.model, "num_requests": num_requests, "num_answered_before": num_answered}
    return counts | price_of(usage, llm.budget)


def used_of(budget: Budget) -> dict[str, Any]:
    """Tokens and dollars of all answers, those from the cache as when they were made."""
    return _priced(budget.used, budget)


def price_of(usage: Usage, budget: Budget) -> dict[str, Any]:
    """Tokens, the dollars for them, and what may be used at most."""
    return _priced(usage, budget) | {"budget": str(budget) or None}


def _priced(usage: Usage, budget: Budget) -> dict[str, Any]:
    dollars = budget.price(usage)
    return {
        "num_prompt_tokens": usage.prompt, "num_completion_tokens": usage.completion,
        "dollars": None if dollars is None else round(dollars, 6),
    }  # fmt: skip


def say_cost(cost: Mapping[str, Any], max_attempts: int) -> None:
    """Say in one line what `cost_of` found."""
    kept = f" ({cost['num_answered_before']:,} more are in the cache)" if cost["num_answered_before"] else ""
    again = f"answers turned down are asked for again, up to {max_attempts} times in all"
    say(f"{cost['num_requests']:,} requests to {cost['model']}{kept}, {cost_in_words(cost, 'llm.prices')}; {again}")


def cost_in_words(cost: Mapping[str, Any], price_setting: str) -> str:
    """Tokens, price and budget; `price_setting` is where a recipe says what tokens cost."""
    price = f"price unknown ({price_setting})" if cost["dollars"] is None else f"about ${cost['dollars']:,.4g}"
    written = f" and {cost['num_completion_tokens']:,} written" if cost["num_completion_tokens"] else ""
    no_budget = f"no budget is set ({price_setting.split('.')[0]}.budget)"
    limit = f"budget {cost['budget']}" if cost["budget"] else no_budget
    return f"about {cost['num_prompt_tokens']:,} tokens read{written}, {price}; {limit}"
