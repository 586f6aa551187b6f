"""Tokenises queries and skills separately, and joins them to pairs for a reranker."""

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

MIN_QUERY_TOKENS = 8
_MIN_SKILL_TOKENS = 8  # a query must leave room for at least these tokens of a skill


class RerankerSettings(Config):
    """Settings of a reranker. They are saved in its folder, beside the weights.

    The default limits are SkillRouter's for the form yes_no, and BERT's for the form pair.
    """

    template: RerankerTemplate = RerankerTemplate()
    max_tokens: int = Field(
        default_factory=lambda fields: 4096 if fields["template"].form == "yes_no" else 512, ge=32
    )
    query_max_tokens: int = Field(
        default_factory=lambda fields: fields["max_tokens"] // 2, ge=MIN_QUERY_TOKENS
    )


@dataclass(frozen=True, slots=True)
class PairIds:
    """Token ids of one (query, skill) pair.

    Attributes:
        ids: Token ids.
        second_start: Position of the first token of the second segment.
        num_cut: Number of the skill's tokens that did not fit.
        embedded: Embeddings of the tokens, if they have been looked up.
    """

    ids: list[int]
    second_start: int
    num_cut: int
    embedded: Float[Tensor, "token width"] | None = None

    def __len__(self) -> int:
        return len(self.ids)


class PairTokenizer:
    """Tokenizer of queries and skills for a reranker.

    Queries and skills are tokenised only once, and joined as token ids. In the form yes_no, the
    query's part ends with a line break and the skill's part begins with `<Document>: `. No token
    spans this border, but a tokenizer may treat the start or the end of a text differently. So each
    part is tokenised together with the border of the other one, and the tokens of that are dropped.
    The joined ids equal those of the whole text.
    """

    def __init__(self, tokenizer: Any, settings: RerankerSettings) -> None:
        """Tokenise the parts that all pairs have in common."""
        self.template = settings.template
        self.settings = settings
        self.text = TextTokenizer(tokenizer)
        self.before, self.between, self.after = _frame(tokenizer, self.template.form)
        self.num_fixed = len(self.before) + len(self.between) + len(self.after)
        # A skill is tokenised after the end of the query's part, whose tokens are then dropped.
        self._query_ending = ""
        self._num_ending_tokens = 0
        skill_prompt = self.template.skill_prompt()
        if skill_prompt:
            self._query_ending = "\n"
            _, spans = self.text.ids_and_spans(f"\n{skill_prompt}a")  # `a` stands for any skill
            self._num_ending_tokens = _first_token_from(len("\n"), spans)

    def query_ids(self, text: str) -> list[int]:
        """Return the token ids of the query's part.

        In the form yes_no, only the query's own text is truncated to `query_max_tokens`, not the
        prompt around it.

        Args:
            text: A raw query.
        """
        limit = self.settings.query_max_tokens
        prompt = self.template.query_prompt()
        ending = self.template.query_end()
        text = text[: self.template.query_chars]
        if not ending:  # the form pair
            return self.text.ids([prompt + text])[0][:limit]

        # Truncate the text until at most `limit` tokens overlap it. Each shorter text is tokenised
        # again, because its last word may be split in another way.
        start = len(prompt)  # the text's first character
        while True:
            end = start + len(text)
            whole = prompt + text + ending + self.template.skill_prompt()
            ids, spans = self.text.ids_and_spans(whole)
            # Starts of the tokens that overlap the text.
            token_starts = [first for first, stop in spans if stop > start and first < end]
            if len(token_starts) <= limit:
                skill_start = end + len(ending)
                return ids[: _first_token_from(skill_start, spans)]
            text = text[: max(0, token_starts[limit] - start)]

    def skill_ids(self, skills: Sequence[Skill]) -> list[list[int]]:
        """Return the token ids of each skill's part, without truncation."""
        if not skills:
            return []
        prefix = self._query_ending + self.template.skill_prompt()
        texts = [prefix + self.template.render_skill(skill) for skill in skills]
        return [ids[self._num_ending_tokens :] for ids in self.text.ids(texts)]

    def join(self, query: TokenIds, skill: TokenIds) -> PairIds:
        """Join a query and a skill to a pair of at most `max_tokens`. The end of the skill is cut.

        Args:
            query: Token ids of the query's part.
            skill: Token ids of the skill's part.
        """
        room = max(0, self.settings.max_tokens - self.num_fixed - len(query))
        first = [*self.before, *_as_list(query), *self.between]
        ids = [*first, *_as_list(skill[:room]), *self.after]
        return PairIds(ids, second_start=len(first), num_cut=max(0, len(skill) - room))

    def room_for_query(self) -> int:
        """Return how many tokens a query may have so that a skill still has room in the pair."""
        empty_query = self.query_ids("")
        (empty_skill,) = self.skill_ids([Skill("", "", "", "")])
        num_fixed = self.num_fixed + len(empty_query) + len(empty_skill)
        return self.settings.max_tokens - num_fixed - _MIN_SKILL_TOKENS


def _as_list(ids: TokenIds) -> list[int]:
    return ids if isinstance(ids, list) else [int(token_id) for token_id in ids]


def _first_token_from(character: int, spans: Sequence[tuple[int, int]]) -> int:
    """Return the index of the first token that starts at or after a character."""
    for number, (start, _) in enumerate(spans):
        if start >= character:
            return number
    return len(spans)


def _frame(tokenizer: Any, form: str) -> tuple[list[int], list[int], list[int]]:
    """Return the fixed token ids before a query, between query and skill, and after the skill.

    For the form pair, they are what the tokenizer puts around the letters of the pair ("a", "a").
    """
    if form == "yes_no":
        prefix = tokenizer.encode(QWEN3_RERANKER_PREFIX, add_special_tokens=False)
        suffix = tokenizer.encode(QWEN3_RERANKER_SUFFIX, add_special_tokens=False)
        return prefix, [], suffix

    letter = tokenizer.encode("a", add_special_tokens=False)
    size = len(letter)
    pair = tokenizer("a", "a")["input_ids"]
    starts = [i for i in range(len(pair)) if pair[i : i + size] == letter]
    first_start = starts[0]
    first_end = first_start + size
    second_start = next(start for start in starts if start >= first_end)
    return pair[:first_start], pair[first_end:second_start], pair[second_start + size :]
