"""What a collector hands over: one folder a skill, and the skills in them."""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from skilltrain.data.collect.archives import ArchiveLimits, unpack
from skilltrain.data.collect.refusal import RefusalError
from skilltrain.data.collect.registry import Listed
from skilltrain.data.collect.registry_client import without_query
from skilltrain.data.collect.sync_state import Outcome, SyncState
from skilltrain.data.pool.skill_file import parse_skill_file
from skilltrain.files import write_text
from skilltrain.records import Dropped, Skill
from skilltrain.terminal import track
from skilltrain.texts import decode_text

SKILLS_FOLDER, COLLECTED = "skills", "collected.jsonl"
_SAFE_ID = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,78}[a-z0-9_-])?")


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
) -> tuple[dict[str, Listed], list[Dropped]]:
    """(folder below out/skills → its skill, what was left out). A broken archive is asked for again."""
    made: dict[str, Listed] = {}
    dropped: list[Dropped] = []
    lines: list[dict[str, Any]] = []
    for skill in track(skills, "unpacking", len(skills)):
        outcome, folder = state.outcomes.get(skill.skill_id), folder_name(skill.skill_id)
        if outcome and outcome.status not in ("fetched", "broken"):
            kept = "; the version of before is kept" if outcome.sha256 else ""
            dropped.append(Dropped("", skill.skill_id, outcome.status, outcome.reason + kept, outcome.value))
        if outcome is None or not outcome.sha256:
            continue
        archive = state.download_path(outcome.sha256)
        try:
            unpacked = unpack(archive, out / SKILLS_FOLDER / folder, limits, only_skill_files)
        except RefusalError as error:
            dropped.append(error.row(skill.skill_id))
            if error.filter == "broken_archive" and outcome.status == "fetched":
                state.record(replace(outcome, status="broken", reason=error.reason))
            continue
        for kind, num in sorted(unpacked.left_out.items()):
            dropped.append(Dropped("", skill.skill_id, kind, f"left out {num} members of its archive", float(num)))
        made[folder] = skill
        lines.append(_origin_row(skill, folder, outcome) | {"num_files": unpacked.num_files})
    write_text(out / COLLECTED, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return made, dropped


def _origin_row(skill: Listed, folder: str, outcome: Outcome) -> dict[str, Any]:
    """Where a skill comes from; its URL without a query, which may hold a signature."""
    return {
        "skill_id": skill.skill_id, "folder": folder, "name": skill.name, "url": without_query(skill.url),
        "version": outcome.version, "sha256": outcome.sha256, "num_bytes": outcome.num_bytes, "date": outcome.date,
    }  # fmt: skip


def read_skills(made: Mapping[str, Listed], source: str, out: Path) -> tuple[list[Skill], list[Dropped]]:
    """(the skills in the folders, those of them that are no text), under the registry's own ids.

    The only SKILL.md of an archive is the listed skill, wherever it lies; of several each has its path behind the id.
    """
    skills: list[Skill] = []
    dropped: list[Dropped] = []
    taken = {listed.skill_id for listed in made.values()}
    for folder_id, listed in made.items():
        folder = out / SKILLS_FOLDER / folder_id
        files = sorted(file for file in folder.rglob("*") if file.name.lower() == "skill.md" and file.is_file())
        for file in files:
            inner = file.parent.relative_to(folder).as_posix()
            is_listed = inner == "." or len(files) == 1
            skill_id = listed.skill_id if is_listed else _free_id(f"{listed.skill_id}/{inner}", taken)
            own_name = listed.name or listed.skill_id.rpartition("/")[2]
            text = decode_text(file.read_bytes())
            if text is None:
                dropped.append(Dropped("", skill_id, "not_text", "its SKILL.md is not text"))
                continue
            name = own_name if inner == "." else file.parent.name
            skills.append(parse_skill_file(text, skill_id, name, source))
    return sorted(skills, key=lambda skill: skill.skill_id), dropped


def _free_id(wanted: str, taken: set[str]) -> str:
    """`wanted`, or with `~2`, `~3`, … behind it where another skill has that id; added to `taken`."""
    skill_id, number = wanted, 1
    while skill_id in taken:
        number += 1
        skill_id = f"{wanted}~{number}"
    taken.add(skill_id)
    return skill_id
