#!/usr/bin/env python
"""Measure how well a router says that no skill fits, on requests of authors that it has not seen.

python benchmarks/no_skill.py ROUTER QUERIES [--group source] [--unserved FILE]

ROUTER is a router of `fit` or `index`, and QUERIES a folder of the stage `queries`. No model of the
router may be trained on these queries. They are cut into five folds by author: the first part of
the gold skill's id, or with `--group source` the skill's source. A query counts as served, and it
is routed again without any skill of its author, so that no skill serves it.

Prints a Markdown table with 95% Wilson intervals. The first row has the calibration that the router
holds. `fit` makes it from passages of the skills. The second row has calibrations that are fitted
to the queries of the other folds. Takes about a minute for 1,000 queries.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from skilltrain.metrics.benchmarks.benchmark import Task
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.metrics.bootstrap import share
from skilltrain.serving.calibrate import (
    GENERAL_REQUESTS,
    Calibrate,
    Case,
    fit_calibrator,
    fit_out_of_fold,
    route_tasks,
    route_unserved,
)
from skilltrain.serving.router import Router

NUM_FOLDS = 5
COLUMNS = {
    "served": "served: refused",
    "author": "author removed: answered",
    "general": "general: answered",
    "unserved": "other unserved: answered",
}


def authors_of(tasks: Sequence[Task], router: Router, group: str) -> list[str]:
    """Return the author or the source of the first gold skill of each task."""
    authors: list[str] = []
    for task in tasks:
        skill = router.skills[min(task.relevance.gold)]
        authors.append(skill.source if group == "source" else skill.skill_id.partition("/")[0])
    return authors


def route_without_authors(
    router: Router, tasks: Sequence[Task], authors: Sequence[str], group: str
) -> list[Case]:
    """Route each task without the skills of its author, and without those that serve it."""
    cases: list[Case] = []
    for task, author in zip(tasks, authors, strict=True):
        hidden_ids = set(task.relevance.gold)
        for skill in router.skills.values():
            owner = skill.source if group == "source" else skill.skill_id.partition("/")[0]
            if owner == author:
                hidden_ids.add(skill.skill_id)
        trace = router.trace(task.query.text, without=hidden_ids)
        cases.append(Case(trace, np.zeros(len(trace.ranking), dtype=bool), "hidden"))
    return cases


def main() -> None:
    """Print a row for the router's calibration, and one for calibrations fitted to other folds."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("router", type=Path)
    parser.add_argument("queries", type=Path)
    parser.add_argument("--group", choices=["author", "source"], default="author")
    parser.add_argument("--unserved", type=Path, help="JSON Lines of requests without a skill")
    options = parser.parse_args()

    router = Router.load(options.router)
    tasks = load_benchmark(options.queries).tasks
    authors = authors_of(tasks, router, options.group)
    task_cases = route_tasks(router, tasks)  # the served and the hidden case of each task
    general_cases = route_unserved(router, GENERAL_REQUESTS, "general")
    cases = [*task_cases, *general_cases]

    # All tasks of one author are in the same fold. General requests are cut at random.
    rng = np.random.default_rng(0)
    fold_by_author = {}
    for position, author in enumerate(rng.permutation(sorted(set(authors))).tolist()):
        fold_by_author[author] = position % NUM_FOLDS
    task_folds = np.array([fold_by_author[author] for author in authors])
    general_folds = rng.permutation(np.arange(len(general_cases)) % NUM_FOLDS)
    folds = np.concatenate([np.repeat(task_folds, 2), general_folds])

    # The cases to judge, and the fold of each.
    judged = {
        "served": (task_cases[::2], task_folds),
        "author": (route_without_authors(router, tasks, authors, options.group), task_folds),
        "general": (general_cases, general_folds),
    }
    if options.unserved:
        unserved = route_unserved(router, options.unserved, "unserved")
        judged["unserved"] = (unserved, rng.permutation(np.arange(len(unserved)) % NUM_FOLDS))

    config = Calibrate.model_construct(answered=None, contained=0.9)
    of_case = fit_out_of_fold(lambda rest: fit_calibrator(rest, config), cases, folds)
    by_fold = {int(fold): of_case[position] for position, fold in enumerate(folds)}
    systems = {"fitted to other authors' queries": by_fold}
    assert router.index is not None
    if router.index.record.calibration:
        own = router.index.record.calibration.calibrator
        systems = {"the router's own": dict.fromkeys(range(NUM_FOLDS), own)} | systems

    print(f"| {len(router.skills)} skills | {' | '.join(COLUMNS[name] for name in judged)} |")
    print(f"| --- |{' ---: |' * len(judged)}")
    for title, calibrators in systems.items():
        cells: list[str] = []
        for name, (kind_cases, kind_folds) in judged.items():
            answered = [
                calibrators[int(fold)].answers(case.trace)
                for case, fold in zip(kind_cases, kind_folds, strict=True)
            ]
            values = np.array(answered)
            interval = share(~values if name == "served" else values)
            cells.append(f"{interval}, n = {interval.n}")
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
