"""What a rule is and what it reads: a text as a person or a shell would, disguises taken off, places known."""

import dataclasses
import html
import re
import unicodedata
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from itertools import islice
from types import ModuleType
from typing import Any, Literal

import yaml

from skilltrain.records import Skill
from skilltrain.texts import INVISIBLE


@cache
def _table() -> dict[str, Any]:
    return yaml.safe_load((files("skilltrain.data.screening") / "rules.yaml").read_text(encoding="utf-8"))


def expand(regex: str) -> str:
    """`regex` in one line, each <NAME> replaced by that fragment of rules.yaml."""
    fragments = _table()["fragments"]
    return re.sub("<([A-Z_]+)>", lambda found: expand(fragments[found[1]]), "".join(regex.splitlines()))


# HTML entities, broken shell lines, invisible characters.
_DISGUISE = re.compile(rf"&(?:#\d{{1,7}}|#x[0-9a-f]{{1,6}}|[a-z]{{2,8}});|\\\n|[{INVISIBLE}]+")
# What programs put between the letters of a word that nobody is to find ('cu' + 'rl', cu""rl, ${IFS}), and variables.
_SPLIT = re.compile(_DISGUISE.pattern + expand("|<SPLIT>"))
_ASSIGNED = re.compile(expand("<ASSIGNED>"))
# Full-width and mathematical letters, and spaces of other widths, as the ASCII that they look like.
_STYLED = re.compile("[\uff01-\uff5e\u3000\u00a0\u2002-\u200a\u202f\U0001d400-\U0001d7ff]")
_STYLED_CODES = (0x3000, 0xA0, 0x202F, *range(0x2002, 0x200B), *range(0xFF01, 0xFF5F), *range(0x1D400, 0x1D800))
_TO_PLAIN = {code: unicodedata.normalize("NFKC", chr(code)).lower() for code in _STYLED_CODES}
# Cyrillic and Greek letters within Latin words, as the Latin letter that they look like.
_LETTERS = "авекмнорстухіјѕһԁԛԝαειορυν"
_LOOK_ALIKE = str.maketrans(_LETTERS, "abekmhopctyxijshdqwaeiopuv")
_MIXED_WORD = re.compile("[a-z]{0,24}[авекмнорстухіјѕһԁԛԝαειορυν]{1,8}[a-zавекмнорстухіјѕһԁԛԝαειορυν]{0,24}")
_OPENING_QUOTES = "\"'`“‘「『«"
_PAIRS = (("“", "”"), ("「", "」"), ("『", "』"), ("«", "»"))
_REPORTED = re.compile(expand("<REPORTED>"), re.ASCII)
_OF_ATTACKS = re.compile(expand("<OF_ATTACKS>"))
WARNING = re.compile(expand("<WARNING>"))
_LISTING = re.compile(r"(?:requirements|constraints)[\w.-]{0,40}\.txt$|cmakelists\.txt$")
_PROSE = (".md", ".mdx", ".txt", ".rst", ".adoc")
_PRINTED = re.compile(expand("<PRINTED>"))
_ON_SECURITY = re.compile(expand("<ON_SECURITY>"))
_COMMENT = re.compile(r"(?:^|(?<=\n))[^\S\n]{0,40}(?:#|//|\*|--)[^\n]{0,400}")
_ELEMENT = re.compile(expand("<ELEMENT>"))
_SCANNER = re.compile(expand("<SCANNER>"))


@dataclass(frozen=True, slots=True)
class Reading:
    """`text` as written, and `plain`: lower case, in the letters it shows, HTML entities resolved, invisible characters
    and broken shell lines (backslash, line end) taken out. `origins[i]` is where `plain[i]` stands in `text`; None: the
    same. `mixed` are words of `plain` that had letters of two scripts.
    """

    text: str
    plain: str
    origins: array | None
    mixed: tuple[tuple[int, int], ...] = ()
    field: str = "body"
    skill: Skill | None = None
    starts: dict[str, list[int]] = dataclasses.field(default_factory=dict, repr=False)

    def stands_between(self, regex: str, start: int, end: int) -> bool:
        """Whether a match of `regex` begins in `plain[start:end]`; all matches are found once, in linear time."""
        if regex not in self.starts:
            self.starts[regex] = [found.start() for found in re.finditer(regex, self.plain)]
        starts = self.starts[regex]
        at = bisect_left(starts, start)
        return at < len(starts) and starts[at] < end

    def place(self, start: int, end: int) -> tuple[int, int]:
        """Where `plain[start:end]` stands in `text`."""
        if self.origins is None or start >= end:
            return start, end
        return self.origins[start], self.origins[end - 1] + 1

    @property
    def kind(self) -> str:
        """What rules take this for: name, description, body (as is any text for readers), or program."""
        if not self.field.startswith("./"):
            return self.field
        is_prose = self.field.lower().endswith(_PROSE) and not _LISTING.search(self.field.lower())
        return "body" if is_prose else "program"

    def line_before(self, start: int, width: int) -> str:
        """What stands before `start` in its line, at most `width` characters."""
        return self.plain[max(self.plain.rfind("\n", max(0, start - width), start) + 1, start - width, 0) : start]

    def is_quoted(self, start: int) -> bool:
        """Whether a phrase at `start` of the plain text is cited, not said: in quotes or code, or after "such as".

        It is how a skill that warns of an attack differs from the attack; an attacker who quotes his own order hides it
        from this check, and from many models too.
        """
        before = self.line_before(start, 300)
        if self.kind == "program" and not self.on_security() and _PRINTED.search(before):
            return False
        if before.rstrip(" *_-❌✗>")[-1:] in tuple(_OPENING_QUOTES) or before.count('"') % 2 or before.count("`") % 2:
            return True
        parts = self.plain[max(0, start - 500) : start].split("```")
        in_sample = len(parts) % 2 == 0 and bool(_OF_ATTACKS.search(parts[-2][-200:]))
        in_pair = any(before.count(left) > before.count(right) for left, right in _PAIRS)
        return in_sample or in_pair or bool(_REPORTED.search(before))

    def is_warned_of(self, start: int, end: int) -> bool:
        """Whether the text around a command says that it is an attack; quotes tell nothing: commands stand in code.

        Comments of a program warn nobody, but those of a scanner; any may list in quotes what it looks for.
        """
        if self.kind == "program" and not self.on_security():
            line = self.line_before(start, 300) + self.plain[start:end].lstrip()[:80]
            code = _COMMENT.sub("", self.plain[max(0, start - 1500) : end + 300])
            in_quotes = any(self.line_before(start, 300).count(quote) % 2 for quote in "\"'`/")
            return (in_quotes or bool(_ELEMENT.match(line))) and bool(_SCANNER.search(code))
        line_end = self.plain.find("\n", end, end + 200)
        before = 1500 if self.on_security() else 300
        return bool(WARNING.search(self.plain[max(0, start - before) : line_end if line_end >= 0 else end + 200]))

    def on_security(self) -> bool:
        """Whether name or description say that the skill is about attacks: it may show some."""
        return self.skill is not None and bool(
            _ON_SECURITY.search(f"{self.skill.name} {self.skill.description}".lower())
        )


Spans = Iterator[tuple[int, int]]
"""(start, end) in the plain text."""


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


@dataclass(frozen=True)
class Find:
    """One way to break a rule: `regex` within `reach` of an anchor, or what `custom` yields; see rules.yaml.

    Places are those of the plain text, of `written` checks those of the text as written.
    """

    anchors: str = ""
    regex: str = ""
    custom: Callable[[Reading], Spans] | None = None
    written: bool = False
    needs: tuple[str, ...] = ()
    unless: str = ""
    cited: Literal["warned", "quoted", ""] = "warned"
    near: int = 160
    reach: int = 400
    fields: tuple[str, ...] = ("name", "description", "body", "program")

    def places(self, reading: Reading) -> Spans:
        """The finds, as (start, end) in the text as written."""
        spans = self.spans(reading)
        return spans if self.written else (reading.place(*span) for span in spans)

    def spans(self, reading: Reading) -> Spans:
        """The finds, as (start, end) in the plain text; of a `written` check in the text as written."""
        tried = self.anchors.split("|") if reading.kind in self.fields else []
        anchors = [anchor for anchor in tried if anchor in reading.plain]
        if not anchors:
            return
        if self.custom is not None:
            yield from self.custom(reading)
            return
        for start, end in _windows(anchors, reading.plain, self.reach):
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
    return tuple(
        Rule(rule["name"], rule["reason"], tuple(_find_of(find, modules) for find in rule["finds"]))
        for rule in _table()["rules"]
    )


def _find_of(row: Mapping[str, Any], modules: Mapping[str, ModuleType]) -> Find:
    regex = row.get("regex", "")
    values: dict[str, Any] = {**row, "regex": "|".join(map(expand, regex if isinstance(regex, list) else [regex]))}
    values |= {key: expand(row[key]) for key in ("anchors", "unless") if key in row}
    values |= {key: tuple(map(expand, row[key])) for key in ("needs", "fields") if key in row}
    if "custom" in row:
        module, _, name = row["custom"].partition(".")
        values["custom"] = getattr(modules[module], name)
    return Find(**values)


def _windows(anchors: list[str], plain: str, reach: int) -> Spans:
    """Stretches of `plain` within `reach` characters of an anchor, in order and never overlapping."""
    places: list[int] = []
    for anchor in anchors:
        at = plain.find(anchor)
        while at >= 0:
            places.append(at)
            at = plain.find(anchor, at + len(anchor))
    start = end = -1
    for at in sorted(places):
        if at - reach > end:
            if end > 0:
                yield start, end
            start = max(0, at - reach)
        end = at + reach
    if end > 0:
        yield start, min(end, len(plain))


def read_text(text: str, field: str = "body", skill: Skill | None = None) -> Reading:
    """`text` with its plain form, in time linear in its length."""
    plain = text.lower()
    if len(plain) != len(text):  # a letter that would become two stays
        plain = "".join(low if len(low := letter.lower()) == 1 else letter for letter in text)
    if _STYLED.search(plain):
        plain = plain.translate(_TO_PLAIN)
    origins = None
    is_program = Reading(text, plain, None, (), field).kind == "program"
    values = {one["name"]: one["value"] for one in islice(_ASSIGNED.finditer(plain), 2_000)} if is_program else {}
    disguise = _SPLIT if is_program else _DISGUISE
    if disguise.search(plain):
        parts: list[str] = []
        origins = array("l")
        done = 0
        for found in disguise.finditer(plain):
            shown = html.unescape(found[0]).lower() if found[0][0] == "&" else ""
            if found[0][0] == "$":
                name = found[0].strip("${}")
                shown = " " if name.startswith("ifs") else values.get(name, found[0])
            elif len(shown) > 1:
                continue  # no entity, or one that stands for two letters
            parts += (plain[done : found.start()], shown)
            origins.extend(range(done, found.start()))
            origins.extend([found.start()] * len(shown))
            done = found.end()
        origins.extend(range(done, len(plain)))
        plain = "".join([*parts, plain[done:]])
    foreign = not plain.isascii() and any(letter in plain for letter in _LETTERS)
    mixed = tuple(_mixed_words(plain)) if foreign else ()
    for start, end in mixed:
        plain = plain[:start] + plain[start:end].translate(_LOOK_ALIKE) + plain[end:]
    return Reading(text, plain, origins, mixed, field, skill)


def _mixed_words(plain: str) -> Spans:
    """Words of Latin letters with look-alikes of another script among them, and of no other letters."""
    for found in _MIXED_WORD.finditer(plain):
        outside = plain[max(0, found.start() - 1) : found.start()] + plain[found.end() : found.end() + 1]
        if re.search("[a-z]{2}|[a-z].+[a-z]", found[0]) and not any(letter.isalpha() for letter in outside):
            yield found.span()
