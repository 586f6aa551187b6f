"""Is an answer a distractor? The skill in it, or the reason why it is turned down."""

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skilltrain.data.near_duplicates.trigrams import Trigrams, WordHashes, jaccard, word_trigrams
from skilltrain.data.pool.skill_file import split_header
from skilltrain.data.synthesis.check import Fault
from skilltrain.data.synthesis.skill_phrases import num_words
from skilltrain.llm import Answer, CompletionError
from skilltrain.records import Skill
from skilltrain.texts import clean_text, name_key, one_line

_FENCED = re.compile(r"^```(?:json)?[ \t]*\n(.*)\n[ \t]*```[ \t]*$", re.S | re.M | re.I)


class Draft(BaseModel):
    """What an answer must hold: texts, and no other kind of value; keys that were not asked for are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=100)]
    description: Annotated[str, Field(min_length=1, max_length=1500)]
    body: Annotated[str, Field(min_length=1)]


def read_draft(answer: Answer) -> Draft | Fault:
    """The one JSON object of an answer, bare or in a fenced block, its texts cleaned; or why there is none."""
    if isinstance(answer, CompletionError):
        return Fault(answer.kind, answer.reason)
    if answer.finish_reason == "refusal":
        return Fault("refused", "the model declined to write it")
    if answer.finish_reason == "length":
        return Fault("truncated", "it was cut off at llm.max_tokens")
    text = answer.text.strip()
    fenced = _FENCED.search(text)
    try:
        # A line break inside a JSON string is a fault that many models make and that loses nothing.
        values = json.loads(fenced[1] if fenced and not text.startswith("{") else text, strict=False)
    except (ValueError, RecursionError) as error:
        return Fault("malformed", f"it is not one JSON object: {error}")
    return _draft_of(values)


def _draft_of(values: Any) -> Draft | Fault:
    try:
        draft = Draft.model_validate(values)
        cleaned = {
            "name": one_line(clean_text(draft.name)), "description": one_line(clean_text(draft.description)),
            "body": split_header(clean_text(draft.body))[1].strip(),
        }  # fmt: skip
        draft = Draft.model_validate(cleaned)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        return Fault("malformed", f"{key}: {first['msg']}" if key else first["msg"])
    if not any(char.isalnum() for char in draft.name):
        return Fault("malformed", "name: holds no letter and no digit")
    return draft


def length_fault(body: str, accepted: tuple[int, int]) -> Fault | None:
    """Why a body is too short or too long; None where it is neither."""
    count = num_words(body)
    if count < accepted[0]:
        return Fault("too_short", f"its body has {count} words, fewer than {accepted[0]}", count)
    if count > accepted[1]:
        return Fault("too_long", f"its body has {count} words, more than {accepted[1]}", count)
    return None


class KnownSkills:
    """The gold skills and the distractors made so far: a new one shares neither its name nor its body with any."""

    def __init__(self, golds: Iterable[Skill], max_jaccard: float) -> None:
        self._max_jaccard = max_jaccard
        self._hashes = WordHashes()
        self._names: dict[str, str] = {}
        self._golds: list[tuple[str, Trigrams]] = []
        self._made: list[tuple[str, Trigrams]] = []
        for gold in golds:
            self._names.setdefault(name_key(gold.name), gold.skill_id)
            self._golds.append((gold.skill_id, word_trigrams(gold.body, self._hashes)))

    def add(self, skill: Skill) -> Fault | None:
        """Why `skill` is turned down; where nothing speaks against it, None, and it is known from now on.

        Bodies are alike where the Jaccard index of their word trigrams is above the limit, as in stage `filter`: a
        copy of a gold skill would be a right answer counted as wrong.
        """
        if other := self._names.get(name_key(skill.name)):
            return Fault("same_name", f"it has the name of {other}")
        trigrams = word_trigrams(skill.body, self._hashes)
        for kind, known in (("near_copy", self._golds), ("duplicate", self._made)):
            for skill_id, others in known:
                likeness = self._likeness(trigrams, others)
                if likeness > self._max_jaccard:
                    return Fault(kind, f"its body is nearly that of {skill_id}", round(likeness, 4))
        self._names[name_key(skill.name)] = skill.skill_id
        self._made.append((skill.skill_id, trigrams))
        return None

    def _likeness(self, left: Trigrams, right: Trigrams) -> float:
        """The Jaccard index; 0 where the sizes alone keep it at or below the limit."""
        fewer, more = sorted((len(left), len(right)))
        return jaccard(left, right) if fewer > self._max_jaccard * more else 0.0
