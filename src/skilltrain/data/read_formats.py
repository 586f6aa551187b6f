"""Read training data in the formats of other tools: BEIR, MTEB and sentence-transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skilltrain.arguments import rows_of
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_records
from skilltrain.metrics.benchmarks.qrels import beir_tasks, read_beir_queries
from skilltrain.records import Verdict
from skilltrain.texts import clean_text, shorten

# Our name of each split of BEIR and MTEB. Queries of other splits get no split here.
_SPLITS = {"train": "train", "dev": "dev", "validation": "dev", "test": "test"}


def beir_query_rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the judged queries of a BEIR or MTEB folder as rows of a query file.

    A skill with a score above 0 is required. Any other score means irrelevant.

    Args:
        folder: Folder of the queries, with their judgements in the folder qrels.

    Yields:
        Pairs of a position and a row. The position names the file of the judgements and the query,
        for error messages.
    """
    for task in beir_tasks(folder, read_beir_queries(folder)):
        query = task.query
        gold = task.relevance.gold  # ids of the skills with a score above 0
        yield (
            f"{task.where}, query {query.query_id}",
            {
                "query_id": query.query_id,
                "query": query.text,
                "origin": query.origin,
                "split": _SPLITS.get(query.split),
                # The order of a set differs between two runs of Python.
                "required": sorted(gold),
                # `gains` has all judged skills.
                "irrelevant": sorted(task.relevance.gains.keys() - gold),
            },
        )


def read_texts(source: Any) -> dict[str, dict[str, Verdict]]:
    """Read pairs, triplets or longer rows of texts, as sentence-transformers trains on them.

    The columns are a query, a positive, and any number of negatives, in this order. The names of
    the columns do not matter. Rows of one query become one list. If one row has a text as positive
    and another row as negative, the text is a positive. The value of a negative may be missing.

    Args:
        source: A file .jsonl, .jsonl.gz, .csv or .parquet, or rows as in `rows_of`.

    Returns:
        Verdict by text, for each query by its text.

    Raises:
        SkilltrainError: A row lacks the query or the positive, has a value that is no text, or has
            a column that the longest row lacks; or there is no row.

    Examples:
        >>> read_texts([{"anchor": "join PDFs", "positive": "Merges.", "negative": "Sorts."}])
        {'join PDFs': {'Merges.': <Verdict.REQUIRED>, 'Sorts.': <Verdict.IRRELEVANT>}}
    """
    if isinstance(source, Path | str):
        rows = [*read_records(Path(source))]
    else:
        rows = [(f"row {number}", row) for number, row in enumerate(rows_of(source, "source"), 1)]
    # A row may lack negatives, so the longest row gives the columns and their order.
    columns = [*max((row for _, row in rows), key=len, default={})]
    verdicts_by_query: dict[str, dict[str, Verdict]] = {}
    for where, row in rows:
        values = [row.get(column) for column in columns]
        texts: list[str] = []  # stays empty if a value is neither a text nor missing
        if all(isinstance(value, str | None) for value in values):
            texts = [clean_text(value or "").strip() for value in values]
        # The query and the positive are not missing or blank. The difference is the columns that
        # the longest row lacks.
        if len(texts) < 2 or not all(texts[:2]) or row.keys() - {*columns}:
            problem = f"is no row of texts: {shorten(', '.join(map(str, row)), 200)}"
            fix = "the columns are a query, a positive and perhaps negatives, all of them texts"
            raise SkilltrainError("invalid-row", problem, where=where, fix=fix)

        query, positive, *negatives = texts
        verdicts = verdicts_by_query.setdefault(query, {})
        verdicts[positive] = Verdict.REQUIRED
        # `filter` leaves out missing negatives. `setdefault` keeps the verdict of a positive.
        for negative in filter(None, negatives):
            verdicts.setdefault(negative, Verdict.IRRELEVANT)
    if not verdicts_by_query:
        raise SkilltrainError("nothing-left", "there is no row of texts", where="source")
    return verdicts_by_query
