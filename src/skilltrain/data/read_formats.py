"""Read training data in the formats of other tools."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skilltrain.metrics.benchmarks.benchmark import name_of
from skilltrain.metrics.benchmarks.qrels import (
    beir_files,
    judged_queries,
    qrels_files,
    read_beir_queries,
    split_of,
)

# Our name of each split of BEIR and MTEB. Queries of other splits get no split here.
_SPLITS = {"train": "train", "dev": "dev", "validation": "dev", "test": "test"}


def is_beir_folder(folder: Path) -> bool:
    """Return whether a folder has queries in a format of BEIR or MTEB."""
    return bool(beir_files(folder, "queries"))


def beir_query_rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the judged queries of a BEIR or MTEB folder as rows of a query file.

    A skill with a score above 0 is required. Any other score means irrelevant.

    Yields:
        Pairs of the file of the judgements, for errors, and a row.
    """
    queries = read_beir_queries(folder)
    for file in qrels_files(folder, split=None):
        for query, scores in judged_queries(file, queries):
            yield (
                f"{file}, query {query.row_id}",
                {
                    "query_id": query.row_id,
                    "query": query.text,
                    "origin": name_of(folder),
                    "split": _SPLITS.get(split_of(file)),
                    "required": [skill_id for skill_id, score in scores.items() if score > 0],
                    "irrelevant": [skill_id for skill_id, score in scores.items() if score <= 0],
                },
            )
