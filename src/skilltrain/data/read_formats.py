"""Read training data in the formats of other tools: BEIR, MTEB and sentence-transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skilltrain.arguments import rows_of
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_records
from skilltrain.metrics.benchmarks.qrels import beir_tasks, read_beir_queries
from skilltrain.records import Verdict
from skilltrain.texts import clean_text

# Our name of each split of BEIR and MTEB. Queries of other splits get no split here.
_SPLITS = {"train": "train", "dev": "dev", "validation": "dev", "test": "test"}


def beir_query_rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the judged queries of a BEIR or MTEB folder as rows of a query file.

    A skill with a score above 0 is required. Any other score means irrelevant.

    Yields:
        Pairs of the file of the judgements, for errors, and a row.
    """
    for task in beir_tasks(folder, read_beir_queries(folder)):
        query = task.query
        gold = task.relevance.gold
        yield (
            f"{task.where}, query {query.query_id}",
            {
                "query_id": query.query_id,
                "query": query.text,
                "origin": query.origin,
                "split": _SPLITS.get(query.split),
                "required": [*gold],
                "irrelevant": [*task.relevance.gains.keys() - gold],
            },
        )


def read_texts(source: Any) -> dict[str, dict[str, Verdict]]:
    """Read pairs, triplets or longer rows of texts, as sentence-transformers trains on them.

    As there, the order of the columns counts: a query, a positive, and any number of negatives.
    Their names do not matter. Rows of one query become one list, and a text that one of them calls
    positive is no negative. A negative may be missing.

    Args:
        source: A file .jsonl, .jsonl.gz, .csv or .parquet, or rows as in `rows_of`.

    Returns:
        Verdict by text, for each query by its text.

    Raises:
        SkilltrainError: A row has no texts or other columns, or there is no row.

    Examples:
        >>> read_texts([{"anchor": "join PDFs", "positive": "Merges.", "negative": "Sorts."}])
        {'join PDFs': {'Merges.': <Verdict.REQUIRED>, 'Sorts.': <Verdict.IRRELEVANT>}}
    """
    if isinstance(source, Path | str):
        rows = read_records(Path(source))
    else:
        rows = ((f"row {number}", row) for number, row in enumerate(rows_of(source, "source"), 1))
    columns: list[str] = []
    verdicts_by_query: dict[str, dict[str, Verdict]] = {}
    for where, row in rows:
        columns = columns or [*row]  # of the first row
        values = [row.get(column) for column in columns]
        are_texts = all(isinstance(value, str | None) for value in values) and all(values[:2])
        if len(columns) < 2 or row.keys() - {*columns} or not are_texts:
            problem = f"is no row of texts: {', '.join(map(str, row))}"
            fix = "the columns are a query, a positive and perhaps negatives, all of them texts"
            raise SkilltrainError("invalid-row", problem, where=where, fix=fix)

        query, positive, *negatives = [clean_text(value or "").strip() for value in values]
        verdicts = verdicts_by_query.setdefault(query, {})
        verdicts[positive] = Verdict.REQUIRED
        for negative in filter(None, negatives):
            verdicts.setdefault(negative, Verdict.IRRELEVANT)
    if not verdicts_by_query:
        raise SkilltrainError("nothing-left", "there is no row of texts", where="source")
    return verdicts_by_query
