"""How gold skills differ from the rest of the pool in structure, not in content (SkillFlow, section 4.3)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FeatureComparison:
    """One structural feature of gold skills against the others: medians (or shares), and a two-sided Mann-Whitney test.

    `p` is adjusted by Holm over all features, `effect` is the probability that a random gold skill has more of it
    than a random other, ties counted half (0.5: no difference).
    """

    feature: str
    gold: float
    others: float
    effect: float
    p: float
    num_gold: int
    num_others: int
