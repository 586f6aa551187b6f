"""One row of a table, from whoever wrote it, as a skill, or why it is none."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skilltrain.data.pool.skill_file import (
    MAX_HEADER_CHARS,
    as_text,
    clean_text,
    first_paragraph,
    one_line,
    parse_skill_file,
)
from skilltrain.records import Skill

ID_COLUMNS = ("skill_id", "id")
BODY_COLUMNS = ("body", "content", "skill_md")
COLUMNS = (*ID_COLUMNS, "name", "description", *BODY_COLUMNS, "category", "lang", "source", "license")


@dataclass(frozen=True, slots=True)
class Refused:
    """Something in a source that did not become a skill, and why."""

    skill_id: str
    filter: str
    reason: str
    value: float | None = None


def skill_from_row(row: Mapping[str, Any], place: str, source: str) -> Skill | Refused:
    """A skill from a row of a table in SkillRouter's shape, or why it is none.

    `content` and `skill_md` may hold a whole SKILL.md, whose frontmatter then fills what the row leaves out.
    Name and description are cut where a frontmatter's would be, at MAX_HEADER_CHARS.
    """
    values = {key: _cell(row[key]) for key in COLUMNS if key in row}
    values |= {key: values[key][:MAX_HEADER_CHARS] for key in ("name", "description") if key in values}
    skill_id = next((one_line(values[key]) for key in (*ID_COLUMNS, "name") if values.get(key)), "")
    body_key = next((key for key in BODY_COLUMNS if values.get(key)), "")
    if not skill_id:
        return Refused("", "no_id", f"{place} has neither skill_id nor name")
    if not body_key:
        return Refused(skill_id, "empty_body", f"{place} has no body")
    if not isinstance(row[body_key], str | bytes):
        return Refused(skill_id, "not_text", f"{place}: {body_key} is a {type(row[body_key]).__name__}, not text")
    fallback_name = one_line(values.get("name") or skill_id.rsplit("/", 1)[-1])
    if body_key == "body":
        body, inner = values["body"].strip(), None
    else:
        inner = parse_skill_file(values[body_key], fallback_name)
        body = inner.body
    return Skill(
        skill_id=skill_id,
        name=one_line(values.get("name") or "") or (inner.name if inner else fallback_name),
        description=(values.get("description") or "").strip()
        or (inner.description if inner else first_paragraph(body)),
        body=body,
        category=one_line(values.get("category") or "") or (inner.category if inner else None),
        lang=one_line(values.get("lang") or "") or (inner.lang if inner else None),
        source=one_line(values.get("source") or source),
        license=one_line(values.get("license") or "") or (inner.license if inner else None),
    )


def _cell(value: Any) -> str:
    return clean_text(value.decode("utf-8", "replace")) if isinstance(value, bytes) else as_text(value)
