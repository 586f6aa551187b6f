"""Parse SKILL.md files and rows of tables as skills, and render skills as SKILL.md.

The texts are untrusted and often untidy. They are parsed, never executed.

Notes:
    - The body of a row may be empty if the row has a description, as for tools of MCP servers.
    - `datetime.fromisoformat` also accepts bare digits, such as a count of seconds.
    - Of the folder `.git`, only the programs in `.git/hooks` belong to a skill, because git runs
      them. `Path.exists` raises for a folder that may not be entered; `Path.glob` does not.
    - Frontmatter that is not YAML, such as `description: Use when: x`, is read line by line. A
      Markdown heading in it shows that the closing `---` is missing, so there is no frontmatter.
    - In such frontmatter an indented line has a key of its own only if the key above has its value
      beside it. Otherwise the line is that value.
    - libyaml overflows the C stack on deeply nested input, so the Python loader reads headers.
    - `user-invocable: false` hides a skill from the user's menu only. Models may still start it.
    - Agents list `when_to_use` after the description. Both together stay within the length that
      the Agent Skills specification allows for a description, or the skill would not be listed.
"""

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
FOR_USERS_ONLY = "for_users_only"
"""`filter` of a row in DROPPED for a skill that no model may start."""
MAX_HEADER_CHARS = 65_536  # of frontmatter, and of each text in it; the rest is cut
MAX_DESCRIPTION_CHARS = 1_000  # of a description taken from the body
# Items of a list in a header. With YAML aliases a small file can repeat a long text many times.
MAX_ITEMS = 256
MAX_LISTED_CHARS = 1_024  # of a description in the Agent Skills specification
MAX_FILES = 500  # beside a SKILL.md; others are neither listed nor screened nor copied
ID_COLUMNS = ("skill_id", "id", "_id")
BODY_COLUMNS = ("body", "content", "skill_md", "text")
COLUMNS = (
    *ID_COLUMNS,
    "name",
    "title",
    "description",
    *BODY_COLUMNS,
    "category",
    "lang",
    "source",
    "license",
    *SKILL_FACTS,
)

_IGNORED_FILE_NAMES = (SKILL_FILE.lower(), ".env", ".env.local")
_STARS = re.compile(r"([0-9]{1,9})(?:\.0)?")  # `.0`: pandas reads columns with gaps as floats
_URL = re.compile(r"https?://\S+", re.IGNORECASE)
_CONTROL = re.compile("[\x01-\x08\x0b\x0e-\x1f]")  # characters that YAML forbids
# First line of frontmatter, after HTML comments.
_OPENING = re.compile(r"(?:(?><!--.*?-->)\s*)*---[ \t]*\n", re.DOTALL)
_BEFORE_HEADER = "\ufeff \t\n"
_CLOSING = re.compile(r"^(?:---|\.\.\.)[ \t]*$", re.MULTILINE)
_HEADING = re.compile(r"\n[ \t]*\n#+ ")  # of Markdown, after an empty line
# `key: value`, and no URL
_KEY = re.compile(r"""["']?([A-Za-z_][\w-]*)["']?[ \t]*:(?!//)[ \t]*(.*)""")
# Starts of lines in Markdown that are no prose
_NO_PROSE = ("#", "<", "|", "---", "===", "![", "[![")
_TEXT_FIELDS = ("name", "description", "category", "lang", "license")
_FIELDS = (
    *_TEXT_FIELDS,
    "metadata",
    "when_to_use",
    "allowed_tools",
    "disable_model_invocation",
    "user_invocable",
)
_INVOCATION_KEY = re.compile("disable[-_]model[-_]invocation", re.IGNORECASE)
_TRUE = re.compile(r"(?:true|yes|on)\b", re.IGNORECASE)  # a comment may follow
_INDENTED_FIELD = re.compile(r" +(name|description)[ ]*:[ ]+(.*)")
# Values of a key whose value is on the next lines.
_BLOCK_MARKS = ("", "|", ">", "|-", ">-", "|+", ">+")
_LANG = re.compile(r"[a-z]{2}")
# Code between ``` or ~~~. A block that is not closed reaches to the end.
_CODE_BLOCK = re.compile(r"^(```|~~~).*?(?:^\1[^\n]*$|\Z)", re.MULTILINE | re.DOTALL)


def parse_skill_file(text: str, skill_id: str, fallback_name: str, source: str = "") -> Skill:
    """Parse a SKILL.md. The first paragraph of the body replaces a missing description.

    Args:
        text: Content of the file.
        skill_id: Id of the skill.
        fallback_name: Name of the skill if the header has none.
        source: Source of the skill.
    """
    fields, body = split_header(clean_text(text))
    # `metadata` is a map inside the header.
    metadata = fields["metadata"] if isinstance(fields.get("metadata"), dict) else {}
    texts = {key: one_line(as_text(fields.get(key))) for key in _TEXT_FIELDS}
    facts = _facts_in(metadata | fields)  # the header takes precedence over its metadata
    description = texts["description"] or first_paragraph(body)
    lang = texts["lang"].lower()[:2]  # en-US becomes en
    return Skill(
        skill_id,
        name=texts["name"] or one_line(clean_text(fallback_name)),
        description=_with_use(description, facts["when_to_use"] or ""),
        body=body.strip(),
        category=texts["category"] or one_line(as_text(metadata.get("category"))) or None,
        lang=lang if _LANG.fullmatch(lang) else None,
        source=source,
        license=texts["license"] or None,
        **facts,
    )


def _with_use(description: str, when_to_use: str) -> str:
    """Return a description that goes on with `when_to_use`, cut to `MAX_LISTED_CHARS`.

    Agents list `when_to_use` after the description. The Agent Skills specification limits the
    length of a description, and a skill with a longer one would not be listed.
    """
    if when_to_use in description:
        return description
    max_chars = max(len(description), MAX_LISTED_CHARS)  # a long description is not cut
    return f"{description} {when_to_use}"[:max_chars].strip()


def is_for_users_only(text: str) -> bool:
    """Return whether the author of a SKILL.md forbids that a model starts the skill.

    Args:
        text: Content of the file.
    """
    # Most files do not have the key, and reading the header takes longer than this search.
    if not _INVOCATION_KEY.search(text):
        return False
    fields, _ = split_header(clean_text(text))
    return _TRUE.match(as_text(fields.get("disable_model_invocation"))) is not None


def dropped_for_users(skill_id: str) -> Dropped:
    """Return the row of DROPPED for a skill that only users may start."""
    reason = "only users may start it (disable-model-invocation: true)"
    return dropped_skill(skill_id, FOR_USERS_ONLY, reason)


def skill_from_row(row: Mapping[str, Any], where: str, source: str) -> Skill | Dropped:
    """Read a skill from a row of a table in SkillRouter's format, or from a document of BEIR.

    The columns `content` and `skill_md` may hold a whole SKILL.md. The other columns of the row
    take precedence over its frontmatter. The body of a row may be empty if the row has a
    description, as for tools of MCP servers.

    Args:
        row: Value by column.
        where: File and number of the row, for the reason.
        source: Source of the skill, if the row names none.

    Returns:
        The skill; or a row of DROPPED, with the reason why the row is no skill.
    """
    values = {key: as_text(row.get(key)) for key in COLUMNS}
    name = values["name"][:MAX_HEADER_CHARS]
    skill_id = one_line(values["skill_id"] or values["id"] or values["_id"] or name)
    # Name of the first body column that has text in this row, or "" if none of them has text.
    body_column = next((key for key in BODY_COLUMNS if values[key]), "")
    if not skill_id:
        return dropped_skill("", "no_id", f"{where} has neither skill_id nor name")
    if body_column and not isinstance(row[body_column], str | bytes):
        reason = f"{where}: {body_column} is a {type(row[body_column]).__name__}, not text"
        return dropped_skill(skill_id, "not_text", reason)

    # If the row gives no name, the last part of the id is the name.
    last_part_of_id = skill_id.rsplit("/", 1)[-1]
    fallback_name = one_line(name or last_part_of_id)
    # The columns `content` and `skill_md` hold a SKILL.md with frontmatter.
    if body_column in ("content", "skill_md"):
        if is_for_users_only(values[body_column]):
            return dropped_for_users(skill_id)
        skill = parse_skill_file(values[body_column], skill_id, fallback_name)
    elif body_column == "text":
        # A document of BEIR or MTEB has only a title, which may be empty, and a text.
        title = one_line(values["title"])
        skill = Skill(skill_id, title, description="", body=values["text"].strip())
    else:
        # The column is `body`, or there is none. Then the body is empty.
        body = values["body"].strip()
        skill = Skill(skill_id, fallback_name, description=first_paragraph(body), body=body)
    # Add the other columns of the row. They replace the values of the frontmatter.
    skill = _add_columns(skill, values, _facts_in(row), source)
    if not (skill.body or skill.description):
        return dropped_skill(skill_id, "empty_body", f"{where} has neither description nor body")
    return skill


def _add_columns(
    skill: Skill, values: Mapping[str, str], facts: Mapping[str, Any], source: str
) -> Skill:
    """Replace the values of a skill by the columns of its row.

    Args:
        skill: The skill, as its body column gives it.
        values: Text of each column.
        facts: Value of each field of SKILL_FACTS (author, URL, stars and so on), or None.
        source: Source of a row that names none.
    """
    description = values["description"][:MAX_HEADER_CHARS].strip()
    if description:
        description = _with_use(description, skill.when_to_use or "")
    # A fact that the row lacks does not replace the fact in the frontmatter.
    known_facts = {key: fact for key, fact in facts.items() if fact is not None}
    return replace(
        skill,
        name=one_line(values["name"][:MAX_HEADER_CHARS]) or skill.name,
        description=description or skill.description,
        category=one_line(values["category"]) or skill.category,
        lang=one_line(values["lang"]) or skill.lang,
        source=one_line(values["source"] or source),
        license=one_line(values["license"]) or skill.license,
        **known_facts,
    )


def dropped_skill(
    skill_id: str,
    code: str,
    reason: str,
    value: float | None = None,
    other_id: str | None = None,
) -> Dropped:
    """Return the row of DROPPED for a skill that is left out.

    Args:
        skill_id: Id of the skill; empty if it has none.
        code: Code of the reason, such as "not_text".
        reason: The reason in words.
        value: Measured value that decided, such as a size.
        other_id: Id of the skill that this skill repeats.
    """
    return Dropped("", skill_id, code, reason, value=value, other_id=other_id)


def _facts_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the facts about a skill: its author, URL, stars and the other fields of SKILL_FACTS.

    Args:
        values: A header or a row of a table, with values by key.

    Returns:
        Value of each field of SKILL_FACTS; None if it is missing or wrong.
    """
    texts = {key: one_line(as_text(values.get(key)))[:MAX_HEADER_CHARS] for key in SKILL_FACTS}
    url = texts["url"] or one_line(as_text(values.get("homepage")))
    stars = _STARS.fullmatch(texts["stars"])
    # `as_text` has joined the items of a list of tags with commas.
    tags = [tag.strip() for tag in texts["tags"].split(",")]
    return {
        "author": texts["author"] or None,
        "url": url if _URL.fullmatch(url) else None,
        "stars": int(stars[1]) if stars else None,
        "updated_at": texts["updated_at"] if _is_iso_date(texts["updated_at"]) else None,
        "when_to_use": texts["when_to_use"] or None,
        "files": _relative_paths(values.get("files")),
        "tags": tuple(filter(None, tags)) or None,
    }


def _is_iso_date(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return text[4] == "-"  # fromisoformat also accepts digits, such as a count of seconds


def _relative_paths(value: Any) -> tuple[str, ...] | None:
    """Return the items of a list as relative paths.

    Returns:
        None if `value` is no list, or if a path is empty, absolute, or leaves its folder with "..".
    """
    # A text or a map can be iterated too, but is no list.
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return None
    paths = [PurePosixPath(one_line(as_text(item))) for item in value]
    if any(not path.parts or path.is_absolute() or ".." in path.parts for path in paths):
        return None
    return tuple(map(str, paths))


def bundled_paths(folder: Path, hidden: bool = False) -> Iterator[Path]:
    """Yield the files and links that belong to a SKILL.md, without those of other skills below it.

    Args:
        folder: Folder of the SKILL.md.
        hidden: False yields the files without a dot at the start of any name in their path. True
            yields the others: hidden files, and files in hidden folders. Of the folder `.git`, only
            the programs in `.git/hooks` are yielded.
    """
    for parent, folder_names, file_names in os.walk(folder):
        names_below = Path(parent).relative_to(folder).parts
        is_git_folder = names_below == (".git",)
        in_hidden_folder = any(name.startswith(".") for name in names_below)

        # Walk into the folders that hold no other skill.
        walked = []
        for name in sorted(folder_names):
            # git runs the programs in .git/hooks. All else in .git is data.
            is_git_data = is_git_folder and name != "hooks"
            # Without `hidden`, a hidden folder has no files to yield.
            if is_git_data or (name.startswith(".") and not hidden):
                continue
            # Not Path.exists, which raises for a folder that may not be entered.
            holds_skill = any(Path(parent, name).glob(SKILL_FILE))
            if not holds_skill:
                walked.append(name)
        folder_names[:] = walked  # os.walk continues with these
        if is_git_folder:
            continue  # leave out the files that are directly in .git

        for name in sorted(file_names):
            is_hidden = in_hidden_folder or name.startswith(".")
            if is_hidden == hidden and name.lower() not in _IGNORED_FILE_NAMES:
                yield Path(parent, name)


def as_text(value: Any) -> str:
    """Return the value of a field as text.

    The items of a list are joined with commas, and the result is cut to MAX_HEADER_CHARS. Lists in
    a list are left out. Maps, NaN, infinity and None become an empty text.
    """
    if isinstance(value, bytes):
        return clean_text(value.decode("utf-8", "replace"))
    if isinstance(value, str):
        # In YAML, `~` and `null` mean that there is no value.
        return "" if value in ("~", "null") else clean_text(value)
    if isinstance(value, list):
        texts = []
        for item in value[:MAX_ITEMS]:
            if isinstance(item, str):
                texts.append(as_text(item[:MAX_HEADER_CHARS]))
            elif not isinstance(item, list):
                texts.append(as_text(item))
        return ", ".join(filter(None, texts))[:MAX_HEADER_CHARS]
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    if value is None or isinstance(value, dict):
        return ""
    return str(value)


def split_header(text: str) -> tuple[dict[str, Any], str]:
    """Split a SKILL.md into its frontmatter and its body.

    A block between two lines `---` at the beginning is frontmatter if it is empty or has one of the
    keys that we read. Any other block belongs to the body. A block that is not YAML, such as
    `description: Use when: x`, is read line by line. If it has a Markdown heading, it is not read:
    the heading shows that the closing `---` is missing, so there is no frontmatter.

    Returns:
        Value by key, such as `when_to_use`: a text, a list or a map. Numbers and booleans are texts
        too. Then the body.
    """
    text = text.lstrip(_BEFORE_HEADER)
    opening = _OPENING.match(text)
    closing = _CLOSING.search(text, opening.end()) if opening else None
    if not opening or not closing:
        return {}, text

    header = _clean_header(text[opening.end() : closing.start()])
    fields = _read_yaml(header)
    if fields is None:  # not YAML
        fields = {} if _HEADING.search(header) else _read_lines(header.split("\n"))

    # `when-to-use` and `when_to_use` are the same key.
    fields = {key.replace("-", "_"): value for key, value in fields.items()}
    has_known_field = not fields.keys().isdisjoint(_FIELDS)
    if has_known_field or not header.strip():
        return fields, text[closing.end() :]
    return {}, text


def header_fault(text: str) -> str | None:
    """Return what is wrong with the frontmatter of a SKILL.md, or None."""
    text = clean_text(text).lstrip(_BEFORE_HEADER)
    opening = _OPENING.match(text)
    if not opening:
        return "the file does not begin with front matter"
    closing = _CLOSING.search(text, opening.end())
    if not closing:
        return "the closing --- of the front matter is missing"

    # The line break makes the line numbers in errors those of the file, whose first line is `---`.
    header = "\n" + _clean_header(text[opening.end() : closing.start()])
    try:
        value = yaml.load(header, yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = one_line(str(error)).replace('in "<unicode string>", line', "at line")
        return f"the front matter is no YAML: {reason}"
    return None if isinstance(value, dict) else "the front matter has no keys"


def _clean_header(header: str) -> str:
    """Return frontmatter without characters that YAML forbids, cut to `MAX_HEADER_CHARS`."""
    return _CONTROL.sub("", header[:MAX_HEADER_CHARS].expandtabs(2))


def _read_yaml(header: str) -> dict[str, Any] | None:
    """Return the values of a header by key in lower case; None if it is not YAML, or no map.

    BaseLoader reads all single values as texts.
    """
    try:
        # Not the C loader: libyaml overflows the C stack on deeply nested input.
        value = yaml.load(header, yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
    if not isinstance(value, dict):
        return None
    return {str(key).lower(): item for key, item in value.items()}


def _read_lines(lines: list[str]) -> dict[str, Any]:
    """Read `key: value` lines of a header that is not YAML.

    A line without a key continues the value of the key above. The keys `name` and `description` may
    be indented, for example by a tab.

    Returns:
        Value by key in lower case. The value of `metadata` is itself a map.
    """
    lines_by_key = {}
    key = ""  # the last key above the line
    for line in lines:
        match = _KEY.match(line)
        # An indented line may be a key of its own only if the key above has its value beside it.
        # If nothing or only a mark such as `|` is beside the key above, the line is its value.
        has_value_beside_key = key != "" and lines_by_key[key][0] not in _BLOCK_MARKS
        if not match and has_value_beside_key:
            match = _INDENTED_FIELD.match(line)
        if match:
            key = match[1].lower()
            lines_by_key[key] = [match[2].strip()]
        elif key and line.strip():
            lines_by_key[key].append(line.strip())
    fields: dict[str, Any] = {key: _join(values) for key, values in lines_by_key.items()}
    if "metadata" in lines_by_key:
        matches = (_KEY.match(line) for line in lines_by_key["metadata"])
        fields["metadata"] = {match[1].lower(): _join([match[2]]) for match in matches if match}
    return fields


def _join(lines: list[str]) -> str:
    """Join the lines of a value. List marks and quotes around the whole value are removed.

    Example: the lines `>`, `Merges PDFs.` and `Splits them.` become "Merges PDFs. Splits them."
    """
    # The first line is what stands beside the key: nothing, a mark such as `|`, or a value.
    if lines[0] in _BLOCK_MARKS:
        lines = lines[1:]
    text = " ".join(line.removeprefix("- ") for line in lines).strip()
    quote = text[:1]
    content = text[1:-1]
    is_quoted = len(text) > 1 and quote in "\"'" and text.endswith(quote)
    # Quotes inside the value show that the outer quotes may not belong together, as in 'a' or 'b'.
    return content if is_quoted and quote not in content else text


def first_paragraph(body: str) -> str:
    """Return the first paragraph of prose in Markdown, on one line of at most 1,000 characters.

    Headings, code, HTML, tables, rules and images are no prose. Empty if there is none.
    """
    # Blocks are separated by empty lines. Marks of quotations and of lists are removed.
    for block in re.split(r"\n[ \t]*\n", _CODE_BLOCK.sub("", body)):
        lines = [line.strip().removeprefix("> ").removeprefix("- ") for line in block.split("\n")]
        prose = [line for line in lines if line and not line.startswith(_NO_PROSE)]
        if prose:
            return one_line(" ".join(prose))[:MAX_DESCRIPTION_CHARS]
    return ""


def skill_text(skill: Skill) -> str:
    """Return the SKILL.md of a skill."""
    # A large width keeps each value on one line.
    header = yaml.safe_dump(front_matter(skill), allow_unicode=True, sort_keys=False, width=10**6)
    return f"---\n{header}---\n\n{skill.body}\n"


def front_matter(skill: Skill) -> dict[str, Any]:
    """Return the header of a SKILL.md."""
    header = {"name": skill.name, "description": skill.description}
    if skill.license:
        header["license"] = skill.license
    return header
