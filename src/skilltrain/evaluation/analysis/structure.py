"""How gold skills differ from the rest of the pool in structure, not in content (SkillFlow, section 4.3)."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.comparison import holm
from skilltrain.terminal import track
from skilltrain.texts import words_of

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

# The bounds keep a text that repeats `scripts/` from costing more than its length.
_MENTIONS = {
    "mentions a script": re.compile(r"(?<![\w-])scripts?/[\w./-]{0,100}\.(?:py|sh|bash|js|mjs|ts|rb|pl|ps1|R)\b"),
    "mentions a reference file": re.compile(r"(?<![\w-])references?/[\w./-]{0,100}\.(?:md|txt|rst|pdf|json|ya?ml)\b"),
}


@dataclass(frozen=True, slots=True)
class FeatureComparison:
    """A feature of gold skills against the others: medians (shares where it is 0 or 1) and a Mann-Whitney test, whose
    `p` is Holm's over all features. `effect`: how likely a random gold skill has more than a random other, ties half.
    """

    feature: str
    gold: float
    others: float
    effect: float
    p: float
    num_gold: int
    num_others: int


def structure_features(body: str) -> dict[str, float]:
    """Feature → value for one skill's body, read as CommonMark, up to 20 blocks inside one another.

    Nothing but words counts inside code. Mentions (0 or 1) stand in for SkillFlow's bundled files: no table has them.
    """
    text = body.replace("\r\n", "\n")
    blocks = _parser().parse(text)
    num_words = len(words_of(text))
    code = [block.content for block in blocks if block.type == "fence"]
    kinds = Counter(token.type for block in blocks for token in (block, *(block.children or ())))
    ordered = sum(block.type == "list_item_open" and block.markup in (".", ")") for block in blocks)
    return {
        "words": num_words,
        "code share": sum(map(len, code)) / max(1, len(text)),
        "code blocks": len(code),
        "headings": kinds["heading_open"],
        "ordered items": ordered,
        "unordered items": kinds["list_item_open"] - ordered,
        "inline code per 100 words": 100 * kinds["code_inline"] / max(1, num_words),
        "links": kinds["link_open"],
        **{name: float(pattern.search(text) is not None) for name, pattern in _MENTIONS.items()},
    }


def compare_structure(gold_bodies: Iterable[str], other_bodies: Iterable[str]) -> tuple[FeatureComparison, ...]:
    """Every feature of gold skills' bodies against those of others, which should not hold the gold ones."""
    from scipy.stats import mannwhitneyu

    gold, others = _features(gold_bodies, "gold"), _features(other_bodies, "other")
    tests = [mannwhitneyu(values, others[name], alternative="two-sided") for name, values in gold.items()]
    adjusted = holm([float(test.pvalue) for test in tests])
    compared: list[FeatureComparison] = []
    for (name, values), test, p in zip(gold.items(), tests, adjusted, strict=True):
        middle = np.mean if name in _MENTIONS else np.median
        middles, nums = (float(middle(values)), float(middle(others[name]))), (len(values), len(others[name]))
        compared.append(FeatureComparison(name, *middles, float(test.statistic) / (nums[0] * nums[1]), p, *nums))
    return tuple(compared)


def _features(bodies: Iterable[str], kind: str) -> dict[str, Float[np.ndarray, " skill"]]:
    """Feature → its value in each body. Raises SkilltrainError for no bodies."""
    rows = [structure_features(body) for body in track(bodies, f"structure of {kind} skills", None)]
    if not rows:
        raise SkilltrainError(f"no {kind} skills, whose structure could be compared")
    return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]}


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").disable(["emphasis", "entity", "newline"])  # they decide nothing here
