"""Write retrieved skills to folders for an agent: SKILL.md and bundled files of each skill."""

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
from skilltrain.data.screening.findings import inherited_findings
from skilltrain.data.screening.rules import Flag
from skilltrain.errors import SkilltrainError
from skilltrain.files import staged_folder, write_json
from skilltrain.records import Rankings, Skill
from skilltrain.terminal import say
from skilltrain.texts import printable

NAMES_FILE = "provisioned.json"
_MAX_NAME = 64  # longest skill name that agents accept, in characters
_MAX_NAME_BYTES = 240  # leaves room for a suffix such as -12; file systems allow 255

Flagged = Literal["leave_out", "use"]


def provision(
    rankings: Rankings, pool: Path, top: int, out: Path, flagged: Flagged = "leave_out"
) -> dict[str, int]:
    """Write the first `top` skills of each query into `out`/QUERY/SKILL.

    Every skill is screened with its current bundled files. Folder names only have letters, digits,
    `_` and `-`, so that no name leads out of `out`. `provisioned.json` maps folders to skill ids.

    Args:
        rankings: Ranking by query id.
        pool: Pool that was ranked.
        top: Number of skills for each query.
        out: Folder to write.
        flagged: Whether to leave out or to write skills that screening flags.

    Returns:
        Number of folders written, and number of skills left out because they are flagged.

    Raises:
        SkilltrainError: The pool lacks a skill, or `out` exists and is no empty folder.
    """
    skills = {skill.skill_id: skill for skill in read_pool(pool)}
    chosen = {}  # ids of the skills to write, by query id
    for query_id, ranking in rankings.items():
        chosen[query_id] = [skill_id for skill_id, _ in ranking[:top]]
        for skill_id in chosen[query_id]:
            if skill_id not in skills:
                problem = f"skill '{skill_id}' is not in the pool"
                raise SkilltrainError("unknown-skill", problem, where=f"query {query_id}")

    # Findings of a chat model count only if flagged skills are left out.
    pools = [pool] if flagged == "leave_out" else []
    findings = inherited_findings(skills.values(), pools)
    # Screen each skill once. A flagged skill has None instead of files, and is left out.
    files: dict[str, list[BundledFile] | None] = {}
    for skill_id in dict.fromkeys(chain.from_iterable(chosen.values())):
        files[skill_id] = _bundled_files(skills[skill_id], flagged, findings.get(skill_id))

    # Write a folder for each query, with a folder for each skill.
    ids_by_folder: dict[str, dict[str, str]] = {}  # a dict of each query, by query id
    num_skills = 0
    with staged_folder(out) as folder:
        for query_id, skill_ids in chosen.items():
            # The query's id may hold characters that a folder name cannot hold.
            query_folder = folder / free_name(query_id, folder)
            query_folder.mkdir()
            ids_by_folder[query_id] = {}
            for skill_id in skill_ids:
                bundled = files[skill_id]
                if bundled is not None:  # the skill is not left out
                    skill = skills[skill_id]
                    target = query_folder / free_name(skill.name, query_folder)
                    write_skill(skill, target, bundled)
                    ids_by_folder[query_id][f"{query_folder.name}/{target.name}"] = skill_id
                    num_skills += 1
        write_json(folder / NAMES_FILE, ids_by_folder)
    return {"num_skills": num_skills, "num_flagged": list(files.values()).count(None)}


def _bundled_files(
    skill: Skill, flagged: Flagged, finding: Flag | None
) -> list[BundledFile] | None:
    """Screen a skill and return its bundled files.

    Bundled files are the other files in the folder of the skill's SKILL.md.

    Args:
        skill: The skill.
        flagged: What happens to a skill that the safety screening flags. `leave_out` leaves the
            skill out. `use` takes every skill, without a screening.
        finding: Finding of a chat model about the skill; None without one, and for `use`.

    Returns:
        The files; None for a flagged skill that is left out.
    """
    original = find_skill_file(skill)  # path of its SKILL.md; None if there is no such file
    files, num_unread = read_bundled_files(original.parent) if original else ([], 0)
    name = printable(skill.skill_id, 90)
    flags = screen_texts(skill, files) if flagged == "leave_out" else []
    if finding is not None:
        flags.append(finding)
    if flags:
        flag = flags[0]  # the message shows only the first finding
        reason = f"{flag.rule} in its {flag.field}: {printable(flag.span, 80)}"
        say(
            f"left out: {name}, which the safety screening flags ({reason}); "
            "`--flagged use` writes it"
        )
        return None
    # The reader of bundled files stops at these limits, so further files are not screened.
    if num_unread:
        limit = f"{MAX_FILES} files and {MAX_BYTES // 2**20} MiB"
        say(
            f"warning: {name} comes without {num_unread} of its files: more than {limit} are "
            "not screened"
        )
    return files


def free_name(text: str, folder: Path) -> str:
    """Return an unused file name in a folder, made from a text.

    For example, "Read PDF!" becomes `read-pdf`, or `read-pdf-2` if the folder has `read-pdf`.

    Args:
        text: Name of a skill, or id of a query. It may hold any characters.
        folder: Folder for the new file or folder.
    """
    # NFKC replaces special forms of characters, such as full-width letters, by the plain ones.
    plain = unicodedata.normalize("NFKC", text).lower()
    # The cut to the longest name can leave a dash at the end. A text without any letter or digit
    # gets the name "skill".
    name = re.sub(r"[^\w-]+", "-", plain).strip("-")[:_MAX_NAME]
    # The cut can split a character of several bytes. `ignore` drops its remains.
    name = name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore").strip("-") or "skill"
    candidate = name
    number = 1
    while (folder / candidate).exists():
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def write_skill(skill: Skill, folder: Path, files: Sequence[BundledFile]) -> None:
    """Write a skill's SKILL.md and its bundled files into a new folder.

    Args:
        skill: The skill. In SKILL.md, its name becomes the name of the folder.
        folder: Folder to make.
        files: The bundled files. Their paths are relative to the folder.
    """
    folder.mkdir()
    for file in files:
        copy = folder / file.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.content)
        # Keep scripts executable. Other permissions of the original are not copied.
        copy.chmod(0o755 if file.is_executable else 0o644)
    (folder / SKILL_FILE).write_text(skill_text(replace(skill, name=folder.name)), encoding="utf-8")
