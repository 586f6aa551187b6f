"""A report with every section, of invented systems on invented queries; seeded, so that tests can count on it."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skilltrain.evaluation.analyse import outcomes
from skilltrain.evaluation.report import Report, build_report
from skilltrain.metrics.benchmarks.benchmark import Benchmark, task_of
from skilltrain.metrics.bootstrap import intervals
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
# name, how well it ranks, p50 in ms of its stages
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
    """The report; every name and text holds HTML, Markdown and bidirectional orders."""
    draw = random.Random(5)
    gold = {
        f"task-{n:03}": frozenset(f"gold/{n}-{k}" for k in range(1 if n % 4 else 2 + n % 3))
        for n in range(num_queries)
    }
    relevances = {q: Relevance(ids, dict.fromkeys(ids, 1.0)) for q, ids in gold.items()}
    results = []
    for name, skill, _ in SYSTEMS:
        ranked = {q: _ranking(draw, ids, skill) for q, ids in gold.items()}
        scores = per_query(ranked, relevances, MEASURES)
        results.append(SystemResult(name + HOSTILE, scores, ranked))
    found = [ranking for result in results for ranking in result.rankings.values()]
    ids = sorted(set().union(*found, *gold.values()))
    names_of = {i: f"{WORDS[hash_of(i) % len(WORDS)].replace(' ', '-')}{HOSTILE}" for i in ids}
    skills = {
        i: Skill(i, name, "word " * (3 + hash_of(i) % 90), "") for i, name in names_of.items()
    }
    tasks = tuple(
        task_of(
            Query(q, f"{_request(draw, n)} {HOSTILE}", "", "invented", "test"),
            relevance,
            {"difficulty": ("easy", "medium", "hard")[n % 3] + HOSTILE},
        )
        for n, (q, relevance) in enumerate(relevances.items())
    )
    benchmark = Benchmark(f"SkillRouter easy{HOSTILE}", tasks)
    provenance = {
        "Benchmark": f"SkillRouter easy{HOSTILE}, split test",
        "Pool": "pool, 4,000 skills",
    }
    report = build_report(benchmark, results, MEASURES, skills, provenance=provenance)
    return replace(report, analysis=_analysis(results))


def hash_of(text: str) -> int:
    """A number that is the same in every process."""
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(text))


def _request(draw: random.Random, number: int) -> str:
    parts = [draw.choice(WORDS) for _ in range(draw.randint(8, 60))]
    return f"I need to {WORDS[number % len(WORDS)]}, then " + ", ".join(parts) + "."


def _ranking(draw: random.Random, gold: frozenset[str], skill: float) -> list[str]:
    """Fifty places; the better the system, the sooner a gold skill is put down, if at all."""
    ranking = [f"other/{draw.randrange(4_000)}-{n}" for n in range(50)]
    for skill_id in sorted(gold):
        place = next((place for place in range(50) if draw.random() < skill / (1 + place / 4)), 50)
        ranking.insert(place, skill_id)
    return ranking[:50]


def _analysis(results: Sequence[SystemResult]) -> dict[str, Any]:
    emb, rank = results[2], results[3]
    values = {
        result.name: np.array([[v[m] for m in COVERAGES] for v in result.per_query.values()])
        for result in results
    }
    coverage = {
        name: dict(zip(COVERAGES, intervals(rows), strict=True)) for name, rows in values.items()
    }
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
        "outcomes": [outcomes(emb, rank, "Hit@1"), outcomes(results[1], rank, "FC@10")],
        "pass_rates": pass_rates(coverage),
        "latencies": _latencies(results),
        "structure": [
            dict(zip(names, row, strict=True), num_gold=180, num_others=26_261) for row in features
        ],
        "attention": [
            _attention(name, count) for name, count in (("SR-Rank MiniLM", 6), ("SR-Rank 0.6B", 28))
        ],
    }


def _latencies(results: Sequence[SystemResult]) -> list[dict[str, Any]]:
    return [
        {
            "system": result.name,
            "stage": stage,
            "mean": ms / 900,
            "p50": ms / 1000,
            "p95": ms * 1.6 / 1000,
            "qps": 900 / ms,
            "gpu_gib": 3.5 if ms > 400 else None,
            "gpu_seconds": ms if ms > 400 else None,
            "num": 75,
        }
        for result, (_, _, stages) in zip(results, SYSTEMS, strict=True)
        for stage, ms in {**stages, "total": sum(stages.values())}.items()
    ]


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
        "pairs": pairs,
    }
