"""Commands that make a router and ask it, and the page that shows training lists."""

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skilltrain.cli.app import AS_WRITTEN, AsJson, DryRun, app, conclude, json_text, only_settings, quietly, show
from skilltrain.config import apply_overrides, parse_yaml, validate
from skilltrain.errors import SkilltrainError
from skilltrain.files import cache_folder
from skilltrain.texts import printable

if TYPE_CHECKING:
    from skilltrain.routing.router import RoutedSkill


@app.command(context_settings=AS_WRITTEN)
def fit(
    skills: Annotated[Path, typer.Argument(help="a folder of SKILL.md files, or another source of the stage pool")],
    out: Annotated[Path, typer.Option(help="folder of the router, and of what it is made of")],
    queries: Annotated[list[Path] | None, typer.Option(help="a file of queries; may be repeated")] = None,
    llm: Annotated[
        str | None, typer.Option(help="what writes queries if none are given, e.g. '{kind: openai, model: …}'")
    ] = None,
    settings: Annotated[list[str] | None, typer.Argument(help="key=value: base, max_tokens, epochs, seed, …")] = None,
    only_plan: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make a router of a folder of skills: pool, queries, negatives, a trained encoder joined with BM25.

    Stopped, the same line goes on. DIR/recipes holds every recipe that it ran.

    Example: skilltrain fit my_skills --out runs/router && skilltrain route --router runs/router "merge these PDFs"
    """
    from skilltrain.fitting import FitConfig, plan_fit, run_fit

    values: dict[str, Any] = {"skills": str(skills), "out": str(out), "queries": [str(file) for file in queries or []]}
    values |= {"llm": parse_yaml(llm, "--llm")} if llm else {}
    config = validate(FitConfig, apply_overrides(values, only_settings(settings)), "skilltrain fit")
    if only_plan:
        show(quietly(plan_fit, config))
        return
    found = quietly(run_fit, config)
    lines = [f"{out}: a router over {found['num_skills']:,} skills, trained on {found['num_lists']:,} lists"]
    if "Hit@1" in found:
        hits = ", ".join(f"{name} {value:.3f}" for name, value in found["Hit@1"].items())
        lines.append(f"Hit@1 of queries held out: {hits}; look at {out}/report/report.html")
    lines.append(f"next: skilltrain route --router {quote(str(out))} 'a task in plain words'")
    conclude(found, lines, as_json)


@app.command()
def route(
    request: Annotated[str, typer.Argument(help="a task in plain words")],
    router: Annotated[Path | None, typer.Option(help="folder that `skilltrain fit` wrote")] = None,
    pool: Annotated[Path | None, typer.Option(help="without a router: the pool, or a folder of SKILL.md files")] = None,
    encoder: Annotated[str | None, typer.Option(help="encoder; BM25 finds the candidates without one")] = None,
    reranker: Annotated[str | None, typer.Option(help="reranker for the top candidates")] = None,
    top: Annotated[int, typer.Option(min=1, help="how many skills to show")] = 5,
    first_weight: Annotated[
        float, typer.Option(min=0, help="order by reranker + weight x the score before; 1 for small rerankers")
    ] = 0.0,
    rankers: Annotated[str | None, typer.Option(help="any rankers, as in a recipe, in their place")] = None,
    cache: Annotated[Path | None, typer.Option(help="folder of the encoder's vectors; else the user's cache")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Find the skills for a task, those marked that the safety screening flags.

    Example: skilltrain route "merge these PDFs and stamp page numbers" --router runs/router

    Example: skilltrain route "merge these PDFs" --pool runs/pool --encoder runs/encoder
    """
    from skilltrain import api
    from skilltrain.data.pool.read import skill_file
    from skilltrain.routing.router import Router

    def find() -> "list[RoutedSkill]":
        if router is not None and pool is None:
            return Router.load(router).route(request, top)
        if pool is not None and router is None:
            return api.route(request, pool, rankers or _rankers(encoder, reranker, first_weight, cache), top)
        raise SkilltrainError("give either --router or --pool", where="skilltrain route")

    found = quietly(find)
    folder = pool or Router.pool_of(router or Path())
    files = [skill_file(folder, routed.skill.skill_id) for routed in found]
    if as_json:
        rows = [
            {"rank": r.rank, "score": r.score, "skill_id": r.skill.skill_id, "name": r.skill.name,
             "description": r.skill.description, "source": r.skill.source, "file": str(file) if file else None,
             "flags": [asdict(flag) for flag in r.flags]}
            for r, file in zip(found, files, strict=True)
        ]  # fmt: skip
        typer.echo(json_text({"request": request, "skills": rows}))
        return
    for routed, file in zip(found, files, strict=True):
        _print(routed, file)


def _rankers(
    encoder: str | None, reranker: str | None, first_weight: float, cache: Path | None
) -> list[dict[str, Any]]:
    """BM25 or the encoder, whose vectors are kept for the next request, and the reranker."""
    kept = {"source": encoder, "cache": str(cache or cache_folder("vectors"))}
    first = {"kind": "dense", **kept} if encoder else {"kind": "lexical"}
    return [first, *([{"kind": "rerank", "source": reranker, "first_weight": first_weight}] if reranker else [])]


def _print(routed: "RoutedSkill", file: Path | None) -> None:
    name, place = printable(routed.skill.name, 90), printable(str(file or routed.skill.skill_id))
    typer.echo(f"{routed.rank:>2}  {routed.score:8.4f}  {name}  ({place})")
    typer.echo(f"                {printable(routed.skill.description, 90)}")
    for flag in reversed({flag.rule: flag for flag in reversed(routed.flags)}.values()):  # one for each rule
        typer.echo(f"    !! FLAGGED {flag.rule}: {flag.reason}; in its {flag.field}: {printable(flag.span, 120)}")


@app.command("inspect")
def inspect_lists(
    lists: Annotated[Path, typer.Argument(help="folder of the stage lists")],
    out: Annotated[Path | None, typer.Option(help="page to write; else LISTS.html beside the folder")] = None,
    pool: Annotated[Path | None, typer.Option(help="the pool, if it has moved since the lists were made")] = None,
    max_lists: Annotated[int, typer.Option(min=1, help="lists to show; if there are more, a sample of them")] = 2000,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page that shows training lists: counts, plots, what filters dropped, every query to search.

    Example: skilltrain inspect runs/encoder_lists --out lists.html
    """
    from skilltrain.report.lists import inspect_lists as inspect

    found = quietly(inspect, lists, out, pool, max_lists)
    odd = ", ".join(f"{name} {count:,}" for name, count in found["worth_a_look"].items()) or "nothing"
    conclude(found, [f"{found['page']}: {found['num_lists']:,} lists; worth a look: {odd}"], as_json)
