"""Safety screening: which skills carry a lure, a hidden text, a secret or an order to the router, and where.

A flag is a finding in the text, not a verdict on its author: a skill that teaches how malware is found may quote one.
What to do with flagged skills is the recipe's choice; by default they are no positives, and routing shows the flag.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path

from skilltrain.data.screening.commands import BARE_ADDRESS, ENCODED_COMMAND, EXFILTRATION, PASTE_SITE
from skilltrain.data.screening.hidden_text import HIDDEN_TEXT
from skilltrain.data.screening.lures import LOCKED_ARCHIVE, OUTSIDE_PROGRAM
from skilltrain.data.screening.orders import OVERRIDE_ORDER, ROUTER_ORDER
from skilltrain.data.screening.reading import Flag, Reading, Rule, read_text
from skilltrain.data.screening.secret_keys import EMBEDDED_SECRET
from skilltrain.records import Skill
from skilltrain.tables import FLAGS, SKILLS, read_table, table_path, write_table
from skilltrain.terminal import say
from skilltrain.workers import WorkersConfig, map_blocks

RULES: tuple[Rule, ...] = (
    ENCODED_COMMAND, BARE_ADDRESS, PASTE_SITE, LOCKED_ARCHIVE, OUTSIDE_PROGRAM, HIDDEN_TEXT, EMBEDDED_SECRET,
    ROUTER_ORDER, OVERRIDE_ORDER, EXFILTRATION,
)  # fmt: skip
FIELDS = ("name", "description", "body")
MAX_FLAGS = 20  # of one rule in one field; more tell no more
MAX_SPAN = 400  # characters
_BLOCK = 256  # skills that a worker screens at a time


def screen(skill: Skill) -> list[Flag]:
    """What the rules find in a skill, in the order of fields, rules and places; time grows linearly with its length."""
    texts = {field: getattr(skill, field) for field in FIELDS}
    return [flag for field, text in texts.items() if text for flag in _screen_text(read_text(text), field)]


def _screen_text(reading: Reading, field: str) -> Iterable[Flag]:
    for rule in RULES:
        if rule.hints and not any(hint in reading.plain for hint in rule.hints):
            continue
        last_end = -1
        for start, end in islice(_apart(rule.find(reading, field)), MAX_FLAGS):
            end = min(end, start + MAX_SPAN)
            if start >= last_end:
                span = reading.text[start:end]
                yield Flag(rule.name, field, start, end, rule.show(span), rule.reason)
                last_end = end


def _apart(spans: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """`spans` without those that begin where one before them began."""
    seen: set[int] = set()
    for start, end in spans:
        if start not in seen:
            seen.add(start)
            yield start, end


def screen_pool(skills: Sequence[Skill], workers: WorkersConfig) -> dict[str, list[Flag]]:
    """skill_id → flags, of the skills that have any."""
    blocks = [skills[start : start + _BLOCK] for start in range(0, len(skills), _BLOCK)]
    found = chain.from_iterable(map_blocks(_screen_block, blocks, workers, "screening skills"))
    return {skill.skill_id: flags for skill, flags in zip(skills, found, strict=True) if flags}


def _screen_block(skills: Sequence[Skill]) -> list[list[Flag]]:
    return [screen(skill) for skill in skills]


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
