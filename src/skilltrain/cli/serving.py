"""The command that serves a router to agents."""

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

import typer

from skilltrain.cli.app import app
from skilltrain.errors import SkilltrainError

_NEEDED = ("mcp", "starlette", "uvicorn", "watchfiles", "prometheus_client")


@app.command()
def serve(
    router: Annotated[Path, typer.Argument(help="folder that `skilltrain fit` or `skilltrain index` wrote")],
    mcp: Annotated[Literal["stdio", "http"], typer.Option(help="stdio: for one agent that starts it")] = "stdio",
    watch: Annotated[Path | None, typer.Option(help="folder of SKILL.md files: changes go into the router")] = None,
    flagged: Annotated[
        Literal["mark", "withhold"], typer.Option(help="what to do with skills that the safety screening flags")
    ] = "mark",
    log: Annotated[Path | None, typer.Option(help="folder for requests and answers, as QUERIES and RANKINGS")] = None,
    host: Annotated[str, typer.Option(help="address to listen on (http)")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen on (http)")] = 8765,
) -> None:
    """Serve a router: MCP over stdio, or over HTTP with /route, /embed, /rerank, /health and /metrics beside it.

    Example: skilltrain serve runs/router --mcp http --watch my_skills
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise SkilltrainError(f"{missing[0]} is not installed", fix="pip install 'skilltrain[serve]'")
    if watch is not None and not watch.is_dir():
        raise SkilltrainError("no such folder", where=watch)
    from skilltrain.routing.router import Router
    from skilltrain.routing.serve import serve_http, serve_stdio
    from skilltrain.routing.service import RouteLog, Service

    service = Service(Router.load(router), flagged, RouteLog(log) if log else None)
    if mcp == "stdio":
        serve_stdio(service, watch)
    else:
        serve_http(service, watch, host, port)
