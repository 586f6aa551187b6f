"""How good the model is while it trains: a dev benchmark, ranked every so many steps by a list of rankers."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from skilltrain.data.pool.read import read_pool
from skilltrain.distributed import of_first_rank
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.benchmarks.benchmark import Task, check_pool
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.metrics.bootstrap import Interval, compact, intervals
from skilltrain.metrics.measures import Relevance, per_query
from skilltrain.models.encoder import Encoder
from skilltrain.models.micro_batches import TokenIds
from skilltrain.models.pairs import PairIds
from skilltrain.models.reranker import Reranker
from skilltrain.models.tokens import tokenize_texts
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.cascade import Cascade, SystemConfig, check_systems, keeps_of
from skilltrain.retrieval.nearest import ChunkVectors, PoolRanker, VectorIndex, starts_of
from skilltrain.retrieval.rankers import OWN, is_own, parts_of
from skilltrain.retrieval.rerank import reordered
from skilltrain.templates import ChunkPool
from skilltrain.terminal import say
from skilltrain.training.settings import DevConfig
from skilltrain.training.steps import Pairs, Texts


class OwnEncoder:
    """The encoder in training as a ranker: all ranks together encode the pool, by the step module `model`."""

    def __init__(self, encoder: Encoder, queries: Sequence[Query], skills: Sequence[Skill]) -> None:
        settings = encoder.settings
        chunks = [settings.chunk_texts(skill) for skill in skills]
        texts = [*chain.from_iterable(chunks)]
        tokens = tokenize_texts(
            dict(zip(texts, texts, strict=True)),
            lambda some: encoder.tokenize(some, settings.max_tokens),
        )
        # Each distinct text is encoded once, so equal skills have equal scores.
        self.text_tokens: list[TokenIds] = [*tokens.values()]
        numbers = {text: number for number, text in enumerate(tokens)}
        self.chunk_rows = np.array([numbers[text] for text in texts], dtype=np.int64)
        self.query_tokens = tokenize_texts(
            {query.query_id: query.text for query in queries}, encoder.tokenize_queries
        )
        self.skill_ids = [skill.skill_id for skill in skills]
        self.starts = starts_of([*map(len, chunks)])
        self.pool: ChunkPool = settings.chunks.pool
        self.model: Any = None

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The `keep` nearest skills of each query, of its candidates alone where there are some."""
        asked: list[TokenIds] = [self.query_tokens[query.query_id] for query in queries]
        vectors = _finite(self.model(Texts([*asked, *self.text_tokens]))).cpu().numpy()
        chunks = vectors[len(queries) :][self.chunk_rows]
        pool = ChunkVectors(chunks, self.starts, self.pool)
        index = VectorIndex(pool, lambda _: vectors[: len(queries)])
        return PoolRanker(self.skill_ids, index).rank(queries, candidates, keep)


@dataclass
class OwnReranker:
    """The reranker in training as a ranker: all ranks together score the candidates that the first rank has."""

    reranker: Reranker
    skills: Mapping[str, Skill]
    model: Any = None
    first_weight: float = 0.0

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The first `keep` candidates of each query by score, the others behind them in their order."""
        candidates = of_first_rank(candidates)
        assert candidates is not None, "a reranker needs candidates"
        rows: dict[str, dict[str, tuple[int, ...]]] = {}  # query id → skill id → token ids
        lists: list[list[PairIds]] = []
        for query in queries:
            skill_ids = [skill_id for skill_id, _ in candidates[query.query_id][:keep]]
            skills = [self.skills[skill_id] for skill_id in skill_ids]
            pairs = self.reranker.tokenize(query.text, skills)
            token_ids = [tuple(pair.ids) for pair in pairs]
            rows[query.query_id] = dict(zip(skill_ids, token_ids, strict=True))
            # Each distinct pair is scored once, so equal skills have equal scores.
            distinct = dict(zip(token_ids, pairs, strict=True))
            if distinct:
                lists.append([*distinct.values()])
        values = iter(_finite(self.model(Pairs(lists))).tolist())
        rankings: Rankings = {}
        for query_id, row in rows.items():
            scores = {ids: next(values) for ids in dict.fromkeys(row.values())}
            by_skill = {skill_id: scores[ids] for skill_id, ids in row.items()}
            ranking = candidates[query_id]
            rankings[query_id] = reordered(ranking, keep, by_skill, self.first_weight)
        return rankings


def _finite(output: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Vectors [text, dim] or scores [pair]. Raises SkilltrainError where one is no number."""
    if not torch.isfinite(output).all():
        raise SkilltrainError("the model's output on the dev benchmark is no number", where="dev")
    return output.float()


@dataclass(frozen=True)
class Dev:
    """A dev benchmark made ready: the queries, what they ask for, and the rankers, one of which is the model."""

    config: DevConfig
    relevances: Mapping[str, Relevance]
    cascade: Cascade
    own: Any  # a Ranker whose `model` is set before each evaluation

    def evaluate(self, model: Any) -> dict[str, Interval]:
        """Measure name → figure, the same on every rank; all ranks must call it, with the wrapped step module.

        Raises SkilltrainError where its output is no number.
        """
        self.own.model = model
        stages = self.cascade.run(self.config.system)
        measures = self.config.measures
        values = per_query(stages[-1].skill_ids(), self.relevances, measures)
        table = np.array([[row[str(measure)] for measure in measures] for row in values.values()])
        # The first rank's figures on every rank: a last bit that differs must not let one rank stop alone.
        found = of_first_rank(intervals(table))
        return {str(measure): figure for measure, figure in zip(measures, found, strict=True)}

    def line(self, figures: Mapping[str, Interval]) -> str:
        """The figures for people: the metric that decides with its interval, then the others."""
        others = (
            f"{name} {compact(figure.mean, 3)}"
            for name, figure in figures.items()
            if name != self.config.metric
        )
        return "  ".join((f"{self.config.metric} {figures[self.config.metric]}", *others))


def open_dev(config: DevConfig, model: Encoder | Reranker, training_pool: Path) -> Dev:
    """The dev benchmark for a model in training. Raises SkilltrainError for gold skills that cannot be found."""
    check_systems([config.system], has_own=True)
    benchmark = load_benchmark(config.benchmark, config.split)
    pool = benchmark.with_gold(read_pool(config.pool or training_pool))
    benchmark = check_pool(benchmark, pool.keys())
    tasks, queries = benchmark.tasks, benchmark.queries
    judged = chain.from_iterable(
        (*task.relevance.gains, *task.relevance.alternatives) for task in tasks
    )
    kept = pool.keys() & judged
    others = [skill_id for skill_id in pool if skill_id not in kept]
    if config.max_skills is not None:
        others = random.Random(0).sample(
            others, min(len(others), max(0, config.max_skills - len(kept)))
        )
    kept.update(others)
    skills = {skill_id: skill for skill_id, skill in pool.items() if skill_id in kept}
    say(
        f"dev: {len(tasks):,} queries of {config.benchmark}, ranked over {len(skills):,} of {len(pool):,} skills"
    )
    is_encoder = isinstance(model, Encoder)
    own = (
        OwnEncoder(model, queries, [*skills.values()]) if is_encoder else OwnReranker(model, skills)
    )
    depth = max(measure.cutoff for measure in config.measures)
    depth = max([depth, *(ranker.keep or 0 for ranker in config.rankers)])
    cascade = Cascade(queries, [*skills.values()], depth, {OWN: own})
    _check_candidates(config, cascade, tasks)
    return Dev(config, benchmark.relevances, cascade, own)


def _check_candidates(config: DevConfig, cascade: Cascade, tasks: Sequence[Task]) -> None:
    """Say how much gold the rankers before the model do not find. Raises SkilltrainError where that is all of it.

    The cascade remembers what they find, and lets go of their models.
    """
    number = next(
        number
        for number, ranker in enumerate(config.rankers)
        if any(map(is_own, parts_of([ranker])))
    )
    if not number:
        return
    keeps = keeps_of(config.system, cascade.depth)
    before = [
        one.model_copy(update={"keep": k})
        for one, k in zip(config.rankers[:number], keeps, strict=False)
    ]
    found = cascade.run(SystemConfig(name="dev", rankers=tuple(before)))[-1].skill_ids()
    cascade.release([config.system.model_copy(update={"rankers": config.rankers[number:]})])
    golds = [(task.query.query_id, skill_id) for task in tasks for skill_id in task.relevance.gold]
    missed = [query_id for query_id, skill_id in golds if skill_id not in found[query_id]]
    place = "among the candidates of the rankers before the model"
    if len(missed) == len(golds):
        what, fix = (
            f"no gold skill of the {len(tasks)} dev queries is {place}",
            "choose others, of this benchmark",
        )
        raise SkilltrainError(what, where="dev.rankers", fix=fix)
    if missed:
        what = f"dev: {len(missed):,} of {len(golds):,} gold skills ({len(set(missed)):,} queries) are not {place}"
        say(f"{what} and count as missed")
