"""The one protocol behind which every chat model stands, and what asking it will take."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from skilltrain.llm.budget import Budget, estimate_prompt
from skilltrain.llm.cache import Answers
from skilltrain.llm.protocol import Answer, Request, Usage


class LLM(Protocol):
    """A chat model, whether it answers at once, in batches, or in this process."""

    @property
    def model(self) -> str: ...

    @property
    def answers(self) -> Answers:
        """The answers that it has given before."""
        ...

    @property
    def budget(self) -> Budget:
        """What it has used and may use: every answer counts, those from the cache as when they were made."""
        ...

    def complete_all(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """(position, answer) of every request, in the order in which they come; positions count from 0.

        Requests are taken one by one, as there is room for them. Raises SkilltrainError where no further request can
        succeed; what was answered until then is in the cache.
        """
        ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """What requests will take. Those answered before cost nothing now; dollars are None where no price is known."""

    num_requests: int
    num_answered: int
    usage: Usage
    dollars: float | None


def estimate(llm: LLM, requests: Iterable[Request], num_completion_tokens: int) -> Estimate:
    """What `complete_all` would ask for, at so many tokens an answer; asks nobody."""
    num_requests, num_answered, num_prompt_tokens = 0, 0, 0
    for request in requests:
        num_requests += 1
        if llm.answers.get(llm.answers.key(request)):
            num_answered += 1
        else:
            num_prompt_tokens += estimate_prompt(request.messages)
    usage = Usage(num_prompt_tokens, (num_requests - num_answered) * num_completion_tokens)
    return Estimate(num_requests, num_answered, usage, llm.budget.price(usage))
