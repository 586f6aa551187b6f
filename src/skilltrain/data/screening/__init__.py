"""Safety screening: find lures, hidden text, secrets and orders to the router in skills.

A flag is a finding in a text and not a verdict on its author. A skill that teaches how to find
malware may quote some. The recipe decides what happens to flagged skills. By default they are not
used as positives, and routing shows the flag.

Notes:
    - Two files can have names that are equal in print. A repeated flag of such files is dropped.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path

from skilltrain.data.screening.bundled import BundledFile, read_bundled_files, read_front_matter
from skilltrain.data.screening.fragments import load_rules_file
from skilltrain.data.screening.normalize import NormalizedText, normalize_text
from skilltrain.data.screening.rules import Flag, Rule
from skilltrain.data.screening.secret_keys import mask_secret
from skilltrain.records import Skill
from skilltrain.tables import FLAGS, SKILLS, read_table, table_path, write_table
from skilltrain.terminal import say
from skilltrain.workers import WorkersConfig, map_blocks

RULES = tuple(Rule.model_validate(rule) for rule in load_rules_file()["rules"])
FIELDS = ("name", "description", "body")
MAX_FLAGS = 20  # per rule and field; more would tell nothing new
MAX_SPAN = 400  # characters
_BLOCK_SIZE = 256  # skills that a worker screens at a time


def screen(skill: Skill, folder: Path | None = None) -> list[Flag]:
    """Screen a skill and the files in its folder, hidden files and front matter included.

    Args:
        skill: The skill to screen.
        folder: The folder of the skill. None: only the skill's texts are screened.

    Returns:
        Flags in the order of fields, rules and positions.
    """
    if folder is None:
        return screen_texts(skill, [])
    visible_files, _ = read_bundled_files(folder)
    hidden_files, _ = read_bundled_files(folder, hidden=True)
    return screen_texts(skill, [*visible_files, *hidden_files, read_front_matter(folder)])


def screen_texts(skill: Skill, files: Iterable[BundledFile]) -> list[Flag]:
    """Screen a skill and files that are already read. See `screen`."""
    fields_and_texts = [(field, getattr(skill, field)) for field in FIELDS]
    fields_and_texts += [(file.field, file.text) for file in files]

    flags_by_position = {}
    for field, text in fields_and_texts:
        normalized = normalize_text(text, field, skill)
        for rule in RULES:
            for flag in _apply_rule(rule, normalized):
                flags_by_position[flag.rule, flag.field, flag.start] = flag
    return list(flags_by_position.values())


def _apply_rule(rule: Rule, text: NormalizedText) -> Iterator[Flag]:
    """Yield flags for a rule's first `MAX_FLAGS` findings in a text, without overlaps."""
    spans = set()
    for check in rule.checks_for(text.kind):
        spans.update(islice(check.find_spans(text), 10 * MAX_FLAGS))

    # longest first at each start
    first_spans = sorted(spans, key=lambda span: (span[0], -span[1]))[:MAX_FLAGS]
    previous_end = 0
    for start, full_end in first_spans:
        if start < previous_end:
            continue
        end = min(full_end, start + MAX_SPAN)
        previous_end = end
        finding = text.original[start:end]
        if rule.name == "embedded_secret":
            finding = mask_secret(finding)
        yield Flag(rule.name, text.field, start, end, finding, rule.reason)


def screen_pool(
    skills: Sequence[Skill],
    workers: WorkersConfig,
    folders_by_skill: Mapping[str, Path] | None = None,
) -> dict[str, list[Flag]]:
    """Screen all skills of a pool.

    Args:
        skills: The skills of the pool.
        workers: Processes that screen blocks of skills.
        folders_by_skill: Folder by skill id, for skills that have bundled files.

    Returns:
        Flags by skill id, of the skills that have any.
    """
    folders = folders_by_skill or {}
    pairs = [(skill, folders.get(skill.skill_id)) for skill in skills]
    blocks = [pairs[start : start + _BLOCK_SIZE] for start in range(0, len(pairs), _BLOCK_SIZE)]
    flags_by_block = map_blocks(_screen_block, blocks, workers, "screening skills")

    all_flags = chain.from_iterable(flags_by_block)  # one list for each skill
    return {skill.skill_id: flags for skill, flags in zip(skills, all_flags, strict=True) if flags}


def _screen_block(pairs: Sequence[tuple[Skill, Path | None]]) -> list[list[Flag]]:
    """Screen pairs of a skill and its folder. Return the flags of each."""
    return [screen(skill, folder) for skill, folder in pairs]


def write_flags(flags_by_skill: Mapping[str, Sequence[Flag]], path: Path) -> Path:
    """Write a FLAGS table. An empty table says that the pool was screened and nothing was found."""
    rows = []
    for skill_id, flags in flags_by_skill.items():
        rows += [{"skill_id": skill_id, **asdict(flag)} for flag in flags]
    return write_table(rows, FLAGS, path)


def read_flags(pool_path: Path) -> dict[str, list[Flag]] | None:
    """Return flags by skill id from the FLAGS table of a pool, or None if there is no table."""
    file = table_path(pool_path, SKILLS).with_name(f"{FLAGS.name}.parquet")
    if not file.is_file():
        return None
    flags_by_skill = {}
    for row in read_table(file, FLAGS).to_pylist():
        skill_id = row.pop("skill_id")
        flags_by_skill.setdefault(skill_id, []).append(Flag(**row))
    return flags_by_skill


def flags_to_leave_out(pool_path: Path) -> dict[str, list[Flag]]:
    """Return flags by skill id, for a stage that leaves flagged skills out.

    A pool that was never screened has no flags. A warning is then printed.
    """
    flags_by_skill = read_flags(pool_path)
    if flags_by_skill is not None:
        return flags_by_skill
    say(
        f"warning: {pool_path} was never screened, so no skill is left out; "
        "`skilltrain pool` screens"
    )
    return {}
