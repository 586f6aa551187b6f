"""What a rule is: a name, the reason that a flag shows, and finds, all in rules.yaml.

`finds` are tried in texts and in bundled files, `programs` in files that are no text for readers. A program's find is
mostly a pair: what it does (RUNS_TEXT, FETCHES, POSTS, FOREIGN, … are lists of names over all languages) near what else
it does; each alone is harmless work.
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ImportString

from skilltrain.config import Config
from skilltrain.data.screening.fragments import expand
from skilltrain.data.screening.reading import Reading, Spans

Kind = Literal["name", "description", "body", "program"]
Expression = Annotated[
    str,
    BeforeValidator(lambda regex: regex if isinstance(regex, str) else "|".join(regex)),
    AfterValidator(expand),
]


class Find(Config, validate_default=False):
    """One way to break a rule, as places in the plain text (of a `written` check in the text as written)."""

    # Texts in lower case: it is tried within `reach` of one, without any everywhere.
    anchors: Annotated[
        tuple[str, ...], BeforeValidator(lambda texts: expand(texts).split("|"))
    ] = ()
    regex: Expression = ""
    custom: ImportString[Callable[..., Spans]] | None = (
        None  # a check in Python instead, which takes the Reading
    )
    written: bool = False
    needs: tuple[Expression, ...] = ()  # all must stand within `near` letters of a find
    score: dict[Expression, int] = Field(
        default={}
    )  # points of what may stand there, of which `least` come together
    least: int = 0
    unless: Expression = ""  # must not stand there
    cited: Literal["warned", "quoted"] | None = (
        "warned"  # no find: a command warned of, an order quoted, or neither
    )
    near: int = 160
    reach: int = 400
    fields: tuple[Kind, ...] = ("name", "description", "body", "program")

    def places(self, reading: Reading) -> Spans:
        """The finds, as (start, end) in the text as written."""
        anchors = [anchor for anchor in self.anchors if anchor in reading.plain]
        if self.anchors and not anchors:
            return
        spans = self.custom(reading) if self.custom else self._matches(reading, anchors)
        yield from spans if self.written else (reading.place(*span) for span in spans)

    def _matches(self, reading: Reading, anchors: Sequence[str]) -> Spans:
        everywhere = [[0, len(reading.plain)]]
        for start, end in _windows(anchors, reading.plain, self.reach) if anchors else everywhere:
            for found in self._pattern.finditer(reading.plain, start, end):
                at = found.end() - len(found[0].lstrip())
                if self._holds(reading, at, found.end()):
                    yield at, found.end()

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(self.regex)

    def _holds(self, reading: Reading, start: int, end: int) -> bool:
        around = start - self.near, end + self.near
        if not all(reading.stands_between(need, *around) for need in self.needs):
            return False
        if (
            sum(
                points
                for notion, points in self.score.items()
                if reading.stands_between(notion, *around)
            )
            < self.least
        ):
            return False
        if self.unless and reading.stands_between(self.unless, *around):
            return False
        if self.cited == "quoted":
            return not reading.is_quoted(start)
        return not (self.cited == "warned" and reading.is_warned_of(start, end))


class Rule(Config):
    """A named check, and why a find matters."""

    name: str
    reason: str
    finds: tuple[Find, ...] = ()
    programs: tuple[Find, ...] = ()

    def tried_in(self, kind: str) -> list[Find]:
        """The finds for a text of this kind."""
        finds = [find for find in self.finds if kind in find.fields]
        return [*finds, *self.programs] if kind == "program" else finds


def _windows(anchors: Sequence[str], plain: str, reach: int) -> list[list[int]]:
    """[start, end] of the stretches of `plain` within `reach` characters of an anchor, in order, without overlap."""
    windows: list[list[int]] = []
    for at in sorted(
        found.start() for anchor in anchors for found in re.finditer(re.escape(anchor), plain)
    ):
        if windows and at - reach <= windows[-1][1]:
            windows[-1][1] = at + reach
        else:
            windows.append([max(0, at - reach), at + reach])
    return windows
