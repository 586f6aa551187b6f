"""Queries from a skill's own text, without any model: a passage becomes a query, and the skill is left without it.

Self-supervised pairs, after the inverse cloze task (Lee, Chang and Toutanova 2019, arXiv 1906.00300), of the
description, quoted requests, "when to use" lines, headings and sentences. The skill's name is taken out of the query.
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

MIN_WORDS, MAX_WORDS = 4, 60
Kind = Literal["description", "quote", "use", "heading", "sentence"]

_BODY_CHARS = 20_000
_CODE = re.compile(r"^\s*(```|~~~).*?(^\s*\1|\Z)", re.S | re.M)
_LINE = re.compile(r"(#{1,6}|[-*+•]|\d+[.)、]|>)?\s*(.*)")  # (mark, text)
_QUOTED = re.compile('["“「]([^"“”「」\n]{8,200})["”」]')
_MARKUP = (
    (re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"[*`|]|<[^>]+>|(?<!\w)_|_(?!\w)"), ""),
    (re.compile(r"^(?:(?:step|phase|part)\s*)?\d+(?:\.\d+)*\s*[:.)、-]\s*", re.I), ""),
)
_UNFIT = re.compile(r"[{}<>=$@\\]|\w\(|://|\w/\w+/|--\w|\.\w+\(")  # signs of code
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")
_USE = re.compile(
    r"when (?:to|should)|use (?:this|when|cases?)|trigger|使用场景|适用|何时|什么时候|触发", re.I
)
_ASIDE = re.compile(
    r"\bnot\b|n['’]t\b|avoid|instead|install|setup|prerequisite|require|config|troubleshoot|error|licen[sc]e|reference"
    r"|api key|不|安装|配置|设置|要求|错误|参考|许可",
    re.I,
)
# What a line says about the user before it says what the user wants.
_LEAD = re.compile(
    r"^(?:use (?:this |the |it )?(?:skill )?(?:when|whenever|if|for)\s+|when(?:ever)?\s+|if\s+)?"
    r"(?:(?:the |a )?users? (?:wants?|needs?|asks?|requests?)|you (?:want|need))(?: you| help)?"
    r"(?: to| for| with| about)?\s|^use (?:this |the |it )?(?:skill )?(?:when|whenever|if|for)\s+|^when(?:ever)?\s+"
    r"|^(?:当|如果)?(?:用户|你)(?:想要?|需要|要求|希望|询问)?",
    re.I,
)


def own_queries(skill: Skill, count: int, seed: int) -> tuple[list[str], Skill]:
    """(at most `count` queries, the skill without their passages); each kind gives one before any gives a second.

    In half of the skills quotes and "when to use" lines come first, so that not every skill loses its description.
    """
    chance = random.Random(stable_number(seed, "passages", skill.skill_id))
    first: list[Kind] = (
        ["description", "quote", "use"]
        if chance.random() < 0.5
        else ["quote", "use", "description"]
    )
    by_kind: dict[Kind, list[str]] = {kind: [] for kind in (*first, "heading", "sentence")}
    for kind, text in _passages(skill):
        by_kind[kind].append(text)
    for found in by_kind.values():
        chance.shuffle(found)
    queries: dict[str, str] = {}
    rest = skill
    while len(queries) < count and any(by_kind.values()):
        for kind, found in by_kind.items():
            query, used = _first_usable(kind, found, skill.name)
            if used and query.casefold() not in queries and len(queries) < count:
                queries[query.casefold()] = query
                description = "" if kind == "description" else rest.description.replace(used, "")
                rest = replace(rest, description=description, body=rest.body.replace(used, ""))
    return list(queries.values()), rest


def _first_usable(kind: Kind, passages: list[str], name: str) -> tuple[str, str]:
    """(query, passage) of the first passage that makes a query; it and those before it are taken off the list."""
    while passages:
        text = passages.pop()
        query = _query_of(text)
        if names_skill(query, name):
            query = without_name(query, name)
        unfit = kind != "description" and _UNFIT.search(query)
        if (
            not unfit
            and MIN_WORDS <= num_words(query) <= MAX_WORDS
            and not names_skill(query, name)
        ):
            return query, text
    return "", ""


def _passages(skill: Skill) -> Iterator[tuple[Kind, str]]:
    """Everything in a skill that may become a query, as it stands there."""
    yield "description", skill.description
    for text in _QUOTED.findall(skill.description):
        yield "quote", text
    heading = ""
    for line in _CODE.sub("\n", skill.body[:_BODY_CHARS]).splitlines():
        mark, text = _LINE.findall(line.strip())[0]
        heading = text if text and mark.startswith("#") else heading
        if not text or _ASIDE.search(heading):
            continue
        if mark.startswith("#"):
            if not _USE.search(heading):
                yield "heading", heading
        elif _USE.search(heading):
            quotes = _QUOTED.findall(line)
            for one in quotes or [text]:
                yield ("quote" if quotes else "use"), one
        else:
            for one in filter(None, _SENTENCE_END.split(text)):
                yield "sentence", one


def _query_of(text: str) -> str:
    """A passage as a query: on one line, without markup and lead-in, of a description the first sentences."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    sentences = _SENTENCE_END.split(" ".join(text.split()).strip(" -–—:："))
    while len(sentences) > 1 and num_words(" ".join(sentences)) > MAX_WORDS:
        sentences.pop()
    return _LEAD.sub("", " ".join(sentences).strip())
