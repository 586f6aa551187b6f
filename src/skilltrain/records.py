"""What moves between stages when it is one thing and not a table."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

Ranking = list[tuple[str, float]]
"""(skill_id, score), best first."""
Rankings = dict[str, Ranking]
"""query_id → its ranking."""


class Verdict(StrEnum):
    """What a judge said of a skill for a query; a fact, to which a recipe gives a gain."""

    REQUIRED = "required"
    USEFUL = "useful"
    IRRELEVANT = "irrelevant"
    REJECTED = "rejected"


class Reason(StrEnum):
    """Why a judge rejected a skill for a query. R3 has eight classes; its public texts do not name them."""

    FUNCTIONAL_OVERLAP = "functional_overlap"
    PLATFORM_CONFLICT = "platform_conflict"
    CONFLICTING_OUTCOME = "conflicting_outcome"
    SCOPE_MISMATCH = "scope_mismatch"
    DOMAIN_MISMATCH = "domain_mismatch"
    IO_MISMATCH = "io_mismatch"
    MISSING_PREREQUISITE = "missing_prerequisite"
    LOW_QUALITY = "low_quality"


POSITIVE = frozenset({Verdict.REQUIRED, Verdict.USEFUL})
"""The verdicts of skills that a model is to find."""


def positives_of(judged: Mapping[str, Verdict]) -> list[str]:
    """The skills that a model is to find, in order of id."""
    return sorted(skill_id for skill_id, verdict in judged.items() if verdict in POSITIVE)


OWN_TEXT = "own_text"
"""The origin of queries that are passages of the skills' own texts."""


@dataclass(frozen=True, slots=True)
class Skill:
    """One entry of the pool. All texts are untrusted.

    The fields from `author` on are facts that no model sees. None: not known.

    Attributes:
        url: Page of the skill, http or https.
        stars: Stars of its repository.
        updated_at: ISO date, or date and time, of its last change.
        when_to_use: The header's field of that name, which some agents read beside the description.
        files: Files beside its SKILL.md, relative to their folder. Empty: it has none.
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

    def __post_init__(self) -> None:
        if self.files is not None:  # tables hold lists, which cannot be hashed
            object.__setattr__(self, "files", tuple(self.files))


SKILL_FACTS = ("author", "url", "stars", "updated_at", "when_to_use", "files")
"""Fields of a skill that no model sees. Tables of earlier versions lack them."""


@dataclass(frozen=True, slots=True)
class Query:
    """One request. `kind` is single or multi, `origin` who wrote it, `split` train, dev or test."""

    query_id: str
    text: str
    kind: str
    origin: str
    split: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge said of a skill for a query: one row of JUDGEMENTS.

    `group` names what was judged together, or the gold skill that this one can stand for; `why` is in words.
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
    """Why something was left out: one row of DROPPED.

    `skill_id` or `query_id` is empty where the fault concerns only the other. `other_id` is the skill that it
    resembles or repeats, `source` the mining source or the file that it came from.
    """

    query_id: str
    skill_id: str
    filter: str
    reason: str
    value: float | None = None
    source: str | None = None
    other_id: str | None = None


def counted(values: Iterable[str]) -> dict[str, int]:
    """How often each value occurs, in their order: so stages count what they wrote and dropped."""
    return dict(sorted(Counter(map(str, values)).items()))


class Ranker(Protocol):
    """Whatever puts skills in an order for a query."""

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """query_id → the skills that it ranks, best first.

        Without `candidates` these are the `keep` best of the whole pool; with them, the candidates in a new order.
        `rerank` and `select` order the first `keep` candidates and leave the others behind them, `admit` drops those
        that it does not choose, all other kinds return the `keep` best. Equal scores keep the order of the candidates,
        or of the pool.
        """
        ...
