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

    Queries and skills are tokenised only once, and joined as token ids. The joined ids equal those
    of the whole text. In the form yes_no, the query's part ends with a line break, and the skill's
    part begins with a prompt such as `<Document>: `. No token spans this border, but the tokens of
    a text may depend on the texts before and after it. So a query is tokenised with the prompt
    behind it, and a skill with a line break in front. The tokens of these additions are dropped.
    """

    def __init__(self, tokenizer: Any, settings: RerankerSettings) -> None:
        """Tokenise the texts that all pairs have in common."""
        self.template = settings.template
        self.settings = settings
        self.text = TextTokenizer(tokenizer)
        self.before, self.between, self.after = _frame(tokenizer, self.template.form)
        self.num_fixed = len(self.before) + len(self.between) + len(self.after)

        # In the form yes_no, a line break separates the query and the skill, and the tokens of a
        # skill depend on it. So `skill_ids` tokenises a skill with this line break in front, and
        # then drops the tokens of the line break. Here they are counted.
        self._line_break = ""
        self._num_line_break_tokens = 0
        skill_prompt = self.template.skill_prompt()
        if skill_prompt:
            self._line_break = "\n"
            example = self._line_break + skill_prompt + "a"  # `a` stands for any skill
            _, spans = self.text.ids_and_spans(example)
            self._num_line_break_tokens = _num_tokens_before(len(self._line_break), spans)

    def query_ids(self, text: str) -> list[int]:
        """Return the token ids of the query's part of a pair: prompt, query and query ending.

        In the form yes_no, only the query itself is truncated to `query_max_tokens`, not the prompt
        and the ending. The form pair has no ending.

        Args:
            text: A raw query.
        """
        limit = self.settings.query_max_tokens
        prompt = self.template.query_prompt()
        ending = self.template.query_end()
        text = text[: self.template.query_chars]
        if not ending:  # the form pair
            return self.text.ids([prompt + text])[0][:limit]

        # The tokens of a query depend on the skill's prompt after it. So the query is tokenised
        # with this prompt behind it, and the tokens of this prompt are dropped.
        skill_prompt = self.template.skill_prompt()

        # Each round tokenises the text and counts its tokens. If there are more than `limit`, the
        # text is cut, and the next round tokenises it again, because the tokens of its last word
        # may change.
        text_start = len(prompt)
        while True:
            text_end = text_start + len(text)
            ids, spans = self.text.ids_and_spans(prompt + text + ending + skill_prompt)

            # Starts of the tokens that have characters of the text.
            token_starts = [start for start, end in spans if end > text_start and start < text_end]
            if len(token_starts) <= limit:
                # Return the tokens of prompt, text and ending, which are before the skill's prompt.
                skill_start = text_end + len(ending)
                return ids[: _num_tokens_before(skill_start, spans)]

            # Cut the text before the first token that exceeds the limit.
            num_chars = token_starts[limit] - text_start  # negative if it starts in the prompt
            text = text[: max(0, num_chars)]

    def skill_ids(self, skills: Sequence[Skill]) -> list[list[int]]:
        """Return the token ids of each skill's part, without truncation."""
        if not skills:
            return []
        # The tokens of a skill depend on the line break before it. Drop those of the line break.
        prefix = self._line_break + self.template.skill_prompt()
        texts = [prefix + self.template.render_skill(skill) for skill in skills]
        return [ids[self._num_line_break_tokens :] for ids in self.text.ids(texts)]

    def join(self, query: TokenIds, skill: TokenIds) -> PairIds:
        """Join a query and a skill to a pair of at most `max_tokens`. The end of the skill is cut.

        Args:
            query: Token ids of the query's part.
            skill: Token ids of the skill's part.
        """
        # `num_fixed` counts the tokens before, between and after the query and the skill.
        room = max(0, self.settings.max_tokens - self.num_fixed - len(query))
        first = [*self.before, *_as_list(query), *self.between]
        ids = [*first, *_as_list(skill[:room]), *self.after]
        return PairIds(ids, second_start=len(first), num_cut=max(0, len(skill) - room))

    def room_for_query(self) -> int:
        """Return how many tokens a query may have so that a skill still has room in the pair."""
        # An empty query and an empty skill have only the tokens of their prompts.
        empty_query = self.query_ids("")
        (empty_skill,) = self.skill_ids([Skill("", "", "", "")])
        num_fixed = self.num_fixed + len(empty_query) + len(empty_skill)
        return self.settings.max_tokens - num_fixed - _MIN_SKILL_TOKENS


def _as_list(ids: TokenIds) -> list[int]:
    return ids if isinstance(ids, list) else [int(token_id) for token_id in ids]


def _num_tokens_before(character: int, spans: Sequence[tuple[int, int]]) -> int:
    """Return how many tokens start before a character. Spans are (start, end) of each token."""
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

    letter_ids = tokenizer.encode("a", add_special_tokens=False)
    length = len(letter_ids)  # usually 1
    pair_ids = tokenizer("a", "a")["input_ids"]

    # Find the two places of the letter in the pair.
    starts = [i for i in range(len(pair_ids)) if pair_ids[i : i + length] == letter_ids]
    first_start = starts[0]
    first_end = first_start + length
    second_start = next(start for start in starts if start >= first_end)
    second_end = second_start + length
    return pair_ids[:first_start], pair_ids[first_end:second_start], pair_ids[second_end:]
