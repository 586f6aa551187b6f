"""A skill as the MCP Skills extension (SEP-2640) shows it: its skill:// address, its entry and the SKILL.md behind it.

The SKILL.md is made of what the router holds, which is what was indexed and screened. A client's address is compared
with those of the router's skills and never opened as a path.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

import yaml

from skilltrain.records import Skill

SCHEME, FILE = "skill://", "/SKILL.md"
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")  # of Agent Skills, up to 64 characters
_BY_ID = "by-id"  # begins the address of a skill whose id does not end in its name


def uri_of(skill: Skill) -> str:
    """`skill://ID/SKILL.md`; the part before SKILL.md is the skill's name, if that is a name of Agent Skills."""
    place = skill.skill_id
    if _is_agent_skill(skill) and place.rpartition("/")[2] != skill.name:
        place = f"{_BY_ID}/{place}/{skill.name}"
    return f"{SCHEME}{quote(place)}{FILE}"


def skill_at(uri: str, skills: Mapping[str, Skill]) -> Skill | None:
    """The skill whose address is `uri`."""
    place = unquote(uri.removeprefix(SCHEME).removesuffix(FILE))
    found = (skills.get(skill_id) for skill_id in (place, place.removeprefix(f"{_BY_ID}/").rpartition("/")[0]))
    return next((skill for skill in found if skill is not None and uri_of(skill) == uri), None)


def entry_of(skill: Skill) -> dict[str, Any] | None:
    """Address, front matter and manifest; None where Agent Skills do not allow the name or the description."""
    if not _is_agent_skill(skill):
        return None
    uri, file = uri_of(skill), skill_text(skill).encode()
    manifest = [{"uri": uri, "digest": f"sha256:{hashlib.sha256(file).hexdigest()}", "size": len(file)}]
    return {"uri": uri, "frontmatter": _front_matter(skill), "resources": manifest}


def skill_text(skill: Skill) -> str:
    """The SKILL.md."""
    header = yaml.safe_dump(_front_matter(skill), sort_keys=False, allow_unicode=True)
    return f"---\n{header}---\n\n{skill.body}\n"


def _front_matter(skill: Skill) -> dict[str, Any]:
    more = {"license": skill.license} if skill.license else {}
    return {"name": skill.name, "description": skill.description, **more}


def _is_agent_skill(skill: Skill) -> bool:
    return bool(_NAME.fullmatch(skill.name)) and len(skill.name) <= 64 and 0 < len(skill.description) <= 1024
