"""Evaluates the model in training on a dev benchmark. The model is one of several rankers."""

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


def encoder_opener(
    encoder: Encoder, queries: Sequence[Query], skills: Mapping[str, Skill]
) -> OpenModel:
    """Return the function `open_model`, which opens an encoder in training as a ranker of `skills`.

    All texts are tokenised here, once. Whenever `open_model` is called, it encodes all texts in one
    call of the step module. The ranker then looks the vectors of its texts up.

    Args:
        encoder: The encoder in training.
        queries: Queries to rank the skills for.
        skills: Skills by id.
    """
    settings = encoder.settings
    query_texts = [settings.template.render_query(query.text) for query in queries]
    skill_texts: list[str] = []
    for skill in skills.values():
        skill_texts += settings.chunk_texts(skill)

    # Each distinct text is encoded once, so equal skills have equal scores. The key of a text is
    # the text with its token limit.
    token_ids: dict[tuple[str, int], np.ndarray] = {}
    inputs = [(query_texts, settings.query_max_tokens), (skill_texts, settings.max_tokens)]
    for texts, max_tokens in inputs:
        text_by_key = {(text, max_tokens): text for text in texts}
        tokenize = partial(encoder.tokenize, max_tokens=max_tokens)
        token_ids.update(tokenize_texts(text_by_key, tokenize))
    row_by_key = {key: row for row, key in enumerate(token_ids)}  # row of each text's vector

    def open_model(step_module: Any) -> Any:
        """Encode all texts, and return a ranker of the skills that looks their vectors up.

        The encoder, its texts and the skills are those of `encoder_opener`.
        """
        all_texts = TextsToEncode([*token_ids.values()])
        vectors = _check_finite(step_module(all_texts)).cpu().numpy()  # [text, dim]

        def look_up(texts: Sequence[str], max_tokens: int) -> Vectors:
            rows = [row_by_key[text, max_tokens] for text in texts]
            return vectors[rows]

        # `look_up` takes the place of the forward pass, so there are no micro-batches to limit.
        # The source OWN stands for the model in training.
        ranker = SkillEncoder(encoder, source=OWN, token_budget=0, forward=look_up)
        return ranker.over(skills)

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
    distinct_lists: list[dict[tuple[int, ...], PairIds]] = []  # pairs of each list by token ids
    for pairs in all_lists:
        distinct_lists.append({tuple(pair.ids): pair for pair in pairs})
    non_empty = [[*pair_by_ids.values()] for pair_by_ids in distinct_lists if pair_by_ids]
    inputs = PairsToScore(non_empty)
    scores = _check_finite(model(inputs)).tolist() if inputs.lists else []

    # The scores are in the order of `distinct_lists`, and of the pairs of each list.
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
    """Load the dev benchmark, and run the rankers that come before the model in the cascade.

    Args:
        config: Settings of the benchmark.
        model: The model in training.
        training_pool: Pool of the training data, which is ranked if `config` names no other.

    Raises:
        SkilltrainError: Gold skills are not in the pool, or the rankers before the model find no
            gold skill.
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

    # Rank enough skills for the largest cutoff of a measure, and for the largest `keep`.
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
    sample: set[str] = set()
    for task in tasks:
        sample |= pool.keys() & {*task.relevance.gains, *task.relevance.alternatives}
    unjudged = [skill_id for skill_id in pool if skill_id not in sample]
    if max_skills is not None:
        num_unjudged = max(0, max_skills - len(sample))
        unjudged = random.Random(0).sample(unjudged, min(len(unjudged), num_unjudged))
    sample.update(unjudged)
    return {skill_id: skill for skill_id, skill in pool.items() if skill_id in sample}


def _run_earlier_rankers(config: DevConfig, cascade: Cascade, tasks: Sequence[Task]) -> None:
    """Run the rankers before the model in training once, and check that they find gold skills.

    The cascade stores their rankings, so that later evaluations need not run them again. If they
    miss some gold skills, a warning says how many.

    Args:
        config: Settings of the dev benchmark.
        cascade: Queries and pool.
        tasks: Queries with their judgements.

    Raises:
        SkilltrainError: The rankers before the model find no gold skill.
    """
    num_earlier = _num_before_model(config)
    if num_earlier == 0:
        return

    # Run the rankers before the model. The cascade stores their rankings.
    rankers = with_keeps(config.rankers, cascade.depth)
    earlier_system = SystemConfig(name="dev", rankers=tuple(rankers[:num_earlier]))
    rankings = cascade.run(earlier_system)[-1].skill_ids()

    # Free their models, because evaluations run only the later rankers.
    later_system = config.system.model_copy(update={"rankers": config.rankers[num_earlier:]})
    cascade.release_unneeded([later_system])

    # Find the gold skills that are not among the candidates of these rankers.
    num_gold = 0
    missed: list[str] = []  # query id of each missed gold skill
    for task in tasks:
        query_id = task.query.query_id
        gold = task.relevance.gold
        num_gold += len(gold)
        missed += [query_id for skill_id in gold if skill_id not in rankings[query_id]]

    if len(missed) == num_gold:
        raise SkilltrainError(
            "missing-gold-skill",
            f"no gold skill of the {len(tasks)} dev queries is among the candidates of the rankers "
            "before the model",
            where="dev.rankers",
            fix="choose others, of this benchmark",
        )
    if missed:
        say(
            f"dev: {len(missed):,} of {num_gold:,} gold skills ({len(set(missed)):,} queries) "
            "are not among the candidates of the rankers before the model and count as missed"
        )


def _num_before_model(config: DevConfig) -> int:
    """Return the number of rankers that run before the model in training."""
    number = 0
    while not any(member.is_in_training for member in flatten_rankers([config.rankers[number]])):
        number += 1
    return number
