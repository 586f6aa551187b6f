"""The analyses of an evaluation, each a list of rows in metrics.json, of its models and skills and of their answers."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from markdown_it import MarkdownIt
from pydantic import Field

from skilltrain.config import Config, InputPath, parse_yaml
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.report import Report
from skilltrain.metrics.benchmarks.benchmark import Benchmark, wanted_skills
from skilltrain.metrics.benchmarks.skillrouter import ORIGIN
from skilltrain.metrics.bootstrap import Interval, cluster_sums, separation
from skilltrain.metrics.comparison import (
    SystemResult,
    holm,
    same_queries,
    sign_test,
    values_of,
)
from skilltrain.metrics.measures import Measure, per_query
from skilltrain.metrics.slices import Row, means_of
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.loading import default_device
from skilltrain.models.reranker import load_reranker
from skilltrain.papers.skillrouter.field_attention import field_attention
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.cascade import RankedStage, SystemConfig
from skilltrain.retrieval.rankers import parts_of
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.terminal import track
from skilltrain.texts import words_of

STAGE_CUTOFFS = (1, 5, 10, 50, 100, 500, 1000)
COVERAGES = (
    "Hit@1",
    "Recall@10",
    "FC@10",
)  # an agent that takes the first, reads ten, or needs all among ten
AVERAGE = "average"
_DECIDES = "Hit@1"  # what is right and what is wrong in the analyses that need a yes or no
_WHOLE = 10**9  # characters
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


class AnalysisConfig(Config):
    """What an evaluation looks at beside its measures; all of it costs little but what asks models again."""

    num_timed: int = Field(
        default=0, ge=0, description="queries asked once more, alone, to time what asks no server"
    )
    num_attention: int = Field(
        default=0, ge=0, description="queries for which rerankers' attention is measured"
    )
    unserved: InputPath | None = Field(
        default=None,
        description="JSON Lines of queries (key `query`) that no skill serves: does the best score tell?",
    )
    truncation: bool = Field(
        default=False, description="how many skills each model sees whole; reads the whole pool"
    )
    structure: bool = Field(
        default=False, description="compare the structure of gold skills with the rest of the pool"
    )


def analyse_inputs(
    config: AnalysisConfig,
    systems: Sequence[SystemConfig],
    benchmark: Benchmark,
    skills: Mapping[str, Skill],
) -> dict[str, list[Row]]:
    """The analyses that need no ranking, made first, so that what fails, fails early.

    Attention is that of each reranker, over the first queries, each with the first skill by id that it wants.
    Raises SkilltrainError where an analysis was asked for and cannot be made.
    """
    parts = {part.key: part for system in systems for part in parts_of(system.rankers)}
    rerankers = [part for part in parts.values() if isinstance(part, RerankConfig)]
    if config.num_attention and not rerankers:
        raise SkilltrainError(
            "is measured in rerankers, and no system has one", where="analysis.num_attention"
        )
    found: dict[str, list[Row]] = {}
    wanted = [(task.query, wanted_skills(task.relevance, skills)) for task in benchmark.tasks]
    if config.structure:
        gold = {
            skill_id: skills[skill_id].body for _, skill_ids in wanted for skill_id in skill_ids
        }
        others = (skill.body for skill in skills.values() if skill.skill_id not in gold)
        found["structure"] = compare_structure(gold.values(), others)
    if config.num_attention:
        pairs = [
            (query, skills[skill_ids[0]]) for query, skill_ids in wanted[: config.num_attention]
        ]
        found["attention"] = [
            field_attention(load_reranker(one, default_device()), pairs, one.source)
            for one in rerankers
        ]
    if config.truncation:
        models = [part for part in parts.values() if isinstance(part, EncoderConfig | RerankConfig)]
        found["truncation"] = [truncation(model, [*skills.values()]) for model in models]
    return found


def analyse_results(
    report: Report, stages: Mapping[str, Sequence[RankedStage]]
) -> dict[str, list[Row]]:
    """What the results tell. Outcomes compare each system with the one before it: a pair that the recipe puts side by
    side. Pass rates are known for the tasks of SkillRouter's benchmark alone.
    """
    results, benchmark = report.results, report.benchmark
    decides = all(_DECIDES in values for result in results for values in result.per_query.values())
    pairs = pairwise(results) if decides else ()
    known = all(task.query.origin == ORIGIN for task in benchmark.tasks)
    return {
        "outcomes": [outcomes(before, after, _DECIDES) for before, after in pairs],
        "pass_rates": pass_rates(report.every.means) if known else [],
        "stages": stage_recalls(stages, benchmark),
        "latencies": latencies(stages),
    }


def outcomes(baseline: SystemResult, system: SystemResult, measure: str) -> Row:
    """Return which queries `system` changed, by a measure that is 0 or 1 (SkillRouter, section 5.5.1).

    Queries are right in both systems, in `system` alone (fixed), in `baseline` alone (broken) or in neither. `p` is
    exact (`sign_test`).
    """
    query_ids = same_queries([baseline, system])
    before, after = (values_of(result, query_ids, [measure]) for result in (baseline, system))
    net, _ = cluster_sums(after - before, baseline.clusters_of(query_ids))
    row: Row = {"baseline": baseline.name, "system": system.name, "measure": measure}
    row["p"] = sign_test(net[:, 0])
    cells = {"both": (1, 1), "fixed": (0, 1), "broken": (1, 0), "neither": (0, 0)}
    for cell, (was_right, is_right) in cells.items():
        chosen = (before == was_right) & (after == is_right)
        row[cell] = np.array(query_ids)[chosen[:, 0]].tolist()
    return row


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


def tell_unserved(
    ranked: Mapping[str, Rankings], query_ids: Sequence[str], unserved: Sequence[Query]
) -> dict[str, Interval]:
    """System → the chance that its best score for a query is above that for one of the `unserved`; -inf for no skill.

    A fused score is made of z-scores over a query's own candidates, and so says how far the best one stands out.
    """

    def tops(rankings: Rankings, ids: Iterable[str]) -> list[float]:
        return [rankings[query_id][0][1] if rankings[query_id] else -math.inf for query_id in ids]

    others = [query.query_id for query in unserved]
    return {
        name: separation(tops(row, query_ids), tops(row, others)) for name, row in ranked.items()
    }


def stage_recalls(stages: Mapping[str, Sequence[RankedStage]], benchmark: Benchmark) -> list[Row]:
    """What each ranker of the systems of several finds (SkillFlow, table 3): the means of measures with cutoffs up to
    its longest ranking, and how many skills it passes on (`num_passed`).

    Recall at this cutoff is what later rankers cannot exceed, Hit at it the Hit@1 of a perfect next ranker.
    """
    relevances = benchmark.relevances
    found: list[Row] = []
    for system, ranked in stages.items():
        for number, stage in enumerate(ranked if len(ranked) > 1 else (), 1):
            longest = max(1, *map(len, stage.rankings.values()))
            passed = min(stage.num_passed or longest, longest)
            cutoffs = sorted({passed, *(k for k in STAGE_CUTOFFS if k <= longest)})
            measures = [Measure(name, k) for name in ("Recall", "Precision") for k in cutoffs]
            measures += [Measure("MRR", longest), Measure("Hit", passed)]
            scores = per_query(stage.skill_ids(), relevances, measures)
            result = SystemResult(system, scores, {}, benchmark.clusters)
            means = means_of([result], list(relevances), list(map(str, measures)))[system]
            row: Row = {"system": system, "stage": f"{number} {stage.kind}"}
            found.append(row | {"num_passed": passed, "means": means})
    return found


def latencies(stages: Mapping[str, Sequence[RankedStage]]) -> list[Row]:
    """Seconds that a query asked alone waits for each ranker of the systems that were timed, and for all (`total`).

    `gpu_gib` is the most memory in use on the GPU, `gpu_seconds` are those of 1,000 queries for which a ranker holds
    it; both are None for rankers that use none. With few queries p95 says little.
    """
    found: list[Row] = []
    for system, ranked in stages.items():
        rows = {
            f"{number} {stage.kind}": [stage]
            for number, stage in enumerate(ranked, 1)
            if stage.alone
        }
        if len(rows) == len(ranked):
            rows["total"] = [*ranked]
        for name, own in rows.items():
            seconds = np.sum([stage.alone for stage in own], axis=0)
            mean, (p50, p95) = float(seconds.mean()), np.quantile(seconds, (0.5, 0.95)).tolist()
            num_bytes = max(stage.gpu_bytes for stage in own)
            held = sum(float(np.mean(stage.alone)) for stage in own if stage.gpu_bytes)
            gpu = {"gpu_gib": num_bytes / 2**30 or None, "gpu_seconds": 1000 * held or None}
            times = {"mean": mean, "p50": p50, "p95": p95, "qps": 1 / mean}
            found.append({"system": system, "stage": name, **times, **gpu, "num": len(seconds)})
    return found


def truncation(config: EncoderConfig | RerankConfig, skills: Sequence[Skill]) -> Row:
    """The share of `skills` that a model sees whole (SkillFlow, figure 6): of the fields that it is shown, neither the
    template's characters nor its tokens cut anything. Nothing is taken off a reranker's tokens for the query.
    """
    if isinstance(config, RerankConfig):
        pairs = load_reranker(config, default_device()).pairs
        template, text, room = (
            pairs.template.skill,
            pairs.text,
            pairs.settings.max_tokens - pairs.num_fixed,
        )
    else:
        encoder = load_encoder(config, default_device())
        template, text = encoder.settings.template.skill, encoder.text_tokenizer
        room = encoder.settings.max_tokens - len(encoder.tokenize([""], 8)[0])
    uncapped = template.model_copy(update={"description_chars": _WHOLE, "body_chars": _WHOLE})
    num = 0
    for skill in track(skills, f"lengths for {config.source}", len(skills)):
        shown = template.render(skill)
        num += shown == uncapped.render(skill) and len(text.ids([shown])[0]) <= room
    return {
        "model": config.source,
        "max_tokens": room,
        "whole": num / len(skills),
        "num_skills": len(skills),
    }


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
            raise SkilltrainError(what, where="analysis.structure")
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
