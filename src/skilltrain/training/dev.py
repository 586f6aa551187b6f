"""How good the model is while it trains: a dev benchmark, ranked every so many steps, and the best step so far."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from skilltrain.config import Config, InputPath
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.metrics import Relevance, parse_measure, parse_measures, per_query
from skilltrain.evaluation.statistics.bootstrap import Interval, compact, intervals
from skilltrain.training.gather import rank_and_world

DEV_MEASURES = ("Hit@1", "MRR@10", "nDCG@10", "Recall@10", "Recall@20")
_ORDER_COUNTS = ("MRR", "nDCG")  # the other measures ask only which skills stand in the top k

InputT = TypeVar("InputT")
DevFigure = Interval  # mean over the dev queries, 95% interval, number of queries


def _known_measure(text: str) -> str:
    try:
        measure = parse_measure(text)
    except SkilltrainError as error:
        raise ValueError(str(error)) from error
    if not measure.cutoff:  # Set-Compat: queries with one gold skill have no value of it
        raise ValueError(f"{text} is not defined for every query, so no step can be chosen by it")
    return str(measure)


Metric = Annotated[str, AfterValidator(_known_measure)]


class EncoderDevConfig(Config):
    """Rank a pool for the queries of a benchmark while the encoder trains."""

    benchmark: InputPath = Field(description="folder of a benchmark, in a published format or in our tables")
    split: str | None = Field(default=None, description="use the queries of this split only; null for all")
    pool: InputPath | None = Field(default=None, description="skills to rank; null for the pool of the training data")
    max_queries: int | None = Field(default=None, ge=1, description="a sample of so many queries; null for all")
    max_skills: int | None = Field(
        default=None,
        ge=1,
        description="rank only the judged skills and a sample, so many together; figures rise, and seconds fall",
    )
    every: int = Field(default=50, ge=1, description="optimiser steps between evaluations")
    metric: Metric = Field(default="MRR@10", description="what decides which step is best, e.g. nDCG@10")
    patience: int | None = Field(
        default=None, ge=1, description="evaluations without a new best after which training stops; null for never"
    )
    seed: int = Field(default=0, ge=0, description="seed of the samples and of the bootstrap")


class RerankerDevConfig(Config):
    """Order candidates for the queries of a benchmark while the reranker trains."""

    benchmark: InputPath = Field(description="folder of a benchmark, in a published format or in our tables")
    split: str | None = Field(default=None, description="use the queries of this split only; null for all")
    pool: InputPath | None = Field(default=None, description="texts of the candidates; null for the training pool")
    candidates: InputPath = Field(description="RANKINGS of a stage candidates for these queries")
    num_candidates: int = Field(default=20, ge=2, description="candidates a query; gold beyond them counts as missed")
    max_queries: int | None = Field(default=None, ge=1, description="a sample of so many queries; null for all")
    every: int = Field(default=50, ge=1, description="optimiser steps between evaluations")
    metric: Metric = Field(default="MRR@10", description="what decides which step is best, e.g. nDCG@10")
    patience: int | None = Field(
        default=None, ge=1, description="evaluations without a new best after which training stops; null for never"
    )
    seed: int = Field(default=0, ge=0, description="seed of the sample and of the bootstrap")

    @model_validator(mode="after")
    def _metric_can_change(self) -> "RerankerDevConfig":
        measure = parse_measure(self.metric)
        if measure.name not in _ORDER_COUNTS and measure.cutoff >= self.num_candidates:
            raise ValueError(f"metric: {self.metric} is the same for every order of {self.num_candidates} candidates")
        return self


@dataclass(frozen=True)
class Dev(Generic[InputT]):
    """A dev benchmark made ready: what the model shall run on, and how its output becomes figures.

    `rank` turns the output for all `inputs` into query_id → skill ids, best first; ties keep the order of the pool
    or of the candidates.
    """

    config: EncoderDevConfig | RerankerDevConfig
    relevances: Mapping[str, Relevance]
    inputs: Sequence[InputT]
    rank: Callable[[Tensor], dict[str, list[str]]]

    @property
    def every(self) -> int:
        """Optimiser steps between evaluations."""
        return self.config.every

    def evaluate(self, run: Callable[[Sequence[InputT]], Tensor]) -> dict[str, DevFigure]:
        """Measure name → figure, the same on every rank; all ranks must call it.

        `run` gives unit vectors [text, dim] (encoder) or flat scores [pair] (reranker) for all inputs, in order.
        Raises SkilltrainError where its output is no number.
        """
        output = run(self.inputs)
        if not torch.isfinite(output).all():
            raise SkilltrainError("the model's output on the dev benchmark is no number", where=self.config.benchmark)
        measures = parse_measures([*DEV_MEASURES, self.config.metric])
        values = per_query(self.rank(output), self.relevances, measures)
        table = np.array([[row[str(measure)] for measure in measures] for row in values.values()])
        found = intervals(table, seed=self.config.seed)
        agreed = _of_first_rank([[one.mean, one.low, one.high] for one in found], output.device)
        figures = (DevFigure(mean, low, high, len(values)) for mean, low, high in agreed)
        return dict(zip(map(str, measures), figures, strict=True))

    def line(self, figures: Mapping[str, DevFigure]) -> str:
        """The figures in one line for the terminal: the metric that decides with its interval, then the others."""
        others = (f"{name} {compact(figure.mean, 3)}" for name, figure in figures.items() if name != self.config.metric)
        return "  ".join((f"{self.config.metric} {figures[self.config.metric]}", *others))


def _of_first_rank(values: list[list[float]], device: torch.device) -> list[list[float]]:
    """The first rank's values on every rank: a last bit that differs must not let one rank stop without the others."""
    if rank_and_world()[1] == 1:
        return values
    table = torch.tensor(values, dtype=torch.float64, device=device)
    dist.broadcast(table, 0)
    return table.tolist()
