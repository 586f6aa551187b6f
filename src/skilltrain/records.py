"""What moves between stages when it is one thing and not a table."""

import re
import unicodedata
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a judge said of a skill for a query; a fact, to which a recipe gives a gain."""

    REQUIRED = "required"
    USEFUL = "useful"
    IRRELEVANT = "irrelevant"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Skill:
    """One entry of the pool. `body` is untrusted text."""

    skill_id: str
    name: str
    description: str
    body: str
    category: str | None = None
    lang: str | None = None
    source: str = ""
    license: str | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """One request. `kind` is single or multi, `origin` who wrote it, `split` train, dev or test."""

    query_id: str
    text: str
    kind: str
    origin: str
    split: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a decomposed request, and the skill chosen for it."""

    step_id: str
    text: str
    depends_on: tuple[str, ...]
    skill_id: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A request decomposed into steps."""

    query_id: str
    text: str
    steps: tuple[Step, ...]


def name_key(name: str) -> str:
    """A name without case and separators: `PDF-Tools`, `pdf_tools` and `pdf tools` are one name, `c++` and `c#` two."""
    return re.sub(r"[\s\-_./:]+", "", unicodedata.normalize("NFKC", name).casefold())
