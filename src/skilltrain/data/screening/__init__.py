"""Safety screening: which skills carry a lure, a hidden text, a secret or an order to the router, and where.

The files beside a SKILL.md are read by the same rules; some finds are for programs alone.

A flag is a finding in the text, not a verdict on its author: a skill that teaches how malware is found may quote one.
What to do with flagged skills is the recipe's choice; by default they are no positives, and routing shows the flag.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from skilltrain.data.screening import hidden, lures, secret_keys
from skilltrain.data.screening.bundled import BundledFile, bundled_files
from skilltrain.data.screening.reading import Flag, Reading, Spans, expand, read_text, table
from skilltrain.records import Skill
from skilltrain.tables import FLAGS, SKILLS, read_table, table_path, write_table
from skilltrain.terminal import say
from skilltrain.workers import WorkersConfig, map_blocks


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
    score: tuple[tuple[str, int], ...] = ()
    least: int = 0
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
    return tuple(
        Rule(rule["name"], rule["reason"], tuple(_find_of(find, modules) for find in rule["finds"]))
        for rule in table()["rules"]
    )


def _find_of(row: Mapping[str, Any], modules: Mapping[str, ModuleType]) -> Find:
    regex = row.get("regex", "")
    values: dict[str, Any] = {**row, "regex": "|".join(map(expand, regex if isinstance(regex, list) else [regex]))}
    values |= {key: expand(row[key]) for key in ("anchors", "unless") if key in row}
    values |= {key: tuple(map(expand, row[key])) for key in ("needs", "fields") if key in row}
    values["score"] = tuple((expand(notion), points) for notion, points in row.get("score", {}).items())
    if "custom" in row:
        module, _, name = row["custom"].partition(".")
        values["custom"] = getattr(modules[module], name)
    return Find(**values)


def _windows(anchors: list[str], plain: str, reach: int) -> Spans:
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


RULES: tuple[Rule, ...] = load_rules({"lures": lures, "hidden": hidden, "secret_keys": secret_keys})
FIELDS = ("name", "description", "body")
MAX_FLAGS = 20  # of one rule in one field; more tell no more
MAX_SPAN = 400  # characters
_BLOCK = 256  # skills that a worker screens at a time


def screen(skill: Skill, folder: Path | None = None) -> list[Flag]:
    """What the rules find in a skill and, where its folder is given, in the files bundled there.

    In the order of fields, rules and places; time grows linearly with the length. The field of a find in a file is
    `./` and the file's path.
    """
    return screen_texts(skill, bundled_files(folder)[0] if folder else ())


def screen_texts(skill: Skill, files: Iterable[BundledFile]) -> list[Flag]:
    """As `screen`, of files that are read already."""
    texts = [(field, getattr(skill, field)) for field in FIELDS] + [(file.field, file.text) for file in files]
    readings = (read_text(text, field, skill) for field, text in texts)
    found = (flag for reading in readings for rule in RULES for flag in _find(rule, reading))
    # Names of files that are shown alike may hold the same.
    return [*{(flag.rule, flag.field, flag.start): flag for flag in found}.values()]


def _find(rule: Rule, reading: Reading) -> Iterable[Flag]:
    """The first finds of a rule in a text; they do not overlap."""
    places = {span for find in rule.finds for span in islice(find.places(reading), 10 * MAX_FLAGS)}
    done = 0
    for start, end in islice(sorted(places, key=lambda span: (span[0], -span[1])), MAX_FLAGS):
        if start >= done:
            done = min(end, start + MAX_SPAN)
            span = reading.text[start:done]
            shown = secret_keys.show_beginning(span) if rule.name == "embedded_secret" else span
            yield Flag(rule.name, reading.field, start, done, shown, rule.reason)


def screen_pool(
    skills: Sequence[Skill], workers: WorkersConfig, folders: Mapping[str, Path] | None = None
) -> dict[str, list[Flag]]:
    """skill_id → flags, of the skills that have any; `folders` (by skill_id) are those of skills with other files."""
    pairs = [(skill, (folders or {}).get(skill.skill_id)) for skill in skills]
    blocks = [pairs[start : start + _BLOCK] for start in range(0, len(pairs), _BLOCK)]
    found = chain.from_iterable(map_blocks(_screen_block, blocks, workers, "screening skills"))
    return {skill.skill_id: flags for skill, flags in zip(skills, found, strict=True) if flags}


def _screen_block(pairs: Sequence[tuple[Skill, Path | None]]) -> list[list[Flag]]:
    return [screen(*pair) for pair in pairs]


def count_flagged(flags: Mapping[str, Sequence[Flag]]) -> dict[str, int]:
    """Rule → number of skills that it flags, of the rules that flag any."""
    return dict(sorted(Counter(rule for found in flags.values() for rule in {flag.rule for flag in found}).items()))


def write_flags(flags: Mapping[str, Sequence[Flag]], path: Path) -> Path:
    """Write a FLAGS table, empty where nothing was found: the table says that the pool was screened."""
    rows = ({"skill_id": skill_id, **asdict(flag)} for skill_id, found in flags.items() for flag in found)
    return write_table(rows, FLAGS, path)


def read_flags(pool_path: Path) -> dict[str, list[Flag]] | None:
    """skill_id → flags from the FLAGS table beside a pool's SKILLS table; None where there is none."""
    file = table_path(pool_path, SKILLS).with_name(f"{FLAGS.name}.parquet")
    if not file.is_file():
        return None
    flags: dict[str, list[Flag]] = {}
    for row in read_table(file, FLAGS).to_pylist():
        flags.setdefault(row.pop("skill_id"), []).append(Flag(**row))
    return flags


def flags_to_leave_out(pool_path: Path) -> dict[str, list[Flag]]:
    """As `read_flags`, for who leaves flagged skills out: a pool that was never screened has none, and it is said."""
    flags = read_flags(pool_path)
    if flags is None:
        say(f"warning: {pool_path} was never screened, so no skill is left out; `skilltrain pool` screens")
    return flags or {}
