"""Verdicts of readers on pairs of a query and a skill, and the sheets that readers fill.

A reader is a person or a language model. Readers see a request and a skill, but neither the system
that ranked the skill nor its rank.
"""

import csv
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from skilltrain.config import Config, validate
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import atomic_path, check_input_file
from skilltrain.metrics.benchmarks.benchmark import Benchmark, Task
from skilltrain.metrics.bootstrap import Interval, agreement
from skilltrain.records import Query, Skill
from skilltrain.texts import spreadsheet_cell, text_of_cell

COLUMNS = ("query_id", "request", "skill_id", "name", "description", "body", "verdict")
_BODY_CHARS = 1000  # as much as a chat model sees
Pair = tuple[str, str]
"""Query id and skill id."""
PairVerdict = Literal["required", "serves", "no"]
"""`required`: the skill that the query needs. `serves`: it serves as well. `no`: it does not."""


def verdict_of_cell(text: str | None) -> str | None:
    """Return the verdict that a reader typed, or None for an empty cell."""
    return (text or "").strip().lower() or None


class _VerdictRow(Config, extra="ignore"):
    """The columns that are read of a filled sheet. Without a reader, the file's name is used."""

    query_id: str
    skill_id: str
    verdict: Annotated[PairVerdict | None, BeforeValidator(verdict_of_cell)]
    reader: str | None = None


@dataclass(frozen=True)
class JudgeAgreement:
    """Agreement of two judges on the skills that both judged.

    Attributes:
        num_equal: Number of equal verdicts.
        kappa: Cohen's kappa with a 95% interval. `n` is the number of skills.
    """

    first: str
    second: str
    num_equal: int
    kappa: Interval


def write_sheet(pairs: Iterable[tuple[Query, Skill]], out: Path) -> None:
    """Write a CSV sheet with a row for each pair. Readers fill its last column, the verdict.

    Args:
        pairs: Queries and skills to judge, in the order of the rows.
        out: The CSV file to write.
    """
    # utf-8-sig writes a mark at the start by which spreadsheet programs recognise UTF-8.
    with atomic_path(out) as path, path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for query, skill in pairs:
            body = skill.body[:_BODY_CHARS]
            texts = [query.query_id, query.text, skill.skill_id, skill.name, skill.description]
            writer.writerow([spreadsheet_cell(text) for text in (*texts, body, "")])


def read_sheet_rows(sheet: Path) -> list[dict[str, Any]]:
    """Read the rows of a CSV file. If a row has too many cells, they get the key `more`."""
    try:
        check_input_file(sheet)
        text = sheet.read_text(encoding="utf-8-sig")
        return list(csv.DictReader(StringIO(text, newline=""), restkey="more"))
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        fix = "save it as CSV in UTF-8"
        raise SkilltrainError("unreadable-file", reason_of(error), where=sheet, fix=fix) from error


def read_pair_verdicts(sheets: Sequence[Path]) -> dict[str, dict[Pair, str]]:
    """Return the verdicts of each reader by query id and skill id.

    Rows without a verdict are left out.

    Args:
        sheets: CSV files with the columns `query_id`, `skill_id`, `verdict` and, if a file has
            several readers, `reader`.

    Raises:
        SkilltrainError: A file is not readable, a verdict is unknown, or a reader judges a pair
            twice and differently.
    """
    verdicts_by_reader: dict[str, dict[Pair, str]] = {}
    for sheet in sheets:
        for number, values in enumerate(read_sheet_rows(sheet), 1):
            where = f"{sheet}, row {number}"
            row = validate(_VerdictRow, values, where)
            if row.verdict is None:
                continue
            verdicts = verdicts_by_reader.setdefault(row.reader or sheet.stem, {})
            pair = (text_of_cell(row.query_id), text_of_cell(row.skill_id))
            # `setdefault` keeps the first verdict on a pair, and returns it.
            if verdicts.setdefault(pair, row.verdict) != row.verdict:
                problem = f"calls skill '{pair[1]}' {row.verdict} for query '{pair[0]}', and"
                problem += f" {verdicts[pair]} in another row of the same reader"
                raise SkilltrainError("invalid-row", problem, where=where)
    return verdicts_by_reader


def compare_judges(verdicts_by_judge: Mapping[str, Mapping[Pair, str]]) -> list[JudgeAgreement]:
    """Compare each two judges on the skills that both judged for the same query.

    Args:
        verdicts_by_judge: Verdicts of each judge by `Pair`: query id and skill id.

    Returns:
        One row for each two judges who share a `Pair`.
    """
    rows: list[JudgeAgreement] = []
    for first, second in combinations(verdicts_by_judge, 2):
        other_verdicts = verdicts_by_judge[second]
        # For each query id: the two verdicts, of the first and of the second judge, on each skill.
        # They are grouped by query, because the interval of kappa comes from resampled queries.
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        num_equal = 0
        for pair, verdict in verdicts_by_judge[first].items():
            if pair in other_verdicts:
                query_id, _ = pair
                groups[query_id].append((verdict, other_verdicts[pair]))
                num_equal += verdict == other_verdicts[pair]
        # Two readers who each judge another part of a sheet share no pair.
        if groups:
            rows.append(JudgeAgreement(first, second, num_equal, agreement([*groups.values()])))
    return rows


def add_judged(
    benchmark: Benchmark,
    verdicts_by_reader: Mapping[str, Mapping[Pair, str]],
    skill_ids: Collection[str],
) -> Benchmark:
    """Add the skills that readers found to serve a query, and notes about the readers.

    A skill counts if all readers who judged it call it `required` or `serves`. A copy of a gold
    skill counts too, unless a reader refuses the copy (verdict `no`). Each added skill replaces one
    gold skill when a ranking is scored. For a query with several gold skills, this is the gold
    skill with the lowest id.

    Args:
        benchmark: The benchmark, with copies if it has any.
        verdicts_by_reader: Verdicts of each reader by query id and skill id.
        skill_ids: Ids of the pool. Empty: any id is allowed.

    Returns:
        The benchmark with `Relevance.judged` of each task, and with the notes.

    Raises:
        SkilltrainError: A reader judges an unknown query or skill.
    """
    verdicts_by_query: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    query_ids = benchmark.unscored.union(benchmark.relevances)
    for reader, verdicts in verdicts_by_reader.items():
        for (query_id, skill_id), verdict in verdicts.items():
            # An empty pool allows all skill ids.
            if query_id not in query_ids or (skill_ids and skill_id not in skill_ids):
                problem = f"the benchmark lacks query '{query_id}', or the pool skill '{skill_id}'"
                raise SkilltrainError("unknown-skill", problem, where=f"verdicts of {reader}")
            verdicts_by_query[query_id][skill_id].add(verdict)

    tasks: list[Task] = []
    for task in benchmark.tasks:
        relevance = task.relevance
        # Gold skill by the id of a skill that replaces it. Copies of gold skills come first.
        judged = dict(relevance.copies)
        for skill_id, verdicts in verdicts_by_query[task.query.query_id].items():
            if "no" in verdicts:
                judged.pop(skill_id, None)
            # A gold skill needs no entry.
            elif skill_id not in relevance.gold:
                judged[skill_id] = min(relevance.gold)
        tasks.append(replace(task, relevance=replace(relevance, judged=judged)))
    num_judged = sum(bool(task.relevance.judged) for task in tasks)
    notes = [
        "(judged): copies, and skills that all their readers call required or serving, count as "
        f"gold too; {num_judged} of {len(tasks)} queries have any."
    ]
    for row in compare_judges(verdicts_by_reader):
        notes.append(
            f"Readers {row.first} and {row.second}: Cohen's kappa {row.kappa}; {row.num_equal} of "
            f"{row.kappa.n} shared verdicts are equal."
        )
    return replace(benchmark, tasks=tuple(tasks), notes=(*benchmark.notes, *notes))
