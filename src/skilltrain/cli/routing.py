"""Commands that make a router, use it and serve it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic_core import to_jsonable_python

from skilltrain.cli.app import (
    AsJson,
    DashedCommand,
    DryRun,
    app,
    conclude,
    quietly,
    read_overrides,
    show,
)
from skilltrain.config import apply_overrides, parse_yaml, validate
from skilltrain.errors import SkilltrainError, install_command
from skilltrain.files import cache_folder
from skilltrain.serving.hosts import CONFIG_FILES, Host, host_config
from skilltrain.terminal import say
from skilltrain.texts import printable

RouterFolder = Annotated[
    Path | None,
    typer.Option(
        help="router that `skilltrain fit` or `skilltrain index` wrote, or hf:OWNER/NAME@REVISION"
    ),
]
PoolFolder = Annotated[
    Path | None, typer.Option(help="pool, or folder of SKILL.md files, instead of a router")
]
Task = Annotated[str, typer.Argument(help="a task in plain words")]
AllowServer = Annotated[
    list[str] | None,
    typer.Option(help="URL that the router's rankers may send tasks to; may be repeated"),
]
WatchedFolders = Annotated[
    list[Path] | None,
    typer.Option(
        exists=True,
        file_okay=False,
        resolve_path=True,
        help="folder of SKILL.md files whose changes the router takes up; may be repeated",
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        help="host name that clients may use (http); loopback names by default; may be repeated",
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(
        help="origin of web pages that may use it (http), e.g. https://a.example; may be repeated",
    ),
]
ServedRouter = Annotated[
    Path,
    typer.Argument(
        help="folder that `skilltrain fit` or `skilltrain index` wrote, or hf:OWNER/NAME@REVISION"
    ),
]
Transport = Annotated[
    Literal["stdio", "http"],
    typer.Option(help="stdio is for one agent, which starts the command"),
]
FlaggedSkills = Annotated[
    Literal["mark", "withhold"],
    typer.Option(help="what to do with skills flagged by the screening"),
]
LogFolder = Annotated[
    Path | None,
    typer.Option(
        help="folder for a log of requests, answers and loaded skills, to learn from; it stays on "
        "this machine"
    ),
]
TokenVariable = Annotated[
    str, typer.Option(help="environment variable with the token that clients must send (http)")
]
ConfiguredHost = Annotated[
    Host | None,
    typer.Option(help="print the configuration with which an agent host starts this command"),
]
if TYPE_CHECKING:
    from skilltrain.serving.answer import RoutedSkill
    from skilltrain.serving.router import Router


QueryFiles = Annotated[
    list[Path] | None,
    typer.Option(
        help="file of queries, a line each: "
        '{"query": "join two PDFs", "skill_ids": ["pdf-merge"]}; or a folder of skills with '
        "evals/trigger-eval.json; may be repeated"
    ),
]
ChatModel = Annotated[
    str | None,
    typer.Option(
        help="chat model that writes queries if none are given, such as "
        "'{kind: openai, model: gpt-4o-mini}'"
    ),
]


@app.command(cls=DashedCommand, rich_help_panel="Start here")
def fit(
    skills: Annotated[
        Path, typer.Argument(help="a folder of SKILL.md files, or another source of the stage pool")
    ],
    out: Annotated[
        Path, typer.Option(help="folder to write: the router, and the results of all steps")
    ],
    queries: QueryFiles = None,
    llm: ChatModel = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value, such as epochs=2; keys: base, in_use, max_tokens, epochs, seed"
        ),
    ] = None,
    no_train: Annotated[
        bool, typer.Option("--no-train", help="stop after the router without training")
    ] = False,
    is_dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make a router from a folder of skills.

    First, an untrained router is made, which takes about a minute for 500 skills. Then an encoder
    is trained. It is used if it is better on held-out queries. The same command continues a stopped
    run. The recipes of all steps are in OUT/recipes.

    Example: skilltrain fit my_skills --out runs/router
    """
    from skilltrain.serving.fit import FitConfig, dry_run_fit, run_fit

    # Read the settings.
    values: dict[str, Any] = {
        "skills": str(skills),
        "out": str(out),
        "queries": [str(file) for file in queries or []],
    }
    if no_train:
        values["train"] = False
    if llm:
        values["llm"] = parse_yaml(llm, "--llm")
    values = apply_overrides(values, read_overrides(settings))
    config = validate(FitConfig, values, "skilltrain fit")
    if is_dry_run:
        show(quietly(dry_run_fit, config))
        return

    # Make the router, and print a summary.
    summary = quietly(run_fit, config)
    training = "without a trained encoder"
    if summary["trained"]:
        training = f"trained on {summary['num_lists']:,} lists"
    lines = [f"{out}: a router over {summary['num_skills']:,} skills, {training}"]
    if "Hit@1" in summary:
        hits = ", ".join(f"{name} {value:.3f}" for name, value in summary["Hit@1"].items())
        lines.append(f"Hit@1 of {summary['num_queries']} held-out queries: {hits}")
        lines.append(f"report: {out}/report/report.html")
    lines.append(f"next: skilltrain route --router {quote(str(out))} 'a task in plain words'")
    conclude(summary, lines, as_json)


@app.command(rich_help_panel="Start here")
def route(
    task: Task,
    router: RouterFolder = None,
    pool: PoolFolder = None,
    encoder: Annotated[
        str | None, typer.Option(help="encoder that finds the candidates; default: BM25")
    ] = None,
    reranker: Annotated[
        str | None, typer.Option(help="reranker for the first 20 candidates")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="number of skills to show")] = 5,
    filters: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value that skills must have: category, lang, source, license, author, tags, "
            "min_stars, updated_since; exclude: ids that are never shown"
        ),
    ] = None,
    allow_server: AllowServer = None,
    as_json: AsJson = False,
) -> None:
    """Find the skills for a task, or say that none fits. Skills flagged by screening are marked.

    Example: skilltrain route "merge these PDFs and stamp page numbers" --router runs/router

    Example: skilltrain route "merge these PDFs" --pool runs/pool --encoder runs/encoder

    Example: skilltrain route "merge these PDFs" --router runs/router license=MIT min_stars=10
    """
    from skilltrain.serving.filters import Filters

    where = "skilltrain route"
    skill_filters = validate(Filters, apply_overrides({}, read_overrides(filters)), where)
    rankers: list[dict[str, Any]] = [{"kind": "lexical"}]
    if encoder:  # the vectors are cached for the next task
        rankers = [{"kind": "dense", "source": encoder, "cache": str(cache_folder("vectors"))}]
    if reranker:
        rankers.append({"kind": "rerank", "source": reranker})
    opened_router = quietly(open_routing, router, pool, rankers, where, allow_server)
    answer = quietly(opened_router.route, task, top, skill_filters)

    if as_json:
        rows = to_jsonable_python(answer.skills)
        show({"task": task, "fits": answer.fits, "num_likely": answer.num_likely, "skills": rows})
        return
    reason = skill_filters.empty_reason(opened_router.skills.values())
    if reason:
        typer.echo(f"The filters leave no skill: {printable(reason)}")
    elif not answer.fits:
        nearest = " The nearest:" if answer.skills else ""
        typer.echo(f"No skill fits, as far as the router can tell.{nearest}")
    for skill in answer.skills:
        _print_skill(skill)


def _print_skill(skill: "RoutedSkill") -> None:
    """Print a skill that a router returned, with an explanation and its safety flags."""
    name = printable(skill.name, 90)
    location = printable(str(skill.path or skill.skill_id))
    probability = "" if skill.probability is None else f"  {skill.probability:.0%}"
    typer.echo(f"{skill.rank:>2}  {skill.score:8.4f}{probability}  {name}  ({location})")
    typer.echo(f"                {printable(skill.description, 90)}")
    typer.echo(f"                {printable(str(skill.why), 120)}")
    for flag in skill.flags:
        # The reason may come from a chat model, which has read a stranger's text.
        finding = f"{flag.rule}: {printable(flag.reason)}; in its {flag.field}"
        typer.echo(f"    !! FLAGGED {finding}: {printable(flag.span, 120)}")


def open_routing(
    router: Path | None,
    pool: Path | None,
    rankers: list[dict[str, Any]],
    where: str,
    allow_server: list[str] | None,
) -> "Router":
    """Open a router, or make one from a pool and rankers.

    Args:
        router: Folder of a router.
        pool: Folder of a pool, or of SKILL.md files.
        rankers: Settings of the rankers for a pool.
        where: The command, for errors.
        allow_server: URLs that the rankers of a router may send tasks to.

    Raises:
        SkilltrainError: Both a router and a pool are given, or neither.
    """
    from skilltrain.serving.router import Router

    if router is not None and pool is None:
        return Router.load(router, allow_server or ())
    if router is None and pool is not None:
        return Router(pool, rankers)
    raise SkilltrainError("conflicting-settings", "give either --router or --pool", where=where)


@app.command(rich_help_panel="Use")
def serve(
    router: ServedRouter,
    mcp: Transport = "stdio",
    watch: WatchedFolders = None,
    allow_server: AllowServer = None,
    flagged: FlaggedSkills = "mark",
    log: LogFolder = None,
    host: Annotated[str, typer.Option(help="address to listen on (http)")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen on (http)")] = 8765,
    allowed_host: AllowedHosts = None,
    allowed_origin: AllowedOrigins = None,
    token_env: TokenVariable = "",
    print_config: ConfiguredHost = None,
) -> None:
    """Serve a router over MCP: on stdio, or on HTTP with /route, /embed, /rerank and /metrics.

    Example: skilltrain serve runs/router --mcp http --watch my_skills

    Example: skilltrain serve runs/router --print-config cursor
    """
    from skilltrain.data.use_log import UseLog
    from skilltrain.serving.router import Router

    try:
        from skilltrain.serving.access import read_access
        from skilltrain.serving.servers import serve_http, serve_stdio
        from skilltrain.serving.service import Service, watched_contents
    except ModuleNotFoundError as error:
        raise SkilltrainError(
            "missing-package",
            f"{error.name} is not installed",
            fix=install_command("serve"),
        ) from error

    if print_config and mcp == "http":
        problem = "--print-config is for --mcp stdio"
        raise SkilltrainError("conflicting-settings", problem, where="skilltrain serve")
    watched_folders = watch or []
    opened_router = Router.load(router, allow_server or ())
    if watched_folders:
        # Check the folders now, so that the command fails before it serves.
        watched_contents(opened_router, watched_folders)
    arguments = _stdio_arguments(router, watched_folders, allow_server or [], flagged, log)
    if print_config:
        program = Path(sys.executable).with_name("skilltrain")
        typer.echo(host_config(print_config, str(program), arguments))
        say(f"for {CONFIG_FILES[print_config]}")
        return

    use_log = UseLog(log) if log else None
    if mcp == "stdio":
        command = join(["skilltrain", *arguments])
        say(f"for an agent to start: claude mcp add skilltrain -- {command}")
        service = Service(opened_router, flagged, use_log, shows_folders=True)
        serve_stdio(service, watched_folders)
    else:
        access = read_access(host, allowed_host or [], allowed_origin or [], token_env)
        service = Service(opened_router, flagged, use_log, shows_folders=access.is_local)
        serve_http(service, watched_folders, host, port, access)


def _stdio_arguments(
    router: Path,
    watched_folders: Sequence[Path],
    allow_server: Sequence[str],
    flagged: str,
    log: Path | None,
) -> list[str]:
    """Return the arguments with which an agent host starts this server from any folder."""
    # A router that is no folder here is on the Hub: hf:OWNER/NAME.
    arguments = ["serve", str(router.resolve() if router.exists() else router)]
    for folder in watched_folders:
        arguments += ["--watch", str(folder)]
    for url in allow_server:
        arguments += ["--allow-server", url]
    if flagged != "mark":
        arguments += ["--flagged", flagged]
    if log is not None:
        arguments += ["--log", str(log.resolve())]
    return arguments
