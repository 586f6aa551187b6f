"""The command line: `skilltrain STAGE [RECIPE] [key=value …]`, and shortcuts for evaluating and routing."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from skilltrain import __version__
from skilltrain.config import Config, apply_overrides, load_recipe
from skilltrain.errors import SkilltrainError
from skilltrain.recipe import dry_run, list_recipes, parse_recipe, run_recipe, schema_of
from skilltrain.stages import STAGES
from skilltrain.terminal import console, is_main_process

app = typer.Typer(
    help="Fine-tune the encoder and the reranker that route an agent's task to the right skill.",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
_INTERRUPTED = 130
Overrides = Annotated[list[str] | None, typer.Argument(help="RECIPE.yaml (optional) and key=value settings")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print what would be done, and do nothing")]


def _split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """(recipe file, overrides) of a stage's arguments."""
    files = [argument for argument in arguments if "=" not in argument]
    if len(files) > 1:
        raise SkilltrainError(f"more than one recipe: {' '.join(files)}", fix="settings have the form key=value")
    return (Path(files[0]) if files else None), [argument for argument in arguments if "=" in argument]


def _values(stage: str, arguments: Sequence[str]) -> tuple[dict[str, Any], object]:
    file, overrides = _split(arguments)
    values = load_recipe(file, overrides) if file else apply_overrides({}, overrides)
    where = file or f"skilltrain {stage}"
    if values.get("stage", stage) != stage:
        raise SkilltrainError(f"is a recipe of stage {values['stage']}, not {stage}", where=where)
    return {"stage": stage} | values, where


def _execute(config: Any, only_plan: bool, resume: bool) -> None:
    with redirect_stdout(sys.stderr):  # some libraries log to stdout, which is for what the command answers
        found = dry_run(config) if only_plan else run_recipe(config, resume)
    if only_plan:
        _show({"plan": found} if found else {})
    else:
        _show({"out": str(config.out), **found})


def _show(summary: dict[str, Any]) -> None:
    if summary and is_main_process():
        typer.echo(json.dumps(summary, ensure_ascii=False, indent=1))


def _describe_fields(config_class: type[Config]) -> str:
    """The settings of a stage for its --help, one a line."""
    lines = []
    for name, field in config_class.model_fields.items():
        if name != "stage":
            default = "required" if field.is_required() else f"default {_brief(field.default)}"
            lines.append(f"  {name}: {field.description} ({default})")
    return "\n".join(lines)


def _brief(value: Any) -> str:
    text = json.dumps(value.model_dump(mode="json")) if isinstance(value, Config) else str(value)
    return text if len(text) <= 70 else text[:67] + "..."


class _StageCommand(TyperCommand):
    """A command whose --help lists the settings of its stage; the stage is imported only then."""

    def get_help(self, ctx: Any) -> str:
        """The usual help, then settings and an example."""
        stage = str(self.name)
        config_class, _ = STAGES[stage].load()
        super().get_help(ctx)
        settings = f"\nSettings (key=value; nested ones as section.key=value):\n{_describe_fields(config_class)}"
        return f"{settings}\n\nExample:\n  skilltrain {stage} {STAGES[stage].example}"


def _add_stage(stage: str) -> None:
    @app.command(stage, cls=_StageCommand, help=STAGES[stage].about)
    def run_stage(arguments: Overrides = None, only_plan: DryRun = False) -> None:
        values, where = _values(stage, arguments or [])
        _execute(parse_recipe(values, where), only_plan, resume=False)


for _stage in STAGES:
    if STAGES[_stage].example:
        _add_stage(_stage)


@app.command()
def train(
    file: Annotated[Path, typer.Argument(help="a recipe of stage train_encoder or train_reranker")],
    overrides: Overrides = None,
    only_plan: DryRun = False,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the newest checkpoint")] = False,
) -> None:
    """Train an encoder or a reranker.

    Example: skilltrain train recipes/tiny/sr_emb_minilm.yaml training.seed=7 out=runs/emb7
    """
    config = parse_recipe(load_recipe(file, overrides or []), file)
    if not STAGES[config.stage].trains:
        raise SkilltrainError(
            f"is a recipe of stage {config.stage}", where=file, fix=f"run: skilltrain {config.stage} {file}"
        )
    _execute(config, only_plan, resume)


@app.command()
def recipes(
    stage: Annotated[str | None, typer.Argument(help="of this stage only, e.g. train_encoder")] = None,
    folder: Annotated[Path, typer.Option("--dir", help="where the recipes are")] = Path("recipes"),
    schema: Annotated[bool, typer.Option("--schema", help="print what a recipe may hold, as JSON Schema")] = False,
) -> None:
    """List the recipes of a folder, or print what a recipe may hold, as JSON Schema.

    Example: skilltrain recipes --schema train_encoder > train_encoder.schema.json
    """
    if stage is not None and stage not in STAGES:
        raise SkilltrainError(f"unknown stage {stage!r}; allowed: {', '.join(STAGES)}", where="skilltrain recipes")
    if schema:
        typer.echo(json.dumps(schema_of([stage] if stage else [*STAGES]), ensure_ascii=False, indent=1))
        return
    for found in list_recipes(folder):
        if stage in (None, found.stage):
            facts = [found.stage, found.base, found.loss]
            typer.echo(f"{found.path}  {'  '.join(fact for fact in facts if fact)}\n    {found.about}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="folder of a training, finished or not")],
    out: Annotated[Path, typer.Option(help="folder to write the model to")],
    checkpoint: Annotated[str | None, typer.Option(help="step-N or best; else what the run ended with")] = None,
) -> None:
    """Write the model of a training run, or of one of its checkpoints, as a folder of its own.

    Example: skilltrain export runs/full/sr_emb_0.6b --checkpoint best --out models/sr_emb
    """
    from skilltrain.training.export_run import export_run

    with redirect_stdout(sys.stderr):
        exported = export_run(run, out, checkpoint)
    _show(exported)


@app.command()
def evaluate(
    arguments: Annotated[list[str] | None, typer.Argument(help="RECIPE.yaml (optional) and key=value settings")] = None,
    benchmark: Annotated[Path | None, typer.Option(help="folder of the benchmark")] = None,
    pool: Annotated[Path | None, typer.Option(help="folder of the pool")] = None,
    encoder: Annotated[list[str] | None, typer.Option(help="an encoder to evaluate; may be repeated")] = None,
    reranker: Annotated[str | None, typer.Option(help="a reranker on top of the last encoder (or of BM25)")] = None,
    predictions: Annotated[Path | None, typer.Option(help="JSON {query_id: [skill_id, …]} to score")] = None,
    only_plan: DryRun = False,
) -> None:
    """Compare systems on a benchmark, with 95% intervals.

    Example: skilltrain evaluate --benchmark bench --pool runs/pool --encoder runs/encoder out=runs/report
    """
    values, where = _values("evaluate", arguments or [])
    given = {"benchmark": benchmark, "pool": pool, "predictions": predictions}
    values |= {key: str(value) for key, value in given.items() if value is not None}
    named = encoder or reranker
    if named and "systems" in values:
        raise SkilltrainError("systems stand in the recipe", where=where, fix="leave --encoder and --reranker out")
    if "systems" not in values and (named or values.get("pool") is not None):
        values["systems"] = _systems(encoder or [], reranker)
    _execute(parse_recipe(values, where), only_plan, resume=False)


def _systems(encoders: Sequence[str], reranker: str | None) -> list[dict[str, Any]]:
    """BM25, each encoder, and the reranker on the last of them."""
    systems: list[dict[str, Any]] = [{"name": "bm25", "lexical": {}}]
    systems += [{"name": f"encoder {source}", "encoder": {"source": source}} for source in encoders]
    if reranker is not None:
        systems.append(systems[-1] | {"name": f"{systems[-1]['name']} + reranker", "reranker": {"source": reranker}})
    return systems


@app.command()
def route(
    request: Annotated[str, typer.Argument(help="a task in plain words")],
    pool: Annotated[Path, typer.Option(help="folder of the pool, or a folder of SKILL.md files")],
    encoder: Annotated[str | None, typer.Option(help="encoder; BM25 finds the candidates without one")] = None,
    reranker: Annotated[str | None, typer.Option(help="reranker for the top 20 candidates")] = None,
    top: Annotated[int, typer.Option(min=1, help="how many skills to show")] = 5,
    first_stage_weight: Annotated[
        float, typer.Option(min=0, help="order by reranker + weight x first-stage score; 1 for small rerankers")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Find the skills for a task, those marked that the safety screening flags.

    The pool's vectors are kept in ~/.cache/skilltrain for the next request.

    Example: skilltrain route "merge these PDFs and stamp page numbers" --pool runs/pool --encoder runs/encoder
    """
    from skilltrain.data.pool.skill_pool import open_pool
    from skilltrain.data.screening import read_flags
    from skilltrain.routing.router import route as find
    from skilltrain.routing.systems import EncoderSource, LexicalSource, RerankerSource, SystemConfig

    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "skilltrain" / "vectors"
    system = SystemConfig(
        name="route",
        lexical=None if encoder else LexicalSource(),
        encoder=EncoderSource(source=encoder, cache=cache) if encoder else None,
        reranker=RerankerSource(source=reranker) if reranker else None,
        first_stage_weight=first_stage_weight,
    )
    found = find(request, open_pool(pool), system, top, read_flags(pool))
    if as_json:
        rows = [
            {"rank": r.rank, "score": r.score, "skill_id": r.skill.skill_id, "name": r.skill.name,
             "description": r.skill.description, "source": r.skill.source, "flags": [asdict(flag) for flag in r.flags]}
            for r in found
        ]  # fmt: skip
        typer.echo(json.dumps({"request": request, "skills": rows}, ensure_ascii=False, indent=1))
        return
    for routed in found:
        skill = routed.skill
        typer.echo(f"{routed.rank:>2}  {routed.score:8.4f}  {_printable(skill.skill_id)}")
        typer.echo(f"                {_printable(skill.description)[:90]}")
        for flag in reversed({flag.rule: flag for flag in reversed(routed.flags)}.values()):  # one a rule
            typer.echo(f"    !! FLAGGED {flag.rule}: {flag.reason}; in its {flag.field}: {_printable(flag.span)[:120]}")


def _printable(text: str) -> str:
    """Untrusted text without the control characters by which it could steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))


@app.command("inspect")
def inspect_lists(
    lists: Annotated[Path, typer.Argument(help="folder of the stage lists")],
    out: Annotated[Path | None, typer.Option(help="page to write; else LISTS.html beside the folder")] = None,
    pool: Annotated[Path | None, typer.Option(help="pool, where the one that the lists name has moved")] = None,
    max_lists: Annotated[int, typer.Option(min=1, help="lists to show; of more, a sample")] = 2000,
) -> None:
    """Write one HTML page that shows training lists: counts, plots, what filters dropped, every query to search.

    Example: skilltrain inspect runs/lists --out lists.html
    """
    from skilltrain.data.inspection.page import inspect_lists as inspect

    with redirect_stdout(sys.stderr):
        found = inspect(lists, out, pool, max_lists)
    _show(found)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a user's fault is one line on stderr and exit code 2, a traceback only with --debug."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    command = typer.main.get_command(app)
    code: Any = 0
    try:
        kept = [argument for argument in given if argument != "--debug"]
        code = command.main(kept or ["--help"], prog_name="skilltrain", standalone_mode=False)
    except (SkilltrainError, OSError) as error:
        if debug:
            raise
        _fail(str(error))
    except typer.TyperException as error:  # a fault in the command line itself
        _fail(f"{error.format_message()} (see skilltrain --help)")
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    if code == _INTERRUPTED:  # what typer makes of Ctrl-C
        _fail("interrupted; what was finished is kept")
    if code:
        sys.exit(code)


def _fail(message: str) -> NoReturn:
    line = " ".join(message.splitlines())
    console.print(f"error: {line}", style="bold red", markup=False, emoji=False, soft_wrap=True)
    sys.exit(2)
