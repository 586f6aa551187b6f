#!/usr/bin/env python
"""Measure how well a router says that no skill fits, on requests of authors that it has not seen.

python benchmarks/no_skill.py ROUTER QUERIES [--group source] [--unserved FILE]

ROUTER is a router of `fit` or `index`, and QUERIES a folder of the stage `queries`. No model of the
router may be trained on these queries. They are cut into five folds by author: the first part of
the gold skill's id, or with `--group source` the skill's source. A query counts as served, and it
is routed again without any skill of its author, so that no skill serves it.

Prints a Markdown table with 95% Wilson intervals. The first row has the calibration that the router
holds. `fit` makes it from passages of the skills and from these same general requests. The second
row has calibrations that are fitted to the requests of the other folds. Takes about a minute for
1,000 queries.
"""

from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path

import numpy as np

from skilltrain.metrics.benchmarks.benchmark import Task
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.metrics.bootstrap import share
from skilltrain.serving.answer import Calibrator
from skilltrain.serving.calibrate import (
    GENERAL_REQUESTS,
    Calibrate,
    Case,
    fit_calibrator,
    route_tasks,
    route_unserved,
)
from skilltrain.serving.router import Router

NUM_FOLDS = 5
Judged = Mapping[str, tuple[Sequence[Case], np.ndarray]]
"""Cases to judge, and the fold of each, by the title of their column."""


def authors_by_id(router: Router, group: str) -> dict[str, str]:
    """Return the author or the source of each skill."""
    authors: dict[str, str] = {}
    for skill in router.skills.values():
        author = skill.skill_id.partition("/")[0]
        authors[skill.skill_id] = skill.source if group == "source" else author
    return authors


def route_without_authors(
    router: Router, tasks: Sequence[Task], author_of: Mapping[str, str]
) -> list[Case]:
    """Route each task without the skills of its author, and without those that serve it."""
    cases: list[Case] = []
    for task in tasks:
        gold_ids = task.relevance.gold
        author = author_of[min(gold_ids)]
        ids_of_author = {skill_id for skill_id in author_of if author_of[skill_id] == author}
        trace = router.trace(task.query.text, without=ids_of_author | gold_ids)
        cases.append(Case(trace, np.zeros(len(trace.ranking), dtype=bool), "hidden"))
    return cases


def assign_author_folds(tasks: Sequence[Task], author_of: Mapping[str, str]) -> np.ndarray:
    """Return the fold of each task. Authors go, most tasks first, to the fold with the fewest."""
    authors = [author_of[min(task.relevance.gold)] for task in tasks]
    fold_sizes = [0] * NUM_FOLDS
    fold_by_author: dict[str, int] = {}
    for author, num_tasks in Counter(authors).most_common():
        fold = fold_sizes.index(min(fold_sizes))
        fold_by_author[author] = fold
        fold_sizes[fold] += num_tasks
    return np.array([fold_by_author[author] for author in authors])


def print_row(title: str, calibrators: Sequence[Calibrator], judged: Judged) -> None:
    """Print the share of wrong decisions in each column. `calibrators` has one for each fold."""
    cells = [title]
    for column, (cases, folds) in judged.items():
        answered: list[bool] = []
        for case, fold in zip(cases, folds.tolist(), strict=True):
            answered.append(calibrators[fold].answers(case.trace))
        is_wrong = ~np.array(answered) if column.endswith("refused") else np.array(answered)
        interval = share(is_wrong)
        cells.append(f"{interval}, n = {interval.n}")
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print a row for the router's calibration, and one for calibrations fitted to other folds."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("router", type=Path)
    parser.add_argument("queries", type=Path)
    parser.add_argument("--group", choices=["author", "source"], default="author")
    parser.add_argument("--unserved", type=Path, help="JSON Lines of requests without a skill")
    options = parser.parse_args()

    # Route all requests.
    router = Router.load(options.router)
    tasks = load_benchmark(options.queries).tasks
    author_of = authors_by_id(router, options.group)
    task_cases = route_tasks(router, tasks)  # of each task its served and its hidden case
    general_cases = route_unserved(router, GENERAL_REQUESTS, "general")
    task_folds = assign_author_folds(tasks, author_of)
    general_folds = np.arange(len(general_cases)) % NUM_FOLDS
    judged = {
        "served: refused": (task_cases[::2], task_folds),
        "author removed: answered": (route_without_authors(router, tasks, author_of), task_folds),
        "general: answered": (general_cases, general_folds),
    }
    if options.unserved:
        cases = route_unserved(router, options.unserved, "unserved")
        judged["unserved: answered"] = (cases, np.arange(len(cases)) % NUM_FOLDS)

    # Fit a calibrator for each fold, to the cases of the other folds.
    cases = [*task_cases, *general_cases]
    folds = np.append(np.repeat(task_folds, 2), general_folds)
    config = Calibrate.model_construct(answered=None, contained=0.9)
    calibrators: list[Calibrator] = []
    for fold in range(NUM_FOLDS):
        calibrators.append(fit_calibrator(list(compress(cases, folds != fold)), config))

    print(f"| {len(router.skills)} skills | {' | '.join(judged)} |")
    print(f"| --- |{' ---: |' * len(judged)}")
    assert router.index is not None
    calibration = router.index.record.calibration
    if calibration is not None:
        print_row("the router's own calibration", [calibration.calibrator] * NUM_FOLDS, judged)
    print_row("fitted to queries for other authors", calibrators, judged)


if __name__ == "__main__":
    main()
