"""How good the model is while it trains: a dev benchmark, ranked every so many steps by a list of rankers."""

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
from skilltrain.retrieval.rankers import OWN
from skilltrain.retrieval.rerank import Rerank
from skilltrain.retrieval.vectors import Vectors
from skilltrain.terminal import say
from skilltrain.training.settings import DevConfig
from skilltrain.training.steps import Pairs, Texts

OpenOwn = Callable[[Any], Any]
"""Opens the model in training as a ranker, given the wrapped step module, which all ranks must call together."""


def encoder_opener(
    encoder: Encoder, queries: Sequence[Query], skills: Mapping[str, Skill]
) -> OpenOwn:
    """Return the function that opens an encoder in training. It encodes all texts in one call."""
    settings = encoder.settings
    query_texts = [settings.template.render_query(query.text) for query in queries]
    # Each distinct text is encoded once, so equal skills have equal scores.
    skill_texts = dict.fromkeys(chain.from_iterable(map(settings.chunk_texts, skills.values())))
    token_ids: list[TokenIds] = []
    row_of: dict[tuple[str, int], int] = {}
    for texts, max_tokens in (
        (query_texts, settings.query_max_tokens),
        (skill_texts, settings.max_tokens),
    ):
        tokenize = partial(encoder.tokenize, max_tokens=max_tokens)
        ids_by_text = tokenize_texts({text: text for text in texts}, tokenize)
        for text in texts:
            row_of.setdefault((text, max_tokens), len(token_ids))
            token_ids.append(ids_by_text[text])

    def open_own(model: Any) -> Any:
        vectors = _finite(model(Texts(token_ids))).cpu().numpy()

        def look_up(texts: Sequence[str], max_tokens: int) -> Vectors:
            return vectors[[row_of[text, max_tokens] for text in texts]]

        return SkillEncoder(encoder, OWN, 0, forward=look_up).over(skills)

    return open_own


def reranker_opener(reranker: Reranker, skills: Mapping[str, Skill]) -> OpenOwn:
    """Return the function that opens a reranker in training."""

    def open_own(model: Any) -> Any:
        def score(lists: Iterable[list[PairIds]]) -> Iterator[list[float]]:
            all_pairs = [*lists]
            # Each distinct pair is scored once, so equal skills have equal scores.
            distinct = [{tuple(pair.ids): pair for pair in pairs} for pairs in all_pairs if pairs]
            inputs = Pairs([[*row.values()] for row in distinct])
            values = iter(_finite(model(inputs)).tolist() if distinct else ())
            for pairs in all_pairs:
                token_ids = [tuple(pair.ids) for pair in pairs]
                scores = {ids: next(values) for ids in dict.fromkeys(token_ids)}
                yield [scores[ids] for ids in token_ids]

        return Rerank(reranker, skills, 0, forward=score)

    return open_own


def _finite(output: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Vectors [text, dim] or scores [pair]. Raises SkilltrainError where one is no number."""
    if not torch.isfinite(output).all():
        raise SkilltrainError(
            "not-a-number", "the model's output on the dev benchmark is no number", where="dev"
        )
    return output.float()


@dataclass(frozen=True)
class Dev:
    """A dev benchmark made ready: the queries, what they ask for, and the rankers, one of which is the model."""

    config: DevConfig
    relevances: Mapping[str, Relevance]
    cascade: Cascade
    open_own: OpenOwn

    def evaluate(self, model: Any) -> dict[str, Interval]:
        """Measure name → figure, the same on every rank; all ranks must call it, with the wrapped step module.

        Raises SkilltrainError where its output is no number.
        """
        self.cascade.pool.opened[OWN] = self.open_own(model)
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
    if isinstance(model, Encoder):
        open_own = encoder_opener(model, queries, skills)
    else:
        open_own = reranker_opener(model, skills)
    depth = max(measure.cutoff for measure in config.measures)
    depth = max([depth, *(ranker.keep or 0 for ranker in config.rankers)])
    cascade = Cascade(queries, [*skills.values()], depth)
    _check_candidates(config, cascade, tasks)
    return Dev(config, benchmark.relevances, cascade, open_own)


def _check_candidates(config: DevConfig, cascade: Cascade, tasks: Sequence[Task]) -> None:
    """Say how much gold the rankers before the model do not find. Raises SkilltrainError where that is all of it.

    The cascade remembers what they find, and lets go of their models.
    """
    number = next(
        number
        for number, ranker in enumerate(config.rankers)
        if any(part.is_own for part in ranker.parts())
    )
    if not number:
        return
    before = with_keeps(config.rankers, cascade.depth)[:number]
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
        raise SkilltrainError("missing-gold-skill", what, where="dev.rankers", fix=fix)
    if missed:
        what = f"dev: {len(missed):,} of {len(golds):,} gold skills ({len(set(missed)):,} queries) are not {place}"
        say(f"{what} and count as missed")
