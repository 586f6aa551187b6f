"""Normalise a text for the rules: undo disguises, and keep each character's original position."""

import dataclasses
import html
import re
import unicodedata
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from skilltrain.data.screening.deobfuscate import MappedText, deobfuscate, replace_matches
from skilltrain.data.screening.fragments import expand
from skilltrain.records import Skill
from skilltrain.texts import INVISIBLE

Spans = Iterator[tuple[int, int]]
"""(start, end) of each finding. In the normalised text, unless a function says otherwise."""

# HTML entities, line continuations of a shell, and invisible characters.
_DISGUISE = re.compile(rf"&(?:#\d{{1,7}}|#x[0-9a-f]{{1,6}}|[a-z]{{2,8}});|\\\n|[{INVISIBLE}]+")
# Full-width and mathematical letters, and spaces of other widths.
_STYLED = re.compile("[\uff01-\uff5e\u3000\u00a0\u2002-\u200a\u202f\U0001d400-\U0001d7ff]")
# Cyrillic and Greek letters, and the Latin letters that they look like.
_LOOK_ALIKES = "авекмнорстухіјѕһԁԛԝαειορυν"
_LATIN_OF_LOOK_ALIKE = str.maketrans(_LOOK_ALIKES, "abekmhopctyxijshdqwaeiopuv")
_MIXED_WORD = re.compile(f"[a-z]{{0,24}}[{_LOOK_ALIKES}]{{1,8}}[a-z{_LOOK_ALIKES}]{{0,24}}")
_TWO_LATIN_LETTERS = re.compile("[a-z].{0,54}[a-z]")  # a mixed word has at most 56 letters
# Other names for what a program calls: `import subprocess as x`, `p = process`.
_ALIAS = re.compile(expand("<ALIAS>"))
_MAX_ALIASES = 50

# Kinds of files: requirements.txt is for programs, notes.txt is for readers.
_DEPENDENCY_LIST = re.compile(r"(?:requirements|constraints)[\w.-]{0,40}\.txt$|cmakelists\.txt$")
_PROSE_SUFFIXES = (".md", ".mdx", ".txt", ".rst", ".adoc")

# Signs that a text only mentions an attack.
_OPENING_QUOTES = ('"', "'", "`", "“", "‘", "「", "『", "«")
_QUOTE_PAIRS = (("“", "”"), ("「", "」"), ("『", "』"), ("«", "»"))
_REPORTED = re.compile(expand("<REPORTED>"), re.ASCII)
_INTRODUCES_ATTACK = re.compile(expand("<INTRODUCES_ATTACK>"))
_LIST_TITLE = re.compile(r"[^\n:]{1,60}:\*{0,2}\s{0,3}\n\s{0,8}[-*]\s")
_WARNING = re.compile(expand("<WARNING>"))
_PRINT_CALL = re.compile(expand("<PRINT_CALL>"))
_SECURITY_TOPIC = re.compile(expand("<SECURITY_TOPIC>"))
_SCANNER_TEST = re.compile(expand("<SCANNER_TEST>"))
_SCANNER_CODE = re.compile(expand("<SCANNER_CODE>"))
_LIST_ELEMENT = re.compile(expand("<LIST_ELEMENT>"))
# Sites and GitHub accounts, and lines of code with a command that downloads something.
_SOURCE = re.compile(expand("<SOURCE>"))
_DOWNLOAD_LINE = re.compile(expand(r"[^\n`]{0,2000}<DOWNLOADER>[^\n`]{0,2000}"))
_COMMENT_LINE = re.compile(r"(?:^|(?<=\n))[^\S\n]{0,40}(?:#|//|\*|--)[^\n]{0,400}")


@dataclass(frozen=True)
class NormalizedText:
    """A text as the rules read it, and the judgement whether a finding in it is only mentioned.

    Attributes:
        original: The text as written.
        normalized: The text in lower case, without HTML entities, invisible characters and line
            continuations. Latin letters replace look-alikes. Programs are deobfuscated.
        offsets: `offsets[i]` is the position of `normalized[i]` in `original`. None: all positions
            are unchanged.
        mixed_words: Spans of words in `normalized` that had letters of two scripts.
        field: Field of the skill, or `./PATH` of a bundled file.
        kind: name, description, body (any text for readers) or program.
        skill: The skill that the text belongs to.
    """

    original: str
    normalized: str
    offsets: array | None
    mixed_words: tuple[tuple[int, int], ...]
    field: str
    kind: str
    skill: Skill | None
    _starts_by_regex: dict[str, list[int]] = dataclasses.field(default_factory=dict, repr=False)
    _presence_by_anchor: dict[str, bool] = dataclasses.field(default_factory=dict, repr=False)

    def has_anchor(self, anchor: str) -> bool:
        """Return whether `anchor` occurs in the normalised text.

        Many checks share an anchor, so each anchor is searched only once.
        """
        if anchor not in self._presence_by_anchor:
            self._presence_by_anchor[anchor] = anchor in self.normalized
        return self._presence_by_anchor[anchor]

    def has_match_between(self, regex: str, start: int, end: int) -> bool:
        """Return whether a match of `regex` begins in `normalized[start:end]`.

        All matches are searched once, so that the time stays linear in the length of the text.

        Args:
            regex: Expression for the normalised text.
            start: First position at which a match may begin.
            end: Position after the last one at which a match may begin.
        """
        if regex not in self._starts_by_regex:
            matches = re.finditer(regex, self.normalized)
            self._starts_by_regex[regex] = [match.start() for match in matches]
        starts = self._starts_by_regex[regex]
        # Find the first match that begins at `start` or later. `starts` is sorted.
        index = bisect_left(starts, start)
        return index < len(starts) and starts[index] < end

    def original_span(self, start: int, end: int) -> tuple[int, int]:
        """Return the span in `original` that `normalized[start:end]` comes from."""
        if self.offsets is None or start >= end:
            return start, end
        return self.offsets[start], self.offsets[end - 1] + 1

    def line_before(self, start: int, max_chars: int) -> str:
        """Return the part of the line before `start`, at most its last `max_chars` characters."""
        window_start = max(0, start - max_chars)
        line_start = self.normalized.rfind("\n", window_start, start) + 1
        return self.normalized[max(line_start, window_start) : start]

    def line_after(self, end: int, max_chars: int) -> str:
        """Return the part of the line after `end`, at most its first `max_chars` characters."""
        return self.normalized[end : end + max_chars].partition("\n")[0]

    def is_quoted(self, start: int) -> bool:
        """Return whether the phrase at `start` is quoted, and so not an order of the skill itself.

        A phrase is quoted if it is in quotation marks or code, or if it follows words such as
        "such as". In a skill about security, block quotations and titles of lists are quoted too.
        So a skill that warns of an attack is not taken for an attack. An attacker can put the order
        in quotation marks, but then many models do not follow the order either.

        Args:
            start: Start of the phrase in `normalized`.
        """
        line = self.line_before(start, max_chars=300)
        # An agent reads what a program prints, and may take it for an order. So what a program
        # prints is not quoted, even in quotation marks. But a program about security may print an
        # order as an example.
        is_ordinary_program = self.kind == "program" and not self.is_about_security
        if is_ordinary_program and _PRINT_CALL.search(line):
            return False

        if _has_open_quotation(line):
            return True
        # _REPORTED matches words that introduce an example or a report: "such as", "asks you to".
        if _REPORTED.search(line) or self._is_in_attack_sample(start):
            return True
        if not self.is_about_security:
            return False
        if line.lstrip().startswith(">"):
            return True  # a block quotation of Markdown
        # A title of a list is a line that ends in a colon, and list items follow it.
        is_line_start = not line.strip(" *_-#")
        return is_line_start and _LIST_TITLE.match(self.normalized, start) is not None

    def _is_in_attack_sample(self, start: int) -> bool:
        """Return whether `start` is in a code block that is introduced as an attack."""
        # The fences ``` begin and end code blocks. Look at 500 characters before `start`.
        blocks = self.normalized[max(0, start - 500) : start].split("```")
        if len(blocks) % 2:
            return False  # the number of fences is even, so `start` is not in a code block
        # The last piece is the code up to `start`. The piece before it introduces the code block.
        introduction = blocks[-2][-200:]
        return bool(_INTRODUCES_ATTACK.search(introduction))

    def has_warning(self, start: int, end: int) -> bool:
        """Return whether the text around a command says that the command is an attack.

        Quotation marks do not count, because commands are usually quoted. Comments in a program do
        not count either. But a program may be a scanner, which lists the commands it looks for. If
        the skill is about security, the words around the command decide.

        Args:
            start: Start of the command in `normalized`.
            end: End of the command in `normalized`.
        """
        if self.kind == "program" and not self.is_about_security:
            return self._is_scanner_pattern(start, end)
        # A skill about security may warn of a command long before it shows the command.
        num_chars = 1500 if self.is_about_security else 300
        context = self.normalized[max(0, start - num_chars) : end] + self.line_after(end, 200)
        return bool(_WARNING.search(context))

    def _is_scanner_pattern(self, start: int, end: int) -> bool:
        """Return whether a program only lists a command as a pattern to look for.

        Such a program is a scanner, which looks for attacks in other programs.
        """
        # A pattern is in quotes, in the slashes of a regex, or it looks like an element of a list.
        # If an odd number of marks precedes it, the last one opens the quotation that it is in.
        line = self.line_before(start, max_chars=300)
        is_in_quotes = any(line.count(mark) % 2 for mark in "\"'`/")
        command = self.normalized[start:end].lstrip()[:80]
        if not is_in_quotes and not _LIST_ELEMENT.match(line + command):
            return False

        # The code around the pattern, without comments, is that of a scanner.
        code = _COMMENT_LINE.sub("", self.normalized[max(0, start - 1500) : end + 300])
        return bool(_SCANNER_CODE.search(code))

    def is_sample(self, start: int, end: int) -> bool:
        """Return whether a skill shows `normalized[start:end]` as an example of an attack.

        A skill about security warns of it in the same section, before the end of the example's
        line. A skill that tests a scanner says so in its first words. But such words never excuse
        a bundled program, because it can be run.
        """
        first_words = f"{self.skill.description}\n{self.skill.body[:300]}" if self.skill else ""
        if self.kind != "program" and _SCANNER_TEST.search(first_words.lower()):
            return True

        # The section begins at the last Markdown heading, at most 600 characters before `start`.
        window_start = max(0, start - 600)
        section_start = max(self.normalized.rfind("\n#", window_start, start), window_start)
        context = self.normalized[section_start:end] + self.line_after(end, max_chars=120)
        return self.is_about_security and bool(_WARNING.search(context))

    def is_from_linked_source(self, start: int, end: int) -> bool:
        """Return whether the skill links elsewhere to all sources in `normalized[start:end]`."""
        passage = self.normalized[start:end]
        # A source is a site or a GitHub account from which something can be downloaded.
        sources = _SOURCE.findall(passage)
        num_links = _count_links(passage)
        # A source is linked elsewhere if the skill has more links to it than the passage has. Links
        # in download commands do not count.
        is_linked = [self._num_links[source] > num_links[source] for source in sources]
        return bool(is_linked) and all(is_linked)

    @cached_property
    def _num_links(self) -> Counter[tuple[str, str]]:
        """Number of links of the skill to each source, outside of download commands."""
        header = f"{self.skill.description}\n{self.skill.url}" if self.skill else ""
        return _count_links(f"{self.normalized}\n{header.lower()}")

    @cached_property
    def is_about_security(self) -> bool:
        """True if name or description say that the skill is about attacks. It may show some."""
        topic = f"{self.skill.name} {self.skill.description}" if self.skill else ""
        return bool(_SECURITY_TOPIC.search(topic.lower()))


def _count_links(text: str) -> Counter[tuple[str, str]]:
    """Count the links to each source in a text, outside of download commands.

    A source is a pair of a GitHub account and a site, one of which is empty.
    """
    return Counter(_SOURCE.findall(_DOWNLOAD_LINE.sub("", text)))


def _has_open_quotation(line: str) -> bool:
    """Return whether a quotation begins in `line` and does not end in it."""
    # A quotation mark is at the end, or only list marks and emphasis follow it.
    if line.rstrip(" *_-❌✗>").endswith(_OPENING_QUOTES):
        return True
    # Of an odd number of marks, the last one opens a quotation.
    if line.count('"') % 2 or line.count("`") % 2:
        return True
    return any(line.count(opening) > line.count(closing) for opening, closing in _QUOTE_PAIRS)


def normalize_text(text: str, field: str = "body", skill: Skill | None = None) -> NormalizedText:
    """Normalise a text for the rules: undo disguises, in time linear in its length.

    Args:
        text: The text as written.
        field: name, description, body, or `./PATH` of a bundled file.
        skill: The skill that the text belongs to.
    """
    # A program is deobfuscated: its encoded and joined texts are written out.
    kind = _kind_of(field)
    mapped = deobfuscate(text) if kind == "program" else MappedText(text, None)
    mapped = mapped._replace(text=_to_plain_lower_case(mapped.text))
    # _DISGUISE matches HTML entities, line continuations and invisible characters.
    mapped = replace_matches(mapped, _DISGUISE, _undisguise)
    if kind == "program":
        # Replace other names of dangerous functions: `import subprocess as x`.
        mapped = _resolve_aliases(mapped)
    # Replace Cyrillic and Greek letters in Latin words. The length stays the same, so the offsets
    # stay valid.
    normalized, mixed_words = _to_one_script(mapped.text)
    return NormalizedText(text, normalized, mapped.offsets, mixed_words, field, kind, skill)


def _kind_of(field: str) -> str:
    if not field.startswith("./"):
        return field
    name = field.lower()
    is_prose = name.endswith(_PROSE_SUFFIXES) and not _DEPENDENCY_LIST.search(name)
    return "body" if is_prose else "program"


def _to_plain_lower_case(text: str) -> str:
    """Lower the case of a text, and replace styled letters by ASCII. The length stays the same."""
    # Python lowers İ to two characters, so only the text between two İ is lowered.
    lowered = "İ".join(segment.lower() for segment in text.split("İ"))
    return _STYLED.sub(lambda match: unicodedata.normalize("NFKC", match[0]).lower(), lowered)


def _undisguise(disguise: re.Match[str]) -> str | None:
    """Return what replaces a match of `_DISGUISE`, or None to keep the match.

    An HTML entity is replaced by its character. All other disguises are removed.
    """
    if not disguise[0].startswith("&"):
        return ""
    character = html.unescape(disguise[0]).lower()
    # It is longer than one if it is no entity, or an entity for two characters.
    return character if len(character) < 2 else None


def _resolve_aliases(mapped: MappedText) -> MappedText:
    """Replace other names for dangerous functions by the functions' own names.

    For example, after `import subprocess as x`, the call `x.run(` becomes `subprocess.run(`.

    Args:
        mapped: Text of a program, with the original position of each character.
    """
    names_by_alias: dict[str, str] = {}
    for match in islice(_ALIAS.finditer(mapped.text), _MAX_ALIASES):
        if match["import_alias"]:  # `import IMPORTED as IMPORT_ALIAS`
            names_by_alias[match["import_alias"]] = match["imported"]
        else:  # `VARIABLE = VALUE`
            names_by_alias[match["variable"]] = match["value"]
    if not names_by_alias:
        return mapped

    # Match an alias at the start of a name, outside of strings and paths (the lookbehind), if an
    # attribute, a bracket or a comma follows it (the lookahead): `x.run`, `x(`, `f(x, y)`.
    # Aliases are words, so they need no escapes in the expression.
    alias_use = re.compile(rf"(?<![\w.$\"'/-])(?:{'|'.join(names_by_alias)})(?=\.\w|[(),])")
    for _ in range(2):  # an alias may be the name of another alias
        mapped = replace_matches(mapped, alias_use, lambda match: names_by_alias[match[0]])
    return mapped


def _to_one_script(text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Write words of Latin letters and look-alikes in Latin letters only.

    Returns:
        The text, which has the same length, and the spans of the words that were changed.
    """
    mixed_words = []

    def to_latin(match: re.Match[str]) -> str:
        """Return a mixed word in Latin letters, and remember its span. Keep other matches."""
        word = match[0]
        start, end = match.span()
        # Beside letters of a third kind, such as `ж` or `é`, the match is only a part of a word.
        neighbours = text[max(0, start - 1) : start] + text[end : end + 1]
        is_part_of_word = any(letter.isalpha() for letter in neighbours)
        if is_part_of_word or not _TWO_LATIN_LETTERS.search(word):
            return word
        mixed_words.append((start, end))
        return word.translate(_LATIN_OF_LOOK_ALIKE)

    # Search for mixed words only if the text has a look-alike at all.
    if not text.isascii() and any(letter in text for letter in _LOOK_ALIKES):
        text = _MIXED_WORD.sub(to_latin, text)
    return text, tuple(mixed_words)
