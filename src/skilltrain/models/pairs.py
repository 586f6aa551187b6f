"""A query and a skill as one sequence of token ids, each part tokenised alone and once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from skilltrain.config import Config
from skilltrain.models.micro_batches import TokenIds
from skilltrain.models.tokens import TextTokenizer
from skilltrain.records import Skill
from skilltrain.templates import QWEN3_RERANKER_PREFIX, QWEN3_RERANKER_SUFFIX, RerankerTemplate

LEAST_SKILL_TOKENS = 8


class RerankerSettings(Config):
    """What, beside its weights, makes a reranker; saved in its folder. yes_no: SkillRouter's limits; else a BERT's."""

    template: RerankerTemplate = RerankerTemplate()
    max_tokens: int = Field(
        default_factory=lambda chosen: 4096 if chosen["template"].form == "yes_no" else 512, ge=32
    )
    query_max_tokens: int = Field(default_factory=lambda chosen: chosen["max_tokens"] // 2, ge=8)


@dataclass(frozen=True, slots=True)
class PairIds:
    """Token ids of one (query, skill) pair; those from `second_start` on belong to the second segment.

    `num_cut` tokens of the skill did not fit; `rows` are the tokens' embeddings where these were looked up already.
    """

    ids: list[int]
    second_start: int
    num_cut: int
    rows: Float[Tensor, "token width"] | None = None

    def __len__(self) -> int:
        return len(self.ids)


class PairTokenizer:
    """Turns queries and skills into pairs of token ids, as a reranker's settings say.

    In the yes_no form the parts meet between a line break and `<Document>: `, which no tokenizer joins: the ids are
    those of the whole text, where each part is tokenised with a little of its neighbour, whose tokens are then dropped.
    """

    def __init__(self, tokenizer: Any, settings: RerankerSettings) -> None:
        self.template, self.settings = settings.template, settings
        self.text = TextTokenizer(tokenizer)
        self.before, self.between, self.after = _frame(tokenizer, self.template.form)
        self.num_fixed = len(self.before) + len(self.between) + len(self.after)
        self._num_lead = 0
        if prompt := self.template.skill_prompt():
            self._num_lead = _num_before(1, self.text.ids_and_spans(f"\n{prompt}a")[1])

    def query(self, text: str) -> list[int]:
        """Token ids of the query's part; only the query's own text is cut, to `query_max_tokens`."""
        template, limit = self.template, self.settings.query_max_tokens
        before, after, text = (
            template.query_prompt(),
            template.query_end(),
            text[: template.query_chars],
        )
        if not after:
            return self.text.ids([before + text])[0][:limit]
        while True:
            ids, spans = self.text.ids_and_spans(before + text + after + template.skill_prompt())
            first, last = len(before), len(before) + len(text)
            own = [start for start, stop in spans if stop > first and start < last]
            if len(own) <= limit:
                return ids[: _num_before(last + len(after), spans)]
            text = text[
                : max(0, own[limit] - first)
            ]  # tokenised anew: its last word may split otherwise

    def skills(self, skills: Sequence[Skill]) -> list[list[int]]:
        """Token ids of each skill's part, whatever the query and the limit."""
        prompt = self.template.skill_prompt()
        lead = f"\n{prompt}" if prompt else ""
        texts = [lead + self.template.render_skill(skill) for skill in skills]
        return [ids[self._num_lead :] for ids in self.text.ids(texts)] if texts else []

    def join(self, query: TokenIds, skill: TokenIds) -> PairIds:
        """The pair of both parts, at most `max_tokens` long: the skill's end is cut."""
        room = max(0, self.settings.max_tokens - self.num_fixed - len(query))
        ids = [*self.before, *_as_list(query), *self.between]
        start = len(ids)
        ids += _as_list(skill[:room])
        return PairIds(ids + self.after, start, max(0, len(skill) - room))

    def query_room(self) -> int:
        """How many tokens a query's text may have, such that a few are left for the skill's."""
        fixed = self.num_fixed + len(self.query("")) + len(self.skills([Skill("", "", "", "")])[0])
        return self.settings.max_tokens - fixed - LEAST_SKILL_TOKENS


def _as_list(ids: TokenIds) -> list[int]:
    return ids if isinstance(ids, list) else [int(number) for number in ids]


def _num_before(border: int, spans: Sequence[tuple[int, int]]) -> int:
    return next((number for number, (start, _) in enumerate(spans) if start >= border), len(spans))


def _frame(tokenizer: Any, form: str) -> tuple[list[int], list[int], list[int]]:
    """The ids before a query, between it and the skill, and after that, found by asking the tokenizer."""
    if form == "yes_no":
        prefix, suffix = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (QWEN3_RERANKER_PREFIX, QWEN3_RERANKER_SUFFIX)
        )
        return prefix, [], suffix
    letter = tokenizer.encode("a", add_special_tokens=False)
    pair = tokenizer("a", "a")["input_ids"]
    first = next(i for i in range(len(pair)) if pair[i : i + len(letter)] == letter)
    second = next(
        i for i in range(first + len(letter), len(pair)) if pair[i : i + len(letter)] == letter
    )
    return pair[:first], pair[first + len(letter) : second], pair[second + len(letter) :]
