"""Dev benchmarks made ready for an encoder or a reranker: which queries, which skills, and their tokens."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from skilltrain.data.pool.skill_pool import open_pool
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, Task
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.evaluation.metrics import Relevance, parse_measures
from skilltrain.models.encoder import Encoder
from skilltrain.models.micro_batches import TokenIds
from skilltrain.models.pairs import PairIds
from skilltrain.models.reranker import Reranker
from skilltrain.models.token_store import tokenized
from skilltrain.records import Skill
from skilltrain.tables import RANKINGS, read_table
from skilltrain.terminal import say
from skilltrain.training.dev import (
    DEV_MEASURES,
    Dev,
    EncoderDevConfig,
    RerankerDevConfig,
)

_QUERIES_AT_ONCE = 64  # rows of scores held while they are sorted
InputT = TypeVar("InputT")


def open_encoder_dev(config: EncoderDevConfig, encoder: Encoder, training_pool: Path) -> Dev[TokenIds]:
    """The dev benchmark for an encoder, its texts tokenised once: first the queries, then the pool.

    Raises SkilltrainError for a folder without a query to score, and for a pool that holds no gold skill at all.
    """
    benchmark = _sampled(load_benchmark(config.benchmark, config.split), config.max_queries, config.seed)
    tasks, pool = benchmark.tasks, _pool(benchmark, config.pool or training_pool)
    judged = {skill_id for task in tasks for skill_id in task.relevance.gains}
    skills = _sampled_skills(list(pool.values()), judged, config.max_skills, config.seed)
    say(f"dev: {len(tasks):,} queries of {config.benchmark}, ranked over {len(skills):,} of {len(pool):,} skills")
    _say_missed(tasks, {task.query.query_id: pool.keys() for task in tasks}, "the pool", config.pool or training_pool)
    query_ids, skill_ids = [task.query.query_id for task in tasks], [skill.skill_id for skill in skills]
    template, most = encoder.settings.template.skill, encoder.settings.max_tokens
    rendered = [template.render(skill) for skill in skills]
    query_tokens = tokenized(query_ids, [task.query.text for task in tasks], encoder.tokenize_queries, "", None)
    skill_tokens = tokenized(skill_ids, rendered, lambda texts: encoder.tokenize(texts, most), "", None)
    texts: list[TokenIds] = [query_tokens[query_id] for query_id in query_ids]
    texts += [skill_tokens[skill_id] for skill_id in skill_ids]
    measures = parse_measures([*DEV_MEASURES, config.metric])
    rank = partial(nearest_skills, query_ids, skill_ids, max(measure.cutoff for measure in measures))
    return _dev(config, tasks, pool, texts, rank)


def open_reranker_dev(config: RerankerDevConfig, reranker: Reranker, training_pool: Path) -> Dev[list[PairIds]]:
    """The dev benchmark for a reranker: the pairs of each query that has candidates, tokenised once.

    A query without candidates scores 0. Raises SkilltrainError for a folder without a query to score, candidates
    that are not in the pool, and where no candidate is gold.
    """
    benchmark = _sampled(load_benchmark(config.benchmark, config.split), config.max_queries, config.seed)
    tasks, path = benchmark.tasks, config.pool or training_pool
    pool = _pool(benchmark, path)
    candidates = _candidates(config)
    found = {task.query.query_id: candidates.get(task.query.query_id, []) for task in tasks}
    if lost := [skill_id for skill_ids in found.values() for skill_id in skill_ids if skill_id not in pool]:
        raise SkilltrainError(f"{len(lost)} candidates are not in the pool {path}: {lost[0]}", where=config.candidates)
    say(f"dev: {len(tasks):,} queries of {config.benchmark}, {config.num_candidates} candidates each")
    _say_missed(tasks, found, "their candidates", config.candidates)
    ranked = {task.query.query_id: task.query.text for task in tasks if found[task.query.query_id]}
    used = sorted({skill_id for query_id in ranked for skill_id in found[query_id]})
    skill_tokens = tokenized(used, [pool[skill_id] for skill_id in used], reranker.tokenize_skills, "", None)
    pairs: list[list[PairIds]] = []
    for query_id, text in ranked.items():
        query_tokens = reranker.tokenize_query(text)
        pairs.append([reranker.join(query_tokens, skill_tokens[skill_id]) for skill_id in found[query_id]])
    return _dev(
        config, tasks, pool, pairs, partial(ordered_candidates, {query_id: found[query_id] for query_id in ranked})
    )


def _dev(
    config: EncoderDevConfig | RerankerDevConfig,
    tasks: Sequence[Task],
    pool: Collection[str],
    inputs: Sequence[InputT],
    rank: Callable[[Tensor], dict[str, list[str]]],
) -> Dev[InputT]:
    relevances = {task.query.query_id: _within(task.relevance, pool) for task in tasks}
    return Dev(config, relevances, inputs, rank)


def nearest_skills(
    query_ids: list[str], skill_ids: list[str], depth: int, vectors: Float[Tensor, "text dim"]
) -> dict[str, list[str]]:
    """query_id → its `depth` nearest skills by cosine; `vectors` holds the queries first, then the skills."""
    queries, skills = vectors[: len(query_ids)], vectors[len(query_ids) :]
    rankings: dict[str, list[str]] = {}
    for start in range(0, len(query_ids), _QUERIES_AT_ONCE):
        with torch.autocast(vectors.device.type, enabled=False):  # bfloat16 would round cosines to 1/256
            scores = queries[start : start + _QUERIES_AT_ONCE].float() @ skills.float().T
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :depth].tolist()
        for query_id, row in zip(query_ids[start:], order, strict=False):
            rankings[query_id] = [skill_ids[position] for position in row]
    return rankings


def ordered_candidates(candidates: Mapping[str, list[str]], scores: Float[Tensor, "pair"]) -> dict[str, list[str]]:
    """query_id → its candidates by score; `scores` holds those of the first query, then of the second, …"""
    rows = scores.split([len(skill_ids) for skill_ids in candidates.values()])
    rankings: dict[str, list[str]] = {}
    for (query_id, skill_ids), row in zip(candidates.items(), rows, strict=True):
        order = row.sort(descending=True, stable=True).indices.tolist()
        rankings[query_id] = [skill_ids[position] for position in order]
    return rankings


def _sampled(benchmark: Benchmark, most: int | None, seed: int) -> Benchmark:
    """The benchmark with at most so many of its tasks, in their order."""
    if most is None or most >= len(benchmark.tasks):
        return benchmark
    chosen = sorted(random.Random(seed).sample(range(len(benchmark.tasks)), most))
    return replace(benchmark, tasks=tuple(benchmark.tasks[position] for position in chosen))


def _pool(benchmark: Benchmark, path: Path) -> dict[str, Skill]:
    """skill_id → skill of the pool; the benchmark's own gold skills come last and never replace one of the pool."""
    pool = {skill.skill_id: skill for skill in open_pool(path)}
    return pool | {skill.skill_id: skill for skill in benchmark.gold_skills if skill.skill_id not in pool}


def _sampled_skills(skills: list[Skill], judged: Collection[str], most: int | None, seed: int) -> list[Skill]:
    """All judged skills and as many others as make up `most`, in the order of the pool."""
    others = [skill.skill_id for skill in skills if skill.skill_id not in judged]
    room = len(others) if most is None else max(0, most - (len(skills) - len(others)))
    chosen = set(random.Random(seed).sample(others, min(room, len(others))))
    return [skill for skill in skills if skill.skill_id in judged or skill.skill_id in chosen]


def _within(relevance: Relevance, pool: Collection[str]) -> Relevance:
    """`relevance` without the gains of skills that are neither gold nor in the pool, as the stage evaluate scores."""
    gains = {s: gain for s, gain in relevance.gains.items() if s in pool or s in relevance.gold}
    return replace(relevance, gains=gains)


def _say_missed(tasks: Sequence[Task], reachable: Mapping[str, Collection[str]], place: str, path: Path) -> None:
    """Say how much gold no ranking can find. Raises SkilltrainError where that is all of it."""
    missed = [(t.query.query_id, s) for t in tasks for s in t.relevance.gold if s not in reachable[t.query.query_id]]
    num_gold, num_queries = sum(len(task.relevance.gold) for task in tasks), len({query_id for query_id, _ in missed})
    if len(missed) == num_gold:
        what = f"no gold skill of the {len(tasks)} dev queries is among {place}"
        raise SkilltrainError(what, where=path, fix="check that benchmark, split and this file belong together")
    if missed:
        what = f"dev: {len(missed):,} of {num_gold:,} gold skills ({num_queries:,} queries) are not among {place}"
        say(f"{what} and count as missed")


def _candidates(config: RerankerDevConfig) -> dict[str, list[str]]:
    """query_id → the first candidates, best first. Raises SkilltrainError where the table holds several rankings."""
    rows = read_table(config.candidates, RANKINGS).to_pylist()
    if len(stages := sorted({row["stage"] for row in rows})) > 1:
        what = f"holds rankings of {len(stages)} stages ({', '.join(stages[:5])}), not of one"
        raise SkilltrainError(what, where=config.candidates, fix="give the output of one stage candidates")
    rows.sort(key=lambda row: (row["query_id"], row["rank"], row["skill_id"]))
    return {
        query_id: [row["skill_id"] for row in found][: config.num_candidates]
        for query_id, found in groupby(rows, key=lambda row: row["query_id"])
    }
