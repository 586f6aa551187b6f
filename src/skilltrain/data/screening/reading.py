"""What rules read: a text as a person or a shell would, disguises taken off, programs put together, places known."""

import dataclasses
import html
import re
import unicodedata
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from skilltrain.data.screening.fragments import expand
from skilltrain.data.screening.unfold import rewrite, unfold
from skilltrain.records import Skill
from skilltrain.texts import INVISIBLE

# HTML entities, broken shell lines, invisible characters.
_DISGUISE = re.compile(rf"&(?:#\d{{1,7}}|#x[0-9a-f]{{1,6}}|[a-z]{{2,8}});|\\\n|[{INVISIBLE}]+")
# Full-width and mathematical letters, and spaces of other widths, as the ASCII that they look like.
_STYLED = re.compile("[\uff01-\uff5e\u3000\u00a0\u2002-\u200a\u202f\U0001d400-\U0001d7ff]")
# Cyrillic and Greek letters within Latin words, as the Latin letter that they look like.
_LETTERS = "авекмнорстухіјѕһԁԛԝαειορυν"
_LOOK_ALIKE = str.maketrans(_LETTERS, "abekmhopctyxijshdqwaeiopuv")
_MIXED_WORD = re.compile(f"[a-z]{{0,24}}[{_LETTERS}]{{1,8}}[a-z{_LETTERS}]{{0,24}}")
# Other names for what a program calls (import x as y, p = process).
_ALIAS = re.compile(expand("<ALIAS>"))
_OPENING_QUOTES = "\"'`“‘「『«"
_PAIRS = (("“", "”"), ("「", "」"), ("『", "』"), ("«", "»"))
_REPORTED = re.compile(expand("<REPORTED>"), re.ASCII)
_OF_ATTACKS = re.compile(expand("<OF_ATTACKS>"))
_WARNING = re.compile(expand("<WARNING>"))
_LISTING = re.compile(r"(?:requirements|constraints)[\w.-]{0,40}\.txt$|cmakelists\.txt$")
_PROSE = (".md", ".mdx", ".txt", ".rst", ".adoc")
_PRINTED = re.compile(expand("<PRINTED>"))
_TITLE = re.compile(r"[^\n:]{1,60}:\*{0,2}\s{0,3}\n\s{0,8}[-*]\s")
_SCANNER_TEST = re.compile(expand("<SCANNER_TEST>"))
_ON_SECURITY = re.compile(expand("<ON_SECURITY>"))
_COMMENT = re.compile(r"(?:^|(?<=\n))[^\S\n]{0,40}(?:#|//|\*|--)[^\n]{0,400}")
_ELEMENT = re.compile(expand("<ELEMENT>"))
_SCANNER = re.compile(expand("<SCANNER>"))


Spans = Iterator[tuple[int, int]]
"""(start, end) of each find in the plain text."""


@dataclass(frozen=True)
class Reading:
    """`text` as written, and `plain`: lower case, in the letters it shows, HTML entities resolved, invisible characters
    and broken shell lines (backslash, line end) taken out. `origins[i]` is where `plain[i]` stands in `text`; None: the
    same. `mixed` are words of `plain` that had letters of two scripts. `kind` is what rules take it for: name,
    description, body (as is any text for readers), or program.
    """

    text: str
    plain: str
    origins: array | None
    mixed: tuple[tuple[int, int], ...]
    field: str
    kind: str
    skill: Skill | None
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

    def line_before(self, start: int, width: int) -> str:
        """What stands before `start` in its line, at most `width` characters."""
        return self.plain[
            max(self.plain.rfind("\n", max(0, start - width), start) + 1, start - width, 0) : start
        ]

    def line_after(self, end: int, width: int) -> str:
        """What stands after `end` in its line, at most `width` characters."""
        return self.plain[end : end + width].partition("\n")[0]

    def is_quoted(self, start: int) -> bool:
        """Whether a phrase at `start` of the plain text is cited, not said: in quotes or code, after "such as", or, in
        a skill on security, as the title of a list.

        It is how a skill that warns of an attack differs from the attack; an attacker who quotes his own order hides it
        from this check, and from many models too.
        """
        before = self.line_before(start, 300)
        if self.kind == "program" and not self.on_security and _PRINTED.search(before):
            return False
        if (
            before.rstrip(" *_-❌✗>")[-1:] in tuple(_OPENING_QUOTES)
            or before.count('"') % 2
            or before.count("`") % 2
        ):
            return True
        parts = self.plain[max(0, start - 500) : start].split("```")
        in_sample = len(parts) % 2 == 0 and bool(_OF_ATTACKS.search(parts[-2][-200:]))
        in_pair = any(before.count(left) > before.count(right) for left, right in _PAIRS)
        is_title = (
            self.on_security and not before.strip(" *_-#") and bool(_TITLE.match(self.plain, start))
        )
        return in_sample or in_pair or is_title or bool(_REPORTED.search(before))

    def is_warned_of(self, start: int, end: int) -> bool:
        """Whether the text around a command says that it is an attack; quotes tell nothing: commands stand in code.

        Comments of a program warn nobody, but those of a scanner; any may list in quotes what it looks for.
        """
        if self.kind == "program" and not self.on_security:
            line = self.line_before(start, 300) + self.plain[start:end].lstrip()[:80]
            code = _COMMENT.sub("", self.plain[max(0, start - 1500) : end + 300])
            in_quotes = any(self.line_before(start, 300).count(quote) % 2 for quote in "\"'`/")
            return (in_quotes or bool(_ELEMENT.match(line))) and bool(_SCANNER.search(code))
        before = self.plain[max(0, start - (1500 if self.on_security else 300)) : end]
        return bool(_WARNING.search(before + self.line_after(end, 200)))

    def is_sample(self, start: int, end: int) -> bool:
        """Whether a skill shows a text as an attack: one on security says so in the section up to the end of the line,
        a test of a scanner in its first words. Files that such a test brings along run all the same.
        """
        section = max(self.plain.rfind("\n#", max(0, start - 600), start), start - 600, 0)
        first_words = f"{self.skill.description}\n{self.skill.body[:300]}" if self.skill else ""
        if self.kind != "program" and _SCANNER_TEST.search(first_words.lower()):
            return True
        return self.on_security and bool(
            _WARNING.search(self.plain[section:end] + self.line_after(end, 120))
        )

    @cached_property
    def on_security(self) -> bool:
        """Whether name or description say that the skill is about attacks: it may show some."""
        about = f"{self.skill.name} {self.skill.description}" if self.skill else ""
        return bool(_ON_SECURITY.search(about.lower()))


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


def read_text(text: str, field: str = "body", skill: Skill | None = None) -> Reading:
    """`text` with its plain form, in time linear in its length."""
    kind = _kind_of(field)
    written, origins = unfold(text) if kind == "program" else (text, None)
    plain = "İ".join(
        part.lower() for part in written.split("İ")
    )  # its lower case would be two letters
    plain = _STYLED.sub(lambda found: unicodedata.normalize("NFKC", found[0]).lower(), plain)
    plain, origins = rewrite(plain, origins, _DISGUISE, _undisguised)
    # What is called by another name under its own; twice, for names of names.
    aliases = (
        {b or c: a or d for a, b, c, d in _ALIAS.findall(plain)[:50]} if kind == "program" else {}
    )
    names = re.compile(rf"(?<![\w.$\"'/-])(?:{'|'.join(aliases)})(?=\.\w|[(),])")
    for _ in range(2 if aliases else 0):
        plain, origins = rewrite(plain, origins, names, lambda found: aliases[found[0]])
    plain, mixed = _in_one_script(plain)
    return Reading(text, plain, origins, mixed, field, kind, skill)


def _kind_of(field: str) -> str:
    if not field.startswith("./"):
        return field
    is_prose = field.lower().endswith(_PROSE) and not _LISTING.search(field.lower())
    return "body" if is_prose else "program"


def _undisguised(found: re.Match[str]) -> str | None:
    shown = html.unescape(found[0]).lower() if found[0][0] == "&" else ""
    return shown if len(shown) < 2 else None  # no entity, or one that stands for two letters


def _in_one_script(plain: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """(`plain` with words of Latin letters and look-alikes of another script, and no other, in Latin, their places)."""
    mixed: list[tuple[int, int]] = []

    def shown(found: re.Match[str]) -> str:
        outside = (
            plain[max(0, found.start() - 1) : found.start()] + plain[found.end() : found.end() + 1]
        )
        if not re.search("[a-z]{2}|[a-z].+[a-z]", found[0]) or any(
            letter.isalpha() for letter in outside
        ):
            return found[0]
        mixed.append(found.span())
        return found[0].translate(_LOOK_ALIKE)

    is_foreign = not plain.isascii() and any(letter in plain for letter in _LETTERS)
    return _MIXED_WORD.sub(shown, plain) if is_foreign else plain, tuple(mixed)
