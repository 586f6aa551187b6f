"""Evaluates the model in training on a dev benchmark. The model is one of several rankers."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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


def encoder_opener(
    encoder: Encoder, queries: Sequence[Query], skills: Mapping[str, Skill]
) -> OpenModel:
    """Return the function that opens an encoder in training as a ranker of `skills`.

    All texts are tokenised here, once. The function encodes them in one call of the step module,
    and the ranker looks their vectors up.
    """
    settings = encoder.settings
    query_texts = [settings.template.render_query(query.text) for query in queries]
    skill_texts = chain.from_iterable(map(settings.chunk_texts, skills.values()))
    inputs = [(query_texts, settings.query_max_tokens), (skill_texts, settings.max_tokens)]

    # Each distinct text is encoded once, so equal skills have equal scores.
    token_ids: dict[tuple[str, int], np.ndarray] = {}  # by text and token limit
    for texts, max_tokens in inputs:
        tokenize = partial(encoder.tokenize, max_tokens=max_tokens)
        token_ids |= tokenize_texts({(text, max_tokens): text for text in texts}, tokenize)
    rows = {text_and_limit: row for row, text_and_limit in enumerate(token_ids)}

    def open_model(model: Any) -> Any:
        vectors = _check_finite(model(TextsToEncode([*token_ids.values()]))).cpu().numpy()

        def look_up(texts: Sequence[str], max_tokens: int) -> Vectors:
            return vectors[[rows[text, max_tokens] for text in texts]]

        return SkillEncoder(encoder, OWN, token_budget=0, forward=look_up).over(skills)

    return open_model


def reranker_opener(reranker: Reranker, skills: Mapping[str, Skill]) -> OpenModel:
    """Return the function that opens a reranker in training as a ranker of `skills`."""
    return lambda model: Rerank(reranker, skills, 0, forward=partial(_score_lists, model))


def _score_lists(model: Any, lists: Iterable[list[PairIds]]) -> Iterator[list[float]]:
    """Score lists of pairs in one call of the model, and yield the scores of each list.

    Args:
        model: The wrapped step module of a reranker.
        lists: Pairs of each query.

    Raises:
        SkilltrainError: A score is not finite.
    """
    # Each distinct pair of a list is scored once, so equal skills have equal scores.
    all_lists = [*lists]
    distinct = []  # the pairs of each list, by their token ids
    for pairs in all_lists:
        distinct.append({tuple(pair.ids): pair for pair in pairs})
    inputs = PairsToScore([[*pairs.values()] for pairs in distinct if pairs])
    scores = _check_finite(model(inputs)).tolist() if inputs.lists else []

    remaining_scores = iter(scores)
    for pairs, pairs_by_ids in zip(all_lists, distinct, strict=True):
        score_by_ids = {ids: next(remaining_scores) for ids in pairs_by_ids}
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

        Raises:
            SkilltrainError: The model's output is not finite.
        """
        self.cascade.pool.opened[OWN] = self.open_model(model)
        stages = self.cascade.run(self.config.system)
        measures = self.config.measures
        values = per_query(stages[-1].skill_ids(), self.relevances, measures)
        table = np.array([[*row.values()] for row in values.values()])  # [query, measure]
        # Rounding may differ between ranks, but all of them must take the same decision to stop.
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
    """Load the dev benchmark for a model in training, and run the rankers before the model.

    Args:
        config: Settings of the benchmark.
        model: The model in training.
        training_pool: Pool of the training data, which is ranked if `config` names no other.

    Raises:
        SkilltrainError: Gold skills are not in the pool, or none of them reaches the model.
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

    # Rank as deep as the largest cutoff and every ranker need.
    cutoffs = [measure.cutoff for measure in config.measures]
    keeps = [ranker.keep or 0 for ranker in config.rankers]
    cascade = Cascade(queries, [*skills.values()], depth=max(cutoffs + keeps))
    _check_candidates(config, cascade, benchmark.tasks)
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
    sample: set[str] = set()
    for task in tasks:
        sample |= pool.keys() & {*task.relevance.gains, *task.relevance.alternatives}
    unjudged = [skill_id for skill_id in pool if skill_id not in sample]
    if max_skills is not None:
        num_unjudged = max(0, max_skills - len(sample))
        unjudged = random.Random(0).sample(unjudged, min(len(unjudged), num_unjudged))
    sample.update(unjudged)
    return {skill_id: skill for skill_id, skill in pool.items() if skill_id in sample}


def _check_candidates(config: DevConfig, cascade: Cascade, tasks: Sequence[Task]) -> None:
    """Run the rankers before the model in training, and warn of gold skills that they miss.

    The cascade keeps their rankings for all evaluations.

    Raises:
        SkilltrainError: They find no gold skill.
    """
    # Run the rankers before the model.
    num_earlier = 0
    while not any(part.is_in_training for part in flatten_rankers([config.rankers[num_earlier]])):
        num_earlier += 1
    if num_earlier == 0:
        return
    rankers = tuple(with_keeps(config.rankers, cascade.depth)[:num_earlier])
    rankings = cascade.run(SystemConfig(name="dev", rankers=rankers))[-1].skill_ids()

    # Release their models. Evaluations need only those of the other rankers.
    later_rankers = {"rankers": config.rankers[num_earlier:]}
    cascade.release_unneeded([config.system.model_copy(update=later_rankers)])

    # Count the gold skills that they miss.
    num_gold = 0
    missed: list[str] = []  # query id of each missed gold skill
    for task in tasks:
        query_id = task.query.query_id
        gold = task.relevance.gold
        num_gold += len(gold)
        missed += [query_id for skill_id in gold if skill_id not in rankings[query_id]]

    where = "among the candidates of the rankers before the model"
    if len(missed) == num_gold:
        raise SkilltrainError(
            "missing-gold-skill",
            f"no gold skill of the {len(tasks)} dev queries is {where}",
            where="dev.rankers",
            fix="choose others, of this benchmark",
        )
    if missed:
        say(
            f"dev: {len(missed):,} of {num_gold:,} gold skills ({len(set(missed)):,} queries) "
            f"are not {where} and count as missed"
        )
