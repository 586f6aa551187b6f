"""Evaluates the model in training on a dev benchmark. The model is one of several rankers.

Notes:
    - Each distinct text, and each distinct pair of a list, goes through the model once, so equal
      skills have equal scores.
    - `forward` takes the place of the forward pass, so there are no micro-batches to limit
      (`token_budget=0`).
    - Rounding may differ between ranks, but all of them must take the same decision to stop.
    - The rankers before the model run once: the cascade stores their rankings, and their models are
      freed.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from skilltrain.models.pairs import PairIds
from skilltrain.models.reranker import Reranker
from skilltrain.models.tokens import tokenize_texts
from skilltrain.records import Query, Skill
from skilltrain.retrieval.cascade import Cascade, SystemConfig, check_systems
from skilltrain.retrieval.dense import SkillEncoder
from skilltrain.retrieval.executor import with_keeps
from skilltrain.retrieval.rankers import OWN, flatten_rankers
from skilltrain.retrieval.rerank import Rerank
from skilltrain.retrieval.vectors import Vectors
from skilltrain.terminal import say
from skilltrain.training.settings import DevConfig
from skilltrain.training.steps import PairsToScore, TextsToEncode

OpenModel = Callable[[Any], Any]
"""Opens the model in training as a ranker, from the wrapped step module. All ranks must call it."""
TextKey = tuple[str, int]
"""A text with its token limit."""


def encoder_opener(
    encoder: Encoder, queries: Sequence[Query], skills: Mapping[str, Skill]
) -> OpenModel:
    """Return the function that opens an encoder in training as a ranker of `skills`.

    All texts are tokenised here, once.

    Args:
        queries: Queries to rank the skills for.
        skills: Skills by id.
    """
    settings = encoder.settings
    query_texts = [settings.template.render_query(query.text) for query in queries]
    skill_texts = []
    for skill in skills.values():
        skill_texts += settings.chunk_texts(skill)

    token_ids = {}
    inputs = [(query_texts, settings.query_max_tokens), (skill_texts, settings.max_tokens)]
    for texts, max_tokens in inputs:
        text_by_key = {(text, max_tokens): text for text in texts}
        tokenize = partial(encoder.tokenize, max_tokens=max_tokens)
        token_ids.update(tokenize_texts(text_by_key, tokenize))
    return partial(_open_encoder, encoder, skills, token_ids)


def _open_encoder(
    encoder: Encoder,
    skills: Mapping[str, Skill],
    token_ids: Mapping[TextKey, np.ndarray],
    model: Any,
) -> Any:
    """Encode all texts with `model`, and return a ranker that looks their vectors up."""
    all_texts = TextsToEncode([*token_ids.values()])
    vectors = _check_finite(model(all_texts)).cpu().numpy()  # [text, dim]
    row_by_key = {key: row for row, key in enumerate(token_ids)}

    def look_up(texts: Sequence[str], max_tokens: int) -> Vectors:
        rows = [row_by_key[text, max_tokens] for text in texts]
        return vectors[rows]

    ranker = SkillEncoder(encoder, source=OWN, token_budget=0, forward=look_up)
    return ranker.over(skills)


def reranker_opener(reranker: Reranker, skills: Mapping[str, Skill]) -> OpenModel:
    """Return the function that opens a reranker in training as a ranker of `skills`."""
    return lambda model: Rerank(reranker, skills, 0, forward=partial(_score_lists, model))


def _score_lists(model: Any, lists: Iterable[list[PairIds]]) -> Iterator[list[float]]:
    """Score lists of pairs in one call of the model, and yield the scores of each list.

    Args:
        model: The wrapped step module of a reranker.
        lists: Pairs of each query.
    """
    all_lists = [*lists]
    distinct_lists = []  # pairs by token ids
    for pairs in all_lists:
        distinct_lists.append({tuple(pair.ids): pair for pair in pairs})
    non_empty = [[*pair_by_ids.values()] for pair_by_ids in distinct_lists if pair_by_ids]
    scores = _check_finite(model(PairsToScore(non_empty))).tolist() if non_empty else []

    remaining_scores = iter(scores)
    for pairs, pair_by_ids in zip(all_lists, distinct_lists, strict=True):
        score_by_ids = {ids: next(remaining_scores) for ids in pair_by_ids}
        yield [score_by_ids[tuple(pair.ids)] for pair in pairs]


def _check_finite(output: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Check vectors [text, dim] or scores [pair] of the model, and convert them to float32.

    Raises:
        SkilltrainError: A value is not finite.
    """
    if not torch.isfinite(output).all():
        raise SkilltrainError(
            "not-a-number", "the model's output on the dev benchmark is no number", where="dev"
        )
    return output.float()


@dataclass(frozen=True)
class Dev:
    """A dev benchmark that is ready to be ranked.

    Attributes:
        config: Settings.
        relevances: Judgements by query id.
        cascade: Queries, pool and opened rankers.
        open_model: Opens the model in training as a ranker.
    """

    config: DevConfig
    relevances: Mapping[str, Relevance]
    cascade: Cascade
    open_model: OpenModel

    def evaluate(self, model: Any) -> dict[str, Interval]:
        """Return the mean and interval of each metric, equal on all ranks.

        Args:
            model: The wrapped step module. All ranks must call this.
        """
        self.cascade.pool.opened[OWN] = self.open_model(model)
        stages = self.cascade.run(self.config.system)
        measures = self.config.measures
        values = per_query(stages[-1].skill_ids(), self.relevances, measures)
        table = np.array([[*row.values()] for row in values.values()])  # [query, measure]
        metrics = of_first_rank(intervals(table))
        return dict(zip(map(str, measures), metrics, strict=True))

    def line(self, metrics: Mapping[str, Interval]) -> str:
        """Format metrics as one line: the metric that decides and its interval, then the others."""
        main = self.config.metric
        texts = [f"{main} {metrics[main]}"]
        for name, metric in metrics.items():
            if name != main:
                texts.append(f"{name} {compact(metric.mean, 3)}")
        return "  ".join(texts)


def open_dev(config: DevConfig, model: Encoder | Reranker, training_pool: Path) -> Dev:
    """Load the dev benchmark, and run the rankers that come before the model in the cascade.

    Args:
        model: The model in training.
        training_pool: Pool that is ranked if `config` names no other.
    """
    check_systems([config.system], has_model=True)
    benchmark = load_benchmark(config.benchmark, config.split)
    pool = benchmark.with_gold(read_pool(config.pool or training_pool))
    benchmark = check_pool(benchmark, pool.keys())
    queries = benchmark.queries
    skills = _sample_pool(pool, benchmark.tasks, config.max_skills)
    say(
        f"dev: {len(queries):,} queries of {config.benchmark}, ranked over {len(skills):,} of "
        f"{len(pool):,} skills"
    )

    if isinstance(model, Encoder):
        open_model = encoder_opener(model, queries, skills)
    else:
        open_model = reranker_opener(model, skills)
    cutoffs = [measure.cutoff for measure in config.measures]
    keeps = [ranker.keep for ranker in config.rankers if ranker.keep is not None]
    cascade = Cascade(queries, [*skills.values()], depth=max(cutoffs + keeps))
    _run_earlier_rankers(config, cascade, benchmark.tasks)
    return Dev(config, benchmark.relevances, cascade, open_model)


def _sample_pool(
    pool: Mapping[str, Skill], tasks: Sequence[Task], max_skills: int | None
) -> dict[str, Skill]:
    """Return all judged skills of a pool, and a random sample of the others.

    Args:
        pool: Skills by id.
        tasks: Queries with their judgements.
        max_skills: Number of skills to return, unless more are judged. None: the whole pool.
    """
    sample = set()
    for task in tasks:
        judged = {*task.relevance.gains, *task.relevance.alternatives}
        sample |= judged & pool.keys()
    unjudged = [skill_id for skill_id in pool if skill_id not in sample]
    if max_skills is not None:
        num_unjudged = max(0, max_skills - len(sample))
        unjudged = random.Random(0).sample(unjudged, min(len(unjudged), num_unjudged))
    sample.update(unjudged)
    return {skill_id: skill for skill_id, skill in pool.items() if skill_id in sample}


def _run_earlier_rankers(config: DevConfig, cascade: Cascade, tasks: Sequence[Task]) -> None:
    """Run the rankers before the model in training, and check that they find gold skills.

    Args:
        cascade: Queries and pool. It stores the rankings.
        tasks: Queries with their judgements.
    """
    num_earlier = _num_before_model(config)
    if num_earlier == 0:
        return
    rankers = with_keeps(config.rankers, cascade.depth)
    earlier_system = SystemConfig(name="dev", rankers=tuple(rankers[:num_earlier]))
    rankings = cascade.run(earlier_system)[-1].skill_ids()
    later_system = config.system.model_copy(update={"rankers": config.rankers[num_earlier:]})
    cascade.release_unneeded([later_system])
    _check_candidates(rankings, tasks)


def _check_candidates(rankings: Mapping[str, Sequence[str]], tasks: Sequence[Task]) -> None:
    """Check that gold skills are candidates. If some are not, a warning says how many."""
    num_gold = 0
    queries_of_missed = []
    for task in tasks:
        query_id = task.query.query_id
        missed = task.relevance.gold.difference(rankings[query_id])
        num_gold += len(task.relevance.gold)
        queries_of_missed += [query_id] * len(missed)

    num_missed = len(queries_of_missed)
    candidates = "the candidates of the rankers before the model"
    if num_missed == num_gold:
        fault = f"no gold skill of the {len(tasks)} dev queries is among {candidates}"
        fix = "choose others, of this benchmark"
        raise SkilltrainError("missing-gold-skill", fault, where="dev.rankers", fix=fix)
    if num_missed:
        num_queries = len(set(queries_of_missed))
        say(
            f"dev: {num_missed:,} of {num_gold:,} gold skills ({num_queries:,} queries) "
            f"are not among {candidates} and count as missed"
        )


def _num_before_model(config: DevConfig) -> int:
    """Return the number of rankers that run before the model in training."""
    number = 0
    while not any(member.is_in_training for member in flatten_rankers([config.rankers[number]])):
        number += 1
    return number
