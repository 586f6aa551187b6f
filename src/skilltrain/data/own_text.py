"""Queries from a skill's own text, without any model: a passage becomes a query, and the skill is left without it.

Self-supervised pairs, after the inverse cloze task (Lee, Chang and Toutanova 2019, arXiv 1906.00300): the description
is to find the body; a quoted request or a "when to use" line the rest of the skill; a heading or a sentence its
surroundings. The skill's name is taken out of the query.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from skilltrain.data.draws import stable_number
from skilltrain.data.query_texts import names_skill, without_name
from skilltrain.records import Skill
from skilltrain.texts import num_words

MIN_WORDS, MAX_WORDS = 4, 60
Kind = Literal["description", "quote", "use", "heading", "sentence"]
Passage = tuple[Kind, str]  # as it is in the skill

_BODY_CHARS = 20_000
_CODE = re.compile(r"^\s*(```|~~~).*?(^\s*\1|\Z)", re.S | re.M)
_LINE = re.compile(r"(?P<mark>#{1,6}|[-*+•]|\d+[.)、]|>)?\s*(?P<text>.*)")
_QUOTED = re.compile('["“「](?P<text>[^"“”「」\n]{8,200})["”」]')
_MARKUP = (
    (re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"[*`|]|<[^>]+>|(?<!\w)_|_(?!\w)"), ""),
    (re.compile(r"^(?:(?:step|phase|part)\s*)?\d+(?:\.\d+)*\s*[:.)、-]\s*", re.I), ""),
)
_UNFIT = re.compile(r"[{}<>=$@\\]|\w\(|://|\w/\w+/|--\w|\.\w+\(")  # signs of code
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")
_USE = re.compile(r"when (?:to|should)|use (?:this|when|cases?)|trigger|使用场景|适用|何时|什么时候|触发", re.I)
_ASIDE = re.compile(
    r"\bnot\b|n['’]t\b|avoid|instead|install|setup|prerequisite|require|config|troubleshoot|error|licen[sc]e|reference"
    r"|api key|不|安装|配置|设置|要求|错误|参考|许可", re.I)  # fmt: skip
# What a line says about the user before it says what the user wants.
_LEAD = re.compile(
    r"^(?:use (?:this |the |it )?(?:skill )?(?:when|whenever|if|for)\s+|when(?:ever)?\s+|if\s+)?"
    r"(?:(?:the |a )?users? (?:wants?|needs?|asks?|requests?)|you (?:want|need))(?: you| help)?"
    r"(?: to| for| with| about)?\s|^use (?:this |the |it )?(?:skill )?(?:when|whenever|if|for)\s+|^when(?:ever)?\s+"
    r"|^(?:当|如果)?(?:用户|你)(?:想要?|需要|要求|希望|询问)?", re.I)  # fmt: skip


def own_queries(skill: Skill, count: int, seed: int) -> tuple[list[str], Skill]:
    """(at most `count` queries, the skill without the passages that they were made of).

    Each kind of passage gives one query before any gives a second. In half of the skills quoted requests and "when to
    use" lines come before the description, so that not every skill loses its description.
    """
    chance = random.Random(stable_number(seed, "passages", skill.skill_id))
    first: list[Kind] = ["description", "quote", "use"] if chance.random() < 0.5 else ["quote", "use", "description"]
    by_kind: dict[Kind, list[Passage]] = {kind: [] for kind in (*first, "heading", "sentence")}
    for passage in _passages(skill):
        by_kind[passage[0]].append(passage)
    for found in by_kind.values():
        chance.shuffle(found)
    queries: dict[str, str] = {}
    rest = skill
    while len(queries) < count and any(by_kind.values()):
        for found in by_kind.values():
            query, used = _first_usable(found, skill.name)
            if used is not None and query.casefold() not in queries and len(queries) < count:
                queries[query.casefold()] = query
                rest = _without(rest, used)
    return list(queries.values()), rest


def _first_usable(passages: list[Passage], name: str) -> tuple[str, Passage | None]:
    """(query, passage) of the first passage that makes a query; it and those before it are taken off the list."""
    while passages:
        kind, text = passages.pop()
        query = _query_of(text)
        if names_skill(query, name):
            query = without_name(query, name)
        unfit = kind != "description" and _UNFIT.search(query)
        if not unfit and MIN_WORDS <= num_words(query) <= MAX_WORDS and not names_skill(query, name):
            return query, (kind, text)
    return "", None


def _without(skill: Skill, passage: Passage) -> Skill:
    kind, text = passage
    description = "" if kind == "description" else skill.description.replace(text, "")
    return replace(skill, description=description, body=skill.body.replace(text, ""))


def _passages(skill: Skill) -> Iterator[Passage]:
    """Everything in a skill that may become a query."""
    yield "description", skill.description
    yield from _quotes(skill.description)
    heading = ""
    for line in _CODE.sub("\n", skill.body[:_BODY_CHARS]).splitlines():
        found = _LINE.fullmatch(line.strip())
        if found is None or not found["text"]:
            continue
        if (found["mark"] or "").startswith("#"):
            heading = found["text"]
            if not _USE.search(heading) and not _ASIDE.search(heading):
                yield "heading", heading
        elif _USE.search(heading) and not _ASIDE.search(heading):
            quotes = list(_quotes(line))
            yield from quotes or [("use", found["text"])]
        elif not _ASIDE.search(heading):
            for text in filter(None, _SENTENCE_END.split(found["text"])):
                yield "sentence", text


def _quotes(text: str) -> Iterator[Passage]:
    for found in _QUOTED.finditer(text):
        yield "quote", found["text"]


def _query_of(text: str) -> str:
    """A passage as a query: on one line, without markup and lead-in, of a description the first sentences."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    sentences = _SENTENCE_END.split(" ".join(text.split()).strip(" -–—:："))
    while len(sentences) > 1 and num_words(" ".join(sentences)) > MAX_WORDS:
        sentences.pop()
    return _LEAD.sub("", " ".join(sentences).strip())
