"""What a rule is and what it finds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from skilltrain.data.screening.reading import Reading

Spans = Iterator[tuple[int, int]]
"""(start, end) in the text as written."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One finding: `text[start:end]` of the skill's `field` is what `rule` is about.

    `span` is that text (of a secret only its beginning), at most 400 characters of it.
    """

    rule: str
    field: str
    start: int
    end: int
    span: str
    reason: str


def as_it_is(span: str) -> str:
    """The span itself: what all rules show of a finding but the one for secrets."""
    return span


@dataclass(frozen=True)
class Rule:
    """A named check. `find` gives the spans in a field's text, in order.

    `hints` are lower-case texts of which every find holds at least one: most skills hold none and are done with.
    """

    name: str
    reason: str
    hints: tuple[str, ...]
    find: Callable[[Reading, str], Spans]
    show: Callable[[str], str] = as_it_is
