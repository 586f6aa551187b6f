"""Queries from a skill's own text, without a model.

A passage becomes a query and is removed from the skill, as in the inverse cloze task (Lee, Chang
and Toutanova 2019, arXiv 1906.00300). Passages are the description, quoted requests, "when to use"
lines, headings and sentences. The skill's name is removed from the query.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from skilltrain.data.query_texts import names_skill, without_name
from skilltrain.data.sampling import stable_number
from skilltrain.records import Skill
from skilltrain.texts import num_words

MIN_WORDS = 4
MAX_WORDS = 60
Kind = Literal["description", "quote", "use", "heading", "sentence"]

_BODY_CHARS = 20_000  # the rest of a longer body is not read
# A Markdown code block, up to the end of the body if it is not closed
_CODE = re.compile(r"^\s*(```|~~~).*?(^\s*\1|\Z)", re.S | re.M)
# The mark of a heading, list item or quotation, and the text after it
_LINE = re.compile(r"(#{1,6}|[-*+•]|\d+[.)、]|>)?\s*(.*)")
_QUOTED = re.compile('["“「]([^"“”「」\n]{8,200})["”」]')
_MARKUP = (
    (re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), r"\1"),  # a link or image becomes its text
    (re.compile(r"[*`|]|<[^>]+>|(?<!\w)_|_(?!\w)"), ""),  # emphasis, tables, HTML tags
    # "Step 2:", "3.1 - "
    (re.compile(r"^(?:(?:step|phase|part)\s*)?\d+(?:\.\d+)*\s*[:.)、-]\s*", re.I), ""),
)
_CODE_SIGN = re.compile(r"[{}<>=$@\\]|\w\(|://|\w/\w+/|--\w|\.\w+\(")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")
# Headings of sections that say when to use the skill
_WHEN_TO_USE = re.compile(
    r"when (?:to|should)|use (?:this|when|cases?)|trigger|使用场景|适用|何时|什么时候|触发", re.I
)
# Headings of sections that are skipped: they do not say what the skill is for
_SKIPPED_HEADING = re.compile(
    r"\bnot\b|n['’]t\b|avoid|instead|install|setup|prerequisite|require|config|troubleshoot"
    r"|error|licen[sc]e|reference|api key|不|安装|配置|设置|要求|错误|参考|许可",
    re.I,
)
# The start of a line that speaks about the user: "Use this skill when the user wants to"
_LEAD = re.compile(
    r"^(?:use (?:this |the |it )?(?:skill )?(?:when|whenever|if|for)\s+|when(?:ever)?\s+|if\s+)?"
    r"(?:(?:the |a )?users? (?:wants?|needs?|asks?|requests?)|you (?:want|need))(?: you| help)?"
    r"(?: to| for| with| about)?\s"
    r"|^use (?:this |the |it )?(?:skill )?(?:when|whenever|if|for)\s+"
    r"|^when(?:ever)?\s+"
    r"|^(?:当|如果)?(?:用户|你)(?:想要?|需要|要求|希望|询问)?",
    re.I,
)


def own_queries(skill: Skill, count: int, seed: int) -> tuple[list[str], Skill]:
    """Make queries from passages of a skill, and remove these passages from the skill.

    Each kind of passage gives one query before any kind gives a second. For half of the skills, at
    random, the description is the first kind. For the other half, quotes and "when to use" lines
    come before it, so that their description often does not become a query and is kept.

    Returns:
        At most `count` queries, and the skill without their passages.
    """
    # Group the passages by kind, in random order.
    rng = random.Random(stable_number(seed, "passages", skill.skill_id))
    kinds: list[Kind] = ["quote", "use", "description", "heading", "sentence"]
    if rng.random() < 0.5:
        kinds = ["description", "quote", "use", "heading", "sentence"]
    passages_by_kind: dict[Kind, list[str]] = {kind: [] for kind in kinds}
    for kind, text in _passages(skill):
        passages_by_kind[kind].append(text)
    for passages in passages_by_kind.values():
        rng.shuffle(passages)

    # Take one query of each kind in turn. `_pop_query` removes the passages that it tries.
    queries: dict[str, str] = {}  # by casefolded text, so that no two are equal
    remaining_skill = skill
    while len(queries) < count and any(passages_by_kind.values()):
        for kind, passages in passages_by_kind.items():
            query, passage = _pop_query(kind, passages, skill.name)
            is_new = query != "" and query.casefold() not in queries
            if is_new and len(queries) < count:
                queries[query.casefold()] = query
                remaining_skill = _without_passage(remaining_skill, kind, passage)
    return list(queries.values()), remaining_skill


def _without_passage(skill: Skill, kind: Kind, passage: str) -> Skill:
    """Remove a passage from the description and the body, which often repeat each other."""
    description = skill.description.replace(passage, "")
    if kind == "description":
        description = ""
    return replace(skill, description=description, body=skill.body.replace(passage, ""))


def _pop_query(kind: Kind, passages: list[str], name: str) -> tuple[str, str]:
    """Take passages off the end of the list until one makes a query.

    Args:
        kind: Kind of the passages.
        passages: Passages that are not used yet.
        name: Name of the skill, which is removed from the query.

    Returns:
        The query and its passage; both are empty if no passage makes one.
    """
    while passages:
        passage = passages.pop()
        query = _query_of(passage)
        if names_skill(query, name):
            query = without_name(query, name)
        # `without_name` does not find every form of a name.
        is_usable = MIN_WORDS <= num_words(query) <= MAX_WORDS and not names_skill(query, name)
        looks_like_code = kind != "description" and _CODE_SIGN.search(query)
        if is_usable and not looks_like_code:
            return query, passage
    return "", ""


def _passages(skill: Skill) -> Iterator[tuple[Kind, str]]:
    """Yield the passages of a skill that may become queries, unchanged, with their kinds.

    The kinds are:

    - `description`: the whole description.
    - `quote`: a quoted request in the description or in a "when to use" section.
    - `use`: a line without quotes in a "when to use" section.
    - `heading` and `sentence`: from all other sections, except skipped ones such as installation.
    """
    yield "description", skill.description
    for quote in _QUOTED.findall(skill.description):
        yield "quote", quote

    heading = ""  # of the section that the line is in
    for line in _CODE.sub("\n", skill.body[:_BODY_CHARS]).splitlines():
        # Split "## Usage" into the mark "##" and the text "Usage". Marks of lists are split too.
        mark, text = _LINE.findall(line.strip())[0]
        if not text:
            continue
        is_heading = mark.startswith("#")
        if is_heading:
            heading = text
        if _SKIPPED_HEADING.search(heading):
            continue

        is_about_use = _WHEN_TO_USE.search(heading)
        if is_heading:
            # A heading such as "When to use" is no query.
            if not is_about_use:
                yield "heading", heading
        elif is_about_use:
            quotes = _QUOTED.findall(line)
            for quote in quotes:
                yield "quote", quote
            if not quotes:
                yield "use", text
        else:
            for sentence in filter(None, _SENTENCE_END.split(text)):
                yield "sentence", sentence


def _query_of(passage: str) -> str:
    """Return a passage as a query: one line, without markup and lead-in.

    Only the first sentences of a long passage are kept.
    """
    for pattern, replacement in _MARKUP:
        passage = pattern.sub(replacement, passage)
    sentences = _SENTENCE_END.split(" ".join(passage.split()).strip(" -–—:："))
    while len(sentences) > 1 and num_words(" ".join(sentences)) > MAX_WORDS:
        sentences.pop()
    return _LEAD.sub("", " ".join(sentences).strip())
