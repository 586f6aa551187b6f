"""Safety screening: which skills carry a lure, a hidden text, a secret or an order to the router, and where.

The files beside a SKILL.md are read by the same rules; some finds are for programs alone.

A flag is a finding in the text, not a verdict on its author: a skill that teaches how malware is found may quote one.
What to do with flagged skills is the recipe's choice; by default they are no positives, and routing shows the flag.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path

from skilltrain.data.screening.bundled import BundledFile, bundled_files
from skilltrain.data.screening.fragments import load_rules_file
from skilltrain.data.screening.reading import Flag, Reading, read_text
from skilltrain.data.screening.rules import Rule
from skilltrain.data.screening.secret_keys import show_beginning
from skilltrain.records import Skill
from skilltrain.tables import FLAGS, SKILLS, read_table, table_path, write_table
from skilltrain.terminal import say
from skilltrain.workers import WorkersConfig, map_blocks

RULES = tuple(Rule.model_validate(row) for row in load_rules_file()["rules"])
FIELDS = ("name", "description", "body")
MAX_FLAGS = 20  # of one rule in one field; more tell no more
MAX_SPAN = 400  # characters
_BLOCK = 256  # skills that a worker screens at a time


def screen(skill: Skill, folder: Path | None = None) -> list[Flag]:
    """What the rules find in a skill and, where its folder is given, in the files there, hidden or not.

    In the order of fields, rules and places; time grows linearly with the length. The field of a find in a file is
    `./` and the file's path.
    """
    files = bundled_files(folder)[0] + bundled_files(folder, hidden=True)[0] if folder else []
    return screen_texts(skill, files)


def screen_texts(skill: Skill, files: Iterable[BundledFile]) -> list[Flag]:
    """As `screen`, of files that are read already."""
    texts = [(field, getattr(skill, field)) for field in FIELDS] + [
        (file.field, file.text) for file in files
    ]
    readings = (read_text(text, field, skill) for field, text in texts)
    found = (flag for reading in readings for rule in RULES for flag in _find(rule, reading))
    # Names of files that are shown alike may hold the same.
    return [*{(flag.rule, flag.field, flag.start): flag for flag in found}.values()]


def _find(rule: Rule, reading: Reading) -> Iterable[Flag]:
    """The first finds of a rule in a text; they do not overlap."""
    places = {
        span
        for find in rule.tried_in(reading.kind)
        for span in islice(find.places(reading), 10 * MAX_FLAGS)
    }
    done = 0
    for start, end in islice(sorted(places, key=lambda span: (span[0], -span[1])), MAX_FLAGS):
        if start >= done:
            done = min(end, start + MAX_SPAN)
            span = reading.text[start:done]
            shown = show_beginning(span) if rule.name == "embedded_secret" else span
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


def write_flags(flags: Mapping[str, Sequence[Flag]], path: Path) -> Path:
    """Write a FLAGS table, empty where nothing was found: the table says that the pool was screened."""
    rows = (
        {"skill_id": skill_id, **asdict(flag)}
        for skill_id, found in flags.items()
        for flag in found
    )
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
        say(
            f"warning: {pool_path} was never screened, so no skill is left out; `skilltrain pool` screens"
        )
    return flags or {}
