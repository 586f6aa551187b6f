"""What lies behind the means: which queries a second system fixed and broke, what agents could gain, latency, where a
reranker looks, and how gold skills differ from the rest of the pool.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.bootstrap import Interval, cluster_sums
from skilltrain.evaluation.comparison import SystemResult, holm, mcnemar, same_queries, values_of
from skilltrain.terminal import track
from skilltrain.texts import words_of

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

COVERAGES = ("Hit@1", "Recall@10", "FC@10")  # an agent that takes the first, reads ten, or needs all among ten
AVERAGE = "average"
FIELDS: tuple[str, ...] = ("name", "description", "body")
Shares = dict[str, float]
"""Field → its share; they sum to 1."""
# The bounds keep a text that repeats `scripts/` from costing more than its length.
_MENTIONS = {
    "mentions a script": re.compile(r"(?<![\w-])scripts?/[\w./-]{0,100}\.(?:py|sh|bash|js|mjs|ts|rb|pl|ps1|R)\b"),
    "mentions a reference file": re.compile(r"(?<![\w-])references?/[\w./-]{0,100}\.(?:md|txt|rst|pdf|json|ya?ml)\b"),
}


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What `system` changed (SkillRouter, section 5.5.1): the queries that are right in both, in `system` alone
    (fixed), in `baseline` alone (broken) and in neither; `p` is McNemar's, exact.
    """

    baseline: str
    system: str
    measure: str
    both: tuple[str, ...]
    fixed: tuple[str, ...]
    broken: tuple[str, ...]
    neither: tuple[str, ...]
    p: float


@dataclass(frozen=True, slots=True)
class StageLatency:
    """Seconds that a query takes in one ranker of a system (`1 lexical`, … or `total`), of `num` asked one by one.

    `gpu_gib` is the most memory in use on the GPU; `gpu_seconds` are those of 1,000 queries for which a ranker holds
    it. Both are None for rankers that use none.
    """

    system: str
    stage: str
    mean: float
    p50: float
    p95: float
    qps: float
    gpu_gib: float | None
    gpu_seconds: float | None
    num: int


@dataclass(frozen=True, slots=True)
class StageRecall:
    """What one ranker of a system finds (SkillFlow, table 3): measure → mean, with cutoffs up to its longest ranking.

    The next ranker sees `num_passed` skills. Recall at this cutoff is what later rankers cannot exceed, Hit at it the
    Hit@1 of a perfect next ranker.
    """

    system: str
    stage: str
    num_passed: int
    means: dict[str, Interval]


@dataclass(frozen=True, slots=True)
class Truncation:
    """The share of skills that a model sees whole (SkillFlow, figure 6): of the fields that it is shown, neither the
    template's characters nor its tokens cut anything. Nothing is taken off a reranker's tokens for the query.
    """

    model: str
    max_tokens: int
    whole: float
    num_skills: int


@dataclass(frozen=True, slots=True)
class PairAttention:
    """One pair of a FieldAttention: its shares over all layers, its fields' shares of tokens, and tokens cut away."""

    query_id: str
    skill_id: str
    overall: Shares
    tokens: Shares
    num_cut: int


@dataclass(frozen=True, slots=True)
class FieldAttention:
    """Where a reranker looks: attention of the last position (of the first for models with a classification token) to
    the skill's fields (SkillRouter, section 3.2 and appendix F), averaged over heads, normalised over a pair's fields,
    averaged over pairs. `tokens` is what attention without a preference would give: the fields' share of tokens.
    `groups` are means of the layers: the first quarter, the half after it and the last quarter (of 28 layers 0–6, 7–20
    and 21–27, the paper's).
    """

    model: str
    layers: tuple[Shares, ...]
    groups: dict[str, Shares]
    overall: Shares
    tokens: Shares
    pairs: tuple[PairAttention, ...]

    @property
    def num_pairs(self) -> int:
        """The pairs that were read."""
        return len(self.pairs)

    def range_of(self, field: str) -> tuple[float, float, float]:
        """The lowest, middle and highest share of a field in one pair."""
        shares = [pair.overall[field] for pair in self.pairs]
        return min(shares), median(shares), max(shares)


@dataclass(frozen=True, slots=True)
class PassRate:
    """The share of tasks that `agent` may pass with a system's rankings, for each of COVERAGES."""

    system: str
    agent: str
    without_skills: float
    with_gold: float
    estimates: dict[str, Interval]


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


@dataclass(frozen=True)
class Analysis:
    """The analyses of one evaluation; what was not asked for, or cannot be computed, is empty.

    `unserved`: system → the chance that its best score for a query is higher than for one that no skill serves.
    """

    outcomes: tuple[Outcomes, ...] = ()
    pass_rates: tuple[PassRate, ...] = ()
    stages: tuple[StageRecall, ...] = ()
    unserved: dict[str, Interval] = field(default_factory=dict)
    truncation: tuple[Truncation, ...] = ()
    latencies: tuple[StageLatency, ...] = ()
    structure: tuple[FeatureComparison, ...] = ()
    attention: tuple[FieldAttention, ...] = ()


class Agent(NamedTuple):
    """The shares of tasks that an agent passes without skills, and with the gold skills."""

    name: str
    without_skills: float
    with_gold: float


# SkillsBench's leaderboard (84 tasks, 5 trials each) as SkillRouter prints it: appendix H, table 16.
AGENTS = (
    Agent("Gemini CLI (Flash)", 0.313, 0.487),
    Agent("Claude Code (Opus 4.5)", 0.220, 0.453),
    Agent("Codex (GPT-5.2)", 0.306, 0.447),
    Agent("Claude Code (Opus 4.6)", 0.306, 0.445),
    Agent("Gemini CLI (Pro)", 0.276, 0.412),
    Agent("Claude Code (Sonnet 4.5)", 0.173, 0.318),
    Agent("Claude Code (Haiku 4.5)", 0.110, 0.277),
)


def outcomes(
    baseline: SystemResult, system: SystemResult, measure: str, clusters: Mapping[str, str] | None = None
) -> Outcomes:
    """The queries that `system` fixed and broke by `measure`, which is 0 or 1; `clusters` as for `compare`."""
    query_ids = same_queries([baseline, system])
    before, after = (values_of(result, query_ids, [measure])[:, 0] for result in (baseline, system))
    names = [(clusters or {}).get(query_id, query_id) for query_id in query_ids]
    net, _ = cluster_sums((after - before)[:, np.newaxis], names)
    cells = [  # both, fixed, broken, neither
        tuple(np.array(query_ids)[(before == was_right) & (after == is_right)].tolist())
        for is_right, was_right in ((1, 1), (1, 0), (0, 1), (0, 0))
    ]
    return Outcomes(baseline.name, system.name, measure, *cells, p=mcnemar(net[:, 0]))


def pass_rates(means: Mapping[str, Mapping[str, Interval]], agents: Sequence[Agent] = AGENTS) -> tuple[PassRate, ...]:
    """What `means` (system → measure → mean) let expect of each agent and their average, if skills found were used."""
    found: list[PassRate] = []
    for system, row in means.items():
        coverages = {name: row[name] for name in COVERAGES if name in row}
        for agent in (*agents, average(agents)) if coverages else ():
            estimates = {name: estimate(agent, value) for name, value in coverages.items()}
            found.append(PassRate(system, agent.name, agent.without_skills, agent.with_gold, estimates))
    return tuple(found)


def average(agents: Sequence[Agent]) -> Agent:
    """The agent whose pass rates, and so whose estimates, are the means of all."""
    return Agent(AVERAGE, fmean(agent.without_skills for agent in agents), fmean(agent.with_gold for agent in agents))


def estimate(agent: Agent, coverage: Interval) -> Interval:
    """Without skills + coverage x (with gold - without), at the mean and the ends (turned round if skills harm)."""
    gain = agent.with_gold - agent.without_skills
    mean, low, high = (agent.without_skills + share * gain for share in (coverage.mean, coverage.low, coverage.high))
    return Interval(mean, min(low, high), max(low, high), coverage.n)


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
