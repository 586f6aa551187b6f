"""Who writes queries: a chat model, or nobody but the skill's own body."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import nsmallest
from typing import Any, Protocol

from skilltrain.data.synthesis.extractive import extractive_query, repeated_lines, without_lines
from skilltrain.data.synthesis.prompt import Ask, request
from skilltrain.data.synthesis.settings import ExtractiveConfig, SynthesizeConfig
from skilltrain.data.synthesis.stratify import stable_number
from skilltrain.llm import LLM, Answer, Completion, cost_of, open_llm, used_of
from skilltrain.records import Skill

_TOKENS_PER_WORD = 1.5  # of an answer, in the mean of English (1.3) and languages that take more


Asks = Iterable[tuple[Ask, Skill]]


class Writer(Protocol):
    """Writes queries."""

    @property
    def origin(self) -> str:
        """Who it is, as the tables say it."""
        ...

    def write(self, asks: Asks) -> Iterator[tuple[int, Answer]]:
        """(position, answer) of every ask, in the order in which they come."""
        ...

    def plan(self, asks: Asks) -> dict[str, Any]:
        """What writing will take: requests, tokens, dollars (None: price unknown); empty if nothing. Asks nobody."""
        ...

    def usage(self) -> dict[str, Any]:
        """What writing has taken."""
        ...


def open_writer(config: SynthesizeConfig, pool: Iterable[Skill]) -> Writer:
    """The writer of a recipe's `llm:` section, which keeps few skills of `pool` or none.

    Raises SkilltrainError where its package is missing, or a setting.
    """
    if isinstance(config.llm, ExtractiveConfig):
        return ExtractiveWriter(pool, config.seed)
    return LLMWriter(open_llm(config.llm), config)


class ExtractiveWriter:
    """Writes from the body alone, leaving out lines that many bodies share."""

    origin = "extractive"

    def __init__(self, pool: Iterable[Skill], seed: int) -> None:
        sample = nsmallest(8000, pool, key=lambda skill: stable_number(seed, "boilerplate", skill.skill_id))
        self._boilerplate = repeated_lines(skill.body for skill in sample)
        self._seed = seed

    def write(self, asks: Asks) -> Iterator[tuple[int, Answer]]:
        """Requests made of the bodies, in order; an empty one where a body holds too little plain text."""
        for position, (ask, skill) in enumerate(asks):
            bodies = (without_lines(skill.body, self._boilerplate), skill.body)
            texts = (extractive_query(replace(skill, body=body), ask.seed(self._seed)) for body in bodies)
            yield position, Completion(next(filter(None, texts), ""))

    def plan(self, asks: Asks) -> dict[str, Any]:
        """Nothing: no model is asked."""
        return {}

    def usage(self) -> dict[str, Any]:
        """Nothing: no model was asked."""
        return {}


class LLMWriter:
    """Asks a chat model."""

    def __init__(self, llm: LLM, config: SynthesizeConfig) -> None:
        self._llm, self._config = llm, config

    @property
    def origin(self) -> str:
        return f"llm:{self._llm.model}"

    def write(self, asks: Asks) -> Iterator[tuple[int, Answer]]:
        """The model's answers."""
        return self._llm.complete_all(request(ask, skill, self._config) for ask, skill in asks)

    def plan(self, asks: Asks) -> dict[str, Any]:
        """The first answer to every ask; those in the cache cost nothing."""
        num_tokens = round(self._config.num_words * _TOKENS_PER_WORD)
        return cost_of(self._llm, (request(ask, skill, self._config) for ask, skill in asks), num_tokens)

    def usage(self) -> dict[str, Any]:
        """Tokens and dollars."""
        return used_of(self._llm.budget)
