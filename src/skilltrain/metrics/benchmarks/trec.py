"""Read runs and judgements (qrels) in the formats of TREC, BEIR and MTEB.

- A run has a line for each ranked skill: `q1 Q0 pdf-merge 1 12.5 bm25`.
- Judgements have a line for each judged skill: `q1 0 pdf-merge 1`. BEIR and MTEB leave out the
  second column, which TREC does not use, and may have a header, JSON Lines or parquet.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AliasChoices, BeforeValidator, Field

from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.metrics.benchmarks.rows import Row, Text, parse_row, read_rows

Id = Annotated[Text, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
"""Id of a query or a skill. In MTEB, ids can be whole numbers."""
_RUN = "query_id Q0 skill_id rank score system"
_BEIR_QRELS = "query_id skill_id score"
_TREC_QRELS = "query_id 0 skill_id score"


class ScoredSkill(Row):
    """The score of a skill for a query, from a judgement or a run."""

    query_id: Id = Field(validation_alias=AliasChoices("query_id", "query-id"))
    skill_id: Id = Field(validation_alias=AliasChoices("skill_id", "corpus-id", "corpus_id"))
    score: float = Field(
        validation_alias=AliasChoices("relevance", "score"), strict=False, allow_inf_nan=False
    )


def read_qrels(file: Path) -> Iterator[tuple[str, ScoredSkill]]:
    """Yield (file and line, judgement) of a .jsonl, .parquet, .tsv or .txt file."""
    if file.suffix in (".jsonl", ".parquet"):
        return read_rows(ScoredSkill, file)
    return _read_lines(file, _BEIR_QRELS, _TREC_QRELS)


def read_run(file: Path) -> dict[str, list[str]]:
    """Read the rankings of a TREC run.

    As in trec_eval, scores give the order, and ranks are not read. Skills with equal scores are in
    descending order of their ids: `b` before `a`.

    Returns:
        Ranked skill ids by query id.

    Raises:
        SkilltrainError: A line is not of a run.
    """
    rankings: dict[str, list[str]] = {}
    rows = [row for _, row in _read_lines(file, _RUN)]
    # trec_eval stores scores in 32 bits, so scores that hardly differ are equal. Scores above
    # 3.4e38 become infinite, about which numpy would warn.
    with np.errstate(over="ignore"):
        rows.sort(key=lambda row: (np.float32(row.score), row.skill_id), reverse=True)
    for row in rows:
        rankings.setdefault(row.query_id, []).append(row.skill_id)
    return rankings


def _read_lines(file: Path, *forms: str) -> Iterator[tuple[str, ScoredSkill]]:
    """Read each line with values as the score of a skill for a query.

    Values are separated by tabs, or by white space in a line without a tab.

    Args:
        file: The file.
        forms: Allowed forms of a line, each as names of columns: "query_id skill_id score". The
            forms differ in their number of columns.

    Yields:
        The place of the line (its file and number), and its ScoredSkill.

    Raises:
        SkilltrainError: The file cannot be read, or a line has another form.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {reason_of(error)}"
        raise SkilltrainError("unreadable-file", problem, where=file) from error
    # Names of the columns by the number of columns. So the length of a line tells its form.
    columns_by_number = {len(form.split()): form.split() for form in forms}
    for number, line in enumerate(lines, 1):
        values = line.split("\t" if "\t" in line else None)
        if not line.strip() or values[0] in ("query_id", "query-id"):
            continue  # a blank line, or a header
        where = f"{file}, line {number}"
        if len(values) not in columns_by_number:
            problem = f"has {len(values)} columns"
            fix = f"its columns are {' or '.join(forms)}, separated by tabs or spaces"
            raise SkilltrainError("invalid-row", problem, where=where, fix=fix)
        row = dict(zip(columns_by_number[len(values)], values, strict=True))
        yield where, parse_row(ScoredSkill, row, where)
