"""What is worth a look: lists that break an assumption of training. What each check means stands in the template."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from skilltrain.data.synthesize.name_leak import names_skill
from skilltrain.report.material import Material, codes
from skilltrain.texts import language_of, name_key, words_of

NUM_SHARED = 3  # names with one description that make it no description of any
SHORT_BODY = 200  # characters; too few to teach what a skill does

Found = Bool[np.ndarray, " entry"]


@dataclass(frozen=True)
class Check:
    """The entries that a check found (their positions), and their lists."""

    key: str
    entries: Int64[np.ndarray, " found"]
    lists: Int64[np.ndarray, " list"]


def run_checks(material: Material) -> list[Check]:
    """All checks that the material allows, those that found something first."""
    found: list[Check] = []
    for key, find in CHECKS.items():
        if _can_ask(key, material):
            entries = np.flatnonzero(find(material))
            found.append(Check(key, entries, np.unique(material.entries.list[entries])))
    return sorted(found, key=lambda check: not len(check.lists))


def _can_ask(key: str, material: Material) -> bool:
    needs = {
        "cluster": material.clusters is not None,
        "flagged_positive": material.flags is not None,
        "teacher": not bool(np.isnan(material.entries.teacher_score).all()),
        "short_list": True,
        "same_query": True,
    }
    return needs.get(key, material.num_pool is not None)


def _leak(material: Material) -> Found:
    entries = material.entries
    found = np.zeros(len(entries.list), dtype=bool)
    for place in np.flatnonzero(entries.positive & material.known[entries.skill]).tolist():
        text, name = material.texts[entries.list[place]], material.skills[entries.skill[place]].name
        found[place] = bool(text and name) and names_skill(text, name)
    return found


def _same_name(material: Material) -> Found:
    return material.like_a_positive(_names(material)) & material.known[material.entries.skill]


def _same_description(material: Material) -> Found:
    return material.like_a_positive(_descriptions(material))


def _shared_description(material: Material) -> Found:
    """Positives whose description skills of several names have; copies bear one name and do not count."""
    numbers = _descriptions(material)
    pairs = np.unique(np.stack([numbers, _names(material)]), axis=1)
    values, counts = np.unique(pairs[0], return_counts=True)
    shared = np.isin(numbers, values[(counts >= NUM_SHARED) & (values >= 0)])
    return material.entries.positive & shared[material.entries.skill]


def _same_body(material: Material) -> Found:
    return material.like_a_positive(_bodies(material))


def _same_cluster(material: Material) -> Found:
    assert material.clusters is not None
    return material.like_a_positive(material.clusters)


def _teacher(material: Material) -> Found:
    """Negatives that the teacher scores above the lowest positive of their list."""
    entries, scores = material.entries, material.entries.teacher_score
    lowest = np.full(len(material.query_ids), np.inf)
    scored = entries.positive & ~np.isnan(scores)
    np.minimum.at(lowest, entries.list[scored], scores[scored])
    return ~entries.positive & (scores > lowest[entries.list])


def _flagged_positive(material: Material) -> Found:
    flagged = {row["skill_id"] for row in material.flags or ()}
    is_flagged = np.array([skill.skill_id in flagged for skill in material.skills], dtype=bool)
    return material.entries.positive & is_flagged[material.entries.skill]


def _other_language(material: Material) -> Found:
    entries = material.entries
    asked = np.array([language_of(text[:4000]) or "" for text in material.texts], dtype=object)[entries.list]
    given = np.array([skill.lang or "" for skill in material.skills], dtype=object)[entries.skill]
    return entries.positive & (asked != "") & (given != "") & (asked != given)


def _short_positive(material: Material) -> Found:
    entries, short = material.entries, material.known & (material.body_chars < SHORT_BODY)
    return entries.positive & short[entries.skill]


def _twin_negatives(material: Material) -> Found:
    """Negatives of one list with one body."""
    entries, numbers = material.entries, _bodies(material)
    key = entries.list * (int(numbers.max(initial=0)) + 1) + numbers[entries.skill]
    usable = ~entries.positive & (numbers[entries.skill] >= 0)
    values, counts = np.unique(key[usable], return_counts=True)
    return usable & np.isin(key, values[counts > 1])


def _same_query(material: Material) -> Found:
    """The first entries of lists whose query stands in another list too, in the same words."""
    own = codes(" ".join(words_of(text)) for text in material.texts)
    numbers, counts = np.unique(own, return_counts=True)
    return _first(material) & np.isin(own, numbers[(counts > 1) & (numbers >= 0)])[material.entries.list]


def _short_list(material: Material) -> Found:
    """The first entries of lists shorter than most."""
    sizes = np.bincount(material.entries.list, minlength=len(material.query_ids))
    usual = int(np.argmax(np.bincount(sizes))) if len(sizes) else 0
    return _first(material) & (sizes < usual)[material.entries.list]


def _unknown_skill(material: Material) -> Found:
    return ~material.known[material.entries.skill]


def _first(material: Material) -> Found:
    return np.diff(material.entries.list, prepend=-1) > 0


def _names(material: Material) -> Int64[np.ndarray, " skill"]:
    return codes(name_key(skill.name) for skill in material.skills)


def _descriptions(material: Material) -> Int64[np.ndarray, " skill"]:
    return codes(skill.description.strip().casefold() for skill in material.skills)


def _bodies(material: Material) -> Int64[np.ndarray, " skill"]:
    return codes(skill.body.strip() for skill in material.skills)


CHECKS: Mapping[str, Callable[[Material], Found]] = {
    "leak": _leak,
    "same_name": _same_name,
    "same_description": _same_description,
    "shared_description": _shared_description,
    "same_body": _same_body,
    "cluster": _same_cluster,
    "teacher": _teacher,
    "flagged_positive": _flagged_positive,
    "other_language": _other_language,
    "short_positive": _short_positive,
    "twin_negatives": _twin_negatives,
    "same_query": _same_query,
    "short_list": _short_list,
    "unknown_skill": _unknown_skill,
}
