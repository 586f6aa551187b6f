"""Chosen skills as an agent reads them: a folder each with its SKILL.md and, where these are known, its other files."""

import re
import unicodedata
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Literal

import yaml

from skilltrain.data.pool.read import read_pool, skill_file
from skilltrain.data.screening import screen_texts
from skilltrain.data.screening.bundled import MAX_BYTES, MAX_FILES, SKILL_FILE, BundledFile, bundled_files
from skilltrain.errors import SkilltrainError
from skilltrain.files import staged_folder, write_json
from skilltrain.records import Rankings, Skill
from skilltrain.terminal import say
from skilltrain.texts import printable

NAMES_FILE = "provisioned.json"
_MAX_NAME = 64  # characters of a skill's name that agents take

Flagged = Literal["leave_out", "use"]


def provision(rankings: Rankings, pool: Path, top: int, out: Path, flagged: Flagged = "leave_out") -> dict[str, int]:
    """Write the first `top` skills of each query into `out`/QUERY/SKILL; how many were written and left out.

    Every skill is screened with the files that go with it, as they are now, and left out where something is found,
    unless `flagged` is use. Folders are named after query and skill in letters, digits, `_` and `-`, so that no name
    leads elsewhere; `provisioned.json` says which is which. Raises SkilltrainError for a skill that the pool lacks,
    and where `out` is not free.
    """
    skills = {skill.skill_id: skill for skill in read_pool(pool)}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SkilltrainError("is not an empty folder", where=out, fix="name another, or remove it")
    for query_id, ranking in rankings.items():
        if missing := [skill_id for skill_id, _ in ranking[:top] if skill_id not in skills]:
            raise SkilltrainError(f"skill '{missing[0]}' is not in the pool", where=f"query {query_id}")
    wanted = dict.fromkeys(skill_id for ranking in rankings.values() for skill_id, _ in ranking[:top])
    files = {skill_id: _files_of(skills[skill_id], pool, flagged) for skill_id in wanted}
    names: dict[str, dict[str, str]] = {}
    with staged_folder(out) as folder:
        for query_id, ranking in rankings.items():
            task = folder / free_name(query_id, folder)
            task.mkdir()
            written = names[query_id] = dict[str, str]()
            for skill_id, _ in ranking[:top]:
                if (own := files[skill_id]) is not None:
                    place = task / free_name(skills[skill_id].name, task)
                    write_skill(skills[skill_id], place, own)
                    written[f"{task.name}/{place.name}"] = skill_id
        write_json(folder / NAMES_FILE, names)
    return {"num_skills": sum(map(len, names.values())), "num_flagged": [*files.values()].count(None)}


def _files_of(skill: Skill, pool: Path, flagged: Flagged) -> list[BundledFile] | None:
    """The files that go with a skill, of which these very bytes are screened and written; None for a flagged skill."""
    original = skill_file(pool, skill.skill_id)
    files, num_left_out = bundled_files(original.parent) if original else ([], 0)
    shown = printable(skill.skill_id, 90)
    if flagged == "leave_out" and (flags := screen_texts(skill, files)):
        found = f"{flags[0].rule} in its {flags[0].field}: {printable(flags[0].span, 80)}"
        say(f"left out: {shown}, which the safety screening flags ({found}); `--flagged use` writes it")
        return None
    if num_left_out:
        most = f"{MAX_FILES} files and {MAX_BYTES // 2**20} MiB"
        say(f"warning: {shown} comes without {num_left_out} of its files: more than {most} are not screened")
    return files


def free_name(text: str, folder: Path) -> str:
    """A name made of `text` that is free in `folder`: `read-pdf`, `read-pdf-2`, …"""
    plain = unicodedata.normalize("NFKC", text).lower()
    name = re.sub(r"[^\w-]+", "-", plain).strip("-")[:_MAX_NAME].strip("-") or "skill"
    return next(one for one in chain([name], (f"{name}-{n}" for n in count(2))) if not (folder / one).exists())


def write_skill(skill: Skill, folder: Path, files: Sequence[BundledFile]) -> None:
    """Write SKILL.md as the pool has it, called as its folder, and its other files beside it."""
    folder.mkdir()
    for file in files:
        copy = folder / file.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.content)
        copy.chmod(0o755 if file.is_executable else 0o644)
    header = {"name": folder.name, "description": skill.description}
    header |= {"license": skill.license} if skill.license else {}
    front = yaml.safe_dump(header, allow_unicode=True, sort_keys=False, width=10**6)
    (folder / SKILL_FILE).write_text(f"---\n{front}---\n\n{skill.body}\n", encoding="utf-8")
