#!/usr/bin/env python
"""BM25 without bodies under other ways of cutting words: what SkillRouter's ".000 across all metrics" can come from.

python benchmarks/bm25_words.py DATA

DATA holds pool/*.parquet and skillsbench-dev/ (SkillRouter's format). Prints a Markdown table, with 95% bootstrap
intervals over the tasks. About two minutes.
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

MEASURES, DEPTH = ("Hit@1", "MRR@10", "Recall@50"), 50
_VOCABULARY = Vocabulary()

Cut = Callable[[str], Iterable[str]]
CUTS: dict[str, Cut] = {
    "our terms: stemmed, without stop words": lambda text: our_terms(text),
    "lower-case words": lambda text: re.findall(r"\w+", text.lower()),
    "lower-case words of two letters and more (bm25s' own)": lambda text: re.findall(
        r"(?u)\b\w\w+\b", text.lower()
    ),
    "lower case, cut at blanks": lambda text: text.lower().split(),
    "cut at blanks": str.split,
}


def our_terms(text: str) -> list[str]:
    """The terms that skilltrain's BM25 makes of a text."""
    return [stem for _, stem in _VOCABULARY.stems(text)]


SHOWN: dict[str, Callable[[Skill], str]] = {
    "all": lambda skill: f"{skill.name} {skill.description} {skill.body}",
    "name and description": lambda skill: f"{skill.name} {skill.description}",
    "name": lambda skill: skill.name,
}


def cells(
    skills: list[Skill], text_of: Callable[[Skill], str], cut: Cut, benchmark: Benchmark
) -> str:
    """The measures of BM25 (Lucene's formula, k1 = 1.5, b = .75) over the skills' texts."""
    numbers, ids = dict[str, int](), [skill.skill_id for skill in skills]
    corpus = [
        [numbers.setdefault(word, len(numbers)) for word in cut(text_of(skill))] for skill in skills
    ]
    index = bm25s.BM25(method="lucene")
    index.index((corpus, numbers), show_progress=False)
    rankings: dict[str, list[str]] = {}
    for task in benchmark.tasks:
        words = [numbers[word] for word in cut(task.query.text) if word in numbers]
        scores = index.get_scores_from_ids(words)
        best = top_k(scores, DEPTH)
        rankings[task.query.query_id] = [ids[int(place)] for place in best if scores[place] > 0]
    values = per_query(rankings, benchmark.relevances, parse_measures(MEASURES))
    rows = np.array([[found[name] for name in MEASURES] for found in values.values()])
    return " | ".join(map(str, intervals(rows)))


def main() -> None:
    """Print the table."""
    data = Path(sys.argv[1])
    benchmark = load_benchmark(data / "skillsbench-dev")
    skills = [*benchmark.with_gold(read_pool(data / "pool")).values()]
    print(
        f"| {len(skills)} skills, n = {len(benchmark.tasks)} tasks | words | {' | '.join(MEASURES)} |"
    )
    print(f"| --- | --- |{' ---: |' * len(MEASURES)}")
    for shown, text_of in SHOWN.items():
        for title, cut in CUTS.items():
            print(f"| {shown} | {title} | {cells(skills, text_of, cut, benchmark)} |", flush=True)


if __name__ == "__main__":
    main()
