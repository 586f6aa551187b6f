"""How gold skills differ from the rest of the pool in structure, not in content (SkillFlow, section 4.3)."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.statistics.significance import holm
from skilltrain.terminal import track
from skilltrain.texts import words_of

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

# Files beside a skill are no part of the SKILLS table: what its text says of them stands in. The bounds keep a text
# that repeats `scripts/` from costing more than its length.
_MENTIONS = {
    "mentions a script": re.compile(r"(?<![\w-])scripts?/[\w./-]{0,100}\.(?:py|sh|bash|js|mjs|ts|rb|pl|ps1|R)\b"),
    "mentions a reference file": re.compile(r"(?<![\w-])references?/[\w./-]{0,100}\.(?:md|txt|rst|pdf|json|ya?ml)\b"),
}


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


def structure_features(body: str) -> dict[str, float]:
    """Feature → value for one skill's body, read as CommonMark.

    Words are those of `texts.words_of`, in code too. `code share` is the characters inside fenced blocks (their fences
    not counted) over all characters; an unclosed block goes on to the end of what holds it, code by indentation alone
    is no block. Items are of lists at any depth, headings of both kinds,
    links also `<https://…>`; none of them counts inside code. The last two are 1 where the text names a file
    `scripts/….py` (or .sh, .js …) or `references/….md`: a proxy for SkillFlow's bundled files, which no table holds.
    What stands in more than 20 blocks inside one another is not read: the parser's guard against hostile text.
    """
    text = body.replace("\r\n", "\n")
    blocks = _parser().parse(text)
    words = len(words_of(text))
    in_line = [token for block in blocks for token in block.children or ()]
    fences = [block for block in blocks if block.type == "fence"]
    ordered, unordered = _count_items(blocks)
    inline_code = sum(token.type == "code_inline" for token in in_line)
    return {
        "words": words,
        "code share": sum(len(fence.content) for fence in fences) / max(1, len(text)),
        "code blocks": len(fences),
        "headings": sum(block.type == "heading_open" for block in blocks),
        "ordered items": ordered,
        "unordered items": unordered,
        "inline code per 100 words": 100 * inline_code / max(1, words),
        "links": sum(token.type == "link_open" for token in in_line),
        **{name: float(pattern.search(text) is not None) for name, pattern in _MENTIONS.items()},
    }


def compare_structure(gold_bodies: Iterable[str], other_bodies: Iterable[str]) -> tuple[FeatureComparison, ...]:
    """Every feature of gold skills' bodies against those of others (which should not hold the gold ones).

    Medians, but shares for the features that are 0 or 1. Raises SkilltrainError if either side is empty.
    """
    all_gold, all_others = _features(gold_bodies, "gold"), _features(other_bodies, "other")
    tests = {name: _mann_whitney(all_gold[name], all_others[name]) for name in all_gold}
    adjusted = holm([p for _, p in tests.values()])
    compared = []
    for (name, (effect, _)), p in zip(tests.items(), adjusted, strict=True):
        middle = np.mean if name in _MENTIONS else np.median
        gold, others = all_gold[name], all_others[name]
        compared.append(
            FeatureComparison(name, float(middle(gold)), float(middle(others)), effect, p, len(gold), len(others))
        )
    return tuple(compared)


def _features(bodies: Iterable[str], kind: str) -> dict[str, Float[np.ndarray, " skill"]]:
    """Feature → its value in each body; bodies are read one by one."""
    rows = [structure_features(body) for body in track(bodies, f"structure of {kind} skills", None)]
    if not rows:
        raise SkilltrainError(f"no {kind} skills, whose structure could be compared")
    return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in rows[0]}


def _mann_whitney(gold: np.ndarray, others: np.ndarray) -> tuple[float, float]:
    """(share of the pairs in which gold has more, ties half; two-sided p, 1 where all values are equal)."""
    from scipy.stats import mannwhitneyu

    result = mannwhitneyu(gold, others, alternative="two-sided")
    return float(result.statistic) / (len(gold) * len(others)), float(result.pvalue)


def _count_items(blocks: Sequence["Token"]) -> tuple[int, int]:
    """(items of ordered lists, items of unordered lists); an item's mark is that of its list."""
    marks = [block.markup for block in blocks if block.type == "list_item_open"]
    ordered = sum(mark in {".", ")"} for mark in marks)
    return ordered, len(marks) - ordered


@cache
def _parser() -> "MarkdownIt":
    """CommonMark without the rules that decide nothing here (emphasis, entities, line breaks)."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").disable(["emphasis", "entity", "newline"])
