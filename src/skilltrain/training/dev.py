"""How good the model is while it trains: a dev benchmark, ranked every so many steps by a list of rankers."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from skilltrain.data.pool.read import read_pool
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.benchmark import Task
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.evaluation.bootstrap import Interval, compact, intervals
from skilltrain.evaluation.metrics import Relevance, parse_measures, per_query
from skilltrain.models.encoder import Encoder
from skilltrain.models.micro_batches import TokenIds
from skilltrain.models.ranks import of_first_rank
from skilltrain.models.reranker import Reranker
from skilltrain.models.tokens import TokensOf, tokenized
from skilltrain.records import Query, Rankings, Skill
from skilltrain.retrieval.cascade import Cascade, SystemConfig, check_systems, keeps_of
from skilltrain.retrieval.nearest import ChunkVectors, PoolRanker, VectorIndex, starts_of
from skilltrain.retrieval.rankers import is_own
from skilltrain.retrieval.rerank import reordered
from skilltrain.templates import ChunkPool
from skilltrain.terminal import say
from skilltrain.training.settings import DEV_MEASURES, DevConfig, depth_of
from skilltrain.training.steps import Pairs, Texts

ItemT = TypeVar("ItemT")


@dataclass
class OwnEncoder:
    """The encoder in training as a ranker: all ranks together encode the pool anew each time that they are asked.

    `model` is the step module, wrapped for the launch, at each evaluation.
    """

    query_tokens: TokensOf
    skill_tokens: Mapping[str, Sequence[TokenIds]]  # of each chunk
    pool: ChunkPool = "max"
    model: Any = None

    def rank(self, queries: Sequence[Query], candidates: Rankings | None, keep: int) -> Rankings:
        """The `keep` nearest skills of each query, of its candidates alone where there are some."""
        texts: list[TokenIds] = [self.query_tokens[query.query_id] for query in queries]
        chunks = [ids for of_skill in self.skill_tokens.values() for ids in of_skill]
        vectors = _finite(self.model(Texts([*texts, *chunks]))).cpu().numpy()
        starts = starts_of([len(of_skill) for of_skill in self.skill_tokens.values()])
        pool = ChunkVectors(vectors[len(queries) :], starts, self.pool)
        index = VectorIndex(pool, lambda _: vectors[: len(queries)])
        return PoolRanker([*self.skill_tokens], index).rank(queries, candidates, keep)


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
        asked = [query for query in queries if candidates[query.query_id]]
        firsts = [[skill_id for skill_id, _ in candidates[query.query_id][:keep]] for query in asked]
        skills = [[self.skills[skill_id] for skill_id in of_query] for of_query in firsts]
        lists = [self.reranker.tokenize(query.text, some) for query, some in zip(asked, skills, strict=True)]
        rows = _finite(self.model(Pairs(lists))).split([len(pairs) for pairs in lists])
        rankings: Rankings = {query.query_id: [] for query in queries}
        for query, skill_ids, row in zip(asked, firsts, rows, strict=True):
            scores = dict(zip(skill_ids, row.tolist(), strict=True))
            rankings[query.query_id] = reordered(candidates[query.query_id], keep, scores, self.first_weight)
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
        """Measure name → figure, the same on every rank; all ranks must call it.

        `model` is the step module, wrapped for the launch. Raises SkilltrainError where its output is no number.
        """
        self.own.model = model
        stages = self.cascade.run(self.config.system)
        rankings = {query_id: [s for s, _ in ranking] for query_id, ranking in stages[-1].rankings.items()}
        measures = parse_measures([*DEV_MEASURES, self.config.metric])
        values = per_query(rankings, self.relevances, measures)
        table = np.array([[row[str(measure)] for measure in measures] for row in values.values()])
        # The first rank's figures on every rank: a last bit that differs must not let one rank stop alone.
        found = of_first_rank(intervals(table, seed=self.config.seed))
        return {str(measure): figure for measure, figure in zip(measures, found, strict=True)}

    def line(self, figures: Mapping[str, Interval]) -> str:
        """The figures for people: the metric that decides with its interval, then the others."""
        others = (f"{name} {compact(figure.mean, 3)}" for name, figure in figures.items() if name != self.config.metric)
        return "  ".join((f"{self.config.metric} {figures[self.config.metric]}", *others))


def open_dev(config: DevConfig, model: Encoder | Reranker, training_pool: Path) -> Dev:
    """The dev benchmark for a model in training; what the rankers before it find is found now, and once.

    Raises SkilltrainError for a benchmark without a query to score, and where no gold skill can be found at all.
    """
    check_systems([config.system], has_own=True)
    benchmark = load_benchmark(config.benchmark, config.split)
    tasks = _sample(benchmark.tasks, config.max_queries, config.seed)
    path = config.pool or training_pool
    pool = {skill.skill_id: skill for skill in read_pool(path)}
    pool |= {skill.skill_id: skill for skill in benchmark.gold_skills if skill.skill_id not in pool}
    queries = [task.query for task in tasks]
    judged = {skill_id for task in tasks for skill_id in task.relevance.gains if skill_id in pool}
    others = [skill_id for skill_id in pool if skill_id not in judged]
    room = None if config.max_skills is None else max(0, config.max_skills - len(judged))
    kept = judged.union(_sample(others, room, config.seed))
    skills = {skill_id: skill for skill_id, skill in pool.items() if skill_id in kept}
    say(f"dev: {len(tasks):,} queries of {config.benchmark}, ranked over {len(skills):,} of {len(pool):,} skills")
    own = _own_encoder(model, queries, skills) if isinstance(model, Encoder) else OwnReranker(model, skills)
    keeps = [ranker.keep for ranker in config.rankers if ranker.keep]
    cascade = Cascade(queries, [*skills.values()], max(depth_of(config.metric), *keeps, 1), own)
    _say_missed(tasks, pool, _before_own(config, cascade), path)
    relevances = {task.query.query_id: _within(task.relevance, pool) for task in tasks}
    return Dev(config, relevances, cascade, own)


def _own_encoder(model: Encoder, queries: Sequence[Query], skills: Mapping[str, Skill]) -> OwnEncoder:
    settings = model.settings
    chunks = {skill_id: settings.chunk_texts(skill) for skill_id, skill in skills.items()}
    each = list(dict.fromkeys(text for of_skill in chunks.values() for text in of_skill))
    tokens = tokenized(each, each, lambda some: model.tokenize(some, settings.max_tokens))
    asked = tokenized([query.query_id for query in queries], [q.text for q in queries], model.tokenize_queries)
    of_skills = {skill_id: [tokens[text] for text in of_skill] for skill_id, of_skill in chunks.items()}
    return OwnEncoder(asked, of_skills, settings.chunks.pool)


def _sample(items: Sequence[ItemT], num: int | None, seed: int) -> list[ItemT]:
    """`num` of the items drawn by `seed`, in their order; all without `num`."""
    chosen = random.Random(seed).sample(range(len(items)), min(len(items) if num is None else num, len(items)))
    return [items[position] for position in sorted(chosen)]


def _before_own(config: DevConfig, cascade: Cascade) -> Rankings | None:
    """What the rankers before the model find, which the cascade remembers; None where the model ranks the pool."""
    number = next(number for number, ranker in enumerate(config.rankers) if is_own(ranker))
    if not number:
        return None
    keeps = keeps_of(config.system, cascade.depth)
    before = [one.model_copy(update={"keep": k}) for one, k in zip(config.rankers[:number], keeps, strict=False)]
    found = cascade.run(SystemConfig(name="dev", rankers=tuple(before)))[-1].rankings
    cascade.release([config.system.model_copy(update={"rankers": config.rankers[number:]})])
    return found


def _within(relevance: Relevance, pool: Collection[str]) -> Relevance:
    """`relevance` without the gains of skills that are neither gold nor in the pool, as the stage evaluate scores."""
    gains = {s: gain for s, gain in relevance.gains.items() if s in pool or s in relevance.gold}
    return replace(relevance, gains=gains)


def _say_missed(tasks: Sequence[Task], pool: Collection[str], found: Rankings | None, path: Path) -> None:
    """Say how much gold no ranking can hold. Raises SkilltrainError where that is all of it."""
    place = "the pool" if found is None else "the candidates of the rankers before the model"
    golds = [(task.query.query_id, skill_id) for task in tasks for skill_id in task.relevance.gold]
    missed = [(q, s) for q, s in golds if s not in (pool if found is None else dict(found[q]))]
    if len(missed) == len(golds):
        what = f"no gold skill of the {len(tasks)} dev queries is among {place}"
        raise SkilltrainError(what, where=path, fix="check that benchmark, split, pool and rankers belong together")
    if missed:
        num_queries = len({query_id for query_id, _ in missed})
        what = f"dev: {len(missed):,} of {len(golds):,} gold skills ({num_queries:,} queries) are not among {place}"
        say(f"{what} and count as missed")
