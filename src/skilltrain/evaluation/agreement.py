"""How far two judges agree beyond chance: Cohen's kappa, with an interval over the groups that they judged."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.bootstrap import LEVEL, Interval

RESAMPLES = 2_000


def agreement(groups: Sequence[Sequence[tuple[str, str]]], *, seed: int) -> Interval:
    """Kappa over all pairs of verdicts (the first judge's, the second's), n of them.

    Its interval draws whole groups: what one request makes a judge think of its skills is no independent evidence.
    Raises SkilltrainError where nothing was judged twice.
    """
    pairs = [pair for group in groups for pair in group]
    if not pairs:
        raise SkilltrainError("no skill was judged twice")
    labels = {label: place for place, label in enumerate(sorted({label for pair in pairs for label in pair}))}
    counts = np.zeros((len(groups), len(labels), len(labels)))
    for number, group in enumerate(groups):
        for first, second in group:
            counts[number, labels[first], labels[second]] += 1
    drawn = np.random.default_rng(seed).multinomial(len(groups), np.full(len(groups), 1 / len(groups)), RESAMPLES)
    low, high = np.quantile(cohens_kappa(np.tensordot(drawn, counts, 1)), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(cohens_kappa(counts.sum(0)[None])[0]), float(low), float(high), len(pairs))


def cohens_kappa(tables: Float[np.ndarray, "table label label"]) -> Float[np.ndarray, " table"]:
    """(p - e) / (1 - e) of each table of counts: p is the share of agreement, e what the margins alone would give.

    Two judges that know one label only agree, and have 1 (Cohen, 1960, leaves it open).
    """
    shares = tables / np.maximum(tables.sum((1, 2), keepdims=True), 1)
    observed = np.trace(shares, axis1=1, axis2=2)
    expected = (shares.sum(1) * shares.sum(2)).sum(1)
    return np.where(expected < 1, (observed - expected) / np.where(expected < 1, 1 - expected, 1), 1.0)
