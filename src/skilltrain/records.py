"""Records that stages exchange: skills, queries, judgements and rankings."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

Ranking = list[tuple[str, float]]
"""Pairs of skill id and score, best first."""
Rankings = dict[str, Ranking]
"""Ranking by query id."""


class Verdict(StrEnum):
    """Judgement of a skill for a query. The gain of a verdict is a setting of each recipe."""

    REQUIRED = "required"
    USEFUL = "useful"
    IRRELEVANT = "irrelevant"
    REJECTED = "rejected"


class Reason(StrEnum):
    """Reason for which a judge rejected a skill.

    R3 has eight classes. Its public texts do not name them; these names are ours.
    """

    FUNCTIONAL_OVERLAP = "functional_overlap"
    PLATFORM_CONFLICT = "platform_conflict"
    CONFLICTING_OUTCOME = "conflicting_outcome"
    SCOPE_MISMATCH = "scope_mismatch"
    DOMAIN_MISMATCH = "domain_mismatch"
    IO_MISMATCH = "io_mismatch"
    MISSING_PREREQUISITE = "missing_prerequisite"
    LOW_QUALITY = "low_quality"


POSITIVE = frozenset({Verdict.REQUIRED, Verdict.USEFUL})
"""Verdicts of skills that a model should retrieve."""


def positives_of(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return the ids of skills with a positive verdict, in order."""
    return sorted(skill_id for skill_id, verdict in verdicts.items() if verdict in POSITIVE)


OWN_TEXT = "own_text"
"""Origin of queries that are passages from the texts of skills."""


@dataclass(frozen=True, slots=True)
class Skill:
    """One entry of the pool. All texts are untrusted.

    The fields from `author` on are facts that no model sees. None means unknown.

    Attributes:
        url: Web page of the skill, http or https.
        stars: Number of stars of its repository.
        updated_at: ISO date, or date and time, of its last change.
        when_to_use: Field of the SKILL.md header. `description` contains it too.
        files: Files beside SKILL.md, relative to its folder. Empty: there are none.
        tags: Keywords that its author chose.
        root: Folder or file on this machine that the skill was read from, as an absolute path. It
            is neither compared nor stored.
    """

    skill_id: str
    name: str
    description: str
    body: str
    category: str | None = None
    lang: str | None = None
    source: str = ""
    license: str | None = None
    author: str | None = None
    url: str | None = None
    stars: int | None = None
    updated_at: str | None = None
    when_to_use: str | None = None
    files: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    root: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("files", "tags"):
            values = getattr(self, name)
            if values is not None:  # a list, if it comes from a table; lists cannot be hashed
                object.__setattr__(self, name, tuple(values))


SKILL_FACTS = ("author", "url", "stars", "updated_at", "when_to_use", "files", "tags")
"""Fields of a skill that no model sees. Tables of earlier versions lack them."""


@dataclass(frozen=True, slots=True)
class Query:
    """A request for skills.

    Attributes:
        kind: `single` if the query needs one skill, `multi` if it needs several.
        origin: Who wrote the query.
        split: `train`, `dev` or `test`.
    """

    query_id: str
    text: str
    kind: str
    origin: str
    split: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict of a judge on a skill for a query: one row of JUDGEMENTS.

    Attributes:
        why: Explanation in words.
        group: Name of the group of skills that were judged together. For a skill that can replace
            a gold skill: id of the gold skill.
    """

    query_id: str
    skill_id: str
    verdict: Verdict
    judge: str
    reason: str | None = None
    why: str | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """A skill or query that a stage left out, with the reason: one row of DROPPED.

    Attributes:
        query_id: Id of the query. Empty if the reason concerns only the skill.
        skill_id: Id of the skill. Empty if the reason concerns only the query.
        filter: Code of the reason.
        reason: The reason in words.
        value: Measured value that decided, such as a similarity.
        source: Mining source, or the file that the row came from.
        other_id: Id of the skill that this one resembles or repeats.
    """

    query_id: str
    skill_id: str
    filter: str
    reason: str
    value: float | None = None
    source: str | None = None
    other_id: str | None = None


def counted(values: Iterable[str]) -> dict[str, int]:
    """Count how often each value occurs, in sorted order."""
    return dict(sorted(Counter(map(str, values)).items()))


class Ranker(Protocol):
    """A model or an index that ranks skills for queries."""

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """Rank skills for each query.

        Args:
            queries: Queries with distinct ids.
            candidates: Skills to rank, by query id. None: rank the whole pool.
            keep: Number of skills. Rankers `rerank` and `select` reorder the first `keep`
                candidates, and return the other candidates after them. Ranker `admit` drops the
                candidates that it does not choose. All other rankers return the `keep` best skills.

        Returns:
            Ranking by query id. Skills with equal scores keep the order of the candidates or of
            the pool.
        """
        ...
