"""Queries from a skill's own text, without a model.

A query is a request made from a passage that says what the skill does or when to use it: a quoted
request, or a clause of the description, of a "when to use" section, of the overview or of a list
of features. As in the inverse cloze task (Lee, Chang and Toutanova 2019, arXiv 1906.00300), the
passage is removed from the skill. The description still says what the skill is for.

Notes:
- If the description needs each passage, only one query is made. The first paragraph of the body is
  then the description, as in skills that have none.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Literal, NamedTuple

from skilltrain.data.imperatives import (
    MIN_WORDS,
    Passage,
    clauses_of,
    passages_of,
    pattern,
    says_task,
    sentences_of,
)
from skilltrain.data.pool.skill_file import first_paragraph
from skilltrain.data.query_texts import names_skill
from skilltrain.data.sampling import stable_number
from skilltrain.records import Skill
from skilltrain.texts import num_words, one_line, words_of

Kind = Literal["quote", "use", "description", "feature"]

_BODY_CHARS = 20_000  # the rest of a longer body is not read
_MIN_CLEAR_WORDS = 6  # of a feature that is seldom vague
_MIN_PARAGRAPH_WORDS = 8  # of a first paragraph that takes the place of a description
# A clause repeats a request if so much of their words agrees (Jaccard index).
_MIN_OVERLAP = 0.5
# A Markdown code block, up to the end of the body if it is not closed
_CODE = re.compile(r"^\s*(```|~~~).*?(^\s*\1|\Z)", re.S | re.M)
# A heading: its mark "##" and its text, or text in bold
_HEADING = re.compile(r"(#{1,6})\s+(.*)|\*\*([^*]+)\*\*[:：]?$")
_QUOTED = re.compile('["“「]([^"“”「」\n]{8,200})["”」]')
# Signs and conjunctions at the start of a text, or twice, where a clause was removed
_LOOSE_SIGNS = re.compile(r"^\W*(?:(?:and|or|then)\s+)?(?=\w)|(?<=,)\s*,")


def own_queries(skill: Skill, count: int, seed: int) -> tuple[list[str], Skill]:
    """Make queries from passages of a skill, and remove these passages from the skill.

    Returns:
        At most `count` queries, and the skill without their passages.
    """
    passages = _shuffled_passages(skill, seed)
    chosen, description = _choose_passages(passages, skill, count)
    body = skill.body
    for passage in chosen:
        body = _cut(body, passage)
    if chosen:
        queries = [passage.request for passage in chosen]
        return queries, replace(skill, description=description, body=body)

    # Take another description.
    for passage in passages:
        body = _cut(skill.body, passage)
        paragraph = first_paragraph(body)
        if _is_description(paragraph):
            return [passage.request], replace(skill, description=paragraph, body=body)
    return [], skill


def _choose_passages(
    passages: Sequence[Passage], skill: Skill, count: int
) -> tuple[list[Passage], str]:
    """Choose passages without which the description still says what the skill is for.

    Returns:
        At most `count` passages with distinct requests, and the description without these passages.
    """
    chosen: dict[str, Passage] = {}  # by casefolded request
    description = skill.description
    for passage in passages:
        if len(chosen) == count:
            break
        remaining_description = _without_passage(description, passage, skill)
        if _says_purpose(remaining_description, skill):
            chosen.setdefault(passage.request.casefold(), passage)
            description = remaining_description
    return list(chosen.values()), description


def _shuffled_passages(skill: Skill, seed: int) -> list[Passage]:
    """Return the passages of a skill in random order. The kinds of passages take turns."""
    rng = random.Random(stable_number(seed, "passages", skill.skill_id))
    kinds: list[Kind] = ["quote", "use", "description", "feature"]
    rng.shuffle(kinds)
    passages_by_kind: dict[Kind, list[Passage]] = {kind: [] for kind in kinds}
    for kind, passage in [*_header_passages(skill), *_body_passages(skill)]:
        passages_by_kind[kind].append(passage)
    for passages in passages_by_kind.values():
        rng.shuffle(passages)

    shuffled: list[Passage] = []
    for turn in zip_longest(*passages_by_kind.values()):
        shuffled += [passage for passage in turn if passage is not None]
    return shuffled


def _header_passages(skill: Skill) -> Iterator[tuple[Kind, Passage]]:
    """Yield the passages of the description and of `when_to_use`, with their kinds."""
    for passage in passages_of(skill.description, skill.name):
        yield "description", passage
    when_to_use = skill.when_to_use or ""
    for passage in passages_of(when_to_use, skill.name, is_about_use=True):
        yield "use", passage
    for passage in _quotations(f"{skill.description}\n{when_to_use}", skill.name):
        yield "quote", passage


def _body_passages(skill: Skill) -> Iterator[tuple[Kind, Passage]]:
    """Yield the passages of the body, with their kinds.

    Passages are in "when to use" sections, in lists of features and in overviews.
    """
    for line in _body_lines(skill.body):
        if pattern("negated").search(f"{line.context} {line.text}"):
            continue
        is_about_use = pattern("when_to_use").search(line.context) is not None
        kind: Kind = "use" if is_about_use else "feature"
        if is_about_use:
            for passage in _quotations(line.text, skill.name):
                yield "quote", passage
        elif not (line.is_overview or pattern("features").search(line.context)):
            continue
        for passage in passages_of(line.text, skill.name, is_about_use):
            if _is_clear(passage.request, kind, skill):
                yield kind, passage


class _BodyLine(NamedTuple):
    """A line of a skill's body.

    Attributes:
        context: Heading of the section, and the sentence in front of the list.
        is_overview: Whether it is the first line of the body or of the overview.
    """

    text: str
    context: str
    is_overview: bool


def _body_lines(body: str) -> Iterator[_BodyLine]:
    """Yield the lines of a body that are no headings and no code."""
    heading = ""
    list_intro = ""
    awaits_overview = True
    for line in _CODE.sub("\n", body[:_BODY_CHARS]).splitlines():
        heading_match = _HEADING.match(line.strip())
        if heading_match:
            heading = heading_match[2] or heading_match[3]
            list_intro = ""
            is_title = heading_match[1] == "#"
            awaits_overview = is_title or pattern("overview").search(heading) is not None
            continue
        if line.rstrip().endswith((":", "：", "…")):
            list_intro = line
        yield _BodyLine(line, f"{heading} {list_intro}", awaits_overview)
        if line.strip():
            awaits_overview = False


def _is_clear(request: str, kind: Kind, skill: Skill) -> bool:
    """Return whether a request from the body can be understood alone.

    It must share words, besides the verb, with the name or the description: one word in a "when to
    use" section or in a longer request, and otherwise two words.
    """
    long_words = {word for word in words_of(request)[1:] if len(word) > 3 or not word.isascii()}
    num_shared = len(long_words.intersection(words_of(f"{skill.name} {skill.description}")))
    is_vague = kind != "use" and num_words(request) < _MIN_CLEAR_WORDS
    return num_shared >= (2 if is_vague else 1)


def _quotations(text: str, name: str) -> Iterator[Passage]:
    """Yield the quotations in a text that are requests of a user and do not name the skill."""
    for quotation in _QUOTED.findall(text):
        request = one_line(quotation).rstrip(" ,;:，；：")
        is_spoken = pattern("spoken").match(request) is not None
        is_request = is_spoken or any(passages_of(request, name, is_about_use=True))
        is_complete = num_words(request) >= MIN_WORDS and not pattern("gap").search(request)
        if is_request and is_complete and not names_skill(request, name):
            yield Passage(quotation, request)


def _says_purpose(description: str, skill: Skill) -> bool:
    """Return whether a description, without a passage, says what the skill is for.

    This is so if the first sentence is left, or another one that says a task.
    """
    if description.startswith(sentences_of(skill.description)[0]):
        return True
    return any(
        num_words(clause) >= MIN_WORDS and says_task(clause, skill.name)
        for clause in clauses_of(description)
    )


def _is_description(paragraph: str) -> bool:
    """Return whether the first paragraph of a body can be the description of the skill."""
    is_prose = num_words(paragraph) >= _MIN_PARAGRAPH_WORDS and paragraph[-1] in ".!。！"
    return is_prose and not pattern("order").search(paragraph)


def _without_passage(description: str, passage: Passage, skill: Skill) -> str:
    """Remove a passage, and clauses that repeat its request, from a description.

    The whole sentence is removed if the other sentences say what the skill is for.
    """
    other_sentences = description
    for sentence in sentences_of(description):
        if passage.text in sentence:
            other_sentences = other_sentences.replace(sentence, "")
    other_sentences = _without_repeats(other_sentences, passage.request).strip()
    if _says_purpose(other_sentences, skill):
        return other_sentences
    return _LOOSE_SIGNS.sub("", _cut(description, passage))


def _cut(text: str, passage: Passage) -> str:
    """Remove a passage, and clauses that repeat its request, from a text."""
    return _without_repeats(text.replace(passage.text, ""), passage.request)


def _without_repeats(text: str, request: str) -> str:
    """Remove the clauses of a text that have nearly the words of a request."""
    request_words = set(words_of(request))
    for clause in clauses_of(text):
        words = set(words_of(clause))
        num_shared = len(words & request_words)
        if num_shared > 0 and num_shared >= _MIN_OVERLAP * len(words | request_words):
            text = text.replace(clause, "")
    return text
