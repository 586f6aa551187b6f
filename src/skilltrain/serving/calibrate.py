"""Stage `calibrate`: fit a router's probabilities on queries that some skill serves, and on others.

Each query is routed twice: over the whole pool, and without the skills that serve it and their
copies. Every answer of the second time is wrong. Further requests that no skill serves come with
the package: small talk, follow-ups, changes of code and general questions.

All metrics are by cross-validation over queries.

- Over all requests: `calibration_error` and `risk_coverage`.
- Shares of wrongly answered requests: of queries whose skills are hidden (`falsely_answered`), of
  general requests (`general`), and of the user's requests that no skill serves (`unserved`).
- Over queries that some skill serves: the share whose first skill is right (`right`), the share
  that is answered (`answered`), the share of right first skills among the answered queries
  (`right_if_answered`), the share whose likely set holds a right skill (`contained`), and the mean
  size of the likely set (`num_likely`).

Notes:
    - A served query whose skills are not found does not teach when to answer. Its answer would not
      help.
    - The two cases of a query are in one fold. So are queries for skills of the same author.
    - With the passages that became queries in the skills, queries would be far easier than requests
      of users.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from math import floor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from skilltrain.config import InputPath, Seed
from skilltrain.data.near_duplicates import copies_of
from skilltrain.data.trigger_evals import UNSERVED_FILE
from skilltrain.errors import SkilltrainError
from skilltrain.files import write_json
from skilltrain.metrics.benchmarks.benchmark import Task, add_copies, check_pool
from skilltrain.metrics.benchmarks.load import load_benchmark, read_unserved
from skilltrain.metrics.bootstrap import share
from skilltrain.metrics.refusal import (
    MAX_REFUSED,
    ScoredRequest,
    assign_folds,
    calibration_error,
    fit_answer_probability,
    fit_out_of_fold,
    fit_skill_probability,
    limit_refusals,
    risk_coverage,
)
from skilltrain.serving.answer import Calibration, Calibrator, Trace
from skilltrain.serving.index import AllowedServers
from skilltrain.serving.indexing import CALIBRATION_FILE
from skilltrain.serving.router import Router
from skilltrain.stage import Stage, Summary
from skilltrain.tables import read_skills
from skilltrain.terminal import say, track

GENERAL_REQUESTS = Path(__file__).with_name("general_requests.jsonl")
"""Requests that hardly any skill serves, which come with the package."""
_ADVISED_QUERIES = 100  # with fewer, a share of .15 has an interval of more than ±.07
# Passages of skills may be easier than requests of users. With 176 skills, thresholds that refused
# .05, .10 and .15 of the passages refused .13, .31 and .41 of 300 requests.
_MAX_REFUSED_PASSAGES = 0.05

CaseKind = Literal["served", "hidden", "general", "unserved"]


class Calibrate(Stage):
    """Teach a router when to answer that no skill fits. Needs queries it was not trained on."""

    example = "router=runs/router queries=runs/queries clusters=runs/clusters out=runs/calibration"
    result = (
        "{num_queries} queries: {answered} answered, {falsely_answered} where no skill fits, and "
        "{general} of general requests; calibration error {calibration_error}"
    )
    next_command = "index calibration={out} out={router}"

    stage: Literal["calibrate"]
    router: InputPath = Field(description="folder of the router")
    queries: InputPath = Field(
        description="folder with the QUERIES and JUDGEMENTS tables, or of a benchmark; at least "
        f"{_ADVISED_QUERIES} queries are advised"
    )
    split: str | None = Field(
        default="dev", description="queries that no model was trained on; null for all"
    )
    max_queries: int | None = Field(
        default=None, ge=1, description="number of queries to draw at random; null for all"
    )
    masked_pool: InputPath | None = Field(
        default=None,
        description="SKILLS without the passages that became queries, as synthesize writes it",
    )
    clusters: InputPath | None = Field(
        default=None, description="CLUSTERS of the pool: copies of gold count as right"
    )
    unserved: InputPath | None = Field(
        default=None,
        description="JSON Lines of further queries (key `query`) that no skill serves; null: "
        f"{UNSERVED_FILE} of the folder `queries`, if it is there",
    )
    answered: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of served tasks to answer: sets the threshold; null refuses at most "
        f"{MAX_REFUSED} of them, or {_MAX_REFUSED_PASSAGES} with `masked_pool`",
    )
    contained: float = Field(
        default=0.9,
        gt=0,
        lt=1,
        description="share of served tasks whose likely skills hold a right one",
    )
    folds: int = Field(
        default=5, ge=2, description="parts of the queries for cross-validation, at most"
    )
    seed: Seed = Field(default=0, description="seed of the folds, and of drawing queries")
    allow_servers: AllowedServers = ()
    out: Path = Field(
        description=f"folder to write: {CALIBRATION_FILE}, which the stage index takes in"
    )

    def run(self, out: Path) -> Summary:
        """Write the calibration, and return its metrics.

        Raises:
            SkilltrainError: The router lacks a gold skill, all queries are for the same skills, or
                the router's first skill is never right.
        """
        router = Router.load(self.router, self.allow_servers)
        assert router.index is not None
        record = router.index.record
        tasks = self._read_tasks(router)
        # If skills hold the passages that became queries, the queries are far too easy.
        if self.masked_pool is not None:
            router = _without_passages(router, tasks, self.masked_pool)

        # Route all requests. `route_tasks` makes two cases of each query. Both are in one fold.
        query_cases = route_tasks(router, tasks)
        query_folds = assign_folds(tasks, self.folds, self.seed)
        unserved_cases = self._route_unserved(router)
        cases = query_cases + unserved_cases
        folds = _folds_of_cases(query_folds, len(unserved_cases))

        # The router gets the calibrator of all cases. Cross-validation only gives its metrics.
        calibrator = fit_calibrator(cases, self)
        if calibrator.threshold == 0:
            say("warning: the threshold is 0, because the queries are too few for this `answered`")
        calibration = Calibration(
            system=record.rankers,
            models=record.models,
            calibrator=calibrator,
            figures=_cross_validate(cases, folds, self),
            num_queries=len(tasks),
        )
        # `values["figures"]` has the metrics as values of JSON, such as lists.
        values = calibration.model_dump(mode="json")
        write_json(out / CALIBRATION_FILE, values)
        return {"num_queries": len(tasks), **values["figures"]}

    def _read_tasks(self, router: Router) -> list[Task]:
        """Read the queries, and draw `max_queries` of them. Warn if there are few.

        Args:
            router: The router, whose pool must have the gold skills of the queries.
        """
        # Gold skills are those that a query asks for.
        benchmark = check_pool(load_benchmark(self.queries, self.split), router.skills.keys())
        if self.clusters is not None:
            gold_ids = set(_gold_ids(benchmark.tasks))
            benchmark = add_copies(benchmark, copies_of(gold_ids, router.skills, self.clusters))

        # Draw positions at random, and keep the drawn queries in their order. With `max_queries`
        # null, the slice takes all.
        shuffled = np.random.default_rng(self.seed).permutation(len(benchmark.tasks))
        positions = sorted(shuffled[: self.max_queries].tolist())
        tasks = [benchmark.tasks[position] for position in positions]
        if len(tasks) < _ADVISED_QUERIES:
            advice = f"at least {_ADVISED_QUERIES} are advised"
            say(f"warning: {len(tasks)} queries to calibrate with; {advice}")
        return tasks

    def _route_unserved(self, router: Router) -> list["Case"]:
        """Route the package's general requests and the user's requests that no skill serves."""
        cases = route_unserved(router, GENERAL_REQUESTS, "general")
        # The folder of the queries may hold such a file, even if the setting names none.
        default_file = self.queries / UNSERVED_FILE
        unserved = self.unserved or (default_file if default_file.is_file() else None)
        if unserved is not None:
            cases += route_unserved(router, unserved, "unserved")
        return cases


class Case(NamedTuple):
    """A routed request.

    Attributes:
        trace: Rankings of the router.
        is_right: [skill] Whether each skill of the final ranking serves the request.
        kind: `served`: a query, with a skill in the pool that serves it. `hidden`: a query, without
            the skills that serve it. `general`: a request of `GENERAL_REQUESTS`. `unserved`: a
            request that the user has found to be served by no skill.
    """

    trace: Trace
    is_right: np.ndarray
    kind: CaseKind

    @property
    def request(self) -> ScoredRequest:
        """The request with the features of all rankers."""
        features = self.trace.features(tuple(self.trace.rankings_by_ranker))
        return ScoredRequest(features, self.is_right, num_gold=int(self.kind == "served"))


def _gold_ids(tasks: Sequence[Task]) -> Iterator[str]:
    """Yield the gold skills of all tasks. They may repeat."""
    return chain.from_iterable(task.relevance.gold for task in tasks)


def _without_passages(router: Router, tasks: Sequence[Task], masked_pool: Path) -> Router:
    """Return a router whose gold skills lack the passages that became queries.

    With these passages in the skills, the queries would be far easier than requests of users.

    Args:
        router: Router over the whole skills.
        tasks: Queries and their gold skills.
        masked_pool: SKILLS table without the passages.
    """
    masked_skills = {skill.skill_id: skill for skill in read_skills(masked_pool)}
    skills = dict(router.skills)
    for skill_id in _gold_ids(tasks):
        # A gold skill that the masked pool lacks stays as it is.
        skills[skill_id] = masked_skills.get(skill_id, skills[skill_id])
    return router.with_skills([*skills.values()])


def route_tasks(router: Router, tasks: Sequence[Task]) -> list[Case]:
    """Route each query twice: over the whole pool, then without the skills that serve it.

    The second ranking has no right skill. It shows how the router scores when nothing fits.
    """
    cases: list[Case] = []
    for task in track(tasks, "routing", len(tasks)):
        relevance = task.relevance
        # Every skill with a gain counts as right, and so do equivalent skills and near-duplicates.
        right_ids = {skill_id for skill_id, gain in relevance.gains.items() if gain > 0}
        right_ids.update(relevance.gold, relevance.alternatives, relevance.copies)
        cases.append(_route(router, task.query.text, right_ids, "served"))
        cases.append(_route(router, task.query.text, right_ids, "hidden"))
    return cases


def _route(router: Router, text: str, right_ids: Collection[str], kind: CaseKind) -> Case:
    """Route one query. For the kind `hidden`, the skills that serve it are left out.

    Args:
        router: The router.
        text: Text of the query.
        right_ids: Ids of the skills that serve the query.
        kind: Kind of the case (see `Case`).
    """
    excluded_ids = right_ids if kind == "hidden" else ()
    trace = router.trace(text, without=excluded_ids)
    is_right = [skill_id in right_ids for skill_id, _ in trace.ranking]
    return Case(trace, np.array(is_right, dtype=bool), kind)


def route_unserved(router: Router, file: Path, kind: CaseKind) -> list[Case]:
    """Route requests of a file that no skill serves."""
    return [_route(router, query.text, (), kind) for query in read_unserved(file)]


def fit_calibrator(cases: Sequence[Case], config: Calibrate) -> Calibrator:
    """Fit the probabilities of a router, then the limits that are derived from them.

    Args:
        cases: Routed requests. Some must have a skill that serves them, and some must have none.
        config: Settings of the stage.

    Returns:
        The calibrator, with both probabilities and both limits.

    Raises:
        SkilltrainError: The first skill is never right.
    """
    requests = [case.request for case in cases]
    if not any(request.first_is_right for request in requests):
        problem = "the router's first skill is never right, so there is nothing to calibrate"
        raise SkilltrainError("cannot-calibrate", problem)

    rankers = tuple(cases[0].trace.rankings_by_ranker)
    # The probability that a certain skill serves a request.
    serves = fit_skill_probability(requests)
    # The probability that any skill serves a request.
    fits = fit_answer_probability(requests)
    # Begin with limits that refuse nothing, then replace both. A skill is likely if 1 - its
    # probability is at most `miss`. A request is answered from the probability `threshold` on.
    unlimited = Calibrator(rankers=rankers, serves=serves, miss=1.0, fits=fits, threshold=0.0)
    threshold = _fit_threshold(unlimited, cases, config)
    miss = _fit_miss(unlimited, cases, config.contained)
    return unlimited.model_copy(update={"threshold": threshold, "miss": miss})


def _fit_threshold(calibrator: Calibrator, cases: Sequence[Case], config: Calibrate) -> float:
    """Return the lowest confidence with which the router answers a request.

    Args:
        calibrator: Calibrator with fitted probabilities, without limits.
        cases: Routed requests.
        config: `answered` is the share of served queries to answer. If `answered` is null, the
            threshold refuses at most the share `MAX_REFUSED` of the served queries.
    """
    # Confidence is the probability that any skill serves a request.
    kinds = np.array([case.kind for case in cases])  # [case]
    confidence = np.array([calibrator.fit_probability(case.trace) for case in cases])  # [case]
    served = confidence[kinds == "served"]
    if config.answered is not None:
        # The confidence of a served query reaches this bound with the probability `answered`.
        return bound(served, config.answered)

    # No skill serves these requests, so the router should refuse them. They come with the package
    # (general) or from the user (unserved).
    general = confidence[np.isin(kinds, ["general", "unserved"])]
    # With `masked_pool`, the queries are passages of skills. Passages are easier than requests of
    # users, so fewer of the passages may be refused.
    max_refused = _MAX_REFUSED_PASSAGES if config.masked_pool else MAX_REFUSED
    return limit_refusals(served, general, max_refused)


def _fit_miss(calibrator: Calibrator, cases: Sequence[Case], contained: float) -> float:
    """Return the limit `miss` with which the share `contained` of likely sets has a right skill.

    The likely set of a query has all skills with a probability of at least 1 - `miss`.

    Args:
        calibrator: Calibrator with fitted probabilities, without limits.
        cases: Routed requests.
        contained: Share of the served queries whose likely set is to hold a right skill.
    """
    served = [case for case in cases if case.kind == "served"]
    # Keep the probabilities of right skills. The likely set needs only the best of them.
    probabilities = [calibrator.probabilities(case.trace)[case.is_right] for case in served]
    best_probabilities = np.array([max(values, default=0.0) for values in probabilities])
    return 1 - bound(best_probabilities, contained)


def bound(values: np.ndarray, level: float) -> float:
    """Return a lower bound for the value of a new query, which holds with the probability `level`.

    The probability is at least `level`. The bound is the (n + 1)(1 - level)-th lowest of the n
    values, or 0 if there are too few. Source: split conformal prediction (Angelopoulos and Bates
    2021, section 1).

    Args:
        values: [query] Values of earlier queries.
        level: Probability between 0 and 1.
    """
    rank = floor((len(values) + 1) * (1 - level) + 1e-9)  # rounding may make .1 · 10 less than 1
    return float(np.sort(values)[rank - 1]) if rank else 0.0


def _folds_of_cases(query_folds: np.ndarray, num_unserved: int) -> np.ndarray:
    """Return the fold of each case: two for each query, then one for each unserved request.

    Args:
        query_folds: [query] Fold of each query.
        num_unserved: Number of unserved requests. They are spread evenly over the folds.
    """
    num_folds = query_folds.max() + 1
    unserved_folds = np.arange(num_unserved) % num_folds
    return np.append(np.repeat(query_folds, 2), unserved_folds)


def _cross_validate(cases: Sequence[Case], folds: np.ndarray, config: Calibrate) -> dict[str, Any]:
    """Return metrics of calibrators on the cases that they were not fitted on.

    Args:
        cases: Routed requests.
        folds: [case] Fold of each case.
        config: Settings of the stage.

    Returns:
        Metrics by name. The module's documentation explains them.
    """
    calibrators = fit_out_of_fold(partial(fit_calibrator, config=config), cases, folds)
    pairs = list(zip(calibrators, cases, strict=True))
    # Each array has one value for each case. The kinds are `served`, `hidden` (a query whose
    # skills were left out), `general` and `unserved` (requests that no skill serves).
    kinds = np.array([case.kind for case in cases])  # [case]
    right = np.array([case.request.first_is_right for case in cases])  # of the first skill
    answered = np.array([calibrator.answers(case.trace) for calibrator, case in pairs])
    probabilities = [calibrator.probabilities(case.trace) for calibrator, case in pairs]
    # The confidence is the highest probability of any skill in the ranking.
    confidence = np.array([max(values, default=0.0) for values in probabilities])

    served = kinds == "served"
    metrics = {
        "right": share(right[served]),
        "answered": share(answered[served]),
        "falsely_answered": share(answered[kinds == "hidden"]),
        "general": share(answered[kinds == "general"]),
        **_likely_set_metrics(pairs),
        "calibration_error": calibration_error(confidence, right),
        "risk_coverage": risk_coverage(confidence, right),
    }
    if any(served & answered):
        metrics["right_if_answered"] = share(right[served & answered])
    if "unserved" in kinds:
        metrics["unserved"] = share(answered[kinds == "unserved"])
    return metrics


def _likely_set_metrics(pairs: Sequence[tuple[Calibrator, Case]]) -> dict[str, Any]:
    """Return how many likely sets of served queries hold a right skill, and their mean size.

    Args:
        pairs: Each case with a calibrator that was not fitted on it.
    """
    contained: list[bool] = []
    sizes: list[int] = []
    for calibrator, case in pairs:
        if case.kind == "served":
            size = calibrator.num_likely(case.trace)
            # The likely set has the first `size` skills of the ranking.
            contained.append(any(case.is_right[:size]))
            sizes.append(size)
    return {"contained": share(contained), "num_likely": float(np.mean(sizes))}
