"""Weights of BM25, a trained encoder and its late interaction, fitted on queries that the encoder has not seen.

python data_pipelines/cross_fit.py RECIPE OUT                                    # three folds
python data_pipelines/cross_fit.py RECIPE OUT folds=5 training.precision=bfloat16

RECIPE trains an encoder; what else is given changes its settings. Its lists are cut into folds by gold skill. For each
fold an encoder is trained without it and ranks its queries. OUT/weights_find and OUT/weights_order are then fitted on
the rankings of all folds: `weights` of a fuse ranker whose encoder is trained on all lists. A run that was stopped goes
on where it was: give the same line again. Why: fitted on queries of its training, an encoder is trusted too far.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from skilltrain.config import Config, load_recipe
from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.load import load_benchmark
from skilltrain.recipe import run_pipeline
from skilltrain.routing.fusion import folds_of
from skilltrain.stages import parse_recipe, run_recipe
from skilltrain.tables import JUDGEMENTS, LISTS, QUERIES, read_table, write_table

Recipe = dict[str, Any]


class Pipeline(Config):
    """What this pipeline can be told beside the recipe's settings."""

    recipe: Path
    out: Path
    folds: int = Field(default=3, ge=2)
    settings: list[str] = Field(default=[], description="further settings of the recipe, key=value")


def run(pipeline: Pipeline) -> dict[str, Any]:
    """Train and rank fold by fold, then fit; the summaries of both fits. Raises SkilltrainError as the stages do."""
    out, training = pipeline.out, load_recipe(pipeline.recipe, pipeline.settings)
    config = parse_recipe(training, pipeline.recipe)
    if config.stage != "train_encoder" or not isinstance(config.data.lists, Path):
        raise SkilltrainError(
            "the recipe must train an encoder on one folder of lists", where=pipeline.recipe
        )
    lists, pool, vectors = config.data.lists, str(config.data.pool), str(out / "vectors")
    tasks = load_benchmark((lists,), None).tasks
    _, folds = folds_of(tasks, pipeline.folds, config.training.seed)
    lexical, late = {"kind": "lexical"}, config.late_interaction is not None
    for number in range(pipeline.folds):
        held = {
            task.query.query_id
            for task, fold in zip(tasks, folds.tolist(), strict=True)
            if fold == number
        }
        part = out / f"fold{number + 1}"
        _cut(lists, held, part)
        encoder = str(part / "encoder")
        _run(training | {"data": training["data"] | {"lists": str(part / "lists")}, "out": encoder})
        dense = {"kind": "dense", "source": encoder, "cache": vectors}
        systems: list[Recipe] = [{"name": "dense", "rankers": [dense]}]
        if late:
            find = {"kind": "fuse", "of": [lexical, dense], "keep": 50}
            systems.append({"name": "late", "rankers": [find, {"kind": "late", "source": encoder}]})
        _run(
            {
                "stage": "evaluate",
                "pool": pool,
                "benchmark": str(part / "held"),
                "depth": 100,
                "systems": systems,
                "out": str(part / "ranked"),
            }
        )
    ranked = [str(out / f"fold{number + 1}" / "ranked") for number in range(pipeline.folds)]
    saved = [{"kind": "saved", "rankings": ranked, "stage": name} for name in ("dense", "late")]
    find = {"kind": "fuse", "of": [lexical, saved[0]]}
    fits: dict[str, list[Recipe]] = {"weights_find": [find]}
    if late:
        fits["weights_order"] = [find | {"keep": 50}, {"kind": "fuse", "of": [lexical, *saved]}]
    fusion = {"stage": "fusion", "pool": pool, "queries": str(lists), "split": None}
    return {
        name: _run(fusion | {"system": {"name": name, "rankers": rankers}, "out": str(out / name)})
        for name, rankers in fits.items()
    }


def _cut(lists: Path, held: Collection[str], part: Path) -> None:
    """Write the lists of all queries but the held ones, and the held queries with their judgements."""
    is_held = pc.field("query_id").isin(pa.array(held, pa.string()))
    for spec in (QUERIES, JUDGEMENTS, LISTS):
        write_table(read_table(lists, spec).filter(~is_held), spec, part / "lists")
    for spec in (QUERIES, JUDGEMENTS):
        write_table(read_table(lists, spec).filter(is_held), spec, part / "held")


def _run(values: Recipe) -> dict[str, Any]:
    return run_recipe(parse_recipe(values, __file__), resume=None)


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
