"""Evaluates the model in training on a dev benchmark, as one of several rankers."""

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
from skilltrain.models.micro_batches import TokenIds
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
    """Return the function that opens an encoder in training. It encodes all texts in one call."""
    settings = encoder.settings
    query_texts = [settings.template.render_query(query.text) for query in queries]
    skill_texts = chain.from_iterable(map(settings.chunk_texts, skills.values()))
    inputs = [(query_texts, settings.query_max_tokens), (skill_texts, settings.max_tokens)]
    # Each distinct text is encoded once, so equal skills have equal scores.
    token_ids: dict[tuple[str, int], TokenIds] = {}
    for texts, max_tokens in inputs:
        tokenize = partial(encoder.tokenize, max_tokens=max_tokens)
        ids_by_text = tokenize_texts({text: text for text in texts}, tokenize)
        for text, ids in ids_by_text.items():
            token_ids[text, max_tokens] = ids
    rows = {text_and_limit: row for row, text_and_limit in enumerate(token_ids)}

    def open_model(model: Any) -> Any:
        vectors = _check_finite(model(TextsToEncode([*token_ids.values()]))).cpu().numpy()

        def look_up(texts: Sequence[str], max_tokens: int) -> Vectors:
            return vectors[[rows[text, max_tokens] for text in texts]]

        return SkillEncoder(encoder, OWN, token_budget=0, forward=look_up).over(skills)

    return open_model


def reranker_opener(reranker: Reranker, skills: Mapping[str, Skill]) -> OpenModel:
    """Return the function that opens a reranker in training."""

    def open_model(model: Any) -> Any:
        def score(lists: Iterable[list[PairIds]]) -> Iterator[list[float]]:
            all_pairs = [*lists]
            # Each distinct pair of a list is scored once, so equal skills have equal scores.
            distinct = [{tuple(pair.ids): pair for pair in pairs} for pairs in all_pairs]
            inputs = PairsToScore([[*pairs.values()] for pairs in distinct if pairs])
            scores = _check_finite(model(inputs)).tolist() if inputs.lists else []
            start = 0
            for pairs, pairs_by_ids in zip(all_pairs, distinct, strict=True):
                end = start + len(pairs_by_ids)
                score_by_ids = dict(zip(pairs_by_ids, scores[start:end], strict=True))
                start = end
                yield [score_by_ids[tuple(pair.ids)] for pair in pairs]

        return Rerank(reranker, skills, 0, forward=score)

    return open_model


def _check_finite(output: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return vectors [text, dim] or scores [pair] in float32.

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
        table = np.array([[row[str(measure)] for measure in measures] for row in values.values()])
        # Rounding may differ between ranks, but all of them must take the same decision to stop.
        metrics = of_first_rank(intervals(table))
        return {str(measure): metric for measure, metric in zip(measures, metrics, strict=True)}

    def line(self, metrics: Mapping[str, Interval]) -> str:
        """Return one line of text: the metric that decides with its interval, then the others."""
        main = self.config.metric
        texts = [f"{main} {metrics[main]}"]
        for name, metric in metrics.items():
            if name != main:
                texts.append(f"{name} {compact(metric.mean, 3)}")
        return "  ".join(texts)


def open_dev(config: DevConfig, model: Encoder | Reranker, training_pool: Path) -> Dev:
    """Load the dev benchmark for a model in training, and run the rankers before the model.

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
    cutoffs = [measure.cutoff for measure in config.measures]
    keeps = [ranker.keep or 0 for ranker in config.rankers]
    cascade = Cascade(queries, [*skills.values()], depth=max(cutoffs + keeps))
    _check_candidates(config, cascade, benchmark.tasks)
    return Dev(config, benchmark.relevances, cascade, open_model)


def _sample_pool(
    pool: Mapping[str, Skill], tasks: Sequence[Task], max_skills: int | None
) -> dict[str, Skill]:
    """Return all judged skills, and a random sample of the others up to `max_skills` in all."""
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
    """Run the rankers before the model, and warn of gold skills that they do not find.

    The cascade keeps their rankings for all later evaluations.

    Raises:
        SkilltrainError: They find no gold skill.
    """
    is_model = [
        any(part.is_in_training for part in flatten_rankers([ranker])) for ranker in config.rankers
    ]
    num_before = is_model.index(True)
    if num_before == 0:
        return
    rankers = tuple(with_keeps(config.rankers, cascade.depth)[:num_before])
    rankings = cascade.run(SystemConfig(name="dev", rankers=rankers))[-1].skill_ids()
    # Their models are not needed any more; those of the rankers from here on are.
    needed = {"rankers": config.rankers[num_before:]}
    cascade.release([config.system.model_copy(update=needed)])

    num_gold = 0
    missed: list[str] = []  # query id of each gold skill that is not found
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
