"""A SKILL.md or a row of a table, however untidy, as a skill. The text is untrusted: it is parsed, never executed."""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from skilltrain.records import SKILL_FACTS, Dropped, Skill
from skilltrain.texts import clean_text, one_line

SKILL_FILE = "SKILL.md"
MAX_HEADER_CHARS = 65_536
MAX_DESCRIPTION_CHARS = 1_000  # of a description taken from the body
MAX_ITEMS = 256  # of a list that becomes a text: by YAML aliases a small file says a long text thousands of times
MAX_FILES = 500  # beside a SKILL.md; others are neither listed nor screened nor handed on
ID_COLUMNS = ("skill_id", "id")
BODY_COLUMNS = ("body", "content", "skill_md")
COLUMNS = (
    *ID_COLUMNS,
    "name",
    "description",
    *BODY_COLUMNS,
    "category",
    "lang",
    "source",
    "license",
    *SKILL_FACTS,
)

_NOT_READ = (SKILL_FILE.lower(), ".env", ".env.local")
_STARS = re.compile(r"([0-9]{1,9})(?:\.0)?")  # pandas makes floats where some are missing
_URL = re.compile(r"https?://\S+", re.IGNORECASE)
_CONTROL = re.compile("[\x01-\x08\x0b\x0e-\x1f]")
_OPENING = re.compile(r"(?:(?><!--.*?-->)\s*)*---[ \t]*\n", re.DOTALL)
_CLOSING = re.compile(r"^(?:---|\.\.\.)[ \t]*$", re.MULTILINE)
_SECTION = re.compile(r"\n[ \t]*\n#+ ")
_KEY = re.compile(r"""["']?([A-Za-z_][\w-]*)["']?[ \t]*:(?!//)[ \t]*(.*)""")
_FIELDS = ("name", "description", "category", "lang", "license", "metadata")
_INDENTED_FIELD = re.compile(r" +(name|description)[ ]*:[ ]+(.*)")
_NO_PLAIN_VALUE = ("", "|", ">", "|-", ">-", "|+", ">+")
_LANG = re.compile(r"[a-z]{2}")


def parse_skill_file(text: str, skill_id: str, fallback_name: str, source: str = "") -> Skill:
    """The skill in a SKILL.md; `fallback_name` and the first paragraph stand in for a missing name and description."""
    fields, body = split_header(clean_text(text))
    metadata = fields["metadata"] if isinstance(fields.get("metadata"), dict) else {}
    said = {
        key: one_line(as_text(fields.get(key)))
        for key in ("name", "description", "category", "lang", "license")
    }
    lang = said["lang"].lower()[:2]
    return Skill(
        skill_id,
        name=said["name"] or one_line(clean_text(fallback_name)),
        description=said["description"] or first_paragraph(body),
        body=body.strip(),
        category=said["category"] or one_line(as_text(metadata.get("category"))) or None,
        lang=lang if _LANG.fullmatch(lang) else None,
        source=source,
        license=said["license"] or None,
        **_facts_in(metadata | fields),
    )


def skill_from_row(row: Mapping[str, Any], place: str, source: str) -> Skill | Dropped:
    """A skill from a row of a table in SkillRouter's shape, or why it is none.

    `content` and `skill_md` may hold a whole SKILL.md, whose frontmatter then fills what the row leaves out. A row that
    has a description and no column for a body is a tool (MCP servers are listed so): its body stays empty.
    """
    values = {key: as_text(row.get(key)) for key in COLUMNS}
    name, description = (values[key][:MAX_HEADER_CHARS] for key in ("name", "description"))
    skill_id = one_line(values["skill_id"] or values["id"] or name)
    body_key = next((key for key in BODY_COLUMNS if values[key]), "")
    if not skill_id:
        return Dropped("", "", "no_id", f"{place} has neither skill_id nor name")
    is_tool = bool(description.strip()) and row.keys().isdisjoint(BODY_COLUMNS)
    if body_key and not isinstance(row[body_key], str | bytes):
        reason = f"{place}: {body_key} is a {type(row[body_key]).__name__}, not text"
        return Dropped("", skill_id, "not_text", reason)
    fallback_name = one_line(name or skill_id.rsplit("/", 1)[-1])
    inner = Skill(skill_id, fallback_name, "", values["body"].strip())
    if body_key not in ("body", ""):
        inner = parse_skill_file(values[body_key], skill_id, fallback_name)
    if not inner.body and not is_tool:
        return Dropped("", skill_id, "empty_body", f"{place} has no body")
    return replace(
        inner,
        name=one_line(name) or inner.name,
        description=description.strip() or inner.description or first_paragraph(inner.body),
        category=one_line(values["category"]) or inner.category,
        lang=one_line(values["lang"]) or inner.lang,
        source=one_line(values["source"] or source),
        license=one_line(values["license"]) or inner.license,
        **{key: fact for key, fact in _facts_in(row).items() if fact is not None},
    )


def _facts_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return SKILL_FACTS of a header or a row. A value that does not fit is None: it is no reason to lose a skill."""
    texts = {key: one_line(as_text(values.get(key)))[:MAX_HEADER_CHARS] for key in SKILL_FACTS}
    url = texts["url"] or one_line(as_text(values.get("homepage")))
    stars = _STARS.fullmatch(texts["stars"])
    return {
        "author": texts["author"] or None,
        "url": url if _URL.fullmatch(url) else None,
        "stars": int(stars[1]) if stars else None,
        "updated_at": texts["updated_at"] if _is_iso_date(texts["updated_at"]) else None,
        "when_to_use": texts["when_to_use"] or None,
        "files": _relative_paths(values.get("files")),
    }


def _is_iso_date(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return text[4] == "-"  # else digits: Python reads some counts of seconds as dates


def _relative_paths(value: Any) -> tuple[str, ...] | None:
    """Return a list of paths that stay in their folder; None for anything else."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return None
    paths = [PurePosixPath(one_line(as_text(item))) for item in value]
    if any(not path.parts or path.is_absolute() or ".." in path.parts for path in paths):
        return None
    return tuple(map(str, paths))


def bundled_paths(folder: Path, hidden: bool = False) -> Iterator[Path]:
    """Yield what lies beside a SKILL.md and belongs to it, links among it; nothing in folders of other skills.

    `hidden` yields hidden files, and no others.
    """
    for place, folders, names in os.walk(folder):
        inside = Path(place).relative_to(folder).parts
        is_git, is_hidden = inside == (".git",), any(part[0] == "." for part in inside)
        # Of a folder that nobody may enter `exists` would raise.
        kept = (
            name
            for name in folders
            if (hidden or name[0] != ".") and not any(Path(place, name).glob(SKILL_FILE))
        )
        folders[:] = sorted(name for name in kept if name == "hooks" or not is_git)
        wanted = (
            name for name in sorted(names) if (is_hidden or name[0] == ".") == hidden and not is_git
        )
        yield from (Path(place, name) for name in wanted if name.lower() not in _NOT_READ)


def as_text(value: Any) -> str:
    """A field's value as text, cut to MAX_HEADER_CHARS: a list's items joined by commas; empty for a map, NaN, None."""
    if isinstance(value, bytes):
        return clean_text(value.decode("utf-8", "replace"))
    if isinstance(value, str):
        return "" if value in ("~", "null") else clean_text(value)
    if isinstance(value, list):
        items = (
            item[:MAX_HEADER_CHARS] if isinstance(item, str) else item for item in value[:MAX_ITEMS]
        )
        parts = (as_text(item) for item in items if not isinstance(item, list))
        return ", ".join(part for part in parts if part)[:MAX_HEADER_CHARS]
    is_no_number = isinstance(value, float) and not math.isfinite(value)
    return "" if value is None or isinstance(value, dict) or is_no_number else str(value)


def split_header(text: str) -> tuple[dict[str, Any], str]:
    """(frontmatter as key → value, body) of a SKILL.md; keys are in lower case, scalars the text they are (`yes`).

    A block between two lines `---` at the beginning is frontmatter where it has one of the keys that we read; prose
    between two thematic breaks belongs to the body. What is not YAML (`description: Use when: x`) is read line by line,
    unless it goes on into a section, for then it was never closed.
    """
    text = text.lstrip("\ufeff \t\n")
    opening = _OPENING.match(text)
    closing = _CLOSING.search(text, opening.end()) if opening else None
    if not opening or not closing:
        return {}, text
    header = _CONTROL.sub(
        "", text[opening.end() : closing.start()][:MAX_HEADER_CHARS].expandtabs(2)
    )
    fields = _read_yaml(header)
    if fields is None:
        fields = {} if _SECTION.search(header) else _read_lines(header.split("\n"))
    is_header = not header.strip() or not fields.keys().isdisjoint(_FIELDS)
    return (fields, text[closing.end() :]) if is_header else ({}, text)


def _read_yaml(header: str) -> dict[str, Any] | None:
    """A header as key → value; None where it is not YAML, or no map."""
    try:
        # The loader in pure Python, on purpose: libyaml overflows the C stack on deeply nested input.
        value = yaml.load(header, yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
    return (
        {str(key).lower(): item for key, item in value.items()} if isinstance(value, dict) else None
    )


def _read_lines(lines: list[str]) -> dict[str, Any]:
    """`key: value` lines as a map; a line without a key goes on with the value before it.

    `name` and `description` are keys when indented too (a tab before them), unless they stand below an empty value.
    """
    parts: dict[str, list[str]] = {}
    key = ""
    for line in lines:
        after_plain_value = bool(key) and parts[key][0] not in _NO_PLAIN_VALUE
        found = _KEY.match(line) or (_INDENTED_FIELD.match(line) if after_plain_value else None)
        if found:
            key = found[1].lower()
            parts[key] = [found[2].strip()]
        elif key and line.strip():
            parts[key].append(line.strip())
    fields: dict[str, Any] = {key: _join(values) for key, values in parts.items()}
    if "metadata" in parts:
        inner = (_KEY.match(line) for line in parts["metadata"])
        fields["metadata"] = {found[1].lower(): _join([found[2]]) for found in inner if found}
    return fields


def _join(values: list[str]) -> str:
    if values[0] in _NO_PLAIN_VALUE:
        values = values[1:]
    text = " ".join(value.removeprefix("- ") for value in values).strip()
    quoted = (
        len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and text[0] not in text[1:-1]
    )
    return text[1:-1] if quoted else text


def first_paragraph(body: str) -> str:
    """The first paragraph of prose in Markdown on one line, cut to 1,000 characters; empty if there is none."""
    without_code = re.sub(
        r"^(```|~~~).*?(?:^\1[^\n]*$|\Z)", "", body, flags=re.MULTILINE | re.DOTALL
    )
    for block in re.split(r"\n[ \t]*\n", without_code):
        lines = [line.strip().removeprefix("> ").removeprefix("- ") for line in block.split("\n")]
        prose = [
            line
            for line in lines
            if line and not line.startswith(("#", "<", "|", "---", "===", "![", "[!["))
        ]
        if prose:
            return one_line(" ".join(prose))[:MAX_DESCRIPTION_CHARS]
    return ""


def skill_text(skill: Skill) -> str:
    """Return the SKILL.md of a skill."""
    header = yaml.safe_dump(front_matter(skill), allow_unicode=True, sort_keys=False, width=10**6)
    return f"---\n{header}---\n\n{skill.body}\n"


def front_matter(skill: Skill) -> dict[str, Any]:
    """Return the header of a SKILL.md."""
    header = {"name": skill.name, "description": skill.description}
    if skill.license:
        header["license"] = skill.license
    return header
