"""Commands of single papers, each in the group of its paper."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from skilltrain.cli.app import (
    AS_WRITTEN,
    AsJson,
    Overrides,
    app,
    conclude,
    only_settings,
    quietly,
    show,
)
from skilltrain.cli.routing import AllowServer, PoolFolder, RouterFolder, Task, open_routing
from skilltrain.cli.stages import training_of
from skilltrain.config import apply_overrides, parse_yaml, validate
from skilltrain.errors import SkilltrainError
from skilltrain.terminal import console
from skilltrain.texts import printable


@app.command("r3 gradients", context_settings=AS_WRITTEN)
def gradients(
    file: Annotated[Path, typer.Argument(help="a recipe of stage train_encoder or train_reranker")],
    overrides: Overrides = None,
    num_batches: Annotated[
        int, typer.Option("--batches", min=1, help="batches of the training to look at")
    ] = 20,
) -> None:
    """Take a loss's gradient apart: what becomes of the push away from rejected skills, beside everything else.

    Trains nothing. A trained model is looked at with model.source=FOLDER.

    Example: skilltrain r3 gradients recipes/r3_emb_0.6b.yaml --batches 50 out=runs/gradients
    """
    from skilltrain.papers.r3.loss_gradients import measure_gradients, write_gradients

    config: Any = training_of(file, overrides)
    if config.out.exists():
        raise SkilltrainError(
            "output-exists", "exists already", where=config.out, fix="name another folder: out=…"
        )
    found = quietly(measure_gradients, config, num_batches)
    write_gradients(found, config, num_batches)
    lost = ", ".join(
        f"{row.survival:.2f} at the {row.at}" for row in found if row.part == "rejected"
    )
    conclude(
        {},
        [f"{config.out}/gradients.html: of the rejections' gradient survive {lost}"],
        as_json=False,
    )


@app.command("skillflow agents")
def agents(
    trials: Annotated[
        Path, typer.Argument(help="JSON Lines: condition, task, trial, passed; used, retrieved, …")
    ],
    benchmark: Annotated[
        Path | None, typer.Option(help="the tasks, to count gold skills among the retrieved")
    ] = None,
    ceiling: Annotated[
        str | None, typer.Option(help="the condition in which agents had the gold skills")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare what agents did under several conditions, each with the first: no skills, gold skills, skills found.

    Example: skilltrain skillflow agents trials.jsonl --benchmark bench --ceiling gold
    """
    from skilltrain.evaluation.page import p_equals, signed_interval
    from skilltrain.metrics.benchmarks.load import load_benchmark
    from skilltrain.papers.skillflow.agent_results import CHIEF, agent_results, read_trials

    relevances = load_benchmark(benchmark).relevances if benchmark else {}
    found = agent_results(read_trials(trials), relevances, ceiling)
    if as_json:
        show(asdict(found))
        return
    table = Table(
        "", *map(printable, found.means), title="means over tasks, 95% bootstrap intervals"
    )
    for measure in dict.fromkeys(measure for row in found.means.values() for measure in row):
        table.add_row(measure, *(str(row.get(measure, "–")) for row in found.means.values()))
    console.print(table)
    for c in found.comparisons:
        difference, p = signed_interval(c.difference), p_equals(c.p_holm)
        typer.echo(
            printable(
                f"{c.system} - {c.baseline}: {CHIEF} {difference}, {p} after Holm, {c.reading}"
            )
        )
    for name, share in found.of_ceiling.items():
        typer.echo(printable(f"{name}: {share:.1%} of {ceiling}'s {CHIEF}"))


@app.command("skillflow provision")
def provision_skills(
    rankings: Annotated[
        Path, typer.Argument(help="RANKINGS table, or the folder of evaluate or candidates")
    ],
    pool: Annotated[Path, typer.Option(help="the pool that was ranked")],
    out: Annotated[
        Path,
        typer.Option(help="folder to write: a folder for each query, in it one for each skill"),
    ],
    stage: Annotated[
        str | None, typer.Option(help="whose ranking, where the table holds several")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="skills of a query at most")] = 5,
    flagged: Annotated[
        Literal["leave_out", "use"], typer.Option(help="for skills that screening flags")
    ] = "leave_out",
    as_json: AsJson = False,
) -> None:
    """Write the skills that a system chose for each query into folders, as agents read them.

    Example: skilltrain skillflow provision runs/report --stage cascade --pool runs/pool --out runs/agent_skills
    """
    from skilltrain.papers.skillflow.provision import NAMES_FILE, provision
    from skilltrain.retrieval.rankings import read_rankings

    found = read_rankings(rankings, stage)
    counts = quietly(provision, found, pool, top, out, flagged)
    line = f"{out}: {counts['num_skills']:,} skills for {len(found):,} queries; {out / NAMES_FILE} says which is which"
    conclude({"out": str(out), "num_queries": len(found)} | counts, [line], as_json)


@app.command("skillweaver plan", context_settings=AS_WRITTEN)
def plan(
    task: Task,
    router: RouterFolder = None,
    pool: PoolFolder = None,
    llm: Annotated[
        str | None, typer.Option(help="what cuts the task: '{kind: openai, …}'; else rules")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(help="key=value: hints.rounds, compose.alpha, …")
    ] = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="print a Mermaid flowchart")] = False,
    allow_server: AllowServer = None,
    as_json: AsJson = False,
) -> None:
    """Cut a compound task into steps, find a skill for each (without a router by BM25), and say which waits for which.

    Example: skilltrain skillweaver plan "download the data, clean it and draw a chart" --pool examples/skill_library/skills
    """
    from skilltrain.api import plan_task
    from skilltrain.papers.skillweaver.compose import plan_json, plan_lines, plan_mermaid
    from skilltrain.papers.skillweaver.planner import PlannerConfig

    values = (
        {"decomposer": {"kind": "llm", "llm": {"temperature": 0.1} | parse_yaml(llm, "--llm")}}
        if llm
        else {}
    )
    config = validate(
        PlannerConfig,
        apply_overrides(values, only_settings(settings)),
        "skilltrain skillweaver plan",
    )
    rankers = [{"kind": "lexical"}]
    opened = quietly(
        open_routing, router, pool, rankers, "skilltrain skillweaver plan", allow_server
    )
    made, flags = quietly(plan_task, config, task, opened)
    if as_json:
        found = {skill_id: [asdict(flag) for flag in own] for skill_id, own in flags.items()}
        show(plan_json(made) | {"flags": found})
    else:
        typer.echo(plan_mermaid(made) if mermaid else "\n".join(plan_lines(made, flags)))
