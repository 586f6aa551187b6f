"""Stage `calibrate`: what a router's scores are worth, on queries that a skill serves and on such that none does.

Each query is routed twice: over the pool as it is, and as if the skills that serve it and their copies were not there,
so that whatever is answered then is wrong. All figures are by cross-validation over the queries.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64
from pydantic import Field

from skilltrain import __version__
from skilltrain.config import Config, InputPath, Seed
from skilltrain.data.near_duplicates import copies_of
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import check_pool, knowing_copies
from skilltrain.evaluation.benchmarks.load import load_benchmark, read_unserved
from skilltrain.evaluation.bootstrap import share
from skilltrain.evaluation.metrics import Relevance
from skilltrain.files import write_json
from skilltrain.routing.answer import Traced
from skilltrain.routing.confidence import (
    CALIBRATION_FILE,
    Calibration,
    Calibrator,
    Evidence,
    bound,
    calibration_error,
    fit_logistic,
    risk_coverage,
)
from skilltrain.routing.fusion import folds_of
from skilltrain.routing.index import Index
from skilltrain.routing.router import Router
from skilltrain.runs import input_fingerprint
from skilltrain.terminal import track

_FITTED = 3
_ANY = -1e9  # below every score


class CalibrateConfig(Config):
    """Fit probabilities to a router's scores, and the threshold below which it answers that no skill fits."""

    stage: Literal["calibrate"]
    router: InputPath = Field(description="folder of the router")
    queries: InputPath = Field(description="folder with the QUERIES and JUDGEMENTS tables, or of a benchmark")
    split: str | None = Field(default="dev", description="queries that no model was trained on; null for all")
    clusters: InputPath | None = Field(
        default=None, description="CLUSTERS of the pool: copies of a gold skill count as right, and go with it"
    )
    unserved: InputPath | None = Field(
        default=None, description="JSON Lines file of queries (key `query`) that no skill serves, to be measured on"
    )
    answered: float = Field(
        default=0.9, gt=0, lt=1, description="share of the tasks that a skill serves to be answered; sets the threshold"
    )
    contained: float = Field(
        default=0.9, gt=0, lt=1, description="share of these tasks whose likely set is to hold a right skill"
    )
    folds: int = Field(default=5, ge=2, description="parts of the queries for cross-validation")
    seed: Seed = Field(default=0, description="seed of the folds")
    out: Path = Field(description=f"folder to write: {CALIBRATION_FILE}, which the stage index takes in")


@dataclass(frozen=True)
class Case:
    """A query's evidence, which of its ranked skills are right, and whether the pool holds any."""

    evidence: Evidence
    right: tuple[bool, ...]
    is_served: bool


def run_calibrate(config: CalibrateConfig, out: Path) -> dict[str, Any]:
    """Write the calibration; its figures.

    Raises SkilltrainError for a gold skill that the router does not hold, for fewer groups of queries than folds, and
    for a router whose first skills are never or always right.
    """
    router, record = Router.load(config.router), Index.open(config.router).record
    benchmark = check_pool(load_benchmark(config.queries, config.split), router.skills.keys())
    if config.clusters is not None:
        gold = {skill_id for task in benchmark.tasks for skill_id in task.relevance.gold}
        benchmark = knowing_copies(benchmark, copies_of(gold, router.skills, config.clusters))
    _, folds = folds_of(benchmark.tasks, config.folds, config.seed)
    cases: list[Case] = []
    for task in track(benchmark.tasks, "routing", len(benchmark.tasks)):
        right = _right(task.relevance)
        cases.append(_case(router.trace(task.query.text), right, True))
        cases.append(_case(router.trace(task.query.text, right), right, False))
    calibrator = fit_calibrator(cases, config.answered, config.contained)
    figures = _figures(cases, np.repeat(folds, 2), config)
    if config.unserved is not None:
        unserved = read_unserved(config.unserved)
        figures["unserved"] = asdict(
            share([calibrator.fits(router.trace(query.text).evidence()) for query in unserved])
        )
    inputs = {"queries": config.queries, "clusters": config.clusters, "unserved": config.unserved}
    calibration = Calibration(
        system=record.rankers, models=record.models, calibrator=calibrator, answered=config.answered,
        contained=config.contained, num_queries=len(benchmark.tasks), figures=figures, skilltrain=__version__,
        fingerprints={key: input_fingerprint(path) for key, path in inputs.items() if path is not None},
    )  # fmt: skip
    write_json(out / CALIBRATION_FILE, calibration.model_dump(mode="json"))
    return {"num_queries": len(benchmark.tasks), **figures}


def _right(relevance: Relevance) -> frozenset[str]:
    """Every skill that does some good to a query."""
    gains = (skill_id for skill_id, gain in relevance.gains.items() if gain > 0)
    return frozenset([*relevance.gold, *relevance.alternatives, *relevance.copies, *gains])


def _case(traced: Traced, right: frozenset[str], is_served: bool) -> Case:
    return Case(traced.evidence(), tuple(skill_id in right for skill_id, _ in traced.ranking), is_served)


def fit_calibrator(cases: Sequence[Case], answered: float, contained: float) -> Calibrator:
    """Probabilities by the first skills of all cases; threshold and likely set by the cases that a skill serves.

    Further skills than the first three are nearly never right, and would only tell that.

    Raises SkilltrainError where the first skill is never right.
    """
    if not any(case.right[:1] == (True,) for case in cases):
        raise SkilltrainError("the router's first skill is never right, so there is nothing to calibrate")
    rankers = tuple(cases[0].evidence.tops)
    rows = np.concatenate([case.evidence.rows(rankers)[:_FITTED] for case in cases])
    weights, intercept = fit_logistic(rows, np.concatenate([case.right[:_FITTED] for case in cases]))
    start = {"threshold": 0.0, "least": (), "miss": 1.0}
    found = Calibrator(rankers=rankers, weights=tuple(weights.tolist()), intercept=intercept, **start)
    served = [(case, found.probabilities(case.evidence)) for case in cases if case.is_served]
    level = 1 - (1 - answered) / (1 + len(rankers))  # each bound may turn away as many: together, 1 - answered at most
    tops = np.array([max(probabilities, default=0.0) for _, probabilities in served])
    best_of = [np.array([case.evidence.tops[name] for case, _ in served]) for name in rankers]
    least = tuple(bound(values, level, _ANY) for values in best_of)
    best = np.array([max(probabilities[[*case.right]], default=0.0) for case, probabilities in served])
    limits = {"threshold": bound(tops, level), "least": least, "miss": 1 - bound(best, contained)}
    return found.model_copy(update=limits)


def _figures(cases: Sequence[Case], folds: Int64[np.ndarray, " case"], config: CalibrateConfig) -> dict[str, Any]:
    """What calibrators are worth that were fitted on the cases of other folds.

    `answered`, `contained` and `num_likely` are over the queries as they are, `falsely_answered` over those whose
    skills were taken away; `calibration_error` and `risk_coverage` are over both, in equal parts.
    """
    tops, right, fits, contains, sizes = (np.zeros(len(cases)) for _ in range(5))
    for fold in range(folds.max() + 1):
        others = [case for case, own in zip(cases, folds, strict=True) if own != fold]
        calibrator = fit_calibrator(others, config.answered, config.contained)
        for place in np.flatnonzero(folds == fold).tolist():
            case = cases[place]
            found = calibrator.probabilities(case.evidence)
            tops[place], right[place] = max(found, default=0.0), any(case.right[:1])
            fits[place], sizes[place] = calibrator.fits(case.evidence), calibrator.num_likely(case.evidence)
            contains[place] = any(case.right[: int(sizes[place])])
    served = np.array([case.is_served for case in cases])
    return {
        "right": asdict(share(right[served])),
        "answered": asdict(share(fits[served])),
        "right_if_answered": asdict(share(right[served & (fits > 0)])),
        "falsely_answered": asdict(share(fits[~served])),
        "contained": asdict(share(contains[served])),
        "num_likely": float(sizes[served].mean()),
        "calibration_error": calibration_error(tops, right > 0),
        "risk_coverage": risk_coverage(tops, right > 0),
        "risk_coverage_served": risk_coverage(tops[served], right[served] > 0),
    }
