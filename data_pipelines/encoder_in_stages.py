"""An encoder trained in up to three stages: on the skills' own text, on the queries, on negatives it gets wrong itself.

python data_pipelines/encoder_in_stages.py RECIPE OUT                              # the queries, then one more round
python data_pipelines/encoder_in_stages.py RECIPE OUT free_pairs=20000 rounds=0    # free pairs, then the queries
python data_pipelines/encoder_in_stages.py RECIPE OUT rounds=2 training.learning_rate=2e-5

RECIPE trains an encoder on one folder of lists; what else is given changes its settings. With `free_pairs` it is first
trained on passages of so many skills of its pool, against these skills without them. Then comes RECIPE. Each of the
`rounds` mines what BM25 and the encoder so far wrongly rank among their first ten, and trains on (as ANCE, Xiong et
al., 2021, but between trainings). Give the same line again after a stop; it prints where each encoder lies.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from skilltrain.config import Config, load_recipe
from skilltrain.errors import SkilltrainError
from skilltrain.fitting import QUOTAS, Recipe, list_steps
from skilltrain.recipe import run_pipeline
from skilltrain.stages import parse_recipe, run_recipe

WRONG_TOP = 10


class Pipeline(Config):
    """What this pipeline can be told beside the recipe's settings."""

    recipe: Path
    out: Path
    free_pairs: int = Field(
        default=0, ge=0, description="skills whose own text is trained on first"
    )
    rounds: int = Field(default=1, ge=0, description="trainings on negatives mined anew")
    settings: list[str] = Field(default=[], description="further settings of the recipe, key=value")


def run(pipeline: Pipeline) -> list[Path]:
    """The folder of each stage's encoder, in their order. Raises SkilltrainError as the stages do."""
    out, training = pipeline.out, load_recipe(pipeline.recipe, pipeline.settings)
    config = parse_recipe(training, pipeline.recipe)
    if config.stage != "train_encoder" or not isinstance(config.data.lists, Path):
        raise SkilltrainError(
            "the recipe must train an encoder on one folder of lists", where=pipeline.recipe
        )
    pool, lists = str(config.data.pool), str(config.data.lists)
    source, encoders = str(config.model.source), list[Path]()

    def train(place: Path, data: Recipe) -> None:
        """Train what there is on `data`, and go on with what comes of it."""
        nonlocal source
        model = training["model"] | {"source": source}
        _run(training | {"model": model, "data": training["data"] | data, "out": str(place)})
        source = str(place)
        encoders.append(place)

    if pipeline.free_pairs:
        place, pairs = out / "free_pairs", str(out / "free_pairs" / "pairs")
        own = {
            "stage": "synthesize",
            "pool": pool,
            "llm": {"kind": "own_text"},
            "max_skills": pipeline.free_pairs,
        }
        _run(own | {"num_queries_per_skill": 2, "out": pairs})
        cut = _new_lists(place, {"pool": pairs, "queries": pairs}, source, source, QUOTAS)
        train(place / "encoder", {"pool": pairs, "lists": cut, "clusters": None})
    train(out / "queries", {})
    base = str(config.model.source)
    for number in range(1, pipeline.rounds + 1):
        place = out / f"round{number}"
        wrong = {"semantic": WRONG_TOP // 2, "lexical": WRONG_TOP // 2}
        train(
            place / "encoder",
            {"lists": _new_lists(place, {"pool": pool, "queries": lists}, source, base, wrong)},
        )
    return encoders


def _new_lists(place: Path, asked: Recipe, miner: str, base: str, quotas: Mapping[str, int]) -> str:
    """Lists with negatives that `miner` finds, filtered by `base`, whose cosines the filter's limits are made for."""
    model = {"source": base, "cache": str(place.parent / "vectors")}
    steps = list_steps(asked, model, place, quotas, seed=0)
    steps["mined"]["encoder"] = model | {"source": miner}
    if len(quotas) == 2:
        steps["mined"] |= {"depth": WRONG_TOP, "sources": [*quotas]}
    for step, values in steps.items():
        _run(values | {"out": str(place / step)})
    return str(place / "encoder_lists")


def _run(values: Recipe) -> None:
    config = parse_recipe(values, __file__)
    print(config.out, run_recipe(config, resume=None))


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
