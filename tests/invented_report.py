"""A report with every section, of invented systems on invented queries, from a fixed seed."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skilltrain.evaluation.analyse import outcomes
from skilltrain.evaluation.report import Report, build_report
from skilltrain.metrics.benchmarks.benchmark import Benchmark, task_of
from skilltrain.metrics.bootstrap import Interval, intervals
from skilltrain.metrics.comparison import SystemResult
from skilltrain.metrics.measures import (
    DEFAULT_MEASURES,
    Measure,
    Relevance,
    parse_measures,
    per_query,
)
from skilltrain.papers.skillrouter.analyses import COVERAGES, pass_rates
from skilltrain.papers.skillrouter.field_attention import FIELDS
from skilltrain.records import Query, Skill

HOSTILE = "</script><img src=http://x.invalid onerror='alert(1)'>\"&|`*\u202eevil\u2066\u200b"
# Name, quality of the ranking from 0 to 1, and p50 of each stage in ms.
SYSTEMS = (
    ("BM25, name and description", 0.35, {"search": 4.1}),
    ("BM25, full text", 0.5, {"search": 9.6}),
    ("SR-Emb MiniLM", 0.62, {"encode query": 7.5, "search": 11.2}),
    ("SR-Emb → SR-Rank", 0.74, {"encode query": 7.5, "search": 11.2, "rerank": 412.0}),
    (
        "SR-Emb → LLM judge (listwise, 10 candidates)",
        0.72,
        {"encode query": 7.5, "search": 11.2, "judge": 2350.0},
    ),
)
WORDS = (
    "restart pods",
    "join two spreadsheets",
    "تحويل الملفات",
    "write release notes",
    "parse journaux d’été",
)
MEASURES = (*parse_measures(DEFAULT_MEASURES), Measure("Set-Compat", 0))


def invented(num_queries: int) -> Report:
    """Return the report; every name and text has HTML, Markdown and bidirectional controls."""
    rng = random.Random(5)
    gold_by_query = {}
    for number in range(num_queries):
        num_gold = 1 if number % 4 else 2 + number % 3
        gold = frozenset(f"gold/{number}-{k}" for k in range(num_gold))
        gold_by_query[f"task-{number:03}"] = gold
    relevances = {
        query_id: Relevance(gold, dict.fromkeys(gold, 1.0))
        for query_id, gold in gold_by_query.items()
    }

    results = []
    skill_ids = set().union(*gold_by_query.values())
    for name, quality, _ in SYSTEMS:
        rankings = {
            query_id: _ranking(rng, gold, quality) for query_id, gold in gold_by_query.items()
        }
        scores = per_query(rankings, relevances, MEASURES)
        results.append(SystemResult(name + HOSTILE, scores, rankings))
        skill_ids.update(*rankings.values())

    skills = {}
    for skill_id in sorted(skill_ids):
        number = hash_of(skill_id)
        name = f"{WORDS[number % len(WORDS)].replace(' ', '-')}{HOSTILE}"
        skills[skill_id] = Skill(skill_id, name, "word " * (3 + number % 90), "")

    tasks = []
    for number, (query_id, relevance) in enumerate(relevances.items()):
        query = Query(query_id, f"{_request(rng, number)} {HOSTILE}", "", "invented", "test")
        difficulty = ("easy", "medium", "hard")[number % 3] + HOSTILE
        tasks.append(task_of(query, relevance, {"difficulty": difficulty}))

    benchmark = Benchmark(f"SkillRouter easy{HOSTILE}", tuple(tasks))
    provenance = {
        "Benchmark": f"SkillRouter easy{HOSTILE}, split test",
        "Pool": "pool, 4,000 skills",
    }
    report = build_report(benchmark, results, MEASURES, skills, provenance=provenance)
    return replace(report, analysis=_analysis(results))


def hash_of(text: str) -> int:
    """Return a number that is the same in every process."""
    return sum(ord(letter) * position for position, letter in enumerate(text, 1))


def _request(rng: random.Random, number: int) -> str:
    phrases = [rng.choice(WORDS) for _ in range(rng.randint(8, 60))]
    return f"I need to {WORDS[number % len(WORDS)]}, then " + ", ".join(phrases) + "."


def _ranking(rng: random.Random, gold: frozenset[str], quality: float) -> list[str]:
    """Rank 50 skills; the better the system, the earlier a gold skill comes, if at all."""
    ranking = [f"other/{rng.randrange(4_000)}-{position}" for position in range(50)]
    for skill_id in sorted(gold):
        position = 0
        while position < 50 and rng.random() >= quality / (1 + position / 4):
            position += 1
        ranking.insert(position, skill_id)
    return ranking[:50]


def _analysis(results: Sequence[SystemResult]) -> dict[str, Any]:
    bm25, encoder, reranked = results[1:4]
    coverage = {}
    for result in results:
        rows = [list(map(values.get, COVERAGES)) for values in result.per_query.values()]
        coverage[result.name] = dict(zip(COVERAGES, intervals(np.array(rows)), strict=True))
    names = ("feature", "gold", "others", "effect", "p")
    features = [
        ("code share of the body", 0.21, 0.09, 0.68, 0.00004),
        ("headings", 11, 8, 0.61, 0.0021),
        ("list items", 34, 22, 0.59, 0.012),
        ("scripts beside it", 0.31, 0.28, 0.52, 0.61),
        ("links", 1, 3, 0.39, 0.0008),
        ("characters", 5_400, 4_980.5, 0.53, 0.41),
    ]
    return {
        "outcomes": [outcomes(encoder, reranked, "Hit@1"), outcomes(bm25, reranked, "FC@10")],
        "pass_rates": pass_rates(coverage),
        "latencies": _latencies(results),
        "unserved": [_unserved(result.name, n) for n, result in enumerate(results)],
        "structure": [
            dict(zip(names, row, strict=True), num_gold=180, num_others=26_261) for row in features
        ],
        "attention": [_attention("SR-Rank MiniLM", 6), _attention("SR-Rank 0.6B", 28)],
    }


def _unserved(system: str, number: int) -> dict[str, Any]:
    value = Interval(0.1 * number, 0.08 * number, 0.15 * number, 40)
    names = ("separation", "answered_unserved", "refused_served", "exact_set", "calibration_error")
    curve = [(n / 10, n / 20) for n in range(1, 11)]
    return {"system": system, **dict.fromkeys(names, value), "risk_coverage": curve}


def _latencies(results: Sequence[SystemResult]) -> list[dict[str, Any]]:
    rows = []
    for result, (_, _, milliseconds) in zip(results, SYSTEMS, strict=True):
        for stage, ms in {**milliseconds, "total": sum(milliseconds.values())}.items():
            uses_gpu = ms > 400
            rows.append(
                {
                    "system": result.name,
                    "stage": stage,
                    "mean": ms / 900,
                    "p50": ms / 1000,
                    "p95": ms * 1.6 / 1000,
                    "qps": 900 / ms,
                    "gpu_gib": 3.5 if uses_gpu else None,
                    "gpu_seconds": ms if uses_gpu else None,
                    "num": 75,
                }
            )
    return rows


def _attention(model: str, num_layers: int) -> dict[str, Any]:
    layers = []
    for n in range(num_layers):
        depth = n / (num_layers - 1)
        name = 0.04 + 0.16 * math.exp(-(((depth - 0.65) / 0.2) ** 2)) + 0.02 * math.sin(9 * depth)
        described = 0.07 + 0.12 * depth + 0.03 * math.cos(7 * depth)
        layers.append({"name": name, "description": described, "body": 1 - name - described})
    overall = {field: sum(layer[field] for layer in layers) / num_layers for field in FIELDS}
    tokens = {"name": 0.008, "description": 0.061, "body": 0.931}
    pairs = [
        {
            "query_id": f"task-{n:03}",
            "skill_id": f"gold/{n}-0",
            "overall": layers[n % num_layers],
            "last_layer": layers[-1],
            "tokens": tokens,
            "num_cut": n,
        }
        for n in range(400)
    ]
    groups = {"early": layers[0], "middle": overall, "late": layers[-1]}
    return {
        "model": model,
        "layers": layers,
        "groups": groups,
        "overall": overall,
        "tokens": tokens,
        "over_pairs": {"sd": tokens, "num_body_above_tokens": 400, "body_length_r": 0.25},
        "pairs": pairs,
    }
