"""Commands that make a router, ask it and serve it."""

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skilltrain.cli.app import (
    AS_WRITTEN,
    AsJson,
    DryRun,
    app,
    conclude,
    only_settings,
    quietly,
    show,
)
from skilltrain.config import apply_overrides, parse_yaml, validate
from skilltrain.errors import SkilltrainError
from skilltrain.files import cache_folder
from skilltrain.texts import printable

RouterFolder = Annotated[
    Path | None, typer.Option(help="folder of `skilltrain fit` or `skilltrain index`")
]
PoolFolder = Annotated[
    Path | None, typer.Option(help="without a router: the pool, or a folder of SKILL.md files")
]
Task = Annotated[str, typer.Argument(help="a task in plain words")]
AllowServer = Annotated[
    list[str] | None,
    typer.Option(help="URL that the router's rankers may send tasks to; may be repeated"),
]
if TYPE_CHECKING:
    from skilltrain.serving.answer import RoutedSkill
    from skilltrain.serving.router import Router


@app.command(context_settings=AS_WRITTEN, rich_help_panel="Start here")
def fit(
    skills: Annotated[
        Path, typer.Argument(help="a folder of SKILL.md files, or another source of the stage pool")
    ],
    out: Annotated[Path, typer.Option(help="folder of the router, and of what it is made of")],
    queries: Annotated[
        list[Path] | None, typer.Option(help="a file of queries; may be repeated")
    ] = None,
    llm: Annotated[
        str | None, typer.Option(help="what writes queries if none are given: '{kind: openai, …}'")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(help="key=value: base, max_tokens, epochs, seed, …")
    ] = None,
    is_dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make a router of a folder of skills: pool, queries, negatives, a trained encoder joined with BM25.

    Stopped, the same line goes on. DIR/recipes holds every recipe that it ran.

    Example: skilltrain fit my_skills --out runs/router && skilltrain route --router runs/router "merge these PDFs"
    """
    from skilltrain.serving.fit import FitConfig, dry_run_fit, run_fit

    values: dict[str, Any] = {
        "skills": str(skills),
        "out": str(out),
        "queries": [str(file) for file in queries or []],
    }
    values |= {"llm": parse_yaml(llm, "--llm")} if llm else {}
    config = validate(FitConfig, apply_overrides(values, only_settings(settings)), "skilltrain fit")
    if is_dry_run:
        show(quietly(dry_run_fit, config))
        return
    found = quietly(run_fit, config)
    lines = [
        f"{out}: a router over {found['num_skills']:,} skills, trained on {found['num_lists']:,} lists"
    ]
    if "Hit@1" in found:
        hits = ", ".join(f"{name} {value:.3f}" for name, value in found["Hit@1"].items())
        lines.append(f"Hit@1 of queries held out: {hits}; look at {out}/report/report.html")
    lines.append(f"next: skilltrain route --router {quote(str(out))} 'a task in plain words'")
    conclude(found, lines, as_json)


@app.command(rich_help_panel="Start here")
def route(
    task: Task,
    router: RouterFolder = None,
    pool: PoolFolder = None,
    encoder: Annotated[
        str | None, typer.Option(help="encoder; BM25 finds the candidates without one")
    ] = None,
    reranker: Annotated[
        str | None, typer.Option(help="reranker for the first 20 candidates")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="how many skills to show")] = 5,
    allow_server: AllowServer = None,
    as_json: AsJson = False,
) -> None:
    """Find the skills for a task, those marked that the safety screening flags; or say that none fits.

    Example: skilltrain route "merge these PDFs and stamp page numbers" --router runs/router

    Example: skilltrain route "merge these PDFs" --pool runs/pool --encoder runs/encoder
    """
    rankers: list[dict[str, Any]] = [{"kind": "lexical"}]
    if encoder:  # its vectors are kept for the next task
        rankers = [{"kind": "dense", "source": encoder, "cache": str(cache_folder("vectors"))}]
    rankers += [{"kind": "rerank", "source": reranker}] if reranker else []
    opened = quietly(open_routing, router, pool, rankers, "skilltrain route", allow_server)
    answer = quietly(opened.route, task, top)
    if as_json:
        rows = [
            asdict(routed) | {"path": routed.path and str(routed.path)} for routed in answer.skills
        ]
        show({"task": task, "fits": answer.fits, "num_likely": answer.num_likely, "skills": rows})
        return
    if not answer.fits:
        typer.echo("No skill fits, as far as the router can tell. The nearest:")
    for routed in answer.skills:
        _print(routed)


def _print(routed: "RoutedSkill") -> None:
    name, place = printable(routed.name, 90), printable(str(routed.path or routed.skill_id))
    sure = "" if routed.probability is None else f"  {routed.probability:.0%}"
    typer.echo(f"{routed.rank:>2}  {routed.score:8.4f}{sure}  {name}  ({place})")
    typer.echo(f"                {printable(routed.description, 90)}")
    typer.echo(f"                {printable(str(routed.why), 120)}")
    for flag in routed.flags:
        typer.echo(
            f"    !! FLAGGED {flag.rule}: {flag.reason}; in its {flag.field}: {printable(flag.span, 120)}"
        )


def open_routing(
    router: Path | None,
    pool: Path | None,
    rankers: list[dict[str, Any]],
    where: str,
    allow_server: list[str] | None,
) -> "Router":
    """Open a router, or rank a pool without one. Raises SkilltrainError if both or none are given."""
    from skilltrain.api import open_router
    from skilltrain.serving.router import Router

    if router is not None and pool is None:
        return Router.load(router, allow_server or ())
    if pool is None or router is not None:
        raise SkilltrainError("conflicting-settings", "give either --router or --pool", where=where)
    return open_router(pool, rankers)


@app.command(rich_help_panel="Use")
def serve(
    router: Annotated[
        Path, typer.Argument(help="folder that `skilltrain fit` or `skilltrain index` wrote")
    ],
    mcp: Annotated[
        Literal["stdio", "http"], typer.Option(help="stdio: for one agent that starts it")
    ] = "stdio",
    watch: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            resolve_path=True,
            help="folder of SKILL.md files: changes go into the router; may be repeated",
        ),
    ] = None,
    allow_server: AllowServer = None,
    flagged: Annotated[
        Literal["mark", "withhold"], typer.Option(help="for skills that screening flags")
    ] = "mark",
    log: Annotated[
        Path | None, typer.Option(help="folder for requests and answers, as QUERIES and RANKINGS")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on (http)")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen on (http)")] = 8765,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="host name that clients may use (http); loopback names by default"),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="web page that may ask (http), e.g. https://a.example")
    ] = None,
    token_env: Annotated[
        str, typer.Option(help="environment variable that holds the token to ask for (http)")
    ] = "",
) -> None:
    """Serve a router: MCP over stdio, or over HTTP with /route, /embed, /rerank, /health and /metrics beside it.

    Example: skilltrain serve runs/router --mcp http --watch my_skills
    """
    from skilltrain.serving.router import Router

    try:
        from skilltrain.serving.access import read_access
        from skilltrain.serving.servers import serve_http, serve_stdio
        from skilltrain.serving.service import RouteLog, Service, watched_contents
    except ModuleNotFoundError as error:
        raise SkilltrainError(
            "missing-package",
            f"{error.name} is not installed",
            fix="pip install 'skilltrain[serve]'",
        ) from error
    watch = watch or []
    opened = Router.load(router, allow_server or ())
    if watch:
        watched_contents(opened, watch)
    service = Service(opened, flagged, RouteLog(log) if log else None)
    if mcp == "stdio":
        serve_stdio(service, watch)
    else:
        access = read_access(host, allowed_host or [], allowed_origin or [], token_env)
        serve_http(service, watch, host, port, access)
