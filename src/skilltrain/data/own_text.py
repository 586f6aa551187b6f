"""Queries from a skill's own text, without a model.

A query is a request made from a passage that says what the skill does or when to use it: a quoted
request, a heading, or a clause of the description, of a "when to use" section, of the overview or
of a list of features. As in the inverse cloze task (Lee, Chang and Toutanova 2019, arXiv
1906.00300), the passage is removed from the skill. The description still says what the skill is
for.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain, zip_longest
from typing import Literal

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

_MIN_CLARITY = 6  # points of a usable request, from `_clarity`
# Of a description or `when_to_use`. Patterns are slow for longer texts, so these make no query.
_MAX_HEADER_CHARS = 5_000
_BODY_CHARS = 20_000  # the rest of a longer body is not read
_STEM_CHARS = 5  # at the start of a word
_MIN_SHARED_WORDS = 3  # of a request and the rest of the description or body
_MIN_LONG_REQUEST_WORDS = 6  # a request this long is seldom vague
_MIN_PARAGRAPH_WORDS = 8  # of a first paragraph that takes the place of a description
# A clause repeats a request or its passage if so many of their words agree (Jaccard index).
_MIN_OVERLAP = 0.5
# A Markdown code block, up to the end of the body if it is not closed
_CODE = re.compile(r"^\s*(```|~~~).*?(^\s*\1|\Z)", re.S | re.M)
# A heading: its mark "##" and its text, or text in bold
_HEADING = re.compile(r"(#{1,6})\s+(.*)|\*\*([^*]+)\*\*[:：]?$")
_QUOTED = re.compile('["“「]([^"“”「」\n]{8,200})["”」]')
# Spaces of hostile texts. Patterns would take very long for them.
_MANY_SPACES = re.compile(r"[ \t]{100,}")
_PARENTHESES = re.compile(r"\([^()]*\)")  # a remark
# Signs and conjunctions at the start of a text, or twice, where a clause was removed
_LOOSE_SIGNS = re.compile(r"^\W*(?:(?:and|or|then)\s+)?(?=\w)|(?<=,)\s*,")


def own_queries(skill: Skill, count: int, seed: int) -> tuple[list[str], Skill]:
    """Make queries from passages of a skill, and remove these passages from the skill.

    A passage is a part of the text that makes a request. Training needs a skill that does not hold
    its own query.

    Args:
        skill: The skill.
        count: Number of queries to make at most.
        seed: Seed of the random choice of passages.

    Returns:
        At most `count` queries, and the skill without their passages.
    """
    description = _MANY_SPACES.sub(" ", skill.description)
    when_to_use = _MANY_SPACES.sub(" ", skill.when_to_use or "")
    body = _MANY_SPACES.sub(" ", skill.body)
    skill = replace(skill, description=description, when_to_use=when_to_use or None, body=body)
    if max(len(description), len(when_to_use)) > _MAX_HEADER_CHARS:
        return [], skill

    # Choose passages without which the description still says what the skill is for.
    passages = _rank_passages(skill, seed)
    chosen: dict[str, Passage] = {}  # by casefolded request, so that no two are equal
    chosen_clarity = 0  # clarity of the chosen passages
    for passage, clarity in passages:
        # Passages are sorted. Stop at a less clear level once a passage is chosen.
        if len(chosen) == count or clarity < chosen_clarity:
            break
        remaining_description = _without_passage(description, passage, skill)
        if _says_purpose(remaining_description, skill):
            chosen.setdefault(passage.request.casefold(), passage)
            chosen_clarity = clarity
            description = remaining_description
    # Remove the chosen passages from the body too, with clauses that repeat their requests.
    if chosen:
        body = skill.body
        for passage in chosen.values():
            body = _without_repeats(body.replace(passage.text, ""), passage)
        queries = [passage.request for passage in chosen.values()]
        return queries, replace(skill, description=description, body=body)

    # Without any of the passages, the description does not say what the skill is for. The first
    # paragraph of the body takes its place, as in skills that have no description.
    for passage, _ in passages:
        body = _without_repeats(skill.body.replace(passage.text, ""), passage)
        paragraph = first_paragraph(body)
        if _is_description(paragraph):
            return [passage.request], replace(skill, description=paragraph, body=body)
    return [], skill


def _rank_passages(skill: Skill, seed: int) -> list[tuple[Passage, int]]:
    """Return the usable passages of a skill with their clarity, the clearest first.

    Equally clear passages are in random order and take turns by kind. A kind is the place of a
    passage, such as "quote" or "description". With turns, a kind with many passages does not crowd
    out the others.
    """
    rng = random.Random(stable_number(seed, "passages", skill.skill_id))
    kinds: list[Kind] = ["quote", "use", "description", "feature"]
    rng.shuffle(kinds)
    passages_by_kind: dict[Kind, list[tuple[Passage, int]]] = {kind: [] for kind in kinds}
    for kind, passage in [*_header_passages(skill), *_body_passages(skill)]:
        clarity = _clarity(passage, kind, skill)
        if clarity >= _MIN_CLARITY:
            passages_by_kind[kind].append((passage, clarity))
    for passages in passages_by_kind.values():
        rng.shuffle(passages)

    # Each turn takes one passage of each kind, or None if a kind has no more passages.
    turns = zip_longest(*passages_by_kind.values())
    shuffled = filter(None, chain.from_iterable(turns))
    return sorted(shuffled, key=lambda item: -item[1])


def _header_passages(skill: Skill) -> Iterator[tuple[Kind, Passage]]:
    """Yield the passages of the description and of `when_to_use`, with their kinds."""
    for sentence in sentences_of(skill.description):
        is_about_use = pattern("about_use").match(sentence) is not None
        for passage in passages_of(sentence, skill.name):
            yield "use" if is_about_use else "description", passage
    when_to_use = skill.when_to_use or ""
    for passage in passages_of(when_to_use, skill.name, is_about_use=True):
        yield "use", passage
    for passage in _quotations(f"{skill.description}\n{when_to_use}", skill.name):
        yield "quote", passage


def _body_passages(skill: Skill) -> Iterator[tuple[Kind, Passage]]:
    """Yield the passages of the body, with their kinds.

    They stand in "when to use" sections, in lists of features, in the first line of the body or of
    its overview, in quotations and in headings.
    """
    heading = ""  # of the section that the line is in
    list_intro = ""  # sentence in front of the list that the line is in
    awaits_overview = True  # the next line with text is the first line of the overview
    for line in _CODE.sub("\n", skill.body[:_BODY_CHARS]).splitlines():
        if not line.strip():
            continue
        heading_match = _HEADING.match(line.strip())
        if heading_match:
            # Group 1: the mark, such as "##". Group 2: its text. Group 3: a line in bold.
            heading = heading_match[2] or heading_match[3]
            list_intro = ""
            is_first_level = heading_match[1] == "#"
            awaits_overview = is_first_level or pattern("overview").search(heading) is not None
            # A heading in lower case, such as "Merge two files", names a task. "Merge Mode" does
            # not. A heading such as "Do not merge" makes no request, so it needs no further check.
            if pattern("sentence_case").match(heading):
                for passage in passages_of(heading, skill.name):
                    yield "feature", passage
            continue
        # A line such as "You can use it to:" introduces a list.
        if line.rstrip().endswith((":", "：", "…")):
            list_intro = line

        is_overview = awaits_overview
        awaits_overview = False
        # The heading and the introduction tell what the line is about.
        context = f"{heading} {list_intro}"
        # Skip a line that says what the skill does not do.
        if pattern("negated").search(f"{context} {line}"):
            continue
        if pattern("when_to_use").search(context):
            for passage in passages_of(line, skill.name, is_about_use=True):
                yield "use", passage
            for passage in _quotations(line, skill.name):
                yield "quote", passage
            continue

        # Outside "when to use", a quoted question may be one that the agent asks, so skip it. A
        # quoted task counts as a feature and needs the usual clarity.
        for passage in _quotations(line, skill.name):
            if not pattern("spoken").match(passage.request):
                yield "feature", passage
        if is_overview or pattern("features").search(context):
            for passage in passages_of(line, skill.name):
                yield "feature", passage


def _clarity(passage: Passage, kind: Kind, skill: Skill) -> int:
    """Rate how well the request of a passage can be understood alone.

    For example, "Merge results from multiple runs" has few of the signs that earn points below.

    Returns:
        0 to 12 points, and 0 for a request about another topic than the skill:

        - four points for a place at the start of the description
        - three points for a name
        - two points if there is no sign of doubt
        - a point for each word of the skill's name, at most two
        - a point for a quotation, or for a text that says when to use the skill
    """
    request = passage.request
    # Leave out the verb: the first word, or the first two characters of a text without spaces.
    stems = _stems(request.partition(" ")[2] or request[2:])
    if not _is_on_topic(passage, stems, skill):
        return 0
    # The start of the description says what the skill is for. Later clauses often add details.
    is_first = skill.description.startswith(passage.text)
    # A name, such as "PDF" or "config.json"
    is_named = pattern("named_thing").search(request) is not None
    # Words such as "when" are signs of doubt. For example, "Start a chat when nobody answers" is
    # probably a step of a skill, and not a request.
    is_plain = pattern("doubtful").search(request) is None
    num_name_words = min(2, len(stems & _stems(skill.name)))
    says_use = kind in ("quote", "use")
    return 4 * is_first + 3 * is_named + 2 * is_plain + num_name_words + says_use


def _is_on_topic(passage: Passage, stems: set[str], skill: Skill) -> bool:
    """Return whether a request shares a stem with the header of its skill, or three with the body.

    Args:
        passage: The passage that makes the request.
        stems: Stems of the request without its verb.
        skill: The skill.
    """
    if not stems.isdisjoint(_stems(f"{skill.name} {skill.description}")):
        return True
    # Count only stems that occur in the body outside the passage.
    rest_of_body = _count_stems(skill.body[:_BODY_CHARS]) - _count_stems(passage.text)
    return sum(stem in rest_of_body for stem in stems) >= _MIN_SHARED_WORDS


def _stems(text: str) -> set[str]:
    """Return the stems of the words of a text."""
    return set(_count_stems(text))


@lru_cache(maxsize=8)  # all passages of a skill are compared with the same body
def _count_stems(text: str) -> Counter[str]:
    """Count the first five letters of each long word, so that "image" matches "images".

    Short words in other scripts count, because a Chinese word has few characters.
    """
    return Counter(
        word[:_STEM_CHARS] for word in words_of(text) if len(word) > 3 or not word.isascii()
    )


def _quotations(text: str, name: str) -> Iterator[Passage]:
    """Yield the quotations in a text that are requests of a user and do not name the skill."""
    for quotation in _QUOTED.findall(text):
        request = one_line(quotation).rstrip(" ,;:，；：")
        if pattern("spoken").match(request):
            passages = [Passage(quotation, request)]
        else:
            # The quotation must be one task as a whole.
            passages = [
                passage
                for passage in passages_of(quotation, name, is_about_use=True)
                if passage.text == quotation
            ]
        for passage in passages:
            # "deploy X to [server]" has gaps for words, so it is not complete.
            is_long = num_words(passage.request) >= MIN_WORDS
            is_complete = is_long and not pattern("gap").search(passage.request)
            if is_complete and not names_skill(passage.request, name):
                yield passage


def _says_purpose(description: str, skill: Skill) -> bool:
    """Return whether a description, without a passage, says what the skill is for.

    This is so if the first sentence is left, or another clause that says a task.

    Args:
        description: The description after a passage was removed.
        skill: The skill with its whole description.
    """
    if description.startswith(sentences_of(skill.description)[0]):
        return True
    return any(
        num_words(clause) >= MIN_WORDS and says_task(clause, skill.name)
        for clause in clauses_of(description)
    )


def _is_description(paragraph: str) -> bool:
    """Return whether the first paragraph of a body can be the description of the skill.

    It must have enough words, end like a sentence, and not be an order to the agent ("Always
    search tools first").
    """
    is_prose = num_words(paragraph) >= _MIN_PARAGRAPH_WORDS and paragraph[-1] in ".!。！"
    return is_prose and not pattern("order").search(paragraph)


def _without_passage(description: str, passage: Passage, skill: Skill) -> str:
    """Remove a passage, and clauses that repeat its request, from a description.

    Args:
        description: Description of the skill, perhaps without earlier passages.
        passage: The passage. It need not be in the description.
        skill: The skill with its whole description.
    """
    # Remove the whole sentence of the passage, if the other sentences say what the skill is for.
    other_sentences = description
    for sentence in sentences_of(description):
        if passage.text in sentence:
            other_sentences = other_sentences.replace(sentence, "")
    other_sentences = _without_repeats(other_sentences, passage).strip()
    if _says_purpose(other_sentences, skill):
        return other_sentences

    # Otherwise remove only the passage.
    remaining = _without_repeats(description.replace(passage.text, ""), passage)
    return _LOOSE_SIGNS.sub("", remaining)


def _without_repeats(text: str, passage: Passage) -> str:
    """Remove the clauses of a text that have nearly the words of a passage or of its request.

    The Jaccard index of their words is at least `_MIN_OVERLAP`. Also removed: a clause that
    contains the request, or all words of a long request. A long clause can hold a short request
    and still have a low index.
    """
    request_words = set(words_of(passage.request))
    passage_words = set(words_of(_PARENTHESES.sub("", passage.text)))
    for clause in clauses_of(text):
        words = set(words_of(clause))
        jaccard_indices = [
            len(words & other_words) / max(1, len(words | other_words))
            for other_words in (request_words, passage_words)
        ]
        # The words of a short request may occur in an unrelated clause.
        is_long = len(request_words) >= _MIN_LONG_REQUEST_WORDS
        is_contained = is_long and request_words <= words
        is_copy = passage.request.casefold() in clause.casefold()
        if is_contained or is_copy or max(jaccard_indices) >= _MIN_OVERLAP:
            text = text.replace(clause, "")
    return text
