"""Sheets in which experts judge groups of skills, and the agreement of all judges.

R3's test set was verified by several experts. The form of their sheet is not public; this one is
ours.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from skilltrain.config import Config, validate
from skilltrain.data.sampling import stable_number
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.verdicts import (
    JudgeAgreement,
    Pair,
    compare_judges,
    read_sheet_rows,
    verdict_of_cell,
    write_sheet,
)
from skilltrain.records import Query, Skill, Verdict
from skilltrain.tables import read_skills, read_verdicts, select_judged
from skilltrain.texts import text_of_cell

CHAT_MODEL = "chat model"


def write_judged_sheet(judged: Path, pool: Path, num_queries: int, out: Path) -> int:
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
    # Pairs of a query and its verdicts by skill id, of the queries of all splits.
    judged_queries = select_judged(judged, split=None)
    # Pseudo-random numbers of the ids decide the order of queries and skills. So an expert cannot
    # guess a verdict from the order, and a repeated run writes the same sheet.
    judged_queries.sort(key=lambda item: stable_number("sheet", item[0].query_id))
    pairs: list[tuple[Query, Skill]] = []
    for query, verdicts in judged_queries[:num_queries]:
        for skill_id in sorted(verdicts, key=lambda key: stable_number(query.query_id, key)):
            if skill_id not in skills:
                problem = f"lacks skill '{skill_id}', which is judged in {judged}"
                raise SkilltrainError("unknown-skill", problem, where=pool)
            pairs.append((query, skills[skill_id]))
    write_sheet(pairs, out)
    return len(pairs)


class SheetRow(Config, extra="ignore"):
    """The columns that are read of a filled sheet."""

    query_id: str
    skill_id: str
    verdict: Annotated[Verdict | None, BeforeValidator(verdict_of_cell)]


def read_sheet(sheet: Path, pairs: Iterable[Pair]) -> dict[Pair, Verdict]:
    """Return the verdicts of a filled sheet. Rows without a verdict are left out.

    Args:
        sheet: The CSV file.
        pairs: Pairs of a query id and a skill id that the sheet may judge.

    Returns:
        Verdict by pair of a query id and a skill id.

    Raises:
        SkilltrainError: The sheet is not readable, a verdict is unknown, or a row judges a pair
            that is not in `pairs` or that an earlier row judges too.
    """
    unread_pairs = set(pairs)
    verdicts = {}
    for number, values in enumerate(read_sheet_rows(sheet), 1):
        where = f"{sheet}, row {number}"
        row = validate(SheetRow, values, where)
        pair = (text_of_cell(row.query_id), text_of_cell(row.skill_id))
        # The pair is not to be judged, or an earlier row judges the pair.
        if pair not in unread_pairs:
            problem = f"'{row.skill_id}' is no judged skill of query '{row.query_id}', or repeated"
            raise SkilltrainError("invalid-row", problem, where=where)
        unread_pairs.remove(pair)
        if row.verdict is not None:
            verdicts[pair] = row.verdict
    return verdicts


def measure_agreement(sheets: Sequence[Path], judged: Path) -> list[JudgeAgreement]:
    """Compare the verdicts of each two judges. The judges are the chat model and the experts.

    Args:
        sheets: Filled sheets. The path of a sheet is the name of a judge.
        judged: Folder from which the sheets were made.

    Returns:
        One row for each two judges who judged some skill for the same query.

    Raises:
        SkilltrainError: A sheet is wrong, or there are no such two judges.
    """
    chat_verdicts = {}  # by query id and skill id
    for query_id, verdict_by_skill in read_verdicts(judged).items():
        for skill_id, verdict in verdict_by_skill.items():
            chat_verdicts[query_id, skill_id] = verdict
    verdicts_by_judge: dict[str, Mapping[Pair, Verdict]] = {CHAT_MODEL: chat_verdicts}
    for sheet in sheets:
        verdicts_by_judge[str(sheet)] = read_sheet(sheet, chat_verdicts)
    rows = compare_judges(verdicts_by_judge)
    if not rows:
        raise SkilltrainError("nothing-to-score", "no skill was judged twice")
    return rows
