"""Make R3's data from a pool, train both models on them, and report their figures.

    skilltrain pool sources=SKILLS out=runs/r3/pool
    python data_pipelines/r3.py runs/r3/pool runs/r3

A second benchmark, in any form that `evaluate` reads, its gold skills added to the same pool:
    python data_pipelines/r3.py runs/r3/pool runs/r3 benchmark=DATA/skillsbench-dev

GPT-4o-mini writes and judges, with the key in OPENAI_API_KEY; `skilltrain r3 rejections --help`
shows how to use another server. Every setting of `Pipeline` below is an option. The same command
continues after a stop. To train on several GPUs, give the training recipes to `accelerate launch`
with the same data.pool, data.lists and out; this program then finds the finished runs.

Skills of the test are in another pool than those of training, as in R3. R3's prompts, groups and
values are not public; those here are ours. docs/papers/r3.md names them.
"""

from pathlib import Path
from typing import Any

from pydantic import Field

from skilltrain.config import Config, load_recipe
from skilltrain.data.sampling import is_drawn
from skilltrain.data.screening import read_flags, write_flags
from skilltrain.papers.r3.loss_gradients import measure_gradients, write_gradients
from skilltrain.recipe import run_pipeline
from skilltrain.records import Skill
from skilltrain.runs import run_stage
from skilltrain.stage import parse_recipe
from skilltrain.tables import SKILLS, read_skills, write_table
from skilltrain.texts import name_key

RECIPES = Path(__file__).parents[1] / "recipes"
MEASURES = ["Hit@1", "nDCG@10", "Set-Compat", "Recall@10", "COMP@10"]
TEST_SHARE = 0.2  # of the skills: R3 has 2,050 of 10,246
DEPTH = 20  # candidates of the reranker, as in R3's infer.py
Recipe = dict[str, Any]


class Pipeline(Config):
    """Settings of this pipeline."""

    pool: Path = Field(description="folder of the stage pool")
    out: Path = Field(description="folder to write: data, both models, reports and gradients")
    llm: dict[str, Any] = Field(
        default={"kind": "openai", "model": "gpt-4o-mini"}, description="who writes and judges"
    )
    base: str = Field(
        default="Qwen/Qwen3-Embedding-0.6B", description="encoder that groups, mines and filters"
    )
    num_groups: int = Field(default=10_000, ge=1, description="groups of skills to judge")
    languages: tuple[str, ...] = Field(
        default=("en", "zh"), description="languages of requests and skills"
    )
    encoder_recipe: Path = Field(
        default=RECIPES / "r3_emb_0.6b.yaml", description="recipe that trains the encoder"
    )
    reranker_recipe: Path = Field(
        default=RECIPES / "r3_rank_0.6b.yaml", description="recipe that trains the reranker"
    )
    num_batches: int = Field(default=20, ge=1, description="batches whose gradients are measured")
    benchmark: Path | None = Field(default=None, description="a second benchmark to report")


def split_pool(pipeline: Pipeline) -> None:
    """Write a pool to train on and a pool for the test, which share no name of a skill."""
    flags = read_flags(pipeline.pool)
    skills_by_split: dict[str, list[Skill]] = {"train": [], "test": []}
    for skill in read_skills(pipeline.pool):
        is_test = is_drawn(TEST_SHARE, "test", name_key(skill.name))
        skills_by_split["test" if is_test else "train"].append(skill)
    for split, skills in skills_by_split.items():
        folder = pipeline.out / f"{split}_pool"
        write_table(skills, SKILLS, folder)
        if flags is not None:
            write_flags(flags, folder)


def query_recipes(pipeline: Pipeline, split: str, share: float) -> dict[str, Recipe]:
    """Return the recipes that judge groups of a pool, and rewrite the requests for them."""
    out = pipeline.out
    judge = {"pool": out / f"{split}_pool", "llm": pipeline.llm}
    groups = {"num_groups": round(share * pipeline.num_groups), "languages": pipeline.languages}
    encoder = {"encoder": {"source": pipeline.base}, "dev_share": 0}
    return {
        f"{split}_judged": {"stage": "rejections", **judge, **groups, **encoder},
        f"{split}_queries": {"stage": "rewrite", **judge, "queries": out / f"{split}_judged"},
    }


def list_recipes(pipeline: Pipeline) -> dict[str, Recipe]:
    """Return the recipes that make the lists of both models, with the trained encoder between."""
    out = pipeline.out
    inputs = {"pool": out / "train_pool", "queries": out / "train_queries"}
    encoder = {"encoder": {"source": pipeline.base, "cache": out / "vectors"}}
    quotas = {"judged": 4, "semantic": 3, "lexical": 2, "random": 1}
    lists = {"stage": "lists", **inputs}
    trained = {"name": "r3_emb", "rankers": [{"kind": "dense", "source": str(out / "r3_emb")}]}
    keep = {"judged_positives": "keep"}
    return {
        "mined": {"stage": "mine", **inputs, **encoder},
        "filtered": {"stage": "filter", **inputs, **encoder, "rankings": out / "mined"},
        "encoder_lists": {**lists, "rankings": out / "filtered", "quotas": quotas},
        "r3_emb": training_recipe(pipeline, pipeline.encoder_recipe, "encoder_lists"),
        "candidates": {"stage": "candidates", **inputs, "system": trained},
        "kept": {"stage": "filter", **inputs, **encoder, "rankings": out / "candidates", **keep},
        "reranker_lists": {
            **lists,
            "rankings": out / "kept",
            "list_size": DEPTH,
            "quotas": {"judged": 6},
        },
        "r3_rank": training_recipe(pipeline, pipeline.reranker_recipe, "reranker_lists"),
    }


def training_recipe(pipeline: Pipeline, file: Path, lists: str) -> Recipe:
    """Return a training recipe with the data of this pipeline."""
    recipe = load_recipe(file)
    recipe["data"] |= {"pool": str(pipeline.out / "train_pool"), "lists": str(pipeline.out / lists)}
    return recipe


def report_recipes(pipeline: Pipeline) -> dict[str, Recipe]:
    """Return the recipes that evaluate the encoder, with and without the reranker."""
    out = pipeline.out
    encoder = {"kind": "dense", "source": str(out / "r3_emb")}
    reranker = {"kind": "rerank", "source": str(out / "r3_rank"), "keep": DEPTH}
    systems = [
        {"name": "R3-Embedding", "rankers": [encoder]},
        {"name": "R3-Embedding + R3-Reranker", "rankers": [encoder, reranker]},
    ]
    report = {"stage": "evaluate", "systems": systems, "measures": MEASURES}
    test = {"pool": out / "test_pool", "benchmark": [out / "test_queries"]}
    recipes = {"report": report | test}
    if pipeline.benchmark is not None:
        other = {"pool": pipeline.pool, "benchmark": [pipeline.benchmark]}
        recipes["report_benchmark"] = report | other
    return recipes


def run(pipeline: Pipeline) -> None:
    """Make the data, train both models, evaluate them, and measure the rejections' gradient."""
    split_pool(pipeline)
    recipes = query_recipes(pipeline, "train", 1.0) | query_recipes(pipeline, "test", TEST_SHARE)
    recipes |= list_recipes(pipeline) | report_recipes(pipeline)
    for name, recipe in recipes.items():
        stage = parse_recipe(recipe | {"out": pipeline.out / name}, f"{__file__}, {name}")
        print(name, run_stage(stage, resume=None))
    for name in ("r3_emb", "r3_rank"):
        out = pipeline.out / "gradients" / name
        if not out.exists():
            config: Any = parse_recipe(recipes[name] | {"out": out}, name)
            rows = measure_gradients(config, pipeline.num_batches)
            write_gradients(rows, config, pipeline.num_batches)


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
