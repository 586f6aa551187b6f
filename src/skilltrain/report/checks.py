"""What is worth a look: lists that break an assumption of training. What each check means stands in the template."""

import numpy as np
from jaxtyping import Bool, Int64

from skilltrain.data.name_leak import names_program, names_skill
from skilltrain.report.material import Material, codes
from skilltrain.texts import language_of, name_key, words_of

SHORT_BODY = 200  # characters; too few to teach what a skill does

Found = Bool[np.ndarray, " entry"]


def run_checks(material: Material) -> dict[str, Int64[np.ndarray, " found"]]:
    """Check → the places of the entries that it found, for all checks that the material allows."""
    m, skills = material, material.skills
    known = m.known[m.skill]
    found: dict[str, Found] = {}
    if m.num_pool is not None:
        _, names = codes(name_key(skill.name) for skill in skills)
        _, bodies = codes(skill.body.strip() for skill in skills)
        _, descriptions = codes(skill.description.strip().casefold() for skill in skills)
        found["leak"], found["program_leak"] = _leak(m)
        found["same_name"] = m.like_a_positive(names) & known
        found["same_text"] = m.like_a_positive(bodies) | m.like_a_positive(descriptions)
        found["other_language"] = _other_language(m)
        found["short_positive"] = m.positive & known & (m.body_chars[m.skill] < SHORT_BODY)
        found["unknown_skill"] = ~known
    if m.clusters is not None:
        found["cluster"] = m.like_a_positive(m.clusters)
    if not np.isnan(m.score).all():
        found["teacher"] = _teacher(m)
    if m.flags is not None:
        flagged = {row["skill_id"] for row in m.flags}
        found["flagged_positive"] = m.positive & np.array([s.skill_id in flagged for s in skills], dtype=bool)[m.skill]
    first = np.diff(m.in_list, prepend=-1) > 0
    found["same_query"] = first & _same_query(m)[m.in_list]
    sizes = np.bincount(m.in_list, minlength=len(m.query_ids))
    found["short_list"] = first & (sizes < np.argmax(np.bincount(sizes, minlength=1)))[m.in_list]
    return {key: np.flatnonzero(mask) for key, mask in found.items()}


def _leak(m: Material) -> tuple[Found, Found]:
    """(positives that their query names, positives of whose programs it names one)."""
    named, program_named = np.zeros(len(m.in_list), dtype=bool), np.zeros(len(m.in_list), dtype=bool)
    for place in np.flatnonzero(m.positive & m.known[m.skill]).tolist():
        text, skill = m.texts[m.in_list[place]], m.skills[m.skill[place]]
        named[place] = bool(text and skill.name) and names_skill(text, skill.name)
        program_named[place] = bool(text) and names_program(text, skill.body)
    return named, program_named


def _teacher(m: Material) -> Found:
    """Negatives that the teacher scores above the lowest positive of their list."""
    lowest = np.full(len(m.query_ids), np.inf)
    scored = m.positive & ~np.isnan(m.score)
    np.minimum.at(lowest, m.in_list[scored], m.score[scored])
    return ~m.positive & (m.score > lowest[m.in_list])


def _other_language(m: Material) -> Found:
    asked = np.array([language_of(text[:4000]) or "" for text in m.texts], dtype=object)[m.in_list]
    given = np.array([skill.lang or "" for skill in m.skills], dtype=object)[m.skill]
    return m.positive & (asked != "") & (given != "") & (asked != given)


def _same_query(m: Material) -> Bool[np.ndarray, " list"]:
    """Lists whose query stands in another list too, in the same words."""
    texts, own = codes(" ".join(words_of(text)) for text in m.texts)
    return (own >= 0) & (np.bincount(own[own >= 0], minlength=len(texts) + 1) > 1)[own]
