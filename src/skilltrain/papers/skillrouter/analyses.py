"""Analyses of SkillRouter's paper: attention by field, structure of gold skills, pass rates of agents."""

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
from skilltrain.metrics.benchmarks.benchmark import wanted_skills
from skilltrain.metrics.benchmarks.skillrouter import ORIGIN
from skilltrain.metrics.bootstrap import Interval
from skilltrain.metrics.comparison import holm
from skilltrain.metrics.slices import Row
from skilltrain.models.loading import default_device
from skilltrain.models.reranker import load_reranker
from skilltrain.papers.skillrouter.field_attention import field_attention
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.terminal import track
from skilltrain.texts import words_of

# An agent that takes the first skill, reads ten, or needs all among ten.
COVERAGES = ("Hit@1", "Recall@10", "FC@10")
AVERAGE = "average"
_MARKDOWN = MarkdownIt("commonmark").disable(
    ["emphasis", "entity", "newline"]
)  # these decide nothing here
# The bounds keep a text that repeats `scripts/` from costing more than its length.
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
        default=50, ge=1, description="queries, each with the first skill by id that it wants"
    )

    def analyse_inputs(self, inputs: Inputs) -> list[Row]:
        rerankers = [model for model in inputs.models() if isinstance(model, RerankConfig)]
        if not rerankers:
            what = "is measured in rerankers, and no system has one"
            raise SkilltrainError("nothing-to-analyse", what, where="analysis.more.attention")
        pairs = [
            (task.query, inputs.skills[wanted_skills(task.relevance, inputs.skills)[0]])
            for task in inputs.benchmark.tasks[: self.num_queries]
        ]
        return [
            field_attention(load_reranker(config, default_device()), pairs, config.source)
            for config in rerankers
        ]


class Structure(Analysis):
    """Structure of gold skills beside that of the rest of the pool."""

    kind: Literal["structure"] = "structure"

    def analyse_inputs(self, inputs: Inputs) -> list[Row]:
        gold: dict[str, str] = {}
        for task in inputs.benchmark.tasks:
            for skill_id in wanted_skills(task.relevance, inputs.skills):
                gold[skill_id] = inputs.skills[skill_id].body
        others = (skill.body for skill in inputs.skills.values() if skill.skill_id not in gold)
        return compare_structure(gold.values(), others)


class PassRates(Analysis):
    """Estimated pass rates of agents (appendix H), if all tasks are of SkillRouter's benchmark."""

    kind: Literal["pass_rates"] = "pass_rates"

    def analyse_results(self, report: Report) -> list[Row]:
        is_known = all(task.query.origin == ORIGIN for task in report.benchmark.tasks)
        return pass_rates(report.every.means) if is_known else []


def pass_rates(means: Mapping[str, Mapping[str, Interval]]) -> list[Row]:
    """Estimate the share of tasks that each agent passes with each system (SkillRouter, appendix H).

    The estimate is: without skills + coverage x (with gold skills - without), for each coverage in COVERAGES. `means`
    maps system → measure → mean. The last agent is the average of all.
    """
    text = Path(__file__).with_name("agents.yaml").read_text(encoding="utf-8")
    agents = parse_yaml(text, "agents.yaml")
    agents[AVERAGE] = np.mean(list(agents.values()), axis=0).tolist()
    rates: list[Row] = []
    for system, row in means.items():
        coverages = {name: row[name] for name in COVERAGES if name in row}
        for agent, (without, with_gold) in agents.items() if coverages else ():
            gain = with_gold - without
            estimates: dict[str, Interval] = {}
            for name, c in coverages.items():
                mean, low, high = (without + gain * share for share in (c.mean, c.low, c.high))
                estimates[name] = Interval(mean, low, high, c.n)
            known = {"without_skills": without, "with_gold": with_gold}
            rates.append({"system": system, "agent": agent, **known, "estimates": estimates})
    return rates


def compare_structure(gold_bodies: Iterable[str], other_bodies: Iterable[str]) -> list[Row]:
    """Every feature of gold skills' bodies against those of others, which should not hold the gold ones: medians
    (shares where it is 0 or 1) and a Mann-Whitney test, whose `p` is Holm's over all features.

    `effect` is how likely a random gold skill has more than a random other, ties half. Raises SkilltrainError where
    one side has no skill.
    """
    from scipy.stats import mannwhitneyu

    rows = {
        "gold": [structure_features(body) for body in gold_bodies],
        "other": [structure_features(b) for b in track(other_bodies, "structure of skills", None)],
    }
    for side, features in rows.items():
        if not features:
            what = f"no {side} skills, whose structure could be compared"
            raise SkilltrainError("nothing-to-analyse", what, where="analysis.more.structure")
    gold, others = (np.array([[*row.values()] for row in side]) for side in rows.values())
    test = mannwhitneyu(gold, others, alternative="two-sided")
    effects = test.statistic / (len(gold) * len(others))
    p_values = holm(test.pvalue)
    compared: list[Row] = []
    for column, name in enumerate(rows["gold"][0]):
        middle = np.mean if name in _MENTIONS else np.median
        medians = {"gold": middle(gold[:, column]), "others": middle(others[:, column])}
        tested = {"p": p_values[column], "effect": float(effects[column])}
        counts = {"num_gold": len(gold), "num_others": len(others)}
        compared.append({"feature": name} | medians | tested | counts)
    return compared


def structure_features(body: str) -> dict[str, float]:
    """Feature → value for one skill's body, read as CommonMark, up to 20 blocks inside one another.

    Nothing but words counts inside code. Mentions (0 or 1) stand in for SkillFlow's bundled files: no table has them.
    """
    text = body.replace("\r\n", "\n")
    blocks = _MARKDOWN.parse(text)
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
