"""Findings of a chat model about skills.

The stage `screen` adds them to the FLAGS table of a pool. Rules can screen a skill again at any
time, but a chat model costs time and money. So pools and routers that are made from this pool
inherit its findings, for all skills whose texts have not changed.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from skilltrain.data.pool.read import content_digest, is_table
from skilltrain.data.screening import FIELDS, read_flags
from skilltrain.data.screening.rules import Flag
from skilltrain.llm.untrusted import untrusted_line
from skilltrain.records import Skill
from skilltrain.tables import read_skills

CHAT_MODEL: Final = "chat_model"
"""Rule of a flag that a chat model has raised."""
_REASON_CHARS = 400  # the rest of a longer reason is cut


def safe_reason(reason: str) -> str:
    """Return a reason on one line, without characters that could harm a terminal or a prompt.

    The reason cannot be trusted: a chat model wrote it after it had read the text of a stranger.
    """
    return untrusted_line(reason, _REASON_CHARS)


def read_findings(folder: Path) -> dict[str, Flag]:
    """Return the findings of chat models in the FLAGS table of a folder, by skill id."""
    findings = {}
    for skill_id, flags in (read_flags(folder) or {}).items():
        for flag in flags:
            # The folder may come from a stranger. So flags of unknown fields are ignored, and the
            # reason is made safe again.
            if flag.rule == CHAT_MODEL and flag.field in FIELDS:
                findings[skill_id] = replace(flag, reason=safe_reason(flag.reason))
    return findings


def inherited_findings(skills: Collection[Skill], pools: Iterable[Path | str]) -> dict[str, Flag]:
    """Return the findings that pools hold about skills with the same texts.

    Args:
        skills: The skills.
        pools: Sources of skills. Sources that are no pool have no findings.

    Returns:
        Findings by the ids of `skills`. A pool may use other ids.
    """
    finding_by_id: dict[str, Flag] = {}
    for pool in filter(is_table, pools):
        findings = read_findings(Path(pool))
        if findings:  # most pools have none, so their skills need not be read
            finding_by_id |= move_findings(findings, read_skills(Path(pool)), skills)
    return finding_by_id


def move_findings(
    findings: Mapping[str, Flag], old_skills: Iterable[Skill], skills: Iterable[Skill]
) -> dict[str, Flag]:
    """Pass findings about old skills on to skills with the same texts.

    A copy of a skill has the finding too, whatever its id. A skill with a changed text has none.

    Args:
        findings: Findings by the ids of the old skills.
        old_skills: Skills that a chat model has read.
        skills: Skills that may have the same texts.

    Returns:
        Findings by the ids that the skills have in `skills`.
    """
    if not findings:
        return {}  # then the digests of all skills need not be computed
    # The digest of a skill depends only on its name, description and body.
    finding_by_digest = {
        content_digest(skill): findings[skill.skill_id]
        for skill in old_skills
        if skill.skill_id in findings
    }

    moved: dict[str, Flag] = {}
    for skill in skills:
        digest = content_digest(skill)
        if digest in finding_by_digest:
            moved[skill.skill_id] = finding_by_digest[digest]
    return moved


def add_findings(
    flags: Mapping[str, list[Flag]], findings: Mapping[str, Flag]
) -> dict[str, list[Flag]]:
    """Return flags and the findings of a chat model together, by skill id.

    A skill has one finding at most. A new finding replaces that of an earlier model.

    Args:
        flags: Flags by skill id.
        findings: Findings by skill id.
    """
    all_flags = dict(flags)
    for skill_id, finding in findings.items():
        rule_flags = [flag for flag in flags.get(skill_id, ()) if flag.rule != CHAT_MODEL]
        all_flags[skill_id] = [*rule_flags, finding]
    return all_flags
