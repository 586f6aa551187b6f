"""Analyses of SkillRouter's paper: attention by field, structure of gold skills, pass rates.

Appendix H estimates a pass rate from each measure in COVERAGES: rate without skills + measure x
(rate with gold skills - rate without skills).

Notes:
    - The columns `gold` and `others` of a structure are medians, or means of features that are 0 or
      1. `p` is that of a Mann-Whitney test, corrected by Holm over all features. `effect` is the
      probability that a random gold skill has a higher value than a random other skill; a tie
      counts half.
    - The CommonMark parser sees up to 20 nested blocks. Headings, list items, inline code and links
      are counted outside code blocks, words in the whole body.
    - If the files beside every SKILL.md are known, the features are SkillFlow's nine (section 4.3).
      Otherwise, mentioned paths replace bundled files, and two more features are compared.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
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
from skilltrain.records import Skill
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


_COMPARED_BY_SKILLFLOW = (
    "words",
    "code share",
    "code blocks",
    "headings",
    "ordered items",
    "inline code per 100 words",
)
_SCRIPTS = frozenset(".py .sh .bash .js .mjs .ts .rb .pl .ps1 .r".split())
_DOCUMENTS = frozenset(".md .txt .rst .pdf .html .docx".split())


class Attention(Analysis):
    """Attention of each reranker to name, description and body (section 3.2, appendix F)."""

    kind: Literal["attention"] = "attention"
    num_queries: int = Field(
        default=50, ge=1, description="number of queries, each with its first gold skill by id"
    )

    def analyse_inputs(self, inputs: Inputs) -> list[Row]:
        """Measure how all rerankers attend to the same (query, gold skill) pairs."""
        rerankers = [model for model in inputs.models() if isinstance(model, RerankConfig)]
        if not rerankers:
            problem = "is measured in rerankers, and no system has one"
            raise SkilltrainError("nothing-to-analyse", problem, where="analysis.more.attention")
        # Pair each query with its first gold skill (a skill that the query needs).
        pairs = []
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
        """Compare the gold skills (that any task needs) with all other skills of the pool."""
        gold_ids = set()
        for task in inputs.benchmark.tasks:
            gold_ids.update(gold_in_pool(task.relevance, inputs.skills))
        gold = [inputs.skills[skill_id] for skill_id in sorted(gold_ids)]
        others = [skill for skill in inputs.skills.values() if skill.skill_id not in gold_ids]
        return compare_structure(gold, others)


class PassRates(Analysis):
    """Estimated pass rates of agents (appendix H), for SkillRouter's benchmark only."""

    kind: Literal["pass_rates"] = "pass_rates"

    def analyse_results(self, report: Report) -> list[Row]:
        """Estimate the pass rates of agents, from each system's means over all queries."""
        # The agents' own pass rates are known only for the tasks of SkillRouter's benchmark.
        if any(task.query.origin != ORIGIN for task in report.benchmark.tasks):
            return []
        return pass_rates(report.overall.means)


def pass_rates(means: Mapping[str, Mapping[str, Interval]]) -> list[Row]:
    """Estimate the share of tasks that each agent passes with each system.

    An agent's pass rates without skills and with the gold skills are known. A system that finds a
    part of the gold skills is taken to gain that part of the difference.

    Args:
        means: Mean by system and measure.

    Returns:
        A row for each system and agent. The last agent is the average of all agents.
    """
    # agents.yaml holds two pass rates of each agent: without skills, and with the gold skills.
    text = Path(__file__).with_name("agents.yaml").read_text(encoding="utf-8")
    rates_by_agent = parse_yaml(text, "agents.yaml")
    rates_by_agent[AVERAGE] = np.mean(list(rates_by_agent.values()), axis=0).tolist()
    rows = []
    for system, system_means in means.items():
        # COVERAGES are the measures that tell which share of the tasks has its gold skills.
        coverages = {name: system_means[name] for name in COVERAGES if name in system_means}
        if not coverages:
            continue
        for agent, (rate_without, rate_with_gold) in rates_by_agent.items():
            rows.append(
                {
                    "system": system,
                    "agent": agent,
                    "without_skills": rate_without,
                    "with_gold": rate_with_gold,
                    "estimates": {
                        name: _estimate(coverage, rate_without, rate_with_gold)
                        for name, coverage in coverages.items()
                    },
                }
            )
    return rows


def _estimate(coverage: Interval, rate_without: float, rate_with_gold: float) -> Interval:
    """Estimate a pass rate of an agent, by interpolation between two known pass rates.

    Args:
        coverage: Share of the tasks for which a system finds the gold skills, with its confidence
            interval.
        rate_without: Share of the tasks that the agent passes without skills.
        rate_with_gold: Share of the tasks that the agent passes with the gold skills.
    """
    gain = rate_with_gold - rate_without
    mean = rate_without + gain * coverage.mean
    low = rate_without + gain * coverage.low
    high = rate_without + gain * coverage.high
    return Interval(mean, low, high, coverage.n)


def compare_structure(gold_skills: Sequence[Skill], other_skills: Sequence[Skill]) -> list[Row]:
    """Compare the structure of gold skills with that of other skills, in a row for each feature.

    Args:
        gold_skills: Skills that any task needs.
        other_skills: The rest of the pool.

    Returns:
        Rows with the name of a feature, its average for gold skills and for other skills, the
        corrected p-value `p` of a Mann-Whitney test, and the `effect`: the probability that a
        random gold skill has a higher value than a random other skill.

    Raises:
        SkilltrainError: There is no gold skill, or no other skill.
    """
    from scipy.stats import mannwhitneyu

    # Use the names of bundled files as features if they are known for every skill. Otherwise use
    # the paths that the texts mention.
    has_files = all(skill.files is not None for skill in [*gold_skills, *other_skills])
    features_of = bundle_features if has_files else mention_features
    gold_features = [features_of(skill) for skill in gold_skills]
    tracked_skills = track(other_skills, "structure of skills", len(other_skills))
    other_features = [features_of(skill) for skill in tracked_skills]
    for side, features in {"gold": gold_features, "other": other_features}.items():
        if not features:
            problem = f"no {side} skills, whose structure could be compared"
            raise SkilltrainError("nothing-to-analyse", problem, where="analysis.more.structure")

    gold = np.array([list(features.values()) for features in gold_features])  # [skill, feature]
    other = np.array([list(features.values()) for features in other_features])  # [skill, feature]
    test = mannwhitneyu(gold, other, alternative="two-sided")
    # The statistic counts the pairs in which the gold skill has the higher value, and ties by half.
    effects = test.statistic / (len(gold) * len(other))  # [feature]
    p_values = holm(test.pvalue)  # [feature], corrected for the number of features
    rows = []
    for column, name in enumerate(gold_features[0]):
        # These features are 0 or 1, so that their mean is a share.
        average = np.mean if name.startswith(("mentions", "bundles")) else np.median
        rows.append(
            {
                "feature": name,
                "gold": average(gold[:, column]),
                "others": average(other[:, column]),
                "p": p_values[column],
                "effect": float(effects[column]),
                "num_gold": len(gold),
                "num_others": len(other),
            }
        )
    return rows


def bundle_features(skill: Skill) -> dict[str, float]:
    """Return SkillFlow's nine features of a skill (section 4.3), as values by feature.

    Six features describe the Markdown body. Three features are 1.0 if the skill has a file of that
    kind beside its SKILL.md, and else 0.0.

    Args:
        skill: A skill whose bundled files are known.
    """
    features = _body_features(skill.body)
    suffixes = {PurePosixPath(file).suffix.lower() for file in skill.files or ()}
    return {name: features[name] for name in _COMPARED_BY_SKILLFLOW} | {
        "bundles scripts": float(bool(suffixes & _SCRIPTS)),
        "bundles documents": float(bool(suffixes & _DOCUMENTS)),
        "bundles other files": float(bool(suffixes - _SCRIPTS - _DOCUMENTS)),
    }


def mention_features(skill: Skill) -> dict[str, float]:
    """Return the features of a skill's body, with the kinds of files that it mentions."""
    mentions = {name: float(bool(regex.search(skill.body))) for name, regex in _MENTIONS.items()}
    return _body_features(skill.body) | mentions


def _body_features(body: str) -> dict[str, float]:
    """Measure the structure of a skill's Markdown body, as values by feature.

    The body is parsed as CommonMark. Headings, list items, inline code and links are counted
    outside code blocks, words in the whole body.
    """
    text = body.replace("\r\n", "\n")
    blocks = _MARKDOWN.parse(text)  # markdown-it's tokens of blocks, such as "heading_open"
    num_words = len(words_of(text))
    code = [block.content for block in blocks if block.type == "fence"]
    num_tokens = Counter()  # Markdown tokens by type
    for block in blocks:
        num_tokens[block.type] += 1
        # The children are the inline tokens of the block, such as links.
        num_tokens.update(token.type for token in block.children or ())
    items = [block for block in blocks if block.type == "list_item_open"]
    # The markup of an item is the mark after its number, or a bullet such as "-".
    num_ordered = sum(item.markup in (".", ")") for item in items)
    return {
        "words": num_words,
        "code share": sum(map(len, code)) / max(1, len(text)),
        "code blocks": len(code),
        "headings": num_tokens["heading_open"],
        "ordered items": num_ordered,
        "unordered items": len(items) - num_ordered,
        "inline code per 100 words": 100 * num_tokens["code_inline"] / max(1, num_words),
        "links": num_tokens["link_open"],
    }
