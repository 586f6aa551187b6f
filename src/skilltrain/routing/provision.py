"""Chosen skills as an agent reads them: a folder each with its SKILL.md and, where these are known, its other files."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

import yaml

from skilltrain.data.pool.read import read_pool, skill_file
from skilltrain.data.screening import screen_texts
from skilltrain.data.screening.bundled import (
    MAX_BYTES,
    MAX_FILES,
    SKILL_FILE,
    BundledFile,
    bundled_files,
)
from skilltrain.errors import SkilltrainError
from skilltrain.files import staged_folder, write_json
from skilltrain.records import Rankings, Skill
from skilltrain.terminal import say
from skilltrain.texts import printable

NAMES_FILE = "provisioned.json"
_MAX_NAME = 64  # characters of a skill's name that agents take

Flagged = Literal["leave_out", "use"]


def provision(
    rankings: Rankings, pool: Path, top: int, out: Path, flagged: Flagged = "leave_out"
) -> dict[str, int]:
    """Write the first `top` skills of each query into `out`/QUERY/SKILL; how many were written and left out.

    Every skill is screened with the files that go with it, as they are now, and left out where something is found,
    unless `flagged` is use. Folders are named after query and skill in letters, digits, `_` and `-`, so that no name
    leads elsewhere; `provisioned.json` says which is which.
    Raises SkilltrainError for a skill that the pool lacks, and where `out` is not free.
    """
    skills = {skill.skill_id: skill for skill in read_pool(pool)}
    chosen = {
        query_id: [skill_id for skill_id, _ in ranking[:top]]
        for query_id, ranking in rankings.items()
    }
    wanted = [
        (skill_id, query_id) for query_id, skill_ids in chosen.items() for skill_id in skill_ids
    ]
    if missing := [pair for pair in wanted if pair[0] not in skills]:
        raise SkilltrainError(
            f"skill '{missing[0][0]}' is not in the pool", where=f"query {missing[0][1]}"
        )
    files = {skill_id: _files_of(skills[skill_id], pool, flagged) for skill_id in dict(wanted)}
    names: dict[str, dict[str, str]] = {}
    with staged_folder(out) as folder:
        for query_id, skill_ids in chosen.items():
            task = folder / free_name(query_id, folder)
            task.mkdir()
            written = names[query_id] = dict[str, str]()
            for skill_id in skill_ids:
                if (own := files[skill_id]) is not None:
                    place = task / free_name(skills[skill_id].name, task)
                    write_skill(skills[skill_id], place, own)
                    written[f"{task.name}/{place.name}"] = skill_id
        write_json(folder / NAMES_FILE, names)
    return {
        "num_skills": sum(map(len, names.values())),
        "num_flagged": [*files.values()].count(None),
    }


def _files_of(skill: Skill, pool: Path, flagged: Flagged) -> list[BundledFile] | None:
    """The files that go with a skill, of which these very bytes are screened and written; None for a flagged skill."""
    original = skill_file(pool, skill.skill_id)
    files, num_left_out = bundled_files(original.parent) if original else ([], 0)
    shown = printable(skill.skill_id, 90)
    if flagged == "leave_out" and (flags := screen_texts(skill, files)):
        found = f"{flags[0].rule} in its {flags[0].field}: {printable(flags[0].span, 80)}"
        say(
            f"left out: {shown}, which the safety screening flags ({found}); `--flagged use` writes it"
        )
        return None
    if num_left_out:
        most = f"{MAX_FILES} files and {MAX_BYTES // 2**20} MiB"
        say(
            f"warning: {shown} comes without {num_left_out} of its files: more than {most} are not screened"
        )
    return files


def free_name(text: str, folder: Path) -> str:
    """A name made of `text` that is free in `folder`: `read-pdf`, `read-pdf-2`, …"""
    plain = unicodedata.normalize("NFKC", text).lower()
    name = re.sub(r"[^\w-]+", "-", plain).strip("-")[:_MAX_NAME].strip("-") or "skill"
    return next(
        one
        for one in chain([name], (f"{name}-{n}" for n in count(2)))
        if not (folder / one).exists()
    )


def write_skill(skill: Skill, folder: Path, files: Sequence[BundledFile]) -> None:
    """Write SKILL.md as the pool has it, called as its folder, and its other files beside it."""
    folder.mkdir()
    for file in files:
        copy = folder / file.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.content)
        copy.chmod(0o755 if file.is_executable else 0o644)
    (folder / SKILL_FILE).write_text(skill_text(replace(skill, name=folder.name)), encoding="utf-8")


def skill_text(skill: Skill) -> str:
    """The SKILL.md of a skill."""
    header = yaml.safe_dump(front_matter(skill), allow_unicode=True, sort_keys=False, width=10**6)
    return f"---\n{header}---\n\n{skill.body}\n"


def front_matter(skill: Skill) -> dict[str, Any]:
    """What stands above the text of a SKILL.md."""
    header = {"name": skill.name, "description": skill.description}
    return header | ({"license": skill.license} if skill.license else {})
