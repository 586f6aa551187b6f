"""What a collector hands over: one folder a skill, and the table that the stage `pool` reads."""

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from skilltrain.data.collecting.archive_members import ArchiveError, ArchiveLimits, Refused
from skilltrain.data.collecting.archives import unpack
from skilltrain.data.collecting.registry_client import without_query
from skilltrain.data.collecting.registry_listing import Listed
from skilltrain.data.collecting.state import Outcome, SyncState
from skilltrain.data.pool.skill_file import parse_skill_file
from skilltrain.data.pool.skill_sources import read_source
from skilltrain.files import write_text
from skilltrain.records import Dropped, Skill
from skilltrain.tables import DROPPED, SKILLS, rows_of, write_table
from skilltrain.terminal import track
from skilltrain.texts import clean_text, decode_text, one_line

SKILLS_FOLDER, COLLECTED = "skills", "collected.jsonl"
_SAFE_ID = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,78}[a-z0-9_-])?")
_MAX_REASON_CHARS = 500


def folder_name(skill_id: str) -> str:
    """A folder's name for a registry's id, another one for each: ids are untrusted, and some systems fold case.

    An id of at most 80 lower-case letters, digits and `._-` is its own name; any other is made of what is readable
    of it, `~` (which stands in no name of the first kind) and 16 digits of its SHA-256.
    """
    if _SAFE_ID.fullmatch(skill_id):
        return skill_id
    readable = re.sub(r"[^a-z0-9]+", "-", unicodedata.normalize("NFKC", skill_id).casefold())[:60].strip("-")
    return f"{readable}~{sha256(skill_id.encode()).hexdigest()[:16]}"


def unpack_all(
    skills: Sequence[Listed], state: SyncState, limits: ArchiveLimits, only_skill_files: bool, out: Path
) -> tuple[dict[str, Listed], list[Refused]]:
    """(folder below out/skills → its skill, what was refused or left out). Broken archives are asked for again."""
    made: dict[str, Listed] = {}
    refused: list[Refused] = []
    lines: list[dict[str, Any]] = []
    for skill in track(skills, "unpacking", len(skills)):
        outcome = state.outcomes.get(skill.skill_id)
        refused += _not_fetched(outcome) if outcome else []
        if outcome is None or not outcome.sha256:
            continue
        folder = folder_name(skill.skill_id)
        try:
            unpacked = unpack(
                state.download_path(outcome.sha256), out / SKILLS_FOLDER / folder, limits, only_skill_files
            )
        except ArchiveError as error:
            refused.append(Refused(skill.skill_id, error.filter, error.reason, error.value))
            if error.filter == "broken_archive" and outcome.status == "fetched":
                state.record(replace(outcome, status="broken", reason=error.reason))
            continue
        refused += [Refused(skill.skill_id, left.filter, left.reason, left.value) for left in unpacked.left_out]
        made[folder] = skill
        lines.append(_sidecar(skill, folder, outcome) | {"num_files": unpacked.num_files})
    write_text(out / COLLECTED, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return made, refused


def _not_fetched(outcome: Outcome) -> list[Refused]:
    if outcome.status in ("fetched", "broken"):
        return []
    kept = "; the version of before is kept" if outcome.sha256 else ""
    return [Refused(outcome.skill_id, outcome.status, outcome.reason + kept, outcome.value)]


def _sidecar(skill: Listed, folder: str, outcome: Outcome) -> dict[str, Any]:
    """Where a skill comes from; its URL without a query, which may hold a signature."""
    return {
        "skill_id": skill.skill_id, "folder": folder, "name": skill.name, "url": without_query(skill.url),
        "version": outcome.version, "sha256": outcome.sha256, "num_bytes": outcome.num_bytes, "date": outcome.date,
    }  # fmt: skip


def read_skills(made: Mapping[str, Listed], source: str, out: Path) -> tuple[list[Skill], list[Refused]]:
    """(the skills in the folders, those of them that could not be read), under the registry's own ids.

    The only SKILL.md of an archive is the listed skill, wherever it lies; of several each has its path behind the id.
    """
    if not made:
        return [], []
    found = [(item, *item.skill_id.partition("/")[::2]) for item in read_source(out / SKILLS_FOLDER)]
    refused = [
        Refused(_inner_id(made[folder], path) if folder in made else "", item.filter, item.reason, item.value)
        for item, folder, path in found
        if isinstance(item, Dropped)
    ]
    num_in_folder: dict[str, int] = {}
    for _, folder, _ in (entry for entry in found if isinstance(entry[0], Skill)):
        num_in_folder[folder] = num_in_folder.get(folder, 0) + 1
    taken = {skill.skill_id for skill in made.values()}
    skills = []
    for item, folder, path in found:
        if isinstance(item, Skill):
            listed = made[folder]
            is_listed = not path or num_in_folder[folder] == 1
            skill_id = listed.skill_id if is_listed else _free_id(_inner_id(listed, path), taken)
            name = item.name
            if not path and name == folder and not _says_its_name(out / SKILLS_FOLDER / folder):
                name = listed.name or one_line(listed.skill_id.rpartition("/")[2])
            skills.append(replace(item, skill_id=skill_id, name=name, source=source))
    return skills, refused


def _says_its_name(folder: Path) -> bool:
    """Whether the SKILL.md in a folder has a name of its own, and not the folder's."""
    file = next(path for path in sorted(folder.iterdir()) if path.name.lower() == "skill.md")
    return bool(parse_skill_file(decode_text(file.read_bytes()) or "", "").name)


def _inner_id(listed: Listed, path: str) -> str:
    return f"{listed.skill_id}/{path}" if path else listed.skill_id


def _free_id(wanted: str, taken: set[str]) -> str:
    """`wanted`, or with `~2`, `~3`, … behind it where another skill has that id; added to `taken`."""
    skill_id, number = wanted, 1
    while skill_id in taken:
        number += 1
        skill_id = f"{wanted}~{number}"
    taken.add(skill_id)
    return skill_id


def write_tables(skills: Sequence[Skill], refused: Iterable[Refused], out: Path) -> None:
    """Write SKILLS and DROPPED."""
    ordered = {skill.skill_id: skill for skill in skills}
    write_table(rows_of(ordered[skill_id] for skill_id in sorted(ordered)), SKILLS, out)
    rows = ({**asdict(row), "query_id": "", "reason": _plain(row.reason)} for row in refused)
    write_table(rows, DROPPED, out)


def _plain(reason: str) -> str:
    """A reason that quotes a stranger, on one line, without what no table can hold."""
    return one_line(clean_text(reason))[:_MAX_REASON_CHARS]
