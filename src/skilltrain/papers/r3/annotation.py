"""Sheets in which experts judge groups of skills, and the agreement of all judges.

R3's test set was verified by several experts. The form of their sheet is not public; this one is
ours.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from skilltrain.config import Config, validate
from skilltrain.data.sampling import stable_number
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import atomic_path
from skilltrain.metrics.bootstrap import Interval, agreement
from skilltrain.records import Skill, Verdict
from skilltrain.tables import read_skills, read_verdicts, select_judged
from skilltrain.texts import spreadsheet_cell

CHAT_MODEL = "chat model"
COLUMNS = ("query_id", "request", "skill_id", "name", "description", "body", "verdict")
_BODY_CHARS = 1000  # as much as the chat model sees
Pair = tuple[str, str]
"""Query id and skill id."""
Verdicts = Mapping[Pair, Verdict]


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


def write_sheet(judged: Path, pool: Path, num_queries: int, out: Path) -> int:
    """Write a CSV sheet with the judged skills of a random sample of queries.

    The sheet holds no verdict of the chat model, so that experts judge without knowing the verdict.

    Args:
        judged: Folder with QUERIES and JUDGEMENTS.
        pool: SKILLS table.
        num_queries: Number of queries in the sample.
        out: The CSV file to write.

    Returns:
        The number of skills to judge.

    Raises:
        SkilltrainError: The pool lacks a judged skill.
    """
    skills = {skill.skill_id: skill for skill in read_skills(pool)}
    judged_queries = select_judged(judged, None)
    # Pseudo-random numbers of the ids decide the order of queries and skills. So an expert cannot
    # guess a verdict from the order, and a repeated run writes the same sheet.
    judged_queries.sort(key=lambda item: stable_number("sheet", item[0].query_id))
    rows = []
    for query, verdicts in judged_queries[:num_queries]:
        for skill_id in sorted(verdicts, key=lambda key: stable_number(query.query_id, key)):
            if skill_id not in skills:
                problem = f"lacks skill '{skill_id}', which is judged in {judged}"
                raise SkilltrainError("unknown-skill", problem, where=pool)
            rows.append(_row(query.query_id, query.text, skills[skill_id]))

    # utf-8-sig writes a mark at the start by which spreadsheet programs recognise UTF-8.
    with atomic_path(out) as path, path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    return len(rows)


def _row(query_id: str, request: str, skill: Skill) -> list[str]:
    """Return a row of a sheet. Its last cell is empty: the expert writes the verdict there."""
    body = skill.body[:_BODY_CHARS]
    texts = (query_id, request, skill.skill_id, skill.name, skill.description, body, "")
    return [spreadsheet_cell(text) for text in texts]


def _verdict_of_cell(text: str | None) -> str | None:
    """Return the verdict that an expert typed, or None for an empty cell."""
    return (text or "").strip().lower() or None


class SheetRow(Config, extra="ignore"):
    """The columns that are read of a filled sheet."""

    query_id: str
    skill_id: str
    verdict: Annotated[Verdict | None, BeforeValidator(_verdict_of_cell)]


def read_sheet(sheet: Path, pairs: Iterable[Pair]) -> dict[Pair, Verdict]:
    """Return the verdicts of a filled sheet. Rows without a verdict are left out.

    Args:
        sheet: The CSV file.
        pairs: Ids of the queries and skills that the sheet may judge.

    Raises:
        SkilltrainError: The sheet is not readable, a verdict is unknown, or a row judges another
            pair, or the same pair as an earlier row.
    """
    # In the sheet, an id that looks like a formula begins with an apostrophe. Map cells to ids.
    pairs_by_cells = {tuple(map(spreadsheet_cell, pair)): pair for pair in pairs}
    verdicts = {}
    for number, values in enumerate(_read_rows(sheet), 1):
        where = f"{sheet}, row {number}"
        row = validate(SheetRow, values, where)
        # Remove the pair, so that a second row for the same pair is noticed.
        pair = pairs_by_cells.pop((row.query_id, row.skill_id), None)
        if pair is None:
            problem = f"'{row.skill_id}' is no judged skill of query '{row.query_id}', or repeated"
            raise SkilltrainError("invalid-row", problem, where=where)
        if row.verdict is not None:
            verdicts[pair] = row.verdict
    return verdicts


def _read_rows(sheet: Path) -> list[dict[str, Any]]:
    """Read the rows of a CSV file. If a row has too many cells, they get the key `more`."""
    try:
        text = sheet.read_text(encoding="utf-8-sig")
        return list(csv.DictReader(StringIO(text, newline=""), restkey="more"))
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        fix = "save it as CSV in UTF-8"
        raise SkilltrainError("unreadable-file", reason_of(error), where=sheet, fix=fix) from error


def measure_agreement(sheets: Sequence[Path], judged: Path) -> list[JudgeAgreement]:
    """Compare the verdicts of each two judges. The judges are the chat model and the experts.

    Args:
        sheets: Filled sheets. The path of a sheet is the name of a judge.
        judged: Folder from which the sheets were made.
    """
    chat_verdicts = {}  # by query id and skill id
    for query_id, verdict_by_skill in read_verdicts(judged).items():
        for skill_id, verdict in verdict_by_skill.items():
            chat_verdicts[query_id, skill_id] = verdict
    verdicts_by_judge: dict[str, Verdicts] = {CHAT_MODEL: chat_verdicts}
    for sheet in sheets:
        verdicts_by_judge[str(sheet)] = read_sheet(sheet, chat_verdicts)
    return [_compare(*names, verdicts_by_judge) for names in combinations(verdicts_by_judge, 2)]


def _compare(first: str, second: str, verdicts_by_judge: Mapping[str, Verdicts]) -> JudgeAgreement:
    """Compare the verdicts of two judges on the skills that both judged.

    Args:
        first: Name of a judge.
        second: Name of the other judge.
        verdicts_by_judge: Verdicts of all judges.
    """
    other_verdicts = verdicts_by_judge[second]
    # Pairs of verdicts by query, because the interval of kappa comes from resampled queries.
    groups = defaultdict(list)
    num_equal = 0
    for pair, verdict in verdicts_by_judge[first].items():
        if pair in other_verdicts:
            query_id, _ = pair
            groups[query_id].append((verdict, other_verdicts[pair]))
            num_equal += verdict == other_verdicts[pair]
    return JudgeAgreement(first, second, num_equal, agreement([*groups.values()]))
