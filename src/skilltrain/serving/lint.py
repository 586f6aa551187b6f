"""Faults of skills that keep an agent from finding the right one.

Notes:
    - Collisions: each description is a request to a router over the names and the bodies of all
      skills. Its own skill should come first. The router does not see descriptions, because no
      description is nearer to a request than the same text.
    - Copies are left out of collisions: the rule `near_duplicate` has named them.
    - Trigger clauses are looked for in English and Chinese descriptions only.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skilltrain.data.near_duplicates import near_duplicate_clusters
from skilltrain.data.pool.read import find_skill_file, merge_sources, read_sources
from skilltrain.data.pool.skill_file import FOR_USERS_ONLY, as_text, header_fault, split_header
from skilltrain.data.screening import screen_pool
from skilltrain.files import cache_folder
from skilltrain.records import Dropped, Skill
from skilltrain.serving.fit import FitConfig
from skilltrain.serving.router import Router
from skilltrain.terminal import track
from skilltrain.texts import clean_text, decode_text, num_words, one_line
from skilltrain.workers import WorkersConfig

_MIN_WORDS = 6  # of a description; 2 of 261 skills of many authors have fewer
_COPY_OVERLAP = 0.6  # Jaccard index of trigrams, as in the stage `clusters`
_MAX_NAMES = 5  # as in the stage `clusters`
_MAX_TERMS = 5  # of a suggestion
_TRIGGER = re.compile(
    r"\b(?:when(?:ever)?|if|trigger(?:s|ed)?)\b"
    r"|\buse[ds]?\s+(?:\w+\s+){0,3}?(?:for|to|as|after|before)\b"
    r"|\buse (?:this|it)\b|适用|用于|何时|当|触发|使用场景",
    re.IGNORECASE,
)
_TRIGGER_LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Finding:
    """A fault of a skill.

    Attributes:
        skill_id: Id of the skill. Empty: a file or folder that could not be read.
        rule: Name of the rule that found it.
        problem: What is wrong.
        fix: What the author can do.
        other_id: Id of the skill that this one repeats or collides with.
    """

    skill_id: str
    rule: str
    problem: str
    fix: str
    other_id: str | None = None


def lint(folder: Path) -> list[Finding]:
    """Find the faults of the skills in a folder, in order of skill id.

    Args:
        folder: Folder of skills, each with a SKILL.md.

    Raises:
        SkilltrainError: The folder holds no skill.
    """
    sources, dropped = read_sources([folder])
    (skills,), duplicates = merge_sources(sources, drop_duplicates=True)
    # A skill that only users may start is left out of a pool on purpose. That is no fault.
    findings = [_left_out(row) for row in dropped + duplicates if row.filter != FOR_USERS_ONLY]
    checks: list[Callable[[Sequence[Skill]], Iterator[Finding]]] = [
        _check_texts,
        _check_pairs,
        _check_flags,
    ]
    for check in checks:
        findings += check(skills)
    return sorted(findings, key=lambda finding: finding.skill_id)


def _left_out(row: Dropped) -> Finding:
    """Return the finding for a skill that a pool leaves out or cuts.

    Args:
        row: Code and reason of the pool. It may name another skill that this one repeats.
    """
    fix = "remove one of them" if row.other_id else "correct the file, or remove it"
    return Finding(row.skill_id, row.filter, row.reason, fix, row.other_id)


def _check_texts(skills: Sequence[Skill]) -> Iterator[Finding]:
    """Find broken front matter, and descriptions that are missing, vague or without a trigger."""
    for skill in skills:
        # The file has faults that the skill, as it was read, no longer shows.
        file = find_skill_file(skill)
        text = decode_text(file.read_bytes()) if file else None
        fault = header_fault(text) if text else None
        if fault:
            fix = "begin with a line ---, then name: and description:, then a line ---"
            yield Finding(skill.skill_id, "front_matter", fault, fix)
        elif text and not _has_description(text):
            problem = "there is no description"
            fix = "say what the skill does and when to use it"
            yield Finding(skill.skill_id, "no_description", problem, fix)
        else:
            yield from _check_description(skill)


def _has_description(text: str) -> bool:
    """Return whether the front matter of a SKILL.md has a description."""
    fields, _ = split_header(clean_text(text))
    return as_text(fields.get("description")).strip() != ""


def _check_description(skill: Skill) -> Iterator[Finding]:
    """Find out whether a description is vague, or does not say when to use the skill."""
    length = num_words(skill.description)
    if length < _MIN_WORDS:
        problem = f"the description has {length} words"
        fix = "name what the skill reads, does and returns"
        yield Finding(skill.skill_id, "vague_description", problem, fix)
    # The pattern of triggers, such as `use when`, knows only these languages.
    if skill.lang in _TRIGGER_LANGUAGES and not _TRIGGER.search(skill.description):
        problem = "the description does not say when to use the skill"
        fix = "add a sentence that begins with 'Use when'"
        yield Finding(skill.skill_id, "no_trigger", problem, fix)


def _check_pairs(skills: Sequence[Skill]) -> Iterator[Finding]:
    """Find near-duplicates and collisions."""
    clusters = near_duplicate_clusters(skills, _COPY_OVERLAP, _MAX_NAMES)
    yield from _check_copies(clusters)
    yield from _check_collisions(skills, clusters)


def _check_copies(clusters: Mapping[str, int]) -> Iterator[Finding]:
    """Find skills whose bodies are nearly the same. Each is paired with the first of them.

    Args:
        clusters: Number of each skill's cluster by skill id. Near-duplicates share a cluster.
    """
    first_ids: dict[int, str] = {}
    for skill_id, cluster in clusters.items():
        # setdefault returns the skill that came first in this cluster.
        first_id = first_ids.setdefault(cluster, skill_id)
        if first_id != skill_id:
            problem = f"the body is nearly that of {first_id}"
            fix = "remove one, or say in both descriptions how they differ"
            yield Finding(skill_id, "near_duplicate", problem, fix, first_id)


def _check_collisions(skills: Sequence[Skill], clusters: Mapping[str, int]) -> Iterator[Finding]:
    """Find skills whose description leads a router to another skill.

    Each description is a request to a router over the names and bodies of all skills.

    Args:
        skills: The skills.
        clusters: Number of each skill's cluster by skill id. Near-duplicates share a cluster.
    """
    # The router must not see descriptions, because each would find its own text.
    router = Router([replace(skill, description="") for skill in skills], _rankers())
    described = [skill for skill in skills if one_line(skill.description)]
    for skill in track(described, "routing descriptions", len(described)):
        best = router.route(skill.description, k=1).skills
        other_id = best[0].skill_id if best else skill.skill_id
        # The router has found the skill itself, or a copy that `_check_copies` reports.
        if clusters[other_id] == clusters[skill.skill_id]:
            continue
        problem = f"the description leads to {other_id} first"
        # Words of the description that the other skill contains, most important first.
        terms = ", ".join(best[0].why.terms[:_MAX_TERMS])
        fix = "say in both descriptions what only one of them does"
        if terms:
            fix += f"; both use: {terms}"
        yield Finding(skill.skill_id, "collision", problem, fix, other_id)


def _rankers() -> list[dict[str, object]]:
    """Return BM25 and the base encoder of `fit`, with the weights of an untrained router."""
    encoder = {"source": FitConfig.model_fields["base"].default, "cache": cache_folder("vectors")}
    legs = [{"kind": "lexical"}, {"kind": "dense", **encoder}]
    return [{"kind": "fuse", "of": legs, "weights": [1.0, 0.5]}]


def _check_flags(skills: Sequence[Skill]) -> Iterator[Finding]:
    """Find what the safety screening flags: the first place of each rule."""
    # Bundled files lie beside a SKILL.md and are screened too.
    files = {skill.skill_id: find_skill_file(skill) for skill in skills}
    folders = {skill_id: file.parent for skill_id, file in files.items() if file}
    for skill_id, flags in screen_pool(skills, WorkersConfig(), folders).items():
        for rule in dict.fromkeys(flag.rule for flag in flags):
            # A rule may have found several places. The first one is reported.
            flag = next(flag for flag in flags if flag.rule == rule)
            problem = f"flagged by the screening in its {flag.field}: {flag.reason}"
            yield Finding(skill_id, rule, problem, "remove or rewrite this text")
