"""What a rule is: a name, the reason that a flag shows, and finds, all in rules.yaml.

`finds` are tried in texts and in bundled files, `programs` in files that are no text for readers. A program's find is
mostly a pair: what it does (RUNS_TEXT, FETCHES, POSTS, FOREIGN, … are lists of names over all languages) near what else
it does; each alone is harmless work.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import yaml

if TYPE_CHECKING:
    from skilltrain.data.screening.reading import Reading

Spans = Iterator[tuple[int, int]]  # (start, end) in the plain text


@cache
def table() -> dict[str, Any]:
    """What rules.yaml holds: `rules`, `steps` of `unfold`, and `fragments` of their expressions by name."""
    return yaml.safe_load((files("skilltrain.data.screening") / "rules.yaml").read_text(encoding="utf-8"))


def expand(regex: str) -> str:
    """`regex` in one line, each <NAME> replaced by that fragment of rules.yaml."""
    fragments = table()["fragments"]
    return re.sub("<([A-Z_]+)>", lambda found: expand(fragments[found[1]]), "".join(regex.splitlines()))


@dataclass(frozen=True)
class Find:
    """One way to break a rule, as places in the plain text (of a `written` check in the text as written)."""

    anchors: tuple[str, ...] = ()  # texts in lower case: it is tried within `reach` of one; everywhere without
    regex: str = ""
    custom: "Callable[[Reading], Spans] | None" = None  # a check in Python instead: its module and name
    written: bool = False
    needs: tuple[str, ...] = ()  # all must stand within `near` letters of a find
    score: tuple[tuple[str, int], ...] = ()  # points of what may stand there, of which `least` come together
    least: int = 0
    unless: str = ""  # must not stand there
    cited: Literal["warned", "quoted", ""] = "warned"  # no find: a command warned of, an order quoted, or neither
    near: int = 160
    reach: int = 400
    fields: tuple[str, ...] = ("name", "description", "body", "program")

    def places(self, reading: "Reading") -> Spans:
        """The finds, as (start, end) in the text as written."""
        if reading.kind not in self.fields:
            return
        anchors = [anchor for anchor in self.anchors if anchor in reading.plain]
        if self.anchors and not anchors:
            return
        spans = self.custom(reading) if self.custom else self._matches(reading, anchors)
        yield from spans if self.written else (reading.place(*span) for span in spans)

    def _matches(self, reading: "Reading", anchors: Sequence[str]) -> Spans:
        windows = _windows(anchors, reading.plain, self.reach) if anchors else [(0, len(reading.plain))]
        for start, end in windows:
            for found in self._pattern.finditer(reading.plain, start, end):
                at = found.end() - len(found[0].lstrip())
                if self._holds(reading, at, found.end()):
                    yield at, found.end()

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(self.regex)

    def _holds(self, reading: "Reading", start: int, end: int) -> bool:
        around = start - self.near, end + self.near
        if not all(reading.stands_between(need, *around) for need in self.needs):
            return False
        if sum(points for notion, points in self.score if reading.stands_between(notion, *around)) < self.least:
            return False
        if self.unless and reading.stands_between(self.unless, *around):
            return False
        if self.cited == "quoted":
            return not reading.is_quoted(start)
        return not (self.cited == "warned" and reading.is_warned_of(start, end))


@dataclass(frozen=True)
class Rule:
    """A named check, and why a find matters."""

    name: str
    reason: str
    finds: tuple[Find, ...]


def load_rules(modules: Mapping[str, ModuleType]) -> tuple[Rule, ...]:
    """The rules of rules.yaml; `modules` are those of the checks in Python, by name."""
    rules = []
    for rule in table()["rules"]:
        programs = ({**row, "fields": ["program"]} for row in rule.get("programs", ()))
        rows = chain(rule.get("finds", ()), programs)
        rules.append(Rule(rule["name"], rule["reason"], tuple(_find_of(row, modules) for row in rows)))
    return tuple(rules)


def _find_of(row: Mapping[str, Any], modules: Mapping[str, ModuleType]) -> Find:
    regex = row.get("regex", "")
    values: dict[str, Any] = {**row, "regex": "|".join(map(expand, regex if isinstance(regex, list) else [regex]))}
    values["anchors"] = tuple(filter(None, expand(row.get("anchors", "")).split("|")))
    values["unless"] = expand(row.get("unless", ""))
    values |= {key: tuple(map(expand, row[key])) for key in ("needs", "fields") if key in row}
    values["score"] = tuple((expand(notion), points) for notion, points in row.get("score", {}).items())
    if "custom" in row:
        module, _, name = row["custom"].partition(".")
        values["custom"] = getattr(modules[module], name)
    return Find(**values)


def _windows(anchors: Sequence[str], plain: str, reach: int) -> Spans:
    """Stretches of `plain` within `reach` characters of an anchor, in order and never overlapping."""
    places = [found.start() for anchor in anchors for found in re.finditer(re.escape(anchor), plain)]
    start = end = -1
    for at in sorted(places):
        if at - reach > end:
            if end > 0:
                yield start, end
            start = max(0, at - reach)
        end = at + reach
    if end > 0:
        yield start, min(end, len(plain))
