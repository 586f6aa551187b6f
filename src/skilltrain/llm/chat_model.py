"""The one protocol behind which every chat model stands."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from skilltrain.llm.budget import Budget
from skilltrain.llm.cache import Answers
from skilltrain.llm.protocol import Answer, Request


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
