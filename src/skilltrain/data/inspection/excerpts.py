"""What of the lists and of the drops is written into the page, for its script to show and to search."""

import json
import random
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from skilltrain.data.inspection.checks import Check
from skilltrain.data.inspection.counts import body_chars
from skilltrain.data.inspection.material import Drop, Material
from skilltrain.texts import CJK

NUM_PER_CHECK = 50  # lists that a check points at and that are shown besides the sample
NUM_PER_LAYER = 60  # dropped pairs shown of each layer
QUERY_CHARS, DESCRIPTION_CHARS, BODY_CHARS = 2_000, 400, 4_000
EXCERPTS = (1_000, 600, 300, 120)  # characters of a body in a list; the longest that keeps the page below:
MAX_BYTES = 22_000_000
SEED = 0
_WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")
ItemT = TypeVar("ItemT")
Pair = tuple[str, str, str, str]
"""(query_id, skill_id, layer, gold_id)"""


@dataclass(frozen=True)
class Shown:
    """The page's data: JSON that is safe inside a script element, and how many lists and pairs it holds.

    Of `lists`, `sampled` were drawn at random and the others are there for a check; `pairs` by layer: (shown, all).
    """

    json: str
    lists: int
    sampled: int
    pairs: Mapping[str, tuple[int, int]]


def choose(material: Material, checks: Sequence[Check], max_lists: int) -> Shown:
    """What to show: `max_lists` lists drawn by seed, some of each check's, and dropped pairs of each layer."""
    sampled = _sample(range(len(material.query_ids)), max_lists, "lists")
    lists = sorted({*sampled, *(place for c in checks for place in _sample(c.lists.tolist(), NUM_PER_CHECK, c.key))})
    pairs, totals = _pairs(material)
    rows = _Rows(material)
    data: dict[str, Any] = {
        "sources": list(material.sources),
        "verdicts": list(material.verdicts),
        "checks": [[check.key, check.title] for check in checks if len(check.lists)],
        "lists": _lists(material, checks, lists, rows),
        "drops": [_pair_row(material, pair, drops, rows) for pair, drops in pairs],
    }
    texts = (embed(data | {"skills": rows.written(num_chars)}) for num_chars in EXCERPTS)
    text = next((text for text in texts if len(text.encode("utf-8", "replace")) < MAX_BYTES), None)
    text = text or embed(data | {"skills": rows.written(EXCERPTS[-1])})
    shown = {layer: (sum(pair[2] == layer for pair, _ in pairs), total) for layer, total in totals.items()}
    return Shown(text, len(lists), len(sampled), shown)


def embed(value: Any) -> str:
    """`value` as JSON for a script element: without `<` and the separators that old scripts take for line ends."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace("\u2028", r"\u2028").replace("\u2029", r"\u2029")


def _sample(items: Iterable[ItemT], count: int, key: str) -> list[ItemT]:
    """Up to `count` of `items`, drawn by seed and key, in their order."""
    given = list(items)
    if len(given) <= count:
        return given
    chosen = random.Random(f"{SEED}/{key}").sample(range(len(given)), count)
    return [given[place] for place in sorted(chosen)]


class _Rows:
    """The skills that are shown, each written once; numbers in the page's data are places among them."""

    def __init__(self, material: Material) -> None:
        self._material, self._places = material, dict[int, int]()
        entries = material.entries
        self._chars = body_chars(material)
        self._serves = np.bincount(entries.skill[~entries.positive], minlength=material.skills.num_rows)

    def place(self, skill: int) -> int:
        """The place of a row of the material's skills."""
        return self._places.setdefault(skill, len(self._places))

    def written(self, num_chars: int) -> list[list[Any]]:
        """id, name, description, beginning of the body, category, language, source, characters of the body (-1: not in
        the pool), times a negative, rules that flag it."""
        order = list(self._places)
        rules: dict[str, list[str]] = {}
        if self._material.flags is not None:
            for skill_id, rule in zip(
                *(self._material.flags.column(c).to_pylist() for c in ("skill_id", "rule")), strict=True
            ):
                rules.setdefault(skill_id, []).append(rule)
        return [
            [
                row["skill_id"], cut(row["name"], DESCRIPTION_CHARS), cut(row["description"], DESCRIPTION_CHARS),
                cut(row["body"], num_chars), row["category"] or "", row["lang"] or "", row["source"],
                int(self._chars[skill]) if self._material.known[skill] else -1, int(self._serves[skill]),
                sorted(set(rules.get(row["skill_id"], ()))),
            ]
            for skill, row in zip(order, self._material.skills.take(order).to_pylist(), strict=True)
        ]  # fmt: skip


def cut(text: str, num_chars: int) -> str:
    """The beginning of a text, with a mark where it goes on."""
    return text if len(text) <= num_chars else text[:num_chars] + "…"


def _lists(material: Material, checks: Sequence[Check], lists: Sequence[int], rows: _Rows) -> list[list[Any]]:
    """id, query, entries (skill, source, rank, verdict, teacher's score if any), findings (check, entries' places)."""
    entries = material.entries
    starts = np.searchsorted(entries.list, np.arange(len(material.query_ids) + 1))
    findings: dict[int, dict[int, list[int]]] = {}
    for number, check in enumerate(check for check in checks if len(check.lists)):
        for entry in check.entries.tolist():
            place = int(entries.list[entry])
            findings.setdefault(place, {}).setdefault(number, []).append(entry - int(starts[place]))
    return [
        [
            material.query_ids[place],
            cut(material.texts[place], QUERY_CHARS),
            [_entry(material, entry, rows) for entry in range(starts[place], starts[place + 1])],
            [[number, found] for number, found in findings.get(place, {}).items()],
        ]
        for place in lists
    ]


def _entry(material: Material, entry: int, rows: _Rows) -> list[Any]:
    entries = material.entries
    row: list[Any] = [int(field[entry]) for field in (entries.source, entries.rank, entries.verdict)]
    score = entries.teacher_score[entry]
    return [rows.place(int(entries.skill[entry])), *row, *([] if np.isnan(score) else [round(float(score), 4)])]


def _pairs(material: Material) -> tuple[list[tuple[Pair, list[Drop]]], dict[str, int]]:
    """(dropped pairs to show with the rows that name them, number of pairs by layer); sources share a pair.

    Those of a layer come in order of their values, so that close calls stand first.
    """
    by_layer: dict[str, dict[Pair, list[Drop]]] = {}
    for drop in material.drops:
        pair = (drop.query_id, drop.skill_id, drop.layer, drop.gold_id)
        by_layer.setdefault(drop.layer, {}).setdefault(pair, []).append(drop)
    drawn = [_sample(pairs.items(), NUM_PER_LAYER, layer) for layer, pairs in by_layer.items()]
    chosen = [item for items in drawn for item in sorted(items, key=lambda item: item[1][0].value or 0.0)]
    return chosen, {layer: len(pairs) for layer, pairs in by_layer.items()}


def _pair_row(material: Material, pair: Pair, drops: Sequence[Drop], rows: _Rows) -> list[Any]:
    """layer, value, sources, query id, query, candidate, gold (-1: none), reason, both bodies in pieces.

    Where the reason names no gold skill, the query's positive takes its place.
    """
    query_id, skill_id, layer, gold_id = pair
    candidate = material.position[skill_id]
    gold = material.position[gold_id] if gold_id else material.positives.get(query_id, -1)
    bodies = [material.skills.column("body")[row].as_py() if row >= 0 else "" for row in (candidate, gold)]
    return [
        layer, drops[0].value, [drop.source for drop in drops], query_id,
        cut(material.query_texts.get(query_id, ""), QUERY_CHARS), rows.place(candidate),
        rows.place(gold) if gold >= 0 else -1, drops[0].reason, *side_by_side(bodies[0], bodies[1]),
    ]  # fmt: skip


def side_by_side(left: str, right: str) -> tuple[list[str], list[str]]:
    """The beginnings of two bodies, each in pieces: not shared, shared, not shared, … by the word trigrams of both.

    Words are those of `near_duplicates.TrigramReader`, so that what is marked is what its Jaccard index counts.
    """
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
    words = _words(cut(text, BODY_CHARS))
    width = min(3, len(words))
    marked = np.zeros(len(words) + 1, dtype=bool)
    for place in range(len(words) - width + 1):
        if tuple(word for word, _, _ in words[place : place + width]) in shared:
            marked[place : place + width] = True
    pieces, end = [], 0
    edges = np.flatnonzero(np.diff(marked, prepend=False)).tolist()  # first of a run, first after it, …
    for first, after in zip(edges[::2], edges[1::2], strict=True):
        start, stop = words[first][1], words[after - 1][2]
        pieces += [text[end:start], text[start:stop]]
        end = stop
    return [*pieces, cut(text, BODY_CHARS)[end:]]
