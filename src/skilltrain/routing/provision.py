"""Chosen skills as an agent reads them: a folder each with its SKILL.md and, where these are known, its other files."""

import os
import re
import shutil
import unicodedata
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

import yaml

from skilltrain.data.pool.read import read_pool, skill_file
from skilltrain.errors import SkilltrainError
from skilltrain.files import staged_folder, write_json
from skilltrain.records import Rankings, Skill

NAMES_FILE = "provisioned.json"
_SKILL_FILE = "SKILL.md"
_MAX_NAME = 64  # characters of a skill's name that agents take


def provision(rankings: Rankings, pool: Path, top: int, out: Path) -> int:
    """Write the first `top` skills of each query into `out`/QUERY/SKILL; how many were written.

    Folders are named after query and skill in letters, digits, `_` and `-`, so that no name leads elsewhere;
    `provisioned.json` says which is which. Raises SkilltrainError for a skill that the pool lacks, and where `out` is
    not free.
    """
    skills = {skill.skill_id: skill for skill in read_pool(pool)}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SkilltrainError("is not an empty folder", where=out, fix="name another, or remove it")
    names: dict[str, dict[str, str]] = {}
    with staged_folder(out) as folder:
        for query_id, ranking in rankings.items():
            task = folder / free_name(query_id, folder)
            task.mkdir()
            written = names[query_id] = dict[str, str]()
            for skill_id, _ in ranking[:top]:
                if skill_id not in skills:
                    raise SkilltrainError(f"skill '{skill_id}' is not in the pool", where=f"query {query_id}")
                place = task / free_name(skills[skill_id].name, task)
                write_skill(skills[skill_id], place, skill_file(pool, skill_id))
                written[f"{task.name}/{place.name}"] = skill_id
        write_json(folder / NAMES_FILE, names)
    return sum(map(len, names.values()))


def free_name(text: str, folder: Path) -> str:
    """A name made of `text` that is free in `folder`: `read-pdf`, `read-pdf-2`, …"""
    plain = unicodedata.normalize("NFKC", text).lower()
    name = re.sub(r"[^\w-]+", "-", plain).strip("-")[:_MAX_NAME].strip("-") or "skill"
    return next(one for one in chain([name], (f"{name}-{n}" for n in count(2))) if not (folder / one).exists())


def write_skill(skill: Skill, folder: Path, original: Path | None) -> None:
    """Write SKILL.md as the pool has it, called as its folder, and beside it the files that lie by the `original`."""
    folder.mkdir()
    for file in bundled(original.parent) if original else ():
        copy = folder / file.relative_to(original.parent) if original else folder
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        copy.chmod(0o755 if os.access(file, os.X_OK) else 0o644)
    header = {"name": folder.name, "description": skill.description}
    header |= {"license": skill.license} if skill.license else {}
    front = yaml.safe_dump(header, allow_unicode=True, sort_keys=False, width=10**6)
    (folder / _SKILL_FILE).write_text(f"---\n{front}---\n\n{skill.body}\n", encoding="utf-8")


def bundled(source: Path) -> Iterator[Path]:
    """The files of a skill's folder but SKILL.md: no links, nothing hidden, and no other skill's folder."""
    for place, folders, files in os.walk(source):
        folders[:] = [name for name in folders if name[0] != "." and not Path(place, name, _SKILL_FILE).exists()]
        paths = (Path(place, name) for name in sorted(files) if name[0] != "." and name.lower() != _SKILL_FILE.lower())
        yield from (path for path in paths if path.is_file() and not path.is_symlink())
