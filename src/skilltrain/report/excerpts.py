"""What of the lists and of the drops is written into the page, for its script to show and to search."""

import random
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from skilltrain.records import Dropped
from skilltrain.report.checks import Check
from skilltrain.report.material import UNKNOWN, Material
from skilltrain.report.numbers import visible
from skilltrain.texts import CJK

NUM_PER_CHECK = 50  # lists that a check points at and that are shown besides the sample
NUM_PER_LAYER = 60  # dropped pairs shown of each layer
QUERY_CHARS, DESCRIPTION_CHARS, BODY_CHARS = 2_000, 400, 4_000
EXCERPT_CHARS, PAGE_CHARS = 1_000, 12_000_000  # of a body in a list: so many, or its part of the page
_WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")
ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class Shown:
    """The page's data, and how many lists and pairs it holds.

    Of `num_lists`, `num_sampled` were drawn at random and the others are there for a check; `pairs` by layer: (shown,
    all).
    """

    data: dict[str, Any]
    num_lists: int
    num_sampled: int
    pairs: dict[str, tuple[int, int]]


def choose(material: Material, checks: Sequence[Check], max_lists: int) -> Shown:
    """What to show: `max_lists` lists drawn by seed, some of each check's, and dropped pairs of each layer."""
    sampled = _sample(range(len(material.query_ids)), max_lists, "lists")
    lists = sorted({*sampled, *(place for c in checks for place in _sample(c.lists.tolist(), NUM_PER_CHECK, c.key))})
    shown = dict[int, int]()  # place of a skill in the material → its place in the page's data
    data: dict[str, Any] = {
        "sources": [visible(source) for source in material.sources],
        "verdicts": material.verdicts,
        "checks": [check.key for check in checks],
        "lists": _lists(material, checks, lists, shown),
        "drops": [],
    }
    pairs: dict[str, tuple[int, int]] = {}
    for layer, by_pair in _pairs(material).items():
        chosen = _sample(by_pair.values(), NUM_PER_LAYER, layer)
        pairs[layer] = len(chosen), len(by_pair)
        in_order = sorted(chosen, key=lambda drops: drops[0].value or 0.0)  # close calls first
        data["drops"] += [_pair(material, drops, shown) for drops in in_order]
    data["skills"] = _skills(material, shown)
    return Shown(data, len(lists), len(sampled), pairs)


def _sample(items: Iterable[ItemT], count: int, key: str) -> list[ItemT]:
    """Up to `count` of `items`, drawn by key, in their order."""
    given = list(items)
    if len(given) <= count:
        return given
    chosen = random.Random(f"0/{key}").sample(range(len(given)), count)
    return [given[place] for place in sorted(chosen)]


def _skills(material: Material, shown: dict[int, int]) -> list[dict[str, Any]]:
    """The skills of the page in order; `chars` of the body is -1 where the pool lacks the skill."""
    rules: dict[str, set[str]] = {}
    for row in material.flags or ():
        rules.setdefault(row["skill_id"], set()).add(row["rule"])
    serves, num_chars = material.num_lists(positive=False), min(EXCERPT_CHARS, PAGE_CHARS // max(1, len(shown)))
    return [
        {
            "id": visible(skill.skill_id),
            "name": cut(skill.name, DESCRIPTION_CHARS),
            "description": cut(skill.description, DESCRIPTION_CHARS),
            "body": cut(skill.body, num_chars),
            "category": visible(skill.category or ""),
            "lang": visible(skill.lang or ""),
            "source": visible(skill.source),
            "chars": len(skill.body) if material.known[place] else -1,
            "serves": int(serves[place]),
            "flags": sorted(rules.get(skill.skill_id, ())),
        }
        for place, skill in ((place, material.skills[place]) for place in shown)
    ]


def cut(text: str, num_chars: int) -> str:
    """The beginning of a text, with everything visible and a mark where it goes on."""
    return visible(text if len(text) <= num_chars else text[:num_chars] + "…")


def _lists(
    material: Material, checks: Sequence[Check], lists: Sequence[int], shown: dict[int, int]
) -> list[dict[str, Any]]:
    """Entries are (skill, source, rank, verdict, teacher's score if any), findings (check, places of its entries)."""
    entries = material.entries
    starts = np.searchsorted(entries.list, np.arange(len(material.query_ids) + 1)).tolist()
    findings: dict[int, dict[int, list[int]]] = {}
    for number, check in enumerate(checks):
        for entry in check.entries.tolist():
            place = int(entries.list[entry])
            findings.setdefault(place, {}).setdefault(number, []).append(entry - starts[place])
    return [
        {
            "id": visible(material.query_ids[place]),
            "query": cut(material.texts[place], QUERY_CHARS),
            "entries": [_entry(material, entry, shown) for entry in range(starts[place], starts[place + 1])],
            "findings": list(findings.get(place, {}).items()),
        }
        for place in lists
    ]


def _entry(material: Material, entry: int, shown: dict[int, int]) -> list[Any]:
    entries = material.entries
    place = shown.setdefault(int(entries.skill[entry]), len(shown))
    score = entries.teacher_score[entry]
    row = [place, *(int(field[entry]) for field in (entries.source, entries.rank, entries.verdict))]
    return row if np.isnan(score) else [*row, round(float(score), 4)]


def _pairs(material: Material) -> dict[str, dict[tuple[str, ...], list[Dropped]]]:
    """Layer → (query, candidate, the skill it resembles) → the drops that say so: sources may share a pair."""
    found: dict[str, dict[tuple[str, ...], list[Dropped]]] = {}
    for drop in material.drops:
        pair = (drop.query_id, drop.skill_id, drop.other_id or "")
        found.setdefault(drop.filter, {}).setdefault(pair, []).append(drop)
    return found


def _pair(material: Material, drops: Sequence[Dropped], shown: dict[int, int]) -> dict[str, Any]:
    """A dropped candidate and the skill that it resembles: the query's positive where the drop names none."""
    drop = drops[0]
    candidate = material.position[drop.skill_id]
    other = material.position[drop.other_id] if drop.other_id else material.positives.get(drop.query_id)
    bodies = side_by_side(material.skills[candidate].body, "" if other is None else material.skills[other].body)
    return {
        "layer": visible(drop.filter),
        "value": drop.value,
        "sources": [visible(each.source or UNKNOWN) for each in drops],
        "id": visible(drop.query_id),
        "query": cut(material.query_texts.get(drop.query_id, ""), QUERY_CHARS),
        "reason": visible(drop.reason),
        "skills": [shown.setdefault(place, len(shown)) for place in (candidate, other) if place is not None],
        "bodies": bodies,
    }


def side_by_side(left: str, right: str) -> tuple[list[str], list[str]]:
    """The beginnings of two bodies, each in pieces: not shared, shared, not shared, … by the word trigrams of both."""
    shared = _trigrams(left) & _trigrams(right)
    return _pieces(left, shared), _pieces(right, shared)


def _words(text: str) -> list[tuple[str, int, int]]:
    """(normalised word, start, end) of every word of `text`."""
    return [(unicodedata.normalize("NFKC", m.group()).lower(), m.start(), m.end()) for m in _WORD.finditer(text)]


def _trigrams(text: str) -> set[tuple[str, ...]]:
    words = [word for word, _, _ in _words(text)]
    width = min(3, len(words))
    return {tuple(words[place : place + width]) for place in range(len(words) - width + 1)} if words else set()


def _pieces(text: str, shared: set[tuple[str, ...]]) -> list[str]:
    text = text if len(text) <= BODY_CHARS else text[:BODY_CHARS] + "…"
    words = _words(text)
    width = min(3, len(words))
    marked = np.zeros(len(words) + 1, dtype=bool)
    for place in range(len(words) - width + 1):
        if tuple(word for word, _, _ in words[place : place + width]) in shared:
            marked[place : place + width] = True
    pieces, end = list[str](), 0
    edges = np.flatnonzero(np.diff(marked, prepend=False)).tolist()  # first of a run, first after it, …
    for first, after in zip(edges[::2], edges[1::2], strict=True):
        start, stop = words[first][1], words[after - 1][2]
        pieces += [visible(text[end:start]), visible(text[start:stop])]
        end = stop
    return [*pieces, visible(text[end:])]
