"""What is worth a look: lists that break an assumption of training, each with the entries that break it."""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from jaxtyping import Bool, Int64

from skilltrain.data.inspection.counts import body_chars, like_a_positive
from skilltrain.data.inspection.material import Material, codes
from skilltrain.data.pool.skill_pool import guess_lang
from skilltrain.data.synthesis.name_leak import names_skill
from skilltrain.records import Skill
from skilltrain.texts import name_key

NUM_SHARED = 3  # names with one description that make it no description of any
SHORT_BODY = 200  # characters; too few to teach what a skill does

Entries = Bool[np.ndarray, " entry"]


@dataclass(frozen=True)
class Check:
    """A question about all lists: `entries` are the positions that answer it with yes, none for what was not asked."""

    key: str
    title: str
    meaning: str
    entries: Int64[np.ndarray, " found"]
    lists: Int64[np.ndarray, " list"]


@dataclass(frozen=True)
class _Question:
    key: str
    title: str
    meaning: str
    find: Callable[[Material], Entries]


def run_checks(material: Material) -> list[Check]:
    """All checks that the material allows, those that found something first."""
    questions = [question for question in _QUESTIONS if _can_ask(question.key, material)]
    found = []
    for question in questions:
        entries = np.flatnonzero(question.find(material))
        lists = np.unique(material.entries.list[entries])
        found.append(Check(question.key, question.title, question.meaning, entries, lists))
    return sorted(found, key=lambda check: not len(check.lists))


def _can_ask(key: str, material: Material) -> bool:
    needs: Mapping[str, bool] = {
        "cluster": material.clusters is not None,
        "flagged_positive": material.flags is not None,
        "teacher": not bool(np.isnan(material.entries.teacher_score).all()),
    }
    return needs.get(key, material.num_pool is not None or key in ("short_list", "same_query"))


def _same_name(material: Material) -> Entries:
    keys = [name_key(name or "") for name in material.texts_of("name")]
    return like_a_positive(material, codes(keys)) & material.known[material.entries.skill]


def _same_description(material: Material) -> Entries:
    return like_a_positive(
        material, codes((text or "").strip().casefold() for text in material.texts_of("description"))
    )


def _shared_description(material: Material) -> Entries:
    """Positives whose description skills of several names have; copies bear one name and do not count."""
    numbers = codes((text or "").strip().casefold() for text in material.texts_of("description"))
    names = codes(name_key(name or "") for name in material.texts_of("name"))
    pairs = np.unique(np.stack([numbers, names]), axis=1)
    values, counts = np.unique(pairs[0], return_counts=True)
    shared = np.isin(numbers, values[(counts >= NUM_SHARED) & (values >= 0)])
    return material.entries.positive & shared[material.entries.skill]


def _same_body(material: Material) -> Entries:
    return like_a_positive(material, _body_codes(material))


def _same_cluster(material: Material) -> Entries:
    assert material.clusters is not None
    return like_a_positive(material, material.clusters)


def _twin_negatives(material: Material) -> Entries:
    """Negatives of one list with one body."""
    entries = material.entries
    numbers = _body_codes(material)
    key = entries.list * (int(numbers.max(initial=0)) + 1) + numbers[entries.skill]
    usable = ~entries.positive & (numbers[entries.skill] >= 0)
    values, counts = np.unique(key[usable], return_counts=True)
    return usable & np.isin(key, values[counts > 1])


def _body_codes(material: Material) -> Int64[np.ndarray, " skill"]:
    trimmed = pc.call_function("utf8_trim_whitespace", [material.skills.column("body")])
    empty = pc.call_function("utf8_length", [trimmed]).to_numpy() == 0
    numbers = trimmed.combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    return np.where(empty, -1, numbers)


def _leak(material: Material) -> Entries:
    entries, names = material.entries, material.texts_of("name")
    found = np.zeros(len(entries.list), dtype=bool)
    for place in np.flatnonzero(entries.positive & material.known[entries.skill]).tolist():
        text, name = material.texts[entries.list[place]], names[entries.skill[place]]
        found[place] = bool(text and name) and names_skill(text, str(name))
    return found


def _other_language(material: Material) -> Entries:
    entries = material.entries
    queries = np.array([guess_lang(Skill("", "", "", text)) or "" for text in material.texts], dtype=object)
    skills = np.array([lang or "" for lang in material.texts_of("lang")], dtype=object)
    asked, given = queries[entries.list], skills[entries.skill]
    return entries.positive & (asked != "") & (given != "") & (asked != given)


def _flagged_positive(material: Material) -> Entries:
    assert material.flags is not None
    flagged = set(material.flags.column("skill_id").to_pylist())
    is_flagged = np.array([skill_id in flagged for skill_id in material.texts_of("skill_id")], dtype=bool)
    return material.entries.positive & is_flagged[material.entries.skill]


def _short_positive(material: Material) -> Entries:
    entries = material.entries
    return entries.positive & material.known[entries.skill] & (body_chars(material) < SHORT_BODY)[entries.skill]


def _unknown_skill(material: Material) -> Entries:
    return ~material.known[material.entries.skill]


def _short_list(material: Material) -> Entries:
    """The first entries of lists shorter than most."""
    sizes = np.bincount(material.entries.list, minlength=len(material.query_ids))
    usual = int(np.argmax(np.bincount(sizes))) if len(sizes) else 0
    first = np.diff(material.entries.list, prepend=-1) > 0
    return first & (sizes < usual)[material.entries.list]


def _same_query(material: Material) -> Entries:
    """The first entries of lists whose query stands in another list too, in the same words but with other positives."""
    keys = [" ".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in material.texts]
    numbers, counts = np.unique(codes(keys), return_counts=True)
    twice = np.isin(codes(keys), numbers[(counts > 1) & (numbers >= 0)])
    return (np.diff(material.entries.list, prepend=-1) > 0) & twice[material.entries.list]


def _teacher(material: Material) -> Entries:
    """Negatives that the teacher scores above the lowest positive of their list."""
    entries = material.entries
    lowest = np.full(len(material.query_ids), np.inf)
    scores = entries.teacher_score
    scored = entries.positive & ~np.isnan(scores)
    np.minimum.at(lowest, entries.list[scored], scores[scored])
    return ~entries.positive & (scores > lowest[entries.list])


_QUESTIONS: Sequence[_Question] = (
    _Question(
        "leak", "The query names its skill",
        "Such a query teaches a model to match names, not needs. One-word names like “pdf” count too.", _leak,
    ),
    _Question(
        "same_name", "A negative bears a positive’s name",
        "Likely a copy or another version of the positive: a false negative.", _same_name,
    ),
    _Question(
        "same_description", "A negative has a positive’s very description",
        "Another version of the positive, whose name and body differ: perhaps a false negative.", _same_description,
    ),
    _Question(
        "shared_description", f"A positive’s description stands under {NUM_SHARED} names or more",
        "A template that nobody filled in, or copies under new names.", _shared_description,
    ),
    _Question(
        "same_body", "A negative has a positive’s very body",
        "The same text under another id: a false negative.", _same_body,
    ),
    _Question(
        "cluster", "A negative is a near-duplicate of a positive",
        "Both stand in one near-duplicate cluster of the pool: a false negative.", _same_cluster,
    ),
    _Question(
        "teacher", "A teacher prefers a negative",
        "The teacher’s score is above the lowest of the positives: perhaps a false negative.", _teacher,
    ),
    _Question(
        "flagged_positive", "A positive is flagged",
        "The safety screening found something in it; a model would learn to recommend it.", _flagged_positive,
    ),
    _Question(
        "other_language", "Query and positive differ in language",
        "Right for cross-lingual training; otherwise a wrong pair or a wrong language tag.", _other_language,
    ),
    _Question(
        "short_positive", f"A positive’s body has less than {SHORT_BODY} characters",
        "There is little to learn from; often a stub that points elsewhere.", _short_positive,
    ),
    _Question(
        "twin_negatives", "Two negatives of a list have one body",
        "One of the two teaches nothing new.", _twin_negatives,
    ),
    _Question(
        "same_query", "A query stands in several lists",
        "In the same words; with different positives, each list makes the other’s positive look wrong.", _same_query,
    ),
    _Question(
        "short_list", "A list is shorter than most",
        "Its sources ran dry, or filters took most of its candidates.", _short_list,
    ),
    _Question(
        "unknown_skill", "A skill is not in the pool",
        "The pool was rebuilt after the lists, or is another one: training will refuse them.", _unknown_skill,
    ),
)  # fmt: skip
