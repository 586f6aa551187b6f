"""Trigger evaluations: queries that should, or should not, start a skill.

The file `evals/trigger-eval.json` in the folder of a skill has a list of objects with `query` and
`should_trigger`.

Notes:
    - One query may stand in the files of several skills. Any skill that expects it is right.
    - The id of a skill is the path of its folder, as in the pool. No SKILL.md is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json
from skilltrain.metrics.benchmarks.rows import Row, parse_row
from skilltrain.texts import clean_text, one_line

TRIGGER_EVAL = "evals/trigger-eval.json"
UNSERVED_FILE = "unserved.jsonl"
"""File beside QUERIES with the queries that no skill is expected to serve."""
ORIGIN = "trigger-eval"
"""Origin of the queries."""


class _TriggerRow(Row):
    query: str
    should_trigger: bool


@dataclass(frozen=True)
class TriggerQuery:
    """A query of trigger evaluations.

    Attributes:
        text: Text of the query.
        where: File and number of its first row.
        expected: Ids of the skills that it should start.
        unexpected: Ids of the skills that it should not start.
    """

    text: str
    where: str
    expected: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def read_trigger_evals(*folders: Path) -> list[TriggerQuery]:
    """Read the trigger evaluations below folders of skills.

    Raises:
        SkilltrainError: A folder is missing, a file is broken, or there is no query.
    """
    queries_by_text: dict[str, TriggerQuery] = {}
    for folder in folders:
        if not folder.exists():
            raise SkilltrainError("not-found", "no such file or folder", where=folder)
        _read_folder(folder.resolve(), queries_by_text)
    if not queries_by_text:
        fix = f"write {TRIGGER_EVAL} in the folder of a skill"
        raise SkilltrainError("not-found", "no trigger evaluation", where=folders[0], fix=fix)
    return [*queries_by_text.values()]


def _read_folder(root: Path, queries_by_text: dict[str, TriggerQuery]) -> None:
    """Read the trigger evaluations below one folder.

    Args:
        root: Folder to search, with all folders below it.
        queries_by_text: Queries of all folders by text. The function adds to them.
    """
    for file in sorted(root.rglob(TRIGGER_EVAL)):
        # The file is in the folder `evals`, and the skill's folder is above that.
        folder = file.parents[1]
        path = folder.relative_to(root).as_posix()
        # The id of a skill is the path of its folder below `root`, or the name of `root` itself.
        skill_id = clean_text(root.name if folder == root else path)
        for where, row in _read_rows(file):
            text = one_line(clean_text(row.query))
            # Rows with the same text become one query, also if they are in files of several skills.
            query = queries_by_text.setdefault(text, TriggerQuery(text, where))
            skill_ids, other_ids = query.expected, query.unexpected
            if not row.should_trigger:
                skill_ids, other_ids = other_ids, skill_ids
            if skill_id in other_ids:
                problem = "an earlier row of this skill says the opposite of this query"
                raise SkilltrainError("invalid-row", problem, where=where)
            if skill_id not in skill_ids:
                skill_ids.append(skill_id)


def _read_rows(file: Path) -> Iterator[tuple[str, _TriggerRow]]:
    """Yield the place and the content of each row of a file.

    Args:
        file: JSON file with a list of rows.
    """
    rows = read_json(file)
    if not isinstance(rows, list):
        problem = "is no list of objects with query and should_trigger"
        raise SkilltrainError("invalid-row", problem, where=file)
    for number, values in enumerate(rows, 1):
        where = f"{file}, row {number}"
        # `parse_row` checks the keys and the types of the row.
        row = parse_row(_TriggerRow, values, where)
        if not one_line(row.query):
            raise SkilltrainError("invalid-row", "query has no visible text", where=where)
        yield where, row


def query_rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the queries that some skill is expected to serve, as rows of a query file."""
    for query in read_trigger_evals(folder):
        if query.expected:
            verdicts = {"skill_ids": query.expected, "irrelevant": query.unexpected}
            yield query.where, {"query": query.text, "origin": ORIGIN, **verdicts}


def unserved_rows(folders: Sequence[Path]) -> list[dict[str, str]]:
    """Return the queries that no skill is expected to serve, as rows of `UNSERVED_FILE`."""
    queries = read_trigger_evals(*folders) if folders else []
    return [{"query": query.text} for query in queries if not query.expected]
