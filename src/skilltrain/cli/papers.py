"""Commands that belong to one paper."""

from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic_core import to_jsonable_python
from rich.table import Table

from skilltrain.cli.app import (
    AsJson,
    DashedCommand,
    Overrides,
    app,
    conclude,
    quietly,
    read_overrides,
    show,
)
from skilltrain.cli.routing import AllowServer, PoolFolder, RouterFolder, Task, open_routing
from skilltrain.cli.stages import training_of
from skilltrain.config import apply_overrides, parse_yaml, validate
from skilltrain.errors import SkilltrainError
from skilltrain.records import Verdict
from skilltrain.terminal import console
from skilltrain.texts import printable

if TYPE_CHECKING:
    from skilltrain.papers.skillflow.agent_results import AgentResults


@app.command("r3 gradients", cls=DashedCommand)
def gradients(
    file: Annotated[Path, typer.Argument(help="a recipe of stage train_encoder or train_reranker")],
    overrides: Overrides = None,
    num_batches: Annotated[
        int, typer.Option("--batches", min=1, help="number of batches to measure")
    ] = 20,
) -> None:
    """Measure how much of the rejected skills' gradient survives in the gradient of a loss.

    Nothing is trained. model.source=FOLDER measures a trained model.

    Example: skilltrain r3 gradients recipes/r3_emb_0.6b.yaml --batches 50 out=runs/gradients
    """
    from skilltrain.papers.r3.loss_gradients import measure_gradients, write_gradients

    config: Any = training_of(file, overrides)
    if config.out.exists():
        raise SkilltrainError(
            "output-exists", "exists already", where=config.out, fix="name another folder: out=…"
        )
    rows = quietly(measure_gradients, config, num_batches)
    write_gradients(rows, config, num_batches)
    shares = [f"{row.survival:.2f} at the {row.at}" for row in rows if row.part == "rejected"]
    line = f"{config.out}/gradients.html: of the rejections' gradient survive {', '.join(shares)}"
    conclude({}, [line], as_json=False)


@app.command("r3 sheet")
def sheet(
    judged: Annotated[Path, typer.Argument(help="folder of the stage rejections or rewrite")],
    pool: Annotated[Path, typer.Option(help="the pool of the judged skills")],
    out: Annotated[Path, typer.Option(help="CSV file to write")],
    num_queries: Annotated[
        int, typer.Option("--queries", min=1, help="number of sampled queries")
    ] = 100,
) -> None:
    """Write a CSV sheet in which an expert judges the skills of some queries.

    Example: skilltrain r3 sheet runs/judged --pool runs/pool --out anna.csv
    """
    from skilltrain.papers.r3.annotation import write_judged_sheet

    if out.exists():
        raise SkilltrainError("output-exists", "exists already", where=out, fix="name another file")
    num_rows = write_judged_sheet(judged, pool, num_queries, out)
    line = f"{out}: {num_rows} skills to judge; the verdicts are {', '.join(Verdict)}"
    conclude({}, [line], as_json=False)


@app.command("r3 agreement")
def sheet_agreement(
    sheets: Annotated[list[Path], typer.Argument(help="filled sheets, one for each expert")],
    judged: Annotated[Path, typer.Option(help="folder from which the sheets were made")],
    as_json: AsJson = False,
) -> None:
    """Measure how far experts and the chat model agree: Cohen's kappa of each two judges.

    Example: skilltrain r3 agreement anna.csv ben.csv --judged runs/judged
    """
    from skilltrain.papers.r3.annotation import measure_agreement

    rows = measure_agreement(sheets, judged)
    lines = [
        f"{row.first} and {row.second}: kappa {row.kappa}, "
        f"{row.num_equal} of {row.kappa.n} verdicts are equal"
        for row in rows
    ]
    conclude({"agreement": [asdict(row) for row in rows]}, lines, as_json)


@app.command("skillflow agents")
def agents(
    trials: Annotated[
        Path,
        typer.Argument(
            help="JSON Lines with condition, task, trial, passed; "
            "optional: used, retrieved, steps, cost"
        ),
    ],
    benchmark: Annotated[
        Path | None,
        typer.Option(
            help="benchmark with the tasks, to count gold skills among the retrieved skills"
        ),
    ] = None,
    ceiling: Annotated[
        str | None, typer.Option(help="condition in which agents had the gold skills")
    ] = None,
    exclude: Annotated[
        Path | None,
        typer.Option(help="JSON Lines with the key task: tasks to leave out"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the results of agents under several conditions with those under the first condition.

    Example: skilltrain skillflow agents trials.jsonl --benchmark bench --ceiling gold
    """
    from skilltrain.metrics.benchmarks.load import load_benchmark
    from skilltrain.papers.skillflow.agent_results import (
        agent_results,
        read_excluded_tasks,
        read_trials,
    )

    relevances = load_benchmark(benchmark).relevances if benchmark else {}
    excluded_tasks = read_excluded_tasks(exclude) if exclude else ()
    results = agent_results(read_trials(trials, excluded_tasks), relevances, ceiling)
    if as_json:
        show(asdict(results))
        return

    _print_agent_results(results, ceiling)


def _print_agent_results(results: "AgentResults", ceiling: str | None) -> None:
    """Print a table of the conditions, and a line for each comparison.

    Args:
        results: Results of agents under all conditions.
        ceiling: Condition in which agents had the gold skills, if any.
    """
    from skilltrain.evaluation.page import p_equals, signed_interval
    from skilltrain.papers.skillflow.agent_results import MAIN_MEASURE

    # Print a table with a column for each condition and a row for each measure.
    title = "means over tasks, 95% bootstrap intervals"
    table = Table("", *map(printable, results.means), title=title)
    columns = results.means.values()
    for measure in dict.fromkeys(chain.from_iterable(columns)):
        cells = [str(column.get(measure, "–")) for column in columns]
        table.add_row(measure, *cells)
    console.print(table, markup=False)  # a condition may be named [b]

    # Print a line for each comparison and for each share of the ceiling.
    for pair in results.comparisons:
        difference = (
            f"{pair.system} - {pair.baseline}: {MAIN_MEASURE} {signed_interval(pair.difference)}"
        )
        line = f"{difference}, {p_equals(pair.p_holm)} after Holm, {pair.reading}"
        typer.echo(printable(line))
    for name, share in results.of_ceiling.items():
        typer.echo(printable(f"{name}: {share:.1%} of {ceiling}'s {MAIN_MEASURE}"))


@app.command("skillflow provision")
def provision_skills(
    rankings: Annotated[
        Path, typer.Argument(help="RANKINGS table, or the folder of evaluate or candidates")
    ],
    pool: Annotated[Path, typer.Option(help="the pool that was ranked")],
    out: Annotated[Path, typer.Option(help="folder to write: QUERY/SKILL/SKILL.md")],
    stage: Annotated[
        str | None, typer.Option(help="ranking to use, if the table holds several")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="number of skills per query")] = 5,
    flagged: Annotated[
        Literal["leave_out", "use"],
        typer.Option(help="what to do with skills that screening flags"),
    ] = "leave_out",
    as_json: AsJson = False,
) -> None:
    """Write the skills that a system chose for each query into folders, as agents read them.

    Example: skilltrain skillflow provision runs/report --stage cascade --pool runs/pool --out out
    """
    from skilltrain.papers.skillflow.provision import NAMES_FILE, provision
    from skilltrain.retrieval.rankings import read_rankings

    ranking_by_query = read_rankings(rankings, stage)
    num_queries = len(ranking_by_query)
    counts = quietly(provision, ranking_by_query, pool, top, out, flagged)
    line = (
        f"{out}: {counts['num_skills']:,} skills for {num_queries:,} queries; "
        f"{out / NAMES_FILE} says which is which"
    )
    conclude({"out": str(out), "num_queries": num_queries} | counts, [line], as_json)


@app.command("skillweaver plan", cls=DashedCommand)
def plan(
    task: Task,
    router: RouterFolder = None,
    pool: PoolFolder = None,
    llm: Annotated[
        str | None,
        typer.Option(help="chat model that splits the task: '{kind: openai, …}'; default: rules"),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(help="key=value: hints.rounds, compose.alpha, …")
    ] = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="print a Mermaid flowchart")] = False,
    allow_server: AllowServer = None,
    as_json: AsJson = False,
) -> None:
    """Split a compound task into steps, find a skill for each step, and order the steps.

    With --pool instead of --router, BM25 finds the skills.

    Example: skilltrain skillweaver plan "clean the data and draw a chart" --pool my_skills
    """
    from skilltrain.api import plan_task
    from skilltrain.papers.skillweaver.compose import plan_json, plan_lines, plan_mermaid
    from skilltrain.papers.skillweaver.planner import PlannerConfig

    # Read the settings of the planner.
    where = "skilltrain skillweaver plan"
    values: dict[str, Any] = {}
    if llm:
        llm_settings = parse_yaml(llm, "--llm")
        if not isinstance(llm_settings, dict):
            problem = f"must be a map of settings, found {llm_settings!r}"
            raise SkilltrainError("invalid-setting", problem, where="--llm")
        values["decomposer"] = {"kind": "llm", "llm": {"temperature": 0.1} | llm_settings}
    values = apply_overrides(values, read_overrides(settings))
    config = validate(PlannerConfig, values, where)

    opened_router = quietly(open_routing, router, pool, [{"kind": "lexical"}], where, allow_server)
    task_plan, flags_by_skill = quietly(plan_task, config, task, opened_router)
    if as_json:
        show(plan_json(task_plan) | {"flags": to_jsonable_python(flags_by_skill)})
    elif mermaid:
        typer.echo(plan_mermaid(task_plan))
    else:
        typer.echo("\n".join(plan_lines(task_plan, flags_by_skill)))


@app.command("skillweaver agreement")
def plan_agreement(
    first: Annotated[Path, typer.Argument(help="folder of a run of skillweaver plans")],
    second: Annotated[
        Path, typer.Argument(help="folder of a run over the same tasks in other words")
    ],
    as_json: AsJson = False,
) -> None:
    """Count the tasks whose plans have the right number of steps in both wordings, or in neither.

    Example: skilltrain skillweaver agreement runs/plans_template runs/plans_paraphrase
    """
    from skilltrain.papers.skillweaver.agreement import agreements

    rows = agreements(first, second)
    if as_json:
        show(to_jsonable_python(rows))
        return
    table = Table(*rows[0], title="share of tasks with equal DA, and means of both runs")
    for row in rows:
        table.add_row(*[printable(str(value), 40) for value in row.values()])
    console.print(table, markup=False)
