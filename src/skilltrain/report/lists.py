"""`skilltrain inspect`: one HTML page on training lists that needs nothing else."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int64

from skilltrain.errors import SkilltrainError
from skilltrain.files import write_text
from skilltrain.records import Dropped
from skilltrain.report.material import SHORT_BODY, Material, codes, rows_of, run_checks
from skilltrain.report.page import histograms, html_page
from skilltrain.tables import DROPPED
from skilltrain.texts import num_words, visible

NUM_HUBS, NUM_SHARES = 20, 30  # rows of the tables of recurring negatives and of categories
NUM_PER_CHECK = 50  # lists that a check points at and that are shown besides the sample
NUM_PER_FILTER = 60  # dropped pairs shown of each filter
QUERY_CHARS, DESCRIPTION_CHARS = 2_000, 400
BODY_CHARS, PAGE_CHARS = 1_500, 12_000_000  # of a body: so many, or its part of the page
UNKNOWN, NO_VALUE = "unknown", "none"
ItemT = TypeVar("ItemT")
Pairs = dict[tuple[str, str, str, str | None], list[Dropped]]
"""(Filter, query, candidate, the skill it resembles) → the drops that say so: sources may share a pair."""


def inspect_lists(
    lists: Path, out: Path | None, pool: Path | None, max_lists: int
) -> dict[str, Any]:
    """Write the page of the folder `lists` to `out` (beside the folder: `lists.html`) and return what it shows.

    `pool` stands in for the pool that the lists' record names; of more than `max_lists` lists a sample is shown.
    Raises SkilltrainError where `lists` holds no lists, or `out` lies in a folder that a training reads.
    """
    material = Material(lists, pool)
    folder = material.trail.folder
    file = folder.with_name(f"{folder.name}.html") if out is None else out
    if folder in file.resolve().parents:
        raise SkilltrainError(
            "lies in the folder of the lists, which a page would change",
            where=file,
            fix="set --out",
        )
    checks = run_checks(material)
    found = {
        key: len(np.unique(material.in_list[entries]))
        for key, entries in checks.items()
        if len(entries)
    }
    pairs: Pairs = {}
    for drop in material.drops:
        pairs.setdefault((drop.filter, drop.query_id, drop.skill_id, drop.other_id), []).append(
            drop
        )
    data = page_data(material, {key: checks[key] for key in found}, max_lists, pairs)
    content = html_page(
        "lists",
        material=material,
        num_sampled=min(max_lists, len(material.query_ids)),
        found=found,
        passed=[key for key in checks if key not in found],
        short_body=SHORT_BODY,
        pairs=Counter(name for name, *_ in pairs),
        data=data,
        **numbers_of(material),
    )
    write_text(file, content)
    return {
        "page": str(file),
        "megabytes": round(len(content.encode()) / 1e6, 1),
        "num_lists": len(material.query_ids),
        "num_lists_shown": len(data["lists"]),
        "num_dropped_pairs_shown": len(data["drops"]),
        "worth_a_look": found,
        "missing": material.trail.missing,
    }


def numbers_of(m: Material) -> dict[str, Any]:
    """What the page counts over all lists, by the names that its template uses."""
    negative, known, runs = ~m.positive, m.known[m.skill], m.trail.runs
    dropped = Counter((drop.source or UNKNOWN, drop.filter) for drop in m.drops)
    serves = np.zeros((len(m.skills), len(m.sources)), dtype=np.int64)  # as a negative, by source
    np.add.at(serves, (m.skill[negative], m.source[negative]), 1)
    chosen = Counter(
        {name: n for name, n in zip(m.sources, serves.sum(axis=0).tolist(), strict=True) if n}
    )
    most = np.lexsort(([skill.skill_id for skill in m.skills], -serves.sum(axis=1))).tolist()
    quotas = next((run.recipe["quotas"] for run in runs if run.recipe.get("quotas")), {})
    layers = [
        each["name"] for run in reversed(m.trail.filters) for each in run.recipe.get("layers") or ()
    ]
    filters = [*(["judged"] if m.trail.filters else ()), *layers, *(name for _, name in dropped)]
    wanted = [
        source for source, quota in quotas.items() if quota
    ]  # one that gave nothing is shown too
    sources = dict.fromkeys(
        [*wanted, *(m.mined or ()), *(m.kept or ()), *chosen, *(source for source, _ in dropped)]
    )
    by_source = {
        name: m.rank[negative & (m.source == m.sources.index(name))]
        for name in sources
        if chosen[name]
    }
    other_drops: dict[
        tuple[str, str], list[dict[str, Any]]
    ] = {}  # of stages that filter no candidates
    for run in (run for run in reversed(runs) if run not in m.trail.filters):
        for row in rows_of(run.folder, DROPPED) or ():
            other_drops.setdefault((run.stage, row["filter"]), []).append(row)
    return {
        "sources": sorted(
            sources, key=lambda name: list(quotas).index(name) if name in quotas else len(quotas)
        ),
        "filters": list(dict.fromkeys(filters)),
        "dropped": dropped,
        "chosen": chosen,
        "quotas": quotas,
        "other_drops": other_drops,
        "ranks": {name: histograms({"rank": ranks}) for name, ranks in by_source.items()},
        "positive_ranks": histograms({"found at rank": m.rank[m.positive & (m.rank > 0)]}),
        "words": histograms(
            {"all queries": np.array([num_words(text) for text in m.texts if text], dtype=np.int64)}
        ),
        "bodies": histograms(
            {
                "positives": m.body_chars[m.skill[m.positive & known]],
                "negatives": m.body_chars[m.skill[negative & known]],
            }
        ),
        "shares": _shares(m) if m.num_pool is not None else {},
        "serves": serves,
        "hubs": [
            (m.skills[place], serves[place].tolist())
            for place in most[:NUM_HUBS]
            if serves[place].any()
        ],
    }


def _shares(m: Material) -> dict[str, dict[str, Any]]:
    """Of categories and languages: (value, positives, negatives) of the largest, and how often lists are of one."""
    found: dict[str, dict[str, Any]] = {}
    for title, column in (("Categories", "category"), ("Languages", "lang")):
        values, numbers = codes(getattr(skill, column) or NO_VALUE for skill in m.skills)
        counts = [
            np.bincount(numbers[m.skill[m.positive == side]], minlength=len(values))
            for side in (True, False)
        ]
        shares = [count / max(1, count.sum()) for count in counts]
        largest = np.argsort(-sum(shares), kind="stable")[:NUM_SHARES].tolist()
        found[title] = {
            "rows": [(values[n], int(counts[0][n]), int(counts[1][n])) for n in largest],
            "num_values": len(values),
            "highest": max(float(share.max(initial=0)) for share in shares),
            "same": int(m.like_a_positive(numbers).sum()),
        }
    return found


def page_data(
    m: Material, checks: Mapping[str, Int64[np.ndarray, " found"]], max_lists: int, pairs: Pairs
) -> Any:
    """What the page's script shows and searches: `max_lists` lists and some of each check's, and dropped pairs.

    Samples are drawn by seed. Entries are (skill, source, rank, verdict, teacher's score if any), a list's findings
    (check, places of its entries).
    """
    lists = set(_sample(range(len(m.query_ids)), max_lists, "lists"))
    for key, entries in checks.items():
        lists.update(_sample(np.unique(m.in_list[entries]).tolist(), NUM_PER_CHECK, key))
    starts = np.searchsorted(m.in_list, np.arange(len(m.query_ids) + 1)).tolist()
    shown = dict[int, int]()  # place of a skill in the material → its place in the page's data
    findings: dict[int, dict[int, list[int]]] = {}
    for number, entries in enumerate(checks.values()):
        for entry, place in zip(entries.tolist(), m.in_list[entries].tolist(), strict=True):
            findings.setdefault(place, {}).setdefault(number, []).append(entry - starts[place])
    rows = [
        {
            "id": visible(m.query_ids[place]),
            "query": cut(m.texts[place], QUERY_CHARS),
            "entries": [
                _entry(m, entry, shown) for entry in range(starts[place], starts[place + 1])
            ],
            "findings": list(findings.get(place, {}).items()),
        }
        for place in sorted(lists)
    ]
    first = {
        m.query_ids[m.in_list[entry]]: int(m.skill[entry])
        for entry in np.flatnonzero(m.positive)[::-1]
    }
    drops: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for name, *_ in pairs):
        chosen = _sample(
            [each for key, each in pairs.items() if key[0] == name], NUM_PER_FILTER, name
        )
        chosen.sort(key=lambda drops: drops[0].value or 0.0)  # close calls first
        drops += [_drop(m, each, shown, first) for each in chosen]
    named = {
        "sources": [visible(source) for source in m.sources],
        "verdicts": m.verdicts,
        "checks": list(checks),
    }
    return named | {"lists": rows, "drops": drops, "skills": _skills(m, shown)}


def _sample(items: Sequence[ItemT], count: int, key: str) -> list[ItemT]:
    """Up to `count` of `items`, drawn by key, in their order."""
    places = random.Random(f"0/{key}").sample(range(len(items)), min(count, len(items)))
    return [items[place] for place in sorted(places)]


def cut(text: str, num_chars: int) -> str:
    """The beginning of a text, with everything visible and a mark where it goes on."""
    return visible(text if len(text) <= num_chars else text[:num_chars] + "…")


def _entry(m: Material, entry: int, shown: dict[int, int]) -> list[Any]:
    place = shown.setdefault(int(m.skill[entry]), len(shown))
    row = [place, *(int(column[entry]) for column in (m.source, m.rank, m.verdict))]
    return row if np.isnan(m.score[entry]) else [*row, round(float(m.score[entry]), 4)]


def _drop(
    m: Material, drops: list[Dropped], shown: dict[int, int], positives: Mapping[str, int]
) -> dict[str, Any]:
    """A dropped candidate and the skill that it resembles: the query's positive where the drop names none."""
    drop = drops[0]
    other = m.position[drop.other_id] if drop.other_id else positives.get(drop.query_id)
    return {
        "filter": visible(drop.filter),
        "value": drop.value,
        "sources": [visible(each.source or UNKNOWN) for each in drops],
        "id": visible(drop.query_id),
        "query": cut(m.query_texts.get(drop.query_id, ""), QUERY_CHARS),
        "reason": visible(drop.reason),
        "skills": [
            shown.setdefault(p, len(shown))
            for p in (m.position[drop.skill_id], other)
            if p is not None
        ],
    }


def _skills(m: Material, places: Iterable[int]) -> list[dict[str, Any]]:
    """The skills of the page in order; `chars` of the body is -1 where the pool lacks the skill."""
    rules: dict[str, set[str]] = {}
    for row in m.flags or ():
        rules.setdefault(row["skill_id"], set()).add(row["rule"])
    skills = [(place, m.skills[place]) for place in places]
    serves, num_chars = (
        m.num_lists(positive=False),
        min(BODY_CHARS, PAGE_CHARS // max(1, len(skills))),
    )
    return [
        {
            "id": visible(skill.skill_id),
            "name": cut(skill.name, DESCRIPTION_CHARS),
            "description": cut(skill.description, DESCRIPTION_CHARS),
            "body": cut(skill.body, num_chars),
            "category": visible(skill.category or ""),
            "lang": visible(skill.lang or ""),
            "source": visible(skill.source),
            "chars": len(skill.body) if m.known[place] else -1,
            "serves": int(serves[place]),
            "flags": sorted(rules.get(skill.skill_id, ())),
        }
        for place, skill in skills
    ]
