"""Write retrieved skills to folders for an agent: SKILL.md and bundled files of each skill.

Notes:
    - Every skill is screened once, with its current bundled files. With `leave_out`, a skill that
      the screening flags is left out.
    - Names of folders only have letters, digits, `_` and `-`, so that no name leads out of the
      output folder.
    - `provisioned.json` maps the folders of each query to skill ids.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal

from skilltrain.data.pool.read import find_skill_file, read_pool
from skilltrain.data.pool.skill_file import SKILL_FILE, skill_text
from skilltrain.data.screening import screen_texts
from skilltrain.data.screening.bundled import (
    MAX_BYTES,
    MAX_FILES,
    BundledFile,
    read_bundled_files,
)
from skilltrain.errors import SkilltrainError
from skilltrain.files import staged_folder, write_json
from skilltrain.records import Rankings, Skill
from skilltrain.terminal import say
from skilltrain.texts import printable

NAMES_FILE = "provisioned.json"
_MAX_NAME = 64  # longest skill name that agents accept, in characters

Flagged = Literal["leave_out", "use"]


def provision(
    rankings: Rankings, pool: Path, top: int, out: Path, flagged: Flagged = "leave_out"
) -> dict[str, int]:
    """Write the first `top` skills of each query into `out`/QUERY/SKILL.

    Args:
        rankings: Ranking by query id.
        pool: Pool that was ranked.
        top: Number of skills for each query.
        out: Folder to write.
        flagged: `use` writes skills that the screening flags.

    Raises:
        SkilltrainError: The pool lacks a skill, or `out` exists and is no empty folder.
    """
    skills = {skill.skill_id: skill for skill in read_pool(pool)}
    chosen = {}
    for query_id, ranking in rankings.items():
        chosen[query_id] = [skill_id for skill_id, _ in ranking[:top]]
        for skill_id in chosen[query_id]:
            if skill_id not in skills:
                problem = f"skill '{skill_id}' is not in the pool"
                raise SkilltrainError("unknown-skill", problem, where=f"query {query_id}")

    files = {}  # None: the skill is left out
    for skill_id in dict.fromkeys(chain.from_iterable(chosen.values())):
        files[skill_id] = _bundled_files(skills[skill_id], flagged)

    ids_by_folder = {}  # a dict of each query, by query id
    num_skills = 0
    with staged_folder(out) as folder:
        for query_id, skill_ids in chosen.items():
            query_folder = folder / free_name(query_id, folder)
            contents = [(skills[skill_id], files[skill_id]) for skill_id in skill_ids]
            ids_by_folder[query_id] = _write_skills(query_folder, contents)
            num_skills += len(ids_by_folder[query_id])
        write_json(folder / NAMES_FILE, ids_by_folder)
    return {"num_skills": num_skills, "num_flagged": list(files.values()).count(None)}


def _write_skills(
    query_folder: Path, contents: Sequence[tuple[Skill, Sequence[BundledFile] | None]]
) -> dict[str, str]:
    """Write a folder for each skill, and return the skill ids by folder.

    Args:
        query_folder: Folder of the query.
        contents: Each skill with its bundled files. A skill with None is left out.
    """
    query_folder.mkdir()
    id_by_folder = {}
    for skill, files in contents:
        if files is not None:
            target = query_folder / free_name(skill.name, query_folder)
            write_skill(skill, target, files)
            id_by_folder[f"{query_folder.name}/{target.name}"] = skill.skill_id
    return id_by_folder


def _bundled_files(skill: Skill, flagged: Flagged) -> list[BundledFile] | None:
    """Screen a skill and return its bundled files, or None if it must be left out."""
    original = find_skill_file(skill)
    files, num_unread = read_bundled_files(original.parent) if original else ([], 0)
    name = printable(skill.skill_id, 90)
    flags = screen_texts(skill, files) if flagged == "leave_out" else ()
    if flags:
        flag = flags[0]
        finding = f"{flag.rule} in its {flag.field}: {printable(flag.span, 80)}"
        say(
            f"left out: {name}, which the safety screening flags ({finding}); "
            "`--flagged use` writes it"
        )
        return None
    if num_unread:
        limit = f"{MAX_FILES} files and {MAX_BYTES // 2**20} MiB"
        say(
            f"warning: {name} comes without {num_unread} of its files: more than {limit} are "
            "not screened"
        )
    return files


def free_name(text: str, folder: Path) -> str:
    """Return an unused file name in a folder, made from a text: `read-pdf`, `read-pdf-2`, …"""
    plain = unicodedata.normalize("NFKC", text).lower()
    name = re.sub(r"[^\w-]+", "-", plain).strip("-")[:_MAX_NAME].strip("-") or "skill"
    candidate = name
    number = 1
    while (folder / candidate).exists():
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def write_skill(skill: Skill, folder: Path, files: Sequence[BundledFile]) -> None:
    """Write a skill's SKILL.md, with the folder's name as its name, and its bundled files."""
    folder.mkdir()
    for file in files:
        copy = folder / file.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.content)
        copy.chmod(0o755 if file.is_executable else 0o644)
    (folder / SKILL_FILE).write_text(skill_text(replace(skill, name=folder.name)), encoding="utf-8")
