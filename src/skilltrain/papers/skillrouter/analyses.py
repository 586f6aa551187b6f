"""Analyses of SkillRouter's paper: attention by field, structure of gold skills, pass rates."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from markdown_it import MarkdownIt
from pydantic import Field

from skilltrain.config import parse_yaml
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.analyse import Analysis, Inputs
from skilltrain.evaluation.report import Report
from skilltrain.metrics.benchmarks.benchmark import gold_in_pool
from skilltrain.metrics.benchmarks.skillrouter import ORIGIN
from skilltrain.metrics.bootstrap import Interval
from skilltrain.metrics.comparison import holm
from skilltrain.metrics.slices import Row
from skilltrain.models.loading import default_device
from skilltrain.models.reranker import load_reranker
from skilltrain.papers.skillrouter.field_attention import field_attention
from skilltrain.records import Query, Skill
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.terminal import track
from skilltrain.texts import words_of

# Measures that count a task as covered, for an agent that takes the first skill, reads ten skills,
# or needs all its skills among ten.
COVERAGES = ("Hit@1", "Recall@10", "FC@10")
AVERAGE = "average"
# The disabled rules do not change any feature.
_MARKDOWN = MarkdownIt("commonmark").disable(["emphasis", "entity", "newline"])
# {0,100}: without a bound, a text that repeats `scripts/` takes quadratic time.
_MENTIONS = {
    "mentions a script": re.compile(
        r"(?<![\w-])scripts?/[\w./-]{0,100}\.(?:py|sh|bash|js|mjs|ts|rb|pl|ps1|R)\b"
    ),
    "mentions a reference file": re.compile(
        r"(?<![\w-])references?/[\w./-]{0,100}\.(?:md|txt|rst|pdf|json|ya?ml)\b"
    ),
}


class Attention(Analysis):
    """Attention of each reranker to name, description and body (section 3.2, appendix F)."""

    kind: Literal["attention"] = "attention"
    num_queries: int = Field(
        default=50, ge=1, description="number of queries, each with its first gold skill by id"
    )

    def analyse_inputs(self, inputs: Inputs) -> list[Row]:
        rerankers = [model for model in inputs.models() if isinstance(model, RerankConfig)]
        if not rerankers:
            fault = "is measured in rerankers, and no system has one"
            raise SkilltrainError("nothing-to-analyse", fault, where="analysis.more.attention")
        pairs: list[tuple[Query, Skill]] = []
        for task in inputs.benchmark.tasks[: self.num_queries]:
            skill_id = gold_in_pool(task.relevance, inputs.skills)[0]
            pairs.append((task.query, inputs.skills[skill_id]))
        return [
            field_attention(load_reranker(config, default_device()), pairs, config.source)
            for config in rerankers
        ]


class Structure(Analysis):
    """Structure of the gold skills compared with the rest of the pool."""

    kind: Literal["structure"] = "structure"

    def analyse_inputs(self, inputs: Inputs) -> list[Row]:
        gold: dict[str, str] = {}
        for task in inputs.benchmark.tasks:
            for skill_id in gold_in_pool(task.relevance, inputs.skills):
                gold[skill_id] = inputs.skills[skill_id].body
        others = (skill.body for skill in inputs.skills.values() if skill.skill_id not in gold)
        return compare_structure(gold.values(), others)


class PassRates(Analysis):
    """Estimated pass rates of agents (appendix H), for SkillRouter's benchmark only."""

    kind: Literal["pass_rates"] = "pass_rates"

    def analyse_results(self, report: Report) -> list[Row]:
        is_known = all(task.query.origin == ORIGIN for task in report.benchmark.tasks)
        return pass_rates(report.every.means) if is_known else []


def pass_rates(means: Mapping[str, Mapping[str, Interval]]) -> list[Row]:
    """Estimate the share of tasks that each agent passes with each system (appendix H).

    For each measure in COVERAGES, the estimate is
    rate without skills + measure x (rate with gold skills - rate without skills).

    Args:
        means: Mean by system and measure.

    Returns:
        A row for each system and agent. The last agent is the average of all agents.
    """
    text = Path(__file__).with_name("agents.yaml").read_text(encoding="utf-8")
    agents = parse_yaml(text, "agents.yaml")
    agents[AVERAGE] = np.mean(list(agents.values()), axis=0).tolist()
    rows: list[Row] = []
    for system, row in means.items():
        coverages = {name: row[name] for name in COVERAGES if name in row}
        if not coverages:
            continue
        for agent, (without, with_gold) in agents.items():
            gain = with_gold - without
            estimates = {
                name: Interval(
                    without + gain * coverage.mean,
                    without + gain * coverage.low,
                    without + gain * coverage.high,
                    coverage.n,
                )
                for name, coverage in coverages.items()
            }
            rates = {"without_skills": without, "with_gold": with_gold, "estimates": estimates}
            rows.append({"system": system, "agent": agent, **rates})
    return rows


def compare_structure(gold_bodies: Iterable[str], other_bodies: Iterable[str]) -> list[Row]:
    """Compare the structure of gold skills with that of other skills.

    Args:
        gold_bodies: Bodies of the gold skills.
        other_bodies: Bodies of other skills, without the gold ones.

    Returns:
        A row for each feature: the medians of both sides (means of features that are 0 or 1); `p`
        of a Mann-Whitney test, corrected by Holm over all features; `effect`, the probability that
        a random gold skill has a higher value than a random other skill, with half of the ties.

    Raises:
        SkilltrainError: One side has no skill.
    """
    from scipy.stats import mannwhitneyu

    features_by_side = {
        "gold": [structure_features(body) for body in gold_bodies],
        "other": [structure_features(b) for b in track(other_bodies, "structure of skills", None)],
    }
    for side, features in features_by_side.items():
        if not features:
            fault = f"no {side} skills, whose structure could be compared"
            raise SkilltrainError("nothing-to-analyse", fault, where="analysis.more.structure")
    names = [*features_by_side["gold"][0]]
    gold = np.array([[*row.values()] for row in features_by_side["gold"]])  # [skill, feature]
    others = np.array([[*row.values()] for row in features_by_side["other"]])  # [skill, feature]

    test = mannwhitneyu(gold, others, alternative="two-sided")
    effects = test.statistic / (len(gold) * len(others))
    p_values = holm(test.pvalue)
    rows: list[Row] = []
    for column, name in enumerate(names):
        average = np.mean if name in _MENTIONS else np.median
        rows.append(
            {
                "feature": name,
                "gold": average(gold[:, column]),
                "others": average(others[:, column]),
                "p": p_values[column],
                "effect": float(effects[column]),
                "num_gold": len(gold),
                "num_others": len(others),
            }
        )
    return rows


def structure_features(body: str) -> dict[str, float]:
    """Measure the structure of a skill's body, parsed as CommonMark with up to 20 nested blocks.

    Words are counted everywhere, all other features outside code only. Mentions (0 or 1) replace
    SkillFlow's features of bundled files.

    Returns:
        Value by feature.
    """
    text = body.replace("\r\n", "\n")
    blocks = _MARKDOWN.parse(text)
    num_words = len(words_of(text))
    code = [block.content for block in blocks if block.type == "fence"]
    kinds: Counter[str] = Counter()
    for block in blocks:
        kinds[block.type] += 1
        kinds.update(token.type for token in block.children or ())
    num_ordered = sum(
        block.type == "list_item_open" and block.markup in (".", ")") for block in blocks
    )
    return {
        "words": num_words,
        "code share": sum(map(len, code)) / max(1, len(text)),
        "code blocks": len(code),
        "headings": kinds["heading_open"],
        "ordered items": num_ordered,
        "unordered items": kinds["list_item_open"] - num_ordered,
        "inline code per 100 words": 100 * kinds["code_inline"] / max(1, num_words),
        "links": kinds["link_open"],
        **{name: float(pattern.search(text) is not None) for name, pattern in _MENTIONS.items()},
    }
