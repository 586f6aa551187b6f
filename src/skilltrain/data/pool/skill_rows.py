"""One row of a table, from whoever wrote it, as a skill, or why it is none."""

from collections.abc import Mapping
from typing import Any

from skilltrain.data.pool.skill_file import MAX_HEADER_CHARS, as_text, first_paragraph, parse_skill_file
from skilltrain.records import Dropped, Skill
from skilltrain.texts import clean_text, one_line

ID_COLUMNS = ("skill_id", "id")
BODY_COLUMNS = ("body", "content", "skill_md")
COLUMNS = (*ID_COLUMNS, "name", "description", *BODY_COLUMNS, "category", "lang", "source", "license")


def skill_from_row(row: Mapping[str, Any], place: str, source: str) -> Skill | Dropped:
    """A skill from a row of a table in SkillRouter's shape, or why it is none.

    `content` and `skill_md` may hold a whole SKILL.md, whose frontmatter then fills what the row leaves out.
    Name and description are cut where a frontmatter's would be, at MAX_HEADER_CHARS.
    """
    values = dict.fromkeys(COLUMNS, "") | {key: _cell(row[key]) for key in COLUMNS if key in row}
    name, description = (values[key][:MAX_HEADER_CHARS] for key in ("name", "description"))
    skill_id = next((one_line(text) for text in (*(values[key] for key in ID_COLUMNS), name) if text), "")
    body_key = next((key for key in BODY_COLUMNS if values[key]), "")
    if not skill_id:
        return Dropped("", "", "no_id", f"{place} has neither skill_id nor name")
    if not body_key:
        return Dropped("", skill_id, "empty_body", f"{place} has no body")
    if not isinstance(row[body_key], str | bytes):
        reason = f"{place}: {body_key} is a {type(row[body_key]).__name__}, not text"
        return Dropped("", skill_id, "not_text", reason)
    fallback_name = one_line(name or skill_id.rsplit("/", 1)[-1])
    header = "" if body_key == "body" else values[body_key]
    inner = parse_skill_file(header, fallback_name)
    body = inner.body if header else values["body"].strip()
    return Skill(
        skill_id=skill_id,
        name=one_line(name) or inner.name,
        description=description.strip() or inner.description or first_paragraph(body),
        body=body,
        category=one_line(values["category"]) or inner.category,
        lang=one_line(values["lang"]) or inner.lang,
        source=one_line(values["source"] or source),
        license=one_line(values["license"]) or inner.license,
    )


def _cell(value: Any) -> str:
    return clean_text(value.decode("utf-8", "replace")) if isinstance(value, bytes) else as_text(value)
