#!/usr/bin/env python
"""Compare ways to split texts into words for BM25, with and without the bodies of skills.

python benchmarks/bm25_words.py DATA

This shows where SkillRouter's ".000 across all metrics" of BM25 without bodies can come from. DATA
holds pool/*.parquet and skillsbench-dev/ (SkillRouter's format). Prints a Markdown table, with 95%
bootstrap intervals over the tasks. Takes about two minutes.
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import bm25s
import numpy as np

from skilltrain.data.pool.read import read_pool
from skilltrain.metrics.benchmarks.benchmark import Benchmark
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.metrics.bootstrap import intervals
from skilltrain.metrics.measures import parse_measures, per_query
from skilltrain.records import Skill
from skilltrain.retrieval.lexical import Vocabulary, top_k

MEASURES = ("Hit@1", "MRR@10", "Recall@50")
DEPTH = 50
_VOCABULARY = Vocabulary()

Split = Callable[[str], Iterable[str]]


def our_terms(text: str) -> list[str]:
    """Return the terms of a text in skilltrain's BM25."""
    return [stem for _, stem in _VOCABULARY.words_and_stems(text)]


SPLITS: dict[str, Split] = {
    "our terms: stemmed, without stop words": our_terms,
    "lower-case words": lambda text: re.findall(r"\w+", text.lower()),
    "lower-case words of two letters and more (bm25s' own)": lambda text: re.findall(
        r"\b\w\w+\b", text.lower()
    ),
    "lower case, cut at blanks": lambda text: text.lower().split(),
    "cut at blanks": str.split,
}
TEXTS: dict[str, Callable[[Skill], str]] = {
    "all": lambda skill: f"{skill.name} {skill.description} {skill.body}",
    "name and description": lambda skill: f"{skill.name} {skill.description}",
    "name": lambda skill: skill.name,
}


def evaluate_bm25(
    skills: list[Skill], text_of: Callable[[Skill], str], split: Split, benchmark: Benchmark
) -> str:
    """Rank the skills with BM25 for each task, and format the mean of each measure.

    BM25 has Lucene's formula with k1 = 1.5 and b = .75.

    Args:
        skills: Skills of the pool.
        text_of: Returns the text of a skill that is searched.
        split: Splits a text into words.
        benchmark: Tasks and their gold skills.
    """
    numbers: dict[str, int] = {}  # number of each word
    corpus: list[list[int]] = []
    for skill in skills:
        words = split(text_of(skill))
        corpus.append([numbers.setdefault(word, len(numbers)) for word in words])
    index = bm25s.BM25(method="lucene")
    index.index((corpus, numbers), show_progress=False)

    rankings: dict[str, list[str]] = {}
    for task in benchmark.tasks:
        query = [numbers[word] for word in split(task.query.text) if word in numbers]
        scores = index.get_scores_from_ids(query)  # [skill]
        best = [position for position in top_k(scores, DEPTH) if scores[position] > 0]
        rankings[task.query.query_id] = [skills[position].skill_id for position in best]
    values = per_query(rankings, benchmark.relevances, parse_measures(MEASURES))
    rows = np.array([list(row.values()) for row in values.values()])  # [task, measure]
    return " | ".join(map(str, intervals(rows)))


def main(data: Path) -> None:
    """Print a table with one row per text of a skill and way to split it."""
    benchmark = load_benchmark(data / "skillsbench-dev")
    skills = [*benchmark.with_gold(read_pool(data / "pool")).values()]
    size = f"{len(skills)} skills, n = {len(benchmark.tasks)} tasks"
    print(f"| {size} | words | {' | '.join(MEASURES)} |")
    print(f"| --- | --- |{' ---: |' * len(MEASURES)}")
    for title, text_of in TEXTS.items():
        for words, split in SPLITS.items():
            cells = evaluate_bm25(skills, text_of, split, benchmark)
            print(f"| {title} | {words} | {cells} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
