"""One SKILL.md, however untidy, read into its parts. The text is untrusted: it is parsed, never executed."""

import math
import re
from dataclasses import dataclass
from typing import Any

import yaml

from skilltrain.texts import clean_text, one_line

MAX_HEADER_CHARS = 65_536
MAX_DESCRIPTION_CHARS = 1_000  # of a description taken from the body

_CONTROL = re.compile("[\x01-\x08\x0b\x0e-\x1f]")
_OPENING = re.compile(r"(?:(?><!--.*?-->)\s*)*---[ \t]*\n", re.DOTALL)
_CLOSING = re.compile(r"^(?:---|\.\.\.)[ \t]*$", re.MULTILINE)
_KEY = re.compile(r"""["']?([A-Za-z_][\w-]*)["']?[ \t]*:(?!//)[ \t]*(.*)""")
_KEY_OF_ANY_LANGUAGE = re.compile(r"""["']?[^\W\d][\w-]*["']?[ \t]*:(?!//)""")
_NAME_OR_DESCRIPTION = re.compile(r"""^["']?(name|description)["']?[ \t]*:""", re.MULTILINE | re.IGNORECASE)
_FIELDS = ("category", "lang", "license", "metadata")  # beside name and description
_INDENTED_FIELD = re.compile(r" +(name|description)[ ]*:[ ]+(.*)")
_NO_PLAIN_VALUE = ("", "|", ">", "|-", ">-", "|+", ">+")
_HEADING_AFTER_BLANK = re.compile(r"\n[ \t]*\n#+ (?!([-=*~_#])\1\1)[^\n]*\n[ \t]*\n")  # not `# --- comment ---`
_BLANK_AT_END = re.compile(r"\n[ \t]*\n\Z")
_HEADER_END = re.compile(r"\n[ \t]*\n|\n(?=#)|\Z")
_LANG = re.compile(r"[a-z]{2,3}")


@dataclass(frozen=True, slots=True)
class SkillFile:
    """What one SKILL.md says; empty or None where it says nothing."""

    name: str
    description: str
    body: str
    category: str | None
    lang: str | None
    license: str | None


def parse_skill_file(text: str, fallback_name: str) -> SkillFile:
    """The parts of a SKILL.md, from the frontmatter where it has them.

    Without a name the skill is called `fallback_name`, without a description its first paragraph stands in.
    Frontmatter that is not YAML (`description: Use when: x`) is read line by line.
    """
    header, body, fields = _split(clean_text(text))
    fields = read_header(header) if fields is None else fields
    metadata = fields["metadata"] if isinstance(fields.get("metadata"), dict) else {}
    lang = as_text(fields.get("lang")).lower()[:2]
    return SkillFile(
        name=one_line(as_text(fields.get("name"))) or one_line(clean_text(fallback_name)),
        description=one_line(as_text(fields.get("description"))) or first_paragraph(body),
        body=body.strip(),
        category=one_line(as_text(fields.get("category")) or as_text(metadata.get("category"))) or None,
        lang=lang if _LANG.fullmatch(lang) else None,
        license=one_line(as_text(fields.get("license"))) or None,
    )


def as_text(value: Any) -> str:
    """A field's value as text: a list becomes its items joined by commas, a map, NaN or nothing becomes empty.

    What a list says is cut to MAX_HEADER_CHARS: by YAML aliases a small file can say a long text thousands of times.
    """
    if isinstance(value, str):
        return "" if value in ("~", "null") else clean_text(value)
    if isinstance(value, list):
        return _joined(value)
    is_no_number = isinstance(value, float) and not math.isfinite(value)
    return "" if value is None or isinstance(value, dict) or is_no_number else str(value)


def _joined(items: list[Any]) -> str:
    """The texts of `items`, lists among them left out; what is too long is never put together."""
    parts: list[str] = []
    room = MAX_HEADER_CHARS
    for item in items:
        if isinstance(item, list):
            continue
        part = as_text(item[:room] if isinstance(item, str) else item)
        room -= len(item) if isinstance(item, str) else len(part)  # cleaning takes time too, whatever it leaves
        parts += [part] if part else []
        if room <= 0:
            break
    return ", ".join(parts)[:MAX_HEADER_CHARS]


def split_header(text: str) -> tuple[str, str]:
    """(frontmatter, body) of a SKILL.md; the frontmatter is empty where there is none.

    A closed block is frontmatter where it is a YAML map with a name or a description, or where its lines look like
    one; prose between two thematic breaks belongs to the body. Frontmatter that is never closed ends at the first
    blank line or heading.
    """
    return _split(text)[:2]


def _split(text: str) -> tuple[str, str, dict[str, Any] | None]:
    """`split_header`, and the frontmatter's fields where they were read on the way: parsing takes the most time."""
    text = text.lstrip("\ufeff \t\n")
    opening = _OPENING.match(text)
    if not opening:
        return "", text, None
    rest = text[opening.end() :]
    closing = _CLOSING.search(rest)
    header, body = (rest[: closing.start()], rest[closing.end() :]) if closing else (rest, "")
    if closing and not header.strip():
        return "", body, None
    if closing and len(header) <= MAX_HEADER_CHARS and not _runs_into_the_body(header):
        fields = _read_yaml(header)
        if fields is not None and fields.keys() & {"name", "description"}:
            return header, body, fields
    if closing is None or _HEADING_AFTER_BLANK.search(header):
        end = _HEADER_END.search(rest)
        cut = end.start() if end else len(rest)
        header, body = rest[:cut], rest[cut:]
    return (header, body, None) if _looks_like_a_header(header) else ("", text, None)


def _runs_into_the_body(header: str) -> bool:
    """Whether a block was perhaps never closed, and ends at a thematic break of the body, with a blank line above.

    To YAML a heading there is a comment and `prose: here` a key, so YAML cannot tell; it is no body that says the name
    or the description that is still missing.
    """
    heading = _HEADING_AFTER_BLANK.search(header)
    if not heading or not _BLANK_AT_END.search(header):
        return False
    above, below = (
        {key.lower() for key in _NAME_OR_DESCRIPTION.findall(part)}
        for part in (header[: heading.start()], header[heading.end() :])
    )
    return below <= above


def _looks_like_a_header(header: str) -> bool:
    """Whether a block that is no YAML map with a name or a description means to be frontmatter, and not prose.

    It starts with a key, and one is name or description; or all its lines are keys, lists or what belongs to them,
    the keys ones that we read or in lower case (`Note: this is prose`).
    """
    lines = [line for line in header.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    if not lines or not _KEY_OF_ANY_LANGUAGE.match(lines[0].strip()):
        return False
    if _NAME_OR_DESCRIPTION.search("\n".join([lines[0].strip(), *lines[1:]])):
        return True
    keys = [_KEY.match(line.strip() if number == 0 else line) for number, line in enumerate(lines)]
    return all(
        key[1][0].islower() or key[1].lower() in _FIELDS if key else line.startswith((" ", "\t", "- ", "]", "}"))
        for key, line in zip(keys, lines, strict=True)
    )


def read_header(header: str) -> dict[str, Any]:
    """Frontmatter as key → value, keys in lower case; scalars stay the text they are (`version: 1.10`, `yes`)."""
    fields = _read_yaml(header)
    return _read_lines(_plain(header).split("\n")) if fields is None else fields


def _plain(header: str) -> str:
    return _CONTROL.sub("", header[:MAX_HEADER_CHARS].expandtabs(2))


def _read_yaml(header: str) -> dict[str, Any] | None:
    """`read_header` of what is YAML; None where it is not, or no map."""
    try:
        # The loader in pure Python, on purpose: libyaml overflows the C stack on deeply nested input.
        value = yaml.load(_plain(header), yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
    return {str(key).lower(): item for key, item in value.items()} if isinstance(value, dict) else None


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
        fields["metadata"] = {key: _join([value]) for key, value in _pairs(parts["metadata"])}
    return fields


def _pairs(lines: list[str]) -> list[tuple[str, str]]:
    return [(found[1].lower(), found[2]) for line in lines if (found := _KEY.match(line))]


def _join(values: list[str]) -> str:
    if values[0] in _NO_PLAIN_VALUE:
        values = values[1:]
    text = " ".join(value.removeprefix("- ") for value in values).strip()
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and text[0] not in text[1:-1]
    return text[1:-1] if quoted else text


def first_paragraph(body: str) -> str:
    """The first paragraph of prose in Markdown on one line, cut to 1,000 characters; empty if there is none."""
    without_code = re.sub(r"^(```|~~~).*?(?:^\1[^\n]*$|\Z)", "", body, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n[ \t]*\n", without_code):
        lines = [line.strip().removeprefix("> ").removeprefix("- ") for line in block.split("\n")]
        prose = [line for line in lines if line and not line.startswith(("#", "<", "|", "---", "===", "![", "[!["))]
        if prose:
            return one_line(" ".join(prose))[:MAX_DESCRIPTION_CHARS]
    return ""
